package worker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// fakeTree ends at the step it is told.
type fakeTree struct {
	end        chan struct{}
	on         How
	terms      int
	kills      int
	killFailed error
}

func (f *fakeTree) PID() int { return 4 }

func (f *fakeTree) Wait() Exit {
	<-f.end
	return Exit{Text: "exited with code 0"}
}

func (f *fakeTree) Terminate() {
	f.terms++
	if f.on == Terminated {
		close(f.end)
	}
}

func (f *fakeTree) Kill(context.Context) error {
	f.kills++
	if f.on == Killed && f.kills == 1 {
		close(f.end)
	}
	return f.killFailed
}

type fakeIn struct{ f *fakeTree }

func (i fakeIn) Write(b []byte) (int, error) { return len(b), nil }

func (i fakeIn) Close() error {
	if i.f.on == Graceful {
		i.f.on = ""
		close(i.f.end)
	}
	return nil
}

// Counterpart of CT-01 and of the stop order: how long each step takes, and what
// was sent.
func TestStopSteps(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		on           How
		terms, kills int // kills count the one that clears up after the end
		after        time.Duration
		killFailed   error
	}{
		{on: EndedBefore, kills: 1},
		{on: Graceful, kills: 1},
		{on: Terminated, terms: 1, kills: 1, after: StopStep},
		{on: Killed, terms: 1, kills: 2, after: 2 * StopStep},
		{on: Unreaped, terms: 1, kills: 1, after: 3 * StopStep},
		{on: Unreaped, terms: 1, kills: 1, after: 3 * StopStep, killFailed: errors.New("stuck")},
		{on: Graceful, kills: 1, killFailed: errors.New("a child stays")},
	} {
		t.Run(string(c.on), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeTree{end: make(chan struct{}), on: c.on, killFailed: c.killFailed}
				or, _ := io.Pipe()
				er, _ := io.Pipe()
				p := NewProcess(f, fakeIn{f}, or, er, nil)
				if text, code := p.Exit(); text != "running" || code != -1 || p.Left() != nil {
					t.Errorf("%s, %d", text, code)
				}
				if c.on == EndedBefore {
					close(f.end)
					synctest.Wait()
				}
				begun := time.Now()
				o := p.Stop(0)
				if o.How != c.on || (o.Err != nil) != (c.killFailed != nil || c.on == Unreaped) {
					t.Errorf("%+v", o)
				}
				if d := time.Since(begun); d != c.after {
					t.Errorf("it took %s", d)
				}
				if c.on == Unreaped {
					close(f.end)
					synctest.Wait()
					c.kills++
				}
				if f.terms != c.terms || f.kills != c.kills {
					t.Errorf("%d TERM, %d KILL", f.terms, f.kills)
				}
				// Output that somebody holds open ends all the same.
				if _, err := io.ReadAll(p.Stdout); err != nil {
					t.Error(err)
				}
				time.Sleep(drainTime)
				synctest.Wait()
			})
		})
	}
}

// both runs a test with both launchers. The direct one needs root for its proof.
func both(t *testing.T, script string, fn func(t *testing.T, r rig)) {
	t.Helper()
	t.Run("direct", func(t *testing.T) {
		need.Root(t)
		t.Parallel()
		fn(t, newDirect(t, bare(t, script)))
	})
	need.EachRuntime(t, func(t *testing.T, path string) {
		t.Parallel()
		fn(t, newBox(t, bare(t, script), with(t, path), noNetwork))
	})
}

