package boxhost

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestMain(m *testing.M) { need.Main(m) }

// script stands in for the real PID 1: init --cwd DIR -- ARGV.
const script = "#!/bin/sh\ncd \"$3\" || exit 125\nshift 4\nexec \"$@\"\n"

type fixture struct {
	*Manager
	t    testing.TB
	cfg  Config
	mu   sync.Mutex
	live map[string]int
	ids  map[string]bool // of all boxes that were made
}

var limits = api.BoxLimits{CPUMillis: 1000, MemoryBytes: 256 << 20, Pids: 128}

// newFixture opens a Manager in a directory of its own and, at the end, checks
// that everything of it is gone.
func newFixture(t testing.TB, change func(*Config)) *fixture {
	t.Helper()
	need.Runc(t)
	rt, err := oci.FindRuntime("runc")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	init := filepath.Join(dir, "init")
	if err := os.WriteFile(init, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, live: map[string]int{}, ids: map[string]bool{}}
	f.cfg = Config{Dir: filepath.Join(dir, "host"), InitPath: init, Runtime: rt,
		CgroupParent: "/stockade-test-" + strings.ToLower(rand.Text()[:10]),
		Live: func(id string) int {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.live[id]
		}}
	if change != nil {
		change(&f.cfg)
	}
	f.reopen()
	t.Cleanup(func() {
		f.mu.Lock()
		clear(f.live)
		f.mu.Unlock()
		infos, err := f.List(context.Background())
		if err != nil {
			t.Error(err)
		}
		for _, b := range infos {
			if err := f.Remove(context.Background(), b.Spec.ID); err != nil {
				t.Errorf("remove: %v", err)
			}
		}
		f.nothingLeft()
	})
	return f
}

func (f *fixture) reopen() {
	f.t.Helper()
	m, err := Open(f.cfg)
	if err != nil {
		f.t.Fatal(err)
	}
	f.Manager = m
}

func (f *fixture) nothingLeft() {
	f.t.Helper()
	ents, err := os.ReadDir(filepath.Join(f.cfg.Dir, "boxes"))
	if err != nil || len(ents) != 0 {
		f.t.Errorf("left in boxes/: %v, %v", ents, err)
	}
	if left, _ := filepath.Glob(filepath.Join(publicRoots, "*")); slices.ContainsFunc(left, func(p string) bool { return f.ids[filepath.Base(p)] }) {
		f.t.Errorf("root directories are left: %v", left)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), f.cfg.Dir) {
		f.t.Errorf("mounts are left (%v)", err)
	}
	left, _ := filepath.Glob("/sys/fs/cgroup/*" + f.cfg.CgroupParent)
	left2, _ := filepath.Glob("/sys/fs/cgroup" + f.cfg.CgroupParent)
	if len(left)+len(left2) > 0 {
		f.t.Errorf("control groups are left: %v %v", left, left2)
	}
}

func newID(kind ident.Kind) string {
	var b [16]byte
	rand.Read(b[:])
	return ident.From(kind, b)
}

// put makes a box.
func (f *fixture) put(change func(*wire.BoxSpec)) string {
	f.t.Helper()
	spec := wire.BoxSpec{ID: newID(ident.Box), Limits: limits}
	if change != nil {
		change(&spec)
	}
	if _, err := f.Put(f.t.Context(), spec); err != nil {
		f.t.Fatalf("Put: %v", err)
	}
	f.ids[spec.ID] = true
	return spec.ID
}

// run runs a command in a box with the real runtime and returns its output and
// exit code.
func (f *fixture) run(box, cwd string, argv ...string) (string, int) {
	f.t.Helper()
	return f.runSpec(wire.ProcSpec{ID: newID(ident.Process), Box: box, Argv: argv, Cwd: cwd, Env: []string{"HOME=/home/agent"}})
}

func (f *fixture) sh(box, cmd string) string {
	f.t.Helper()
	out, code := f.run(box, "", "/bin/sh", "-c", cmd)
	if code != 0 {
		f.t.Fatalf("%q ended with %d:\n%s", cmd, code, out)
	}
	return out
}

func (f *fixture) runSpec(spec wire.ProcSpec) (string, int) {
	f.t.Helper()
	bundle := filepath.Join(f.cfg.Dir, "procs", spec.ID)
	l, err := f.Bundle(f.t.Context(), spec, bundle)
	if err != nil {
		f.t.Fatalf("Bundle: %v", err)
	}
	root := filepath.Join(f.cfg.Dir, "rt")
	cmd := exec.Command(f.cfg.Runtime.Path, "--root", root, "run", "--bundle", bundle, l.Container)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Run()
	if err := f.cfg.Runtime.Delete(context.Background(), root, l.Container); err != nil {
		f.t.Errorf("delete: %v", err)
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		f.t.Fatal(err)
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

func wantCode(t *testing.T, err error, code errdefs.Code, part string) {
	t.Helper()
	if !errdefs.Is(err, code) || !strings.Contains(fmt.Sprint(err), part) {
		t.Errorf("got %v (%s), want %s with %q", err, errdefs.CodeOf(err), code, part)
	}
}
