package shim

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

func (p *proc) close(grace time.Duration) wire.ProcState {
	p.t.Helper()
	st, err := p.client.Close(p.ctx(), wire.Close{Reason: "test", GraceMillis: grace.Milliseconds()})
	check(p.t, err)
	if st.Phase != wire.PhaseEnded || st.Proof == nil {
		p.t.Fatalf("close answered %+v", st)
	}
	return p.quiescent()
}

func TestCloseAsksFirst(t *testing.T) { each(t, closeAsksFirst) }

func closeAsksFirst(t *over) {
	t.Parallel()
	p := newProc(t, sh(`trap 'echo bye; exit 9' TERM; echo ready; while :; do sleep 0.05; done`)).start()
	p.says("ready")
	p.wantExit(p.close(patience), api.ExitExited, 9, "")
	if out, _ := p.output(); string(out) != "ready\nbye\n" {
		t.Errorf("output %q", out)
	}
}

func TestCloseKillsWhatDoesNotListen(t *testing.T) { each(t, closeKillsWhatDoesNotListen) }

func closeKillsWhatDoesNotListen(t *over) {
	t.Parallel()
	for name, script := range map[string]string{
		"child ignores TERM":            `trap "" TERM; echo ready; while :; do sleep 1000; done`,
		"grandchild ignores TERM":       `sh -c 'trap "" TERM; echo ready; while :; do sleep 1000; done' & wait; wait; sleep 1000`,
		"grandchild in its own session": `trap "" TERM; setsid sh -c 'trap "" TERM; echo ready; while :; do sleep 1000; done' & while :; do sleep 1000; done`,
		"stopped child":                 `echo ready; kill -STOP $$`,
	} {
		for _, grace := range []time.Duration{0, 100 * time.Millisecond} {
			t.Run(fmt.Sprint(name, "/", grace), func(t *over) {
				t.Parallel()
				p := newProc(t, sh(script)).start()
				p.says("ready")
				st := p.close(grace)
				if st.Exit.Kind != api.ExitSignalled || (st.Exit.Signal != "SIGKILL" && st.Exit.Signal != "SIGTERM") {
					t.Errorf("exit %+v", st.Exit)
				}
				if procs, err := cgroup.New("", p.cfg.Cgroup).Procs(); err == nil && len(procs) > 0 {
					t.Errorf("left: %v", procs)
				}
			})
		}
	}
}

// A close can come at any moment, also while the container starts.
func TestCloseWhileStarting(t *testing.T) { each(t, closeWhileStarting) }

func closeWhileStarting(t *over) {
	t.Parallel()
	for i := range 6 {
		t.Run(fmt.Sprint(i), func(t *over) {
			t.Parallel()
			p := newProc(t, sh("sleep 1000")).start()
			st := p.close(time.Duration(i%2) * patience)
			switch st.Exit.Kind {
			case api.ExitSignalled, api.ExitSpawnFailed:
			default:
				t.Errorf("exit %+v", st.Exit)
			}
		})
	}
}

// A terminal whose child ends by SIGTERM in the moment of its start.
func TestCloseWhileStartingOnATerminal(t *testing.T) { each(t, closeWhileStartingOnATerminal) }

func closeWhileStartingOnATerminal(t *over) {
	t.Parallel()
	p := newProc(t, sh("sleep 1000"), with(terminal)).start()
	st := p.close(patience)
	if st.Exit.Kind != api.ExitSignalled || st.Exit.Signal != "SIGTERM" {
		t.Errorf("exit %+v", st.Exit)
	}
}

func TestRepeatedClose(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`trap "" TERM; echo ready; while :; do sleep 1000; done`)).start()
	p.says("ready")
	var wg sync.WaitGroup
	results := make([]wire.ProcState, 4)
	for i := range results {
		wg.Go(func() {
			// The first asks for ever; a later one shortens it.
			grace := 10 * patience
			if i == len(results)-1 {
				grace = 10 * time.Millisecond
			}
			st, err := p.client.Close(p.ctx(), wire.Close{Reason: "test", GraceMillis: grace.Milliseconds()})
			if err != nil {
				t.Error(err)
			}
			results[i] = st
		})
	}
	wg.Wait()
	for _, st := range results {
		if st.Proof == nil || st.Rev != results[0].Rev {
			t.Errorf("answers differ: %+v", st)
		}
	}
	p.wantExit(p.close(0), api.ExitSignalled, 0, "SIGKILL")
	_, err := p.client.Close(p.ctx(), wire.Close{GraceMillis: -1})
	wantCode(t, err, errdefs.Invalid)
}

func TestDeadline(t *testing.T) { each(t, deadlineTest) }