// Counterpart of WL-12, WL-15 to WL-17 for workers: real ones that heed, or not.
func TestStopReal(t *testing.T) {
	t.Parallel()
	script := `
import signal, sys, time
how = sys.stdin.readline().strip()
if how == "killed": signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
if how == "graceful": sys.stdin.read(); sys.exit(7)
while True: time.sleep(600)
`
	both(t, script, func(t *testing.T, r rig) {
		for _, how := range []How{Graceful, Terminated, Killed} {
			p := start(t, r, r.spec)
			fmt.Fprintln(p.Stdin, how)
			line(t, bufio.NewReader(p.Stdout))
			o := p.Stop(map[How]time.Duration{Graceful: patience, Terminated: 3 * time.Second, Killed: 3 * time.Second}[how])
			text, code := p.Exit()
			if o.How != how || o.Err != nil {
				t.Errorf("%s: %+v, %s", how, o, text)
			}
			want := map[How]string{Graceful: "exited with code 7", Terminated: "ended by SIGTERM", Killed: ""}[how]
			if !strings.HasPrefix(text, want) || (code == 7) != (how == Graceful) {
				t.Errorf("%s: %q, %d", how, text, code)
			}
			if o := p.Stop(0); o.How != EndedBefore {
				t.Errorf("stopped twice: %+v", o)
			}
		}
	})
}

// TestForksAndDies: what a worker has forked does not outlive it, whatever it did
// to get away, and does not keep its output open.
func TestForksAndDies(t *testing.T) {
	t.Parallel()
	script := `
import os, sys, time
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(w, b"%d\n" % os.getpid())
        while True: time.sleep(600)
    os._exit(0)
os.read(r, 100)
print(open("/proc/self/cgroup").read().count("stockade"), flush=True)
os._exit(9)
`
	both(t, script, func(t *testing.T, r rig) {
		p := start(t, r, r.spec)
		out, _ := finish(t, p)
		if text, code := p.Exit(); code != 9 {
			t.Errorf("%s, %d; %q", text, code, out)
		}
	})
}

// TestForksForEver: a process that is always about to fork is ended too.
func TestForksForEver(t *testing.T) {
	t.Parallel()
	script := `
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b"up\n")
if os.fork() > 0:
    sys.stdin.read()
    os._exit(0)
while True: # a new process, a new session, the old one gone
    if os.fork() > 0: os._exit(0)
    os.setsid()
`
	both(t, script, func(t *testing.T, r rig) {
		p := start(t, r, r.spec)
		line(t, bufio.NewReader(p.Stdout))
		if o := p.Stop(0); o.Err != nil || o.How == Unreaped {
			t.Errorf("%+v", o)
		}
		wait(t, p)
	})
}

// TestForkBomb: in a box a fork bomb is held to its tasks and ends with it.
func TestForkBomb(t *testing.T) {
	t.Parallel()
	r := newBox(t, bare(t, `
import os, sys
os.write(1, b"up\n")
while True:
    try: os.fork()
    except OSError: pass
`), noNetwork)
	p := start(t, r, r.spec)
	line(t, bufio.NewReader(p.Stdout))
	if o := p.Stop(0); o.Err != nil || o.How == Unreaped {
		t.Errorf("%+v", o)
	}
	wait(t, p)
}

// TestFlood: a worker whose output nobody reads is ended like any other.
func TestFlood(t *testing.T) {
	t.Parallel()
	both(t, "import sys\nwhile True: sys.stdout.write('x'*65536); sys.stderr.write('y'*65536)\n", func(t *testing.T, r rig) {
		p := start(t, r, r.spec)
		if _, err := p.Stdout.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if o := p.Stop(time.Second); o.Err != nil || o.How != Terminated {
			t.Errorf("%+v", o)
		}
		if out, err := io.ReadAll(p.Stdout); err != nil || len(out) == 0 {
			t.Errorf("%d bytes, %v", len(out), err)
		}
	})
}

// TestClose: a launcher ends what runs, and starts nothing any more.
func TestClose(t *testing.T) {
	t.Parallel()
	both(t, "import sys\nprint('up',flush=True)\nsys.stdin.read()\n", func(t *testing.T, r rig) {
		var ps []*Process
		for i := range 3 {
			ps = append(ps, start(t, r, newSpec(t, r.dir, "inst-"+strconv.Itoa(i))))
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		for _, p := range ps {
			select {
			case <-p.Exited():
			default:
				t.Error("it lives on")
			}
		}
		if p, err := r.Start(t.Context(), r.spec); !errdefs.Is(err, errdefs.Unavailable) {
			t.Errorf("%v, %v", p, err)
		}
	})
}

func TestCancelledStart(t *testing.T) {
	t.Parallel()
	both(t, "import time\ntime.sleep(600)\n", func(t *testing.T, r rig) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if p, err := r.Start(ctx, r.spec); err == nil {
			t.Errorf("%v", p)
		}
	})
}

