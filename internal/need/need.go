// Package need says what a test needs from the machine. Where a part is missing
// the test skips and says what to install; with STOCKADE_REQUIRE=all, as in CI,
// it fails, so that a green run means that everything ran.
package need

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func missing(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("STOCKADE_REQUIRE") == "all" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// Root skips or fails a test that must run as root (namespaces, cgroups).
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "this test needs root: run it with sudo")
	}
}

// Tool skips or fails a test that needs a program, and returns its path. pkg is
// the Debian package that brings it.
func Tool(t testing.TB, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		missing(t, "this test needs %s: apt-get install %s", name, pkg)
	}
	return path
}

// Runc skips or fails a test that runs real containers: root and runc.
func Runc(t testing.TB) string {
	t.Helper()
	Root(t)
	return Tool(t, "runc", "runc")
}

// Programs builds the programs into dir as they are shipped, static and without
// the race detector, and returns nothing else: stockade, stockade-host and
// testagent. A test calls it once and shares the directory among its subtests.
func Programs(t testing.TB, dir string) {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		t.Fatalf("the module's directory is not known: %v", err)
	}
	cmd := exec.Command("go", "build", "-trimpath", "-o", dir+"/", "./cmd/stockade", "./cmd/stockade-host", "./cmd/testagent")
	cmd.Dir = strings.TrimSpace(string(out))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the programs: %v\n%s", err, out)
	}
}

// That skips or fails a test whose machine lacks something no program brings. The
// message says what is missing and what to do about it.
func That(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if !ok {
		missing(t, format, args...)
	}
}
