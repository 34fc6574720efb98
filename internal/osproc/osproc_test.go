package osproc

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// start runs a helper with short grace times.
func start(t *testing.T, change func(*Config), argv ...string) *Process {
	t.Helper()
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cfg := Config{Argv: append([]string{exe()}, argv...), Dir: dir, Keeper: []string{exe(), KeeperCommand},
		Grace: 100 * time.Millisecond, KillWait: 20 * time.Second}
	if change != nil {
		change(&cfg)
	}
	p, err := Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop() })
	return p
}

// who reads n lines "name pid" and returns the numbers.
func who(t *testing.T, p *Process, n int) []int {
	t.Helper()
	var pids []int
	for range n {
		line, err := p.ReadLine()
		if err != nil {
			t.Fatalf("after %v: %v; %s", pids, err, p.Stderr())
		}
		var name string
		var pid int
		if _, err := fmt.Sscan(string(line), &name, &pid); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// alive reports which of pids exist as anything but zombies.
func alive(pids []int) []int {
	var left []int
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue
		}
		if f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]); len(f) > 0 && string(f[0]) != "Z" && string(f[0]) != "X" {
			left = append(left, pid)
		}
	}
	return left
}

func confirmed(t *testing.T, p *Process, pids ...int) {
	t.Helper()
	if o := p.Stop(); !o.Confirmed {
		t.Errorf("not confirmed: %s", o.Why)
	}
	if left := alive(pids); len(left) > 0 {
		t.Errorf("confirmed, and %v are alive", left)
	}
}

// Paired with test_coding_native_lifecycle.py, native_cancel_awaits_child_and_grandchild_exit.
func TestNativeCancelAwaitsChildAndGrandchildExit(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "family")
	pids := who(t, p, 3)
	if len(alive(pids)) != 3 {
		t.Fatalf("%v are not all there", pids)
	}
	confirmed(t, p, pids...)
	if e := p.Exit(); e.Code != -1 || e.Signal != "SIGKILL" {
		t.Errorf("exit %+v", e)
	}
	if _, err := p.ReadLine(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
}

func TestSignalOrder(t *testing.T) {
	t.Parallel()
	p := start(t, func(c *Config) { c.Grace = time.Hour }, "obeys")
	pids := who(t, p, 1)
	if pids[0] != p.PID() {
		t.Errorf("PID() = %d, the agent says %d", p.PID(), pids[0])
	}
	confirmed(t, p, pids...) // and does not wait for the grace time to pass
	if e := p.Exit(); e.Signal != "SIGTERM" {
		t.Errorf("exit %+v", e)
	}
}

// What left its group, session, parent and environment is still found.
func TestOrphansAreHunted(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "orphans")
	pids := who(t, p, 2)
	<-p.Exited()
	if e := p.Exit(); e != (Exit{}) {
		t.Errorf("exit %+v", e)
	}
	if len(alive(pids)) != 1 {
		t.Fatalf("of %v one is to be alive", pids)
	}
	confirmed(t, p, pids...)
}

func TestForkingTree(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "forker")
	who(t, p, 1)
	mark := p.PID()
	confirmed(t, p, mark)
}

func TestStopIsOneAndNotInterrupted(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "family")
	pids := who(t, p, 3)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if o := p.Stop(); !o.Confirmed {
				t.Errorf("not confirmed: %s", o.Why)
			}
			if left := alive(pids); len(left) > 0 {
				t.Errorf("%v are alive after a Stop", left)
			}
		})
	}
	wg.Wait()
}

func TestExits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		argv []string
		want Exit
	}{
		{[]string{"exit", "0"}, Exit{}},
		{[]string{"exit", "7"}, Exit{Code: 7}},
		{[]string{"crash"}, Exit{Code: -1, Signal: "SIGKILL"}},
	} {
		p := start(t, nil, c.argv...)
		if e := p.Exit(); e != c.want {
			t.Errorf("%v: %+v, want %+v", c.argv, e, c.want)
		}
		confirmed(t, p, p.PID())
	}
}

// Paired with test_coding_native_lifecycle.py, cleanup_os_failure_never_becomes_successful_ack.
func TestCleanupOSFailureNeverBecomesConfirmed(t *testing.T) {
	t.Parallel()
	p := start(t, func(c *Config) {
		c.Keeper, c.Grace, c.KillWait = []string{exe(), "keeper-denied"}, 20*time.Millisecond, 50*time.Millisecond
	}, "stubborn")
	pids := who(t, p, 1)
	o := p.Stop()
	if o.Confirmed || !strings.Contains(o.Why, "operation not permitted") {
		t.Errorf("outcome %+v", o)
	}
	if again := p.Stop(); again != o {
		t.Errorf("then %+v", again)
	}
	// The keeper has gone, and with its thread the agent, its own child.
	wait(t, func() bool { return len(alive(pids)) == 0 })
}