// TestMain_killed plays the runtime for TestKilledRuntime.
func TestMain_killed(t *testing.T) {
	kind := os.Getenv("STOCKADE_WORKER_KILLED")
	if kind == "" {
		t.Skip("only as a child of TestKilledRuntime")
	}
	r := rig{dir: os.Getenv("STOCKADE_WORKER_DIR")}
	i := bare(t, "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up',flush=True)\nwhile True: time.sleep(600)\n")
	var err error
	if kind == "box" {
		cfg := boxConfig(t, i)
		cfg.DataDir, cfg.Network = r.dir, NetworkNone
		r.Launcher, err = Box(cfg)
	} else {
		r.Launcher, err = Direct(DirectConfig{Interp: i, DataDir: r.dir})
	}
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, r, newSpec(t, r.dir, "inst-a"))
	line(t, bufio.NewReader(p.Stdout))
	fmt.Printf("pid %d\n", p.PID())
	select {}
}

// TestKilledRuntime: a runtime that is killed leaves a direct worker no time at
// all, and whatever it left is gone when the next one opens its directory.
func TestKilledRuntime(t *testing.T) {
	t.Parallel()
	need.Runc(t)
	initPath(t)
	for _, c := range []struct{ kind, next string }{{"direct", "direct"}, {"box", "box"}, {"box", "direct"}} {
		t.Run(c.kind+" then "+c.next, func(t *testing.T) {
			t.Parallel()
			kind := c.kind
			dir := dataDir(t)
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMain_killed$")
			// It will not clean up after itself: what it makes is the parent's to remove.
			cmd.Env = append(os.Environ(), "STOCKADE_WORKER_KILLED="+kind, "STOCKADE_WORKER_DIR="+dir, "TMPDIR="+t.TempDir())
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			pid := 0
			for sc := bufio.NewScanner(out); pid == 0 && sc.Scan(); {
				fmt.Sscanf(sc.Text(), "pid %d", &pid)
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if pid == 0 {
				t.Fatal("it started no worker")
			}
			gone := func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }
			if kind == "direct" {
				eventually(t, "the worker is gone", gone)
			} else if gone() {
				t.Log("the box ended by itself")
			}
			var l Launcher
			if c.next == "box" {
				cfg := boxConfig(t, bare(t, ""))
				cfg.DataDir = dir
				l, err = Box(cfg)
			} else {
				l, err = Direct(DirectConfig{Interp: bare(t, ""), DataDir: dir})
			}
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "what was left is gone", gone)
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestWhatLiesElsewhereGoes: where the directory of running boxes lies depends on the
// OCI runtime. What one has left goes with the start of the next, unless somebody else
// made it.
func TestWhatLiesElsewhereGoes(t *testing.T) {
	t.Parallel()
	need.Root(t)
	data := dataDir(t)
	k, err := key(data)
	if err != nil {
		t.Fatal(err)
	}
	begin := func() {
		t.Helper()
		l, err := Direct(DirectConfig{Interp: bare(t, ""), DataDir: data})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	there := func(dir string) bool { _, err := os.Lstat(dir); return err == nil }
	dirs := runDirs(k)
	for _, d := range dirs {
		if err := os.MkdirAll(filepath.Join(d, "bundles", "left"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	strangers := dirs[1]
	if err := os.Chown(strangers, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	begin()
	if there(dirs[0]) || !there(strangers) {
		t.Errorf("ours is there: %v, the stranger's: %v", there(dirs[0]), there(strangers))
	}
	if _, err := runDir(strangers, k, false); !errdefs.Is(err, errdefs.Denied) {
		t.Errorf("the stranger's is taken: %v", err)
	}
	if err := os.Chown(strangers, 0, 0); err != nil {
		t.Fatal(err)
	}
	begin()
	if there(strangers) {
		t.Error("it is left")
	}
}
