// Package need says what a test needs from the machine. Where a part is missing
// the test skips and says what to install; with STOCKADE_REQUIRE=all, as in CI,
// it fails, so that a green run means that everything ran.
package need

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
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

// Main is the TestMain of a package: it runs the tests as [Run] does and exits.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run runs the tests of a package with a temporary directory of their own, and fails
// them if they leave goroutines, or files there. It gives goroutines half a minute to
// end: on a busy machine one that is about to may not get its turn for a while.
// after is called when the tests are over, before it looks: what they share goes
// there. It returns the exit code.
func Run(m *testing.M, after ...func()) int {
	tmp, err := os.MkdirTemp("", "need-")
	if err == nil {
		err = os.Chmod(tmp, 0o711) // boxes and other users go through it, as through /tmp
	}
	if err == nil {
		err = os.Setenv("TMPDIR", tmp)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(tmp)
	code := m.Run()
	for _, f := range after {
		f()
	}
	if code != 0 {
		return code
	}
	err = goleak.Find()
	for end := time.Now().Add(30 * time.Second); err != nil && time.Now().Before(end); {
		err = goleak.Find()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		fmt.Fprintln(os.Stderr, "left in the temporary directory:", left, err)
		return 1
	}
	return 0
}

// Disk puts a small file system of its own over the directory dir, for tests that
// fill it, and takes it away at the end of the test, which fails if something there
// is still open. options are those of tmpfs(5), such as "size=256k". It needs root.
func Disk(t testing.TB, dir, options string) {
	t.Helper()
	Root(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		missing(t, "this test mounts a small tmpfs, which is refused: %v; run it with CAP_SYS_ADMIN", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("taking away the file system at %s: %v", dir, err)
			_ = unix.Unmount(dir, unix.MNT_DETACH)
		}
	})
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

// runtimes are the OCI runtimes that everything with containers is tested with,
// and what brings each.
var runtimes = []struct{ name, fix string }{
	{"runc", "apt-get install runc"}, {"crun", "sh scripts/setup.sh runtimes"}, {"runsc", "sh scripts/setup.sh runtimes"},
}

// EachRuntime runs a test over every OCI runtime, as a subtest of its name, with
// the runtime's path: one of the PATH, or one that scripts/setup.sh built into
// .cache/ of the checkout. Where one is missing its subtest skips or fails.
func EachRuntime(t *testing.T, test func(t *testing.T, path string)) {
	t.Helper()
	for _, r := range runtimes {
		t.Run(r.name, func(t *testing.T) {
			Root(t)
			path, err := exec.LookPath(r.name)
			if err != nil {
				path, err = exec.LookPath(filepath.Join(checkout(t), ".cache", r.name, r.name))
			}
			if err != nil {
				missing(t, "this test needs %s: %s", r.name, r.fix)
			}
			test(t, path)
		})
	}
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

// SDK skips or fails a test that runs plugins with the published Python SDK of
// LangBot, and returns the Python that has it. series is "0.5", "0.6" or "0.7"; the
// exact versions are pinned in testdata/sdk. A longer version, such as "0.6.3", is
// taken for its series.
func SDK(t testing.TB, series string) string {
	t.Helper()
	if parts := strings.SplitN(series, ".", 3); len(parts) == 3 {
		series = parts[0] + "." + parts[1]
	}
	path := filepath.Join(checkout(t), ".cache", "sdk", series, "bin", "python")
	if _, err := os.Stat(path); err != nil {
		missing(t, "this test needs the Python SDK %s of LangBot: make setup-sdk", series)
	}
	return path
}

// UV skips or fails a test that installs with uv, and returns its path: the one that
// is pinned beside the newest SDK.
func UV(t testing.TB) string {
	t.Helper()
	path := filepath.Join(filepath.Dir(SDK(t, "0.7")), "uv")
	if _, err := os.Stat(path); err != nil {
		missing(t, "this test needs uv beside the newest SDK: make setup-sdk")
	}
	return path
}

// Loopback returns an address of loopback that no other test has: what listens on it
// can go away and come back to the same port, which nobody was given meanwhile.
func Loopback() string {
	return fmt.Sprintf("127.%d.%d.%d", rand.N(256), rand.N(256), 1+rand.N(254))
}

// Program writes a program that the test, or what it tests, then starts. Nothing is
// forked while the file is open: a child would hold it open too until its own exec,
// and a file that somebody writes to is not run (ETXTBSY).
func Program(t testing.TB, path, content string) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

// Testdata returns the path of a file or directory below testdata/ of the checkout,
// from whichever package the test runs.
func Testdata(t testing.TB, elem ...string) string {
	t.Helper()
	return filepath.Join(append([]string{checkout(t), "testdata"}, elem...)...)
}

// checkout finds the directory of go.mod above the test's own.
func checkout(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			t.Fatal("this test runs outside a checkout: no go.mod above it")
		}
		dir = up
	}
}