func deadlineTest(t *over) {
	t.Parallel()
	p := newProc(t, sh(`trap 'exit 0' TERM; while :; do sleep 0.05; done`), deadline(300)).start()
	p.wantExit(p.quiescent(), api.ExitDeadline, 0, "")
	p = newProc(t, sh(`exit 5`), deadline(60_000)).start()
	p.wantExit(p.quiescent(), api.ExitExited, 5, "")
}

// A lease that is renewed holds; one that is not ends the process.
func TestLease(t *testing.T) {
	t.Parallel()
	held := false
	// On a machine that stalls a lease may run out between two renewals. Then the
	// process ends rightly, and a longer lease is tried.
	for lease := 400 * time.Millisecond; !held && lease < time.Minute; lease *= 4 {
		file := filepath.Join(t.TempDir(), "lease")
		check(t, WriteLease(file, lease))
		p := newProc(t, sh(`trap 'exit 0' TERM; while :; do sleep 0.05; done`), with(func(c *Config) { c.LeaseFile = file })).start()
		var began time.Duration
		for ended := false; !held && !ended; {
			check(t, WriteLease(file, lease))
			st, err := p.client.State(p.ctx())
			check(t, err)
			switch st.Phase {
			case wire.PhaseRunning:
				if began == 0 {
					began = bootTime()
				}
				held = bootTime() > began+3*lease
			case wire.PhaseStopping, wire.PhaseEnded:
				ended = true
			}
		}
		st := p.quiescent()
		p.wantExit(st, api.ExitDeadline, 0, "")
		if !strings.Contains(st.Exit.Detail, "lease") {
			t.Errorf("detail %q", st.Exit.Detail)
		}
	}
	if !held {
		t.Error("a lease that is renewed does not hold")
	}
}

func TestNoLeaseGrantsNothing(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "lease")
	p := newProc(t, sh(`while :; do sleep 1000; done`), with(func(c *Config) { c.LeaseFile = file })).start()
	p.wantExit(p.quiescent(), api.ExitDeadline, 0, "")
}

func TestTwoStartsOneChild(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`echo started; sleep 1000`))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := Start(p.ctx(), p.exe, p.dir); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	p.says("started")
	check(t, Start(p.ctx(), p.exe, p.dir)) // and another, later
	alive, err := Find(p.dir)
	if !alive || err != nil {
		t.Errorf("Find: %v %v", alive, err)
	}
	p.close(0)
	if out, _ := p.output(); string(out) != "started\n" {
		t.Errorf("output %q", out)
	}
}

// After the end nothing is started again from the same directory.
func TestNeverAgain(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`exit 0`)).start()
	p.quiescent()
	check(t, Start(p.ctx(), p.exe, p.dir)) // the shim lingers: it answers
	check(t, p.client.Forget(p.ctx()))
	alive, err := Find(p.dir)
	if alive || err != nil {
		t.Errorf("Find: %v %v", alive, err)
	}
	wantCode(t, Start(p.ctx(), p.exe, p.dir), errdefs.Conflict)
	check(t, os.Remove(filepath.Join(p.dir, markerFile)))
	wantCode(t, Start(p.ctx(), p.exe, p.dir), errdefs.Conflict)
}

func TestForgetOnlyTheEnded(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`echo ready; sleep 1000`)).start()
	p.says("ready")
	wantCode(t, p.client.Forget(p.ctx()), errdefs.Conflict)
}

// The starter's death is none of the shim's business.
func TestSurvivesItsStarter(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`echo ready; read x; echo got $x; exit 4`), with(stdin))
	err := exec.Command(p.exe, "start-and-die", p.exe, p.dir).Run()
	if ee, ok := err.(*exec.ExitError); !ok || ee.ExitCode() != -1 {
		t.Fatalf("the starter did not die by a signal: %v", err)
	}
	p.says("ready")
	if _, err := p.client.WriteStdin(p.ctx(), 0, []byte("line\n"), true); err != nil {
		t.Fatal(err)
	}
	p.wantExit(p.quiescent(), api.ExitExited, 4, "")
	if out, _ := p.output(); string(out) != "ready\ngot line\n" {
		t.Errorf("output %q", out)
	}
}

// When the shim itself dies, Find says so, the container is still there, and
// the marker forbids another start.
func TestShimKilled(t *testing.T) { each(t, shimKilled) }

