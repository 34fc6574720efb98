package worker

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/python"
)

var programs struct {
	once sync.Once
	dir  string
	err  error
}

func TestMain(m *testing.M) {
	code := need.Run(m, func() { os.RemoveAll(programs.dir) })
	if code == 0 {
		if left := leftovers(); left != "" {
			fmt.Fprintln(os.Stderr, "left on the machine:\n"+left)
			code = 1
		}
	}
	os.Exit(code)
}

// used are the data directories of all launchers of the tests.
var used struct {
	sync.Mutex
	keys []string
}

func dataDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	k, err := key(dir)
	if err != nil {
		t.Fatal(err)
	}
	used.Lock()
	defer used.Unlock()
	used.keys = append(used.keys, k)
	return dir
}

// leftovers lists what launchers of the tests have left on the machine.
func leftovers() string {
	var all []string
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for _, k := range used.keys {
		for _, p := range []string{"/run/*", "/dev/shm/*", "/sys/fs/cgroup/*/stockade/*", "/sys/fs/cgroup/stockade/*"} {
			m, _ := filepath.Glob(p + k)
			all = append(all, m...)
		}
		for line := range strings.Lines(string(mounts)) {
			if strings.Contains(line, k) {
				all = append(all, line)
			}
		}
	}
	return strings.Join(all, "\n")
}

// initPath builds PID 1 of boxes, once.
func initPath(t testing.TB) string {
	t.Helper()
	programs.once.Do(func() {
		if programs.dir, programs.err = os.MkdirTemp("", "stockade-worker-test"); programs.err != nil {
			return
		}
		if programs.err = os.Chmod(programs.dir, 0o755); programs.err != nil {
			return
		}
		cmd := exec.Command("go", "build", "-o", filepath.Join(programs.dir, "stockade-host"), "../../cmd/stockade-host")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			programs.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if programs.err != nil {
		t.Fatal(programs.err)
	}
	return filepath.Join(programs.dir, "stockade-host")
}

// sdk is a genuine interpreter with the SDK.
func sdk(t testing.TB, series string) Interpreter {
	t.Helper()
	i, err := Probe(t.Context(), need.SDK(t, series))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// bare is an interpreter whose SDK is a script of the test: what a worker runs is
// then the test's own, with the command line of a worker.
func bare(t testing.TB, script string) Interpreter {
	t.Helper()
	path := need.Tool(t, "python3", "python3")
	i, err := python.Probe(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(t.TempDir(), "sdk")
	dir := filepath.Join(root, "langbot_plugin", "cli")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string]string{
		filepath.Join(root, "langbot_plugin", "__init__.py"): "",
		// The package is imported before it is run, by the same file.
		filepath.Join(dir, "__init__.py"):                  "if __name__ == '__main__':\n    import langbot_plugin.script\n",
		filepath.Join(root, "langbot_plugin", "script.py"): script,
	} {
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	i.ImportRoot, i.SDK = root, "0.7.18"
	return i
}

func policy() pluginwire.WorkerPolicy {
	return pluginwire.WorkerPolicy{MaxCPUs: 1.5, MaxMemoryMB: 384, MaxPids: 73, MaxOpenFiles: 211, MaxFileSizeMB: 97, RequireHardLimits: true}
}

const capability = "cap-0123456789abcdef0123456789abcdef0123456789"

// rig is a launcher with the directories of one installation.
type rig struct {
	Launcher
	dir  string
	box  *box
	spec Spec
}

func (r rig) live() *live {
	switch l := r.Launcher.(type) {
	case *box:
		return &l.live
	case *direct:
		return &l.live
	}
	return nil
}

func mkdirs(t testing.TB, base string, names ...string) {
	t.Helper()
	for _, n := range names {
		if err := os.MkdirAll(filepath.Join(base, n), 0o700); err != nil {
			t.Fatal(err)
		}
	}
}

func newSpec(t testing.TB, dir, name string) Spec {
	t.Helper()
	at := filepath.Join(dir, "installations", name)
	mkdirs(t, at, "home", "tmp", "data", "rpc-transfer")
	mkdirs(t, dir, "code", "site-packages", "scratch")
	for _, d := range []string{"code", "site-packages"} {
		if err := os.Chmod(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return Spec{
		Name: name, Code: filepath.Join(dir, "code"), SitePackages: filepath.Join(dir, "site-packages"),
		Private:     &Private{Home: filepath.Join(at, "home"), Tmp: filepath.Join(at, "tmp"), Data: filepath.Join(at, "data")},
		TransferDir: filepath.Join(at, "rpc-transfer"), Capability: capability, Policy: policy(),
	}
}

func newDirect(t testing.TB, i Interpreter) rig {
	t.Helper()
	dir := dataDir(t)
	l, err := Direct(DirectConfig{Interp: i, DataDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return rig{Launcher: l, dir: dir, spec: newSpec(t, dir, "inst-a")}
}

func boxConfig(t testing.TB, i Interpreter) BoxConfig {
	t.Helper()
	rt, err := oci.FindRuntime(need.Runc(t))
	if err != nil {
		t.Fatal(err)
	}
	return BoxConfig{Interp: i, DataDir: dataDir(t), Policy: policy(), InitPath: initPath(t), Runtime: rt}
}

// with makes boxes with another OCI runtime.
func with(t testing.TB, path string) func(*BoxConfig) {
	t.Helper()
	rt, err := oci.FindRuntime(path)
	if err != nil {
		t.Fatal(err)
	}
	return func(c *BoxConfig) { c.Runtime = rt }
}

func noNetwork(c *BoxConfig) { c.Network = NetworkNone }

func newBox(t testing.TB, i Interpreter, change ...func(*BoxConfig)) rig {
	t.Helper()
	cfg := boxConfig(t, i)
	for _, c := range change {
		c(&cfg)
	}
	l, err := Box(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return rig{Launcher: l, dir: cfg.DataDir, box: l.(*box), spec: newSpec(t, cfg.DataDir, "inst-a")}
}

func start(t testing.TB, l Launcher, spec Spec) *Process {
	t.Helper()
	p, err := l.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(0) })
	return p
}

// finish reads a worker's output to its end and waits for its exit.
func finish(t testing.TB, p *Process) (out, errs string) {
	t.Helper()
	var wg sync.WaitGroup
	var a, b []byte
	wg.Go(func() { a, _ = io.ReadAll(p.Stdout) })
	wg.Go(func() { b, _ = io.ReadAll(p.Stderr) })
	wg.Wait()
	wait(t, p)
	return string(a), string(b)
}

const patience = 5 * time.Minute

func wait(t testing.TB, p *Process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	select {
	case <-p.Exited():
		if err := p.Left(); err != nil {
			t.Error(err)
		}
	case <-ctx.Done():
		t.Fatal("the worker did not end")
	}
}

// line reads one line of a worker's output.
func line(t testing.TB, r *bufio.Reader) string {
	t.Helper()
	s, err := r.ReadString('\n')
	if err != nil && (s == "" || !errors.Is(err, io.EOF)) {
		t.Fatalf("no line: %v", err)
	}
	return strings.TrimSpace(s)
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func decode(t testing.TB, s string, v any) {
	t.Helper()
	if err := json.Unmarshal([]byte(s), v); err != nil {
		t.Fatalf("%v: %q", err, s)
	}
}
