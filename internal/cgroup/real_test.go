package cgroup

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// childEnv makes the test binary a child of a test.
const childEnv = "STOCKADE_CGROUP_TEST_CHILD"

func TestMain(m *testing.M) {
	switch mode := os.Getenv(childEnv); mode {
	case "":
		need.Main(m)
	case "alloc": // uses memory until it is stopped, once it may begin
		_, _ = os.Stdin.Read(make([]byte, 1))
		var keep [][]byte
		for range 512 {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			keep = append(keep, b)
		}
		fmt.Println(len(keep))
	default: // "root path": tries to kill the group it is in itself
		root, path, _ := strings.Cut(mode, " ")
		g := New(root, path)
		if err := g.Add(os.Getpid()); err != nil {
			fmt.Println(err)
			os.Exit(2)
		}
		if err := g.Kill(context.Background()); !errdefs.Is(err, errdefs.Internal) {
			fmt.Println(err)
			os.Exit(3)
		}
	}
}

// roots are the trees the tests run on for real: the machine's, and on a hybrid
// machine also its v2 part alone.
func roots(t *testing.T) map[string]string {
	t.Helper()
	need.Root(t)
	m, err := Detect("")
	need.That(t, err == nil, "this test needs control groups: %v", err)
	t.Logf("this machine: %+v", m)
	all := map[string]string{string(m.Kind): DefaultRoot}
	if m.Kind == Hybrid {
		all["v2"] = filepath.Join(DefaultRoot, "unified")
	}
	return all
}

// newGroup makes a group of the test's own, removed at the end with its parent.
func newGroup(t *testing.T, root string, limits api.BoxLimits) Group {
	t.Helper()
	parent := New(root, fmt.Sprintf("/stockade-test-%d-%s", os.Getpid(), strings.NewReplacer("/", "-", " ", "-").Replace(t.Name())))
	g := New(root, parent.Path()+"/box")
	t.Cleanup(func() {
		ctx := context.Background()
		if err := parent.Kill(ctx); err != nil {
			t.Error(err)
		}
		if err := parent.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	if err := g.Create(limits); err != nil {
		t.Fatal(err)
	}
	return g
}

// child starts a program; it is killed and waited for at the end.
func child(t *testing.T, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func sleeper(t *testing.T) *exec.Cmd { return child(t, exec.Command("sleep", "1000")) }

// dirs are the group's directories in all hierarchies, those that exist.
func dirs(t *testing.T, g Group) (all []string) {
	t.Helper()
	hs, err := g.hierarchies()
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range hs {
		if exists(g.in(h), "cgroup.procs") {
			all = append(all, g.in(h))
		}
	}
	return all
}

func eachRoot(t *testing.T, f func(t *testing.T, root string)) {
	t.Helper()
	t.Parallel()
	for name, root := range roots(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, root)
		})
	}
}