// The same with a real permission: an agent that became another user.
func TestAnotherUserIsNotConfirmed(t *testing.T) {
	need.Root(t)
	t.Parallel()
	dir, err := os.MkdirTemp("/var/tmp", "osproc") // every user may enter it, and set-user-ID counts
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	program, err := os.ReadFile(exe())
	if err != nil {
		t.Fatal(err)
	}
	plain, setuid := filepath.Join(dir, "plain"), filepath.Join(dir, "setuid")
	for name, mode := range map[string]uint32{plain: 0o755, setuid: 0o4755} {
		need.Program(t, name, string(program))
		if err := errors.Join(os.Chown(name, 64321, 64321), unix.Chmod(name, mode), os.Chmod(dir, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(plain, "unprivileged", setuid, "other")
	cmd.Env, cmd.Dir = []string{}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	var pid int
	if _, serr := fmt.Sscanf(string(out), "other %d", &pid); err != nil || serr != nil {
		t.Fatalf("%v, %v: %s", err, serr, out)
	}
	t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGKILL) })
	if !strings.Contains(string(out), "\nfalse 1 processes are still there after SIGKILL") || !strings.Contains(string(out), "not permitted") {
		t.Errorf("it says: %s", out)
	}
	if len(alive([]int{pid})) != 1 {
		t.Errorf("process %d should be alive: the test proves nothing", pid)
	}
}

func TestKilledKeeperProvesNothing(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "murderer")
	pids := who(t, p, 1)
	t.Cleanup(func() { _ = unix.Kill(pids[0], unix.SIGKILL) })
	if o := p.Stop(); o.Confirmed || !strings.Contains(o.Why, "keeper was killed") {
		t.Errorf("outcome %+v", o)
	}
	if e := p.Exit(); e.Code != -1 || e.Signal != "" {
		t.Errorf("exit %+v", e)
	}
}