func shimKilled(t *over) {
	t.Parallel()
	p := newProc(t, sh(`echo ready; sleep 1000`)).start()
	p.says("ready")
	id, ok := readIdentity(p.dir)
	if !ok {
		t.Fatal("no shim.json")
	}
	st, err := p.client.State(p.ctx())
	check(t, err)
	died := make(chan error, 1)
	go func() {
		_, err := p.client.Wait(p.ctx(), st.Rev, -1)
		died <- err
	}()
	check(t, unix.Kill(id.PID, unix.SIGKILL))
	wantCode(t, <-died, errdefs.Unavailable)
	for {
		alive, err := Find(p.dir)
		check(t, err)
		if !alive {
			break
		}
	}
	if tried, err := Tried(p.dir); !tried || err != nil {
		t.Errorf("Tried: %v %v", tried, err)
	}
	wantCode(t, Start(p.ctx(), p.exe, p.dir), errdefs.Conflict)
	g := cgroup.New("", p.cfg.Cgroup)
	if populated, err := g.Populated(); err != nil || !populated {
		t.Fatalf("the container is gone: %v %v", populated, err)
	}
	check(t, g.Kill(p.ctx()))
	check(t, exec.Command(p.cfg.Runtime, "--root", p.cfg.RuntimeRoot, "delete", "--force", p.cfg.Container).Run())
	now := time.Now().UTC()
	check(t, WriteExit(p.dir, wire.ProcState{ID: p.cfg.Spec.ID, Phase: wire.PhaseEnded, Ended: &now, Exit: &api.Exit{Kind: api.ExitUnknown}}))
	if st, err := ReadExit(p.dir); err != nil || st.Exit.Kind != api.ExitUnknown {
		t.Errorf("%+v %v", st, err)
	}
}

// A shim that is told to end by the machine ends its process in order, and goes.
func TestTermOfTheShim(t *testing.T) { each(t, termOfTheShim) }

func termOfTheShim(t *over) {
	t.Parallel()
	p := newProc(t, sh(`trap 'exit 6' TERM; echo ready; while :; do sleep 0.05; done`)).start()
	p.says("ready")
	id, _ := readIdentity(p.dir)
	check(t, unix.Kill(id.PID, unix.SIGTERM))
	for alive := true; alive; {
		var err error
		alive, err = Find(p.dir)
		check(t, err)
	}
	st, err := ReadExit(p.dir)
	check(t, err)
	p.wantExit(st, api.ExitExited, 6, "")
	if st.Proof == nil {
		t.Errorf("no proof: %+v", st)
	}
}

func TestSignals(t *testing.T) { each(t, signalsTest) }

func signalsTest(t *over) {
	t.Parallel()
	p := newProc(t, sh(`trap 'echo usr1' USR1; trap 'echo int' INT; trap 'echo hup; exit 0' HUP; echo ready; while :; do sleep 0.02; done`)).start()
	p.says("ready")
	for _, name := range []string{"SIGUSR1", "SIGINT", "SIGHUP"} {
		check(t, p.client.Signal(p.ctx(), name))
		p.until(0, name, func(st wire.ProcState) bool {
			out, _ := p.output()
			return strings.Contains(string(out), strings.ToLower(strings.TrimPrefix(name, "SIG")))
		})
	}
	p.wantExit(p.quiescent(), api.ExitExited, 0, "")
	wantCode(t, p.client.Signal(p.ctx(), "SIGKILL"), errdefs.Invalid)
	wantCode(t, p.client.Signal(p.ctx(), "9"), errdefs.Invalid)
	wantCode(t, p.client.Signal(p.ctx(), "SIGINT"), errdefs.Conflict)
}

// A signal that comes before the command exists reaches it.
func TestEarlySignal(t *testing.T) { each(t, earlySignal) }

func earlySignal(t *over) {
	t.Parallel()
	p := newProc(t, sh(`sleep 1000`)).start()
	check(t, p.client.Signal(p.ctx(), "SIGUSR2"))
	p.wantExit(p.quiescent(), api.ExitSignalled, 0, "SIGUSR2")
}

func TestSuspendAndContinue(t *testing.T) { each(t, suspendAndContinue) }

func suspendAndContinue(t *over) {
	t.Parallel()
	p := newProc(t, sh(`trap 'echo cont; exit 0' CONT; echo ready; while :; do sleep 0.02; done`)).start()
	p.says("ready")
	check(t, p.client.Signal(p.ctx(), "SIGTSTP"))
	check(t, p.client.Signal(p.ctx(), "SIGCONT"))
	p.wantExit(p.quiescent(), api.ExitExited, 0, "")
}

// Wait with a context that ends returns, and leaves the shim as it is.
func TestWaitEnds(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`echo ready; sleep 1000`)).start()
	p.says("ready")
	st := p.until(-1, "running", func(st wire.ProcState) bool { return st.Phase == wire.PhaseRunning })
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := p.client.Wait(ctx, st.Rev, -1); err == nil {
		t.Error("Wait returned without a change")
	}
	if again, err := p.client.State(p.ctx()); err != nil || again.Rev != st.Rev {
		t.Errorf("%+v %v", again, err)
	}
}