func TestLife(t *testing.T) {
	eachRoot(t, func(t *testing.T, root string) {
		g := newGroup(t, root, api.BoxLimits{})
		hs, err := g.hierarchies()
		if err != nil || len(dirs(t, g)) != len(hs) {
			t.Fatalf("made in %v of %d hierarchies: %v", dirs(t, g), len(hs), err)
		}
		if some, err := g.Populated(); some || err != nil {
			t.Fatal(some, err)
		}
		below := New(root, g.Path()+"/proc/deep")
		if err := below.Create(api.BoxLimits{}); err != nil {
			t.Fatal(err)
		}
		a, b := sleeper(t), sleeper(t)
		// On v2 a group with controllers and groups below may hold no process
		// itself; then only the one below counts.
		if err := g.Add(a.Process.Pid); err != nil && !errors.Is(err, syscall.EBUSY) {
			t.Fatal(err)
		}
		if err := below.Add(b.Process.Pid); err != nil {
			t.Fatal(err)
		}
		pids, err := g.Procs()
		if err != nil || !slices.Contains(pids, b.Process.Pid) {
			t.Fatal(pids, err)
		}
		for _, g := range []Group{g, below} {
			if some, err := g.Populated(); !some || err != nil {
				t.Fatal(some, err)
			}
		}
		// Not while something lives in it.
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		defer cancel()
		wantCode(t, g.Remove(ctx), errdefs.Conflict)

		if err := g.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		if some, err := g.Populated(); some || err != nil {
			t.Fatal(some, err)
		}
		_ = b.Wait()
		if ws := b.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
			t.Fatalf("it ended with %v", b.ProcessState)
		}
		for range 2 {
			if err := g.Remove(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if left := dirs(t, g); len(left) > 0 {
			t.Fatal("left:", left)
		}
		if err := g.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// TestOneHierarchyOnly: a process that hides in a single hierarchy is seen and
// killed.
func TestOneHierarchyOnly(t *testing.T) {
	t.Parallel()
	roots(t)
	g := newGroup(t, "", api.BoxLimits{})
	for _, dir := range dirs(t, g) {
		c := sleeper(t)
		if err := write(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(c.Process.Pid)); err != nil {
			t.Fatal(err)
		}
		if some, err := g.Populated(); !some || err != nil {
			t.Fatal(dir, some, err)
		}
		if err := g.Kill(t.Context()); err != nil {
			t.Fatal(dir, err)
		}
		if some, err := g.Populated(); some || err != nil {
			t.Fatal(dir, some, err)
		}
	}
}

func TestLimitsForReal(t *testing.T) {
	t.Parallel()
	need.Root(t)
	m, err := Detect("")
	need.That(t, err == nil, "this test needs control groups: %v", err)
	all := api.BoxLimits{CPUMillis: 500, MemoryBytes: 64 << 20, Pids: 40}
	g := newGroup(t, "", m.Enforceable(all))
	check := func(controller, file, want string) {
		t.Helper()
		if !m.Has(controller) {
			return
		}
		dir := DefaultRoot
		if m.Kind != V2 {
			dir = filepath.Join(dir, controller)
		}
		words, err := readWords(filepath.Join(dir, g.Path(), file))
		if missing(err) && strings.Contains(file, "sw") { // without swap, or its accounting
			return
		}
		if got := strings.Join(words, " "); err != nil || got != want {
			t.Errorf("%s holds %q, want %q: %v", file, got, want, err)
		}
	}
	memory := func(bytes int64) {
		t.Helper()
		if m.Kind == V2 {
			check(Memory, "memory.max", itoa(bytes))
			check(Memory, "memory.swap.max", "0")
			return
		}
		check(Memory, "memory.limit_in_bytes", itoa(bytes))
		check(Memory, "memory.memsw.limit_in_bytes", itoa(bytes))
	}
	if m.Kind == V2 {
		check(CPU, "cpu.max", "50000 100000")
	} else {
		check(CPU, "cpu.cfs_quota_us", "50000")
		check(CPU, "cpu.cfs_period_us", "100000")
	}
	check(Pids, "pids.max", "40")
	memory(64 << 20)
	// Up and down again: the limit over memory and swap must go along.
	for _, bytes := range []int64{128 << 20, 32 << 20} {
		all.MemoryBytes = bytes
		if err := g.Create(m.Enforceable(all)); err != nil {
			t.Fatal(err)
		}
		memory(bytes)
	}
}

// A process in a group keeps controllers from the groups below: so it is in the root
// that a privileged container sees. Who made the container is told what to do.
func TestProcessInTheWay(t *testing.T) {
	t.Parallel()
	for err, word := range map[error]string{syscall.EBUSY: "mkdir -p /x/init && xargs", syscall.EROFS: "mount it read-write"} {
		e := undelegated(&os.PathError{Op: "write", Err: err}, "/x", "/")
		if wantCode(t, e, errdefs.Unavailable); !strings.Contains(e.Error(), word) {
			t.Errorf("%v: %v", err, e)
		}
	}
	need.Root(t)
	m, err := Detect("")
	if err != nil || m.Kind != V2 || !m.Has(Pids) {
		t.Skip("only on v2 can a process be in the way")
	}
	g := newGroup(t, "", api.BoxLimits{})
	if err := g.Add(sleeper(t).Process.Pid); err != nil {
		t.Fatal(err)
	}
	err = New("", g.Path()+"/below").Create(api.BoxLimits{Pids: 10})
	if wantCode(t, err, errdefs.Unavailable); !strings.Contains(err.Error(), "xargs") {
		t.Error(err)
	}
}

func TestOOM(t *testing.T) {
	t.Parallel()
	need.Root(t)
	m, err := Detect("")
	need.That(t, err == nil && m.Has(Memory), "this test needs the cgroup controller memory: %v", err)
	box := newGroup(t, "", api.BoxLimits{MemoryBytes: 48 << 20})
	proc, other := New("", box.Path()+"/proc"), New("", box.Path()+"/other")
	for _, g := range []Group{proc, other} {
		if err := g.Create(api.BoxLimits{}); err != nil {
			t.Fatal(err)
		}
		if n, err := g.OOMKills(); n != 0 || err != nil {
			t.Fatal(n, err)
		}
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=alloc")
	begin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	child(t, cmd)
	if err := proc.Add(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if _, err := begin.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
		t.Fatalf("it was not killed: %v", err)
	}
	for g, want := range map[Group]int64{box: 1, proc: 1, other: 0} {
		if n, err := g.OOMKills(); n != want || err != nil {
			t.Errorf("%s counts %d, want %d: %v", g.Path(), n, want, err)
		}
	}
}

// TestKillForkBomb kills a tree that forks as fast as it may. It runs in a PID
// namespace of its own, so that nothing of it is left for others to wait for.
func TestKillForkBomb(t *testing.T) {
	eachRoot(t, func(t *testing.T, root string) {
		m, err := Detect(root)
		if err != nil {
			t.Fatal(err)
		}
		limits := api.BoxLimits{}
		script := `i=0; while [ $i -lt 60 ]; do (while :; do sleep 0 & wait; done) & i=$((i+1)); done; wait`
		if m.Has(Pids) {
			limits.Pids = 100
			script = `b() { b & b & wait; }; b`
		}
		g := newGroup(t, root, limits)
		cmd := exec.Command("sh", "-c", "read x; "+script)
		begin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		child(t, cmd)
		if err := g.Add(cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		if _, err := begin.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := poll(ctx, func() (bool, error) { pids, err := g.Procs(); return len(pids) > 40, err }); err != nil {
			t.Fatal("it never grew:", err)
		}
		if err := g.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		if pids, err := g.Procs(); len(pids) > 0 || err != nil {
			t.Fatal(pids, err)
		}
	})
}

// TestKillFrozen: a tree that somebody froze dies all the same.
func TestKillFrozen(t *testing.T) {
	eachRoot(t, func(t *testing.T, root string) {
		g := newGroup(t, root, api.BoxLimits{})
		c := sleeper(t)
		if err := g.Add(c.Process.Pid); err != nil {
			t.Fatal(err)
		}
		for _, dir := range dirs(t, g) {
			for name, value := range map[string]string{"freezer.state": "FROZEN", "cgroup.freeze": "1"} {
				if exists(dir, name) {
					if err := write(filepath.Join(dir, name), value); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		if err := g.Kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

func TestNeverKillsItself(t *testing.T) {
	eachRoot(t, func(t *testing.T, root string) {
		g := newGroup(t, root, api.BoxLimits{})
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+root+" "+g.Path())
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	})
}

// Groups come and go below a parent that whoever is last removes.
func TestSharedParentComesAndGoes(t *testing.T) {
	t.Parallel()
	need.Root(t)
	parent := "/stockade-test-shared-" + strings.ToLower(rand.Text()[:8])
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for range 50 {
				g := New("", fmt.Sprintf("%s/%d", parent, i))
				if err := g.Create(api.BoxLimits{}); err != nil {
					t.Error(err)
					return
				}
				if err := g.Remove(t.Context()); err != nil {
					t.Error(err)
					return
				}
				New("", parent).RemoveUnused()
			}
		})
	}
	wg.Wait()
	New("", parent).RemoveUnused()
	if left, err := filepath.Glob("/sys/fs/cgroup/*" + parent); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