// With a control group even that is proven.
func TestGroupProvesWithoutKeeper(t *testing.T) {
	need.Root(t)
	t.Parallel()
	parent := fmt.Sprintf("/osproc-test-%d", os.Getpid())
	t.Cleanup(func() {
		ctx, cancel := detached(time.Minute)
		defer cancel()
		if err := cgroup.New("", parent).Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Run("all", func(t *testing.T) {
		for _, helper := range []string{"murderer", "family", "orphans"} {
			t.Run(helper, func(t *testing.T) {
				t.Parallel()
				p := start(t, func(c *Config) { c.CgroupParent = parent }, helper)
				if p.group == nil {
					need.That(t, false, "this machine lets no control group be made")
				}
				pids := who(t, p, map[string]int{"murderer": 1, "family": 3, "orphans": 2}[helper])
				confirmed(t, p, pids...)
				if some, err := p.group.Populated(); some || err != nil {
					t.Errorf("populated %v, %v", some, err)
				}
			})
		}
	})
}

// A caller that is killed leaves nothing behind.
func TestCallerDies(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(exe(), "caller")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pids []int
	for sc := bufio.NewScanner(out); len(pids) < 3 && sc.Scan(); {
		var name string
		var pid int
		if _, err := fmt.Sscan(sc.Text(), &name, &pid); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(alive(pids)) != 3 {
		t.Fatalf("%v are not all there", pids)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	wait(t, func() bool { return len(alive(pids)) == 0 })
}

// wait waits for a condition that is not under this test's control.
func wait(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not come true")
		}
	}
}

func TestArgumentsDirectoryAndEnvironment(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "echo", "$(touch x); `y` 'z'", "*", "")
	if line, err := p.ReadLine(); err != nil || string(line) != "$(touch x); `y` 'z'|*|" {
		t.Errorf("%q, %v", line, err)
	}
	dir := t.TempDir()
	p = start(t, func(c *Config) {
		f, _, err := OpenWorkspace([]string{dir}, "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		c.Dir, c.Env = f, []string{"A=1", "B=x y"}
	}, "where")
	var got []string
	for {
		line, err := p.ReadLine()
		if err != nil {
			break
		}
		got = append(got, string(line))
	}
	if want := []string{dir, "A=1", "B=x y"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestStartErrors(t *testing.T) {
	t.Parallel()
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, c := range []struct {
		cfg  Config
		code errdefs.Code
	}{
		{Config{Argv: []string{"/no/such/program"}, Dir: dir}, errdefs.NotFound},
		{Config{Argv: []string{plain}, Dir: dir}, errdefs.Denied},
		{Config{Argv: []string{"relative"}, Dir: dir}, errdefs.Internal},
		{Config{Argv: []string{"/bin/true"}}, errdefs.Internal},
		{Config{Argv: []string{"/bin/true"}, Dir: dir, Keeper: []string{"/no/such/keeper"}}, errdefs.Unavailable},
		{Config{Argv: []string{"/bin/true"}, Dir: dir, Keeper: []string{"/bin/false"}}, errdefs.Unavailable},
	} {
		if c.cfg.Keeper == nil {
			c.cfg.Keeper = []string{exe(), KeeperCommand}
		}
		if p, err := Start(c.cfg); !errdefs.Is(err, c.code) {
			t.Errorf("%v: %v, %v, want %s", c.cfg.Argv, p, err, c.code)
		}
	}
}

func TestOutputBounds(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.MaxLine = 1000 }, "limit of 1000 bytes"},
		{func(c *Config) { c.MaxLine, c.MaxOutput = 1<<30, 3<<20 }, "limit for all of it"},
	} {
		p := start(t, c.change, "flood")
		_, err := p.ReadLine()
		if !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
		if _, err2 := p.ReadLine(); err2 != err {
			t.Errorf("then %v", err2)
		}
		confirmed(t, p, p.PID())
	}
}

func TestInput(t *testing.T) {
	t.Parallel()
	p := start(t, nil, "cat")
	big := bytes.Repeat([]byte("y"), 3<<20)
	for _, data := range [][]byte{[]byte("a\nb\n"), big, []byte("\nend")} {
		if err := p.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	p.CloseInput()
	if err := p.Write([]byte("too late")); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"a", "b", string(big), "end"} {
		line, err := p.ReadLine()
		if err != nil || string(line) != want {
			t.Fatalf("%d bytes, %v, want %d", len(line), err, len(want))
		}
	}
	if _, err := p.ReadLine(); err != io.EOF {
		t.Error(err)
	}
	if e := p.Exit(); e.Code != 0 {
		t.Errorf("%+v", e)
	}

	// One that does not read: the bound is told, and nothing hangs.
	p = start(t, func(c *Config) { c.MaxPending = 1 << 20 }, "obeys")
	var err error
	for i := 0; err == nil && i < 10; i++ {
		err = p.Write(make([]byte, 512<<10))
	}
	if !errdefs.Is(err, errdefs.Exhausted) {
		t.Errorf("unread input: %v", err)
	}
	confirmed(t, p, p.PID())
}

// A process of somebody else may hold the tree's output for ever. The tree is gone all
// the same, and so is its output once it was read.
func TestOutputHeldByAStranger(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := start(t, nil, "lender", path)
	c, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	oob := make([]byte, 64)
	_, n, _, _, err := c.ReadMsgUnix(make([]byte, 1), oob)
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(msgs) != 1 {
		t.Fatal(msgs, err)
	}
	held, err := unix.ParseUnixRights(&msgs[0])
	if err != nil {
		t.Fatal(err)
	}
	release := sync.OnceFunc(func() {
		for _, fd := range held {
			_ = unix.Close(fd)
		}
	})
	t.Cleanup(release)
	pids := who(t, p, 1)
	rest := make(chan error, 1)
	go func() { // waits when the tree ends, as a driver does
		_, err := p.ReadLine()
		rest <- err
	}()
	over := make(chan struct{})
	go func() {
		defer close(over)
		confirmed(t, p, pids...)
		if err := <-rest; err != io.EOF {
			t.Error(err)
		}
	}()
	select {
	case <-over:
	case <-time.After(20 * time.Second):
		t.Error("it waits for the stranger")
		release()
		<-over
	}
	if got := p.Stderr(); got != "last words\n" {
		t.Errorf("stderr %q", got)
	}
}

func TestStderrIsRedacted(t *testing.T) {
	t.Parallel()
	p := start(t, func(c *Config) { c.Secrets = []string{"s3cr3t-value", "x"} }, "stderr")
	<-p.Exited()
	confirmed(t, p, p.PID())
	if got, want := p.Stderr(), "api_key=[REDACTED]\nvalue [REDACTED] told\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
