package host_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

func exited(st wire.ProcState, code int) bool {
	return st.Phase == wire.PhaseEnded && st.Exit != nil && st.Exit.Kind == api.ExitExited && *st.Exit.Code == code
}

func TestRunsAProcessToItsEnd(t *testing.T) { need.EachRuntime(t, runsAProcessToItsEnd) }

func runsAProcessToItsEnd(t *testing.T, runtime string) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.NewOver(t, runtime)
	spec := h.Run(hosttest.Sh(h.Box(), "echo out; echo err >&2; exit 7"))
	stdout, stderr := h.Output(spec.ID)
	if string(stdout) != "out\n" || string(stderr) != "err\n" {
		t.Errorf("output %q, %q", stdout, stderr)
	}
	st := h.Phase(spec.ID, wire.PhaseEnded)
	if !exited(st, 7) || st.Proof == nil || st.Proof.Method != "pid_namespace" || st.Started == nil || st.Ended == nil {
		t.Errorf("state %+v, exit %+v", st, st.Exit)
	}
	if st.Log.Next != 8 || st.Log.Stdout != 4 || !st.Log.EOF {
		t.Errorf("log %+v", st.Log)
	}
	hosttest.Eventually(t, "the shim of an ended process is gone", func() bool { return len(h.Programs("shim")) == 0 })
	if again, _ := h.Output(spec.ID); string(again) != "out\n" {
		t.Errorf("read again: %q", again)
	}
	if err := h.Client().Forget(ctx, spec.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Client().Proc(ctx, spec.ID); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("after forget: %v", err)
	}
	if err := h.Client().Forget(ctx, spec.ID); err != nil {
		t.Errorf("forget again: %v", err)
	}
}

func TestConcurrentStartsStartOne(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := hosttest.Sh(h.Box(), "echo ran >> /workspace/count; cat /workspace/count")
	var wg sync.WaitGroup
	for range 24 {
		wg.Go(func() {
			c := h.As(h.Generation)
			if st, err := c.Start(ctx, spec); err != nil || st.ID != spec.ID {
				t.Errorf("start: %+v, %v", st, err)
			}
		})
	}
	wg.Wait()
	if out, _ := h.Output(spec.ID); string(out) != "ran\n" {
		t.Errorf("it ran %q", out)
	}
	h.Phase(spec.ID, wire.PhaseEnded)
	h.Restart()
	if st, err := h.Client().Start(ctx, spec); err != nil || !exited(st, 0) {
		t.Errorf("start after the end and a restart: %+v, %v", st, err)
	}
	other := spec
	other.Argv = []string{"/bin/true"}
	_, err := h.Client().Start(ctx, other)
	if !errdefs.Is(err, errdefs.Conflict) || !host.Refused(err) {
		t.Errorf("another spec: %v", err)
	}
	if out, _ := h.Output(spec.ID); string(out) != "ran\n" {
		t.Errorf("it ran %q", out)
	}
}

func TestARefusedStartLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	box := h.Box()
	spec := hosttest.Sh(box, "echo ok")
	bad := map[string]func(*wire.ProcSpec){
		"cwd is not there":    func(s *wire.ProcSpec) { s.Cwd = "nowhere" },
		"cwd leads out":       func(s *wire.ProcSpec) { s.Cwd = "../.." },
		"no command":          func(s *wire.ProcSpec) { s.Argv = nil },
		"NUL in an argument":  func(s *wire.ProcSpec) { s.Argv = []string{"a\x00b"} },
		"too long":            func(s *wire.ProcSpec) { s.Argv = []string{strings.Repeat("x", 2<<20)} },
		"no such box":         func(s *wire.ProcSpec) { s.Box = hosttest.NewID(ident.Box) },
		"a box that is none":  func(s *wire.ProcSpec) { s.Box = "../x" },
		"negative limit":      func(s *wire.ProcSpec) { s.SpoolBytes = -1 },
		"unknown overflow":    func(s *wire.ProcSpec) { s.Overflow = "explode" },
		"terminal of no size": func(s *wire.ProcSpec) { s.PTY = &api.Winsize{} },
		"nameless variable":   func(s *wire.ProcSpec) { s.Env = []string{"=x"} },
	}
	for name, change := range bad {
		s := spec
		change(&s)
		_, err := h.Client().Start(ctx, s)
		if !host.Refused(err) || !errdefs.Is(err, errdefs.Invalid) && !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := h.Client().Proc(ctx, spec.ID); !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%s: it is kept: %v", name, err)
		}
		if left, _ := os.ReadDir(filepath.Join(h.Dir, "procs")); len(left) > 0 {
			t.Errorf("%s: left behind: %v", name, left)
		}
	}
	h.Run(spec)
	if out, _ := h.Output(spec.ID); string(out) != "ok\n" {
		t.Errorf("the same id, done right: %q", out)
	}
}

func TestClosingAnUnknownIDForbidsItsStart(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := hosttest.Sh(h.Box(), "echo ran")
	for range 2 {
		st, err := h.Client().CloseProc(ctx, spec.ID, wire.Close{Reason: "never mind"})
		if err != nil || st.Phase != wire.PhaseEnded || st.Proof == nil || st.Proof.Method != "never_started" {
			t.Fatalf("close: %+v, %v", st, err)
		}
		h.Restart()
		st, err = h.Client().Start(ctx, spec)
		if err != nil || st.Phase != wire.PhaseEnded || st.Proof.Method != "never_started" {
			t.Fatalf("start after close: %+v, %v", st, err)
		}
	}
	if stdout, stderr := h.Output(spec.ID); len(stdout)+len(stderr) > 0 {
		t.Errorf("it said %q %q", stdout, stderr)
	}
}

func TestCloseEndsAWholeTree(t *testing.T) { need.EachRuntime(t, closeEndsAWholeTree) }

func closeEndsAWholeTree(t *testing.T, runtime string) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	spec := h.Run(hosttest.Sh(box, `trap "" TERM; (trap "" TERM; setsid sh -c 'trap "" TERM; while :; do sleep 1; done') & echo up; while :; do sleep 1; done`))
	hosttest.Eventually(t, "it says that it is up", func() bool {
		st, err := h.Client().Proc(ctx, spec.ID)
		return err == nil && st.Log.Next == 3
	})
	if err := h.Client().RemoveBox(ctx, box); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a box with a process in it was removed: %v", err)
	}
	if err := h.Client().Forget(ctx, spec.ID); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a living process was forgotten: %v", err)
	}
	if info, err := h.Client().Box(ctx, box); err != nil || info.Procs != 1 {
		t.Errorf("box: %+v, %v", info, err)
	}
	if n := len(h.Inside(box, spec.ID)); n < 3 {
		t.Fatalf("%d processes inside", n)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			st, err := h.As(h.Generation).CloseProc(ctx, spec.ID, wire.Close{Reason: "enough", GraceMillis: 100})
			if err != nil || st.Phase != wire.PhaseEnded || st.Proof == nil {
				t.Errorf("close: %+v, %v", st, err)
			}
		})
	}
	wg.Wait()
	if left := h.Inside(box, spec.ID); len(left) > 0 {
		t.Errorf("left inside: %v", left)
	}
	if st := h.Phase(spec.ID, wire.PhaseEnded); st.Exit.Kind != api.ExitSignalled || st.Exit.Signal != "SIGKILL" {
		t.Errorf("exit %+v", st.Exit)
	}
	if info, err := h.Client().Box(ctx, box); err != nil || info.Procs != 0 {
		t.Errorf("box: %+v, %v", info, err)
	}
}

// Callers that wait for a long grace hold up nobody, and a later close may
// shorten it.
func TestManyClosersHoldUpNobody(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := hosttest.Sh(h.Box(), `trap "" TERM; echo up; cat; while :; do sleep 1; done`)
	spec.Stdin = true
	h.Run(spec)
	hosttest.Eventually(t, "it is up", func() bool {
		st, err := h.Client().Proc(ctx, spec.ID)
		return err == nil && st.Log.Next == 3
	})
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			st, err := h.Client().CloseProc(ctx, spec.ID, wire.Close{GraceMillis: 500_000})
			if err != nil || st.Proof == nil {
				t.Errorf("a patient close: %+v, %v", st, err)
			}
		})
	}
	hosttest.Eventually(t, "it is being closed", func() bool {
		st, err := h.Client().Proc(ctx, spec.ID)
		return err == nil && st.Phase == wire.PhaseStopping
	})
	if st, err := h.Client().WriteStdin(ctx, spec.ID, 0, []byte("still there"), true); err != nil || st.Accepted != 11 {
		t.Errorf("input meanwhile: %+v, %v", st, err)
	}
	hosttest.Eventually(t, "it answers", func() bool {
		st, err := h.Client().Proc(ctx, spec.ID)
		return err == nil && st.Log.Next == 14
	})
	if st, err := h.Client().CloseProc(ctx, spec.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Errorf("close at once: %+v, %v", st, err)
	}
	wg.Wait()
}

func TestInputByOffset(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	spec := hosttest.Spec(h.Box(), "/bin/cat")
	spec.Stdin = true
	h.Run(spec)
	c := h.Client()
	// At once: the write waits for the shim.
	if st, err := c.WriteStdin(ctx, spec.ID, 0, []byte("hello "), false); err != nil || st.Accepted != 6 {
		t.Fatalf("%+v, %v", st, err)
	}
	if st, err := c.WriteStdin(ctx, spec.ID, 3, []byte("lo world"), false); err != nil || st.Accepted != 11 {
		t.Fatalf("overlap: %+v, %v", st, err)
	}
	if _, err := c.WriteStdin(ctx, spec.ID, 12, []byte("x"), false); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("ahead: %v", err)
	}
	if _, err := c.WriteStdin(ctx, spec.ID, 0, make([]byte, host.MaxStdinBody+1), false); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("too much: %v", err)
	}
	for range 2 {
		if st, err := c.WriteStdin(ctx, spec.ID, 11, nil, true); err != nil || !st.EOF {
			t.Fatalf("end: %+v, %v", st, err)
		}
	}
	if out, _ := h.Output(spec.ID); string(out) != "hello world" {
		t.Errorf("it read %q", out)
	}
	h.Phase(spec.ID, wire.PhaseEnded)
	if st, err := c.WriteStdin(ctx, spec.ID, 6, []byte("world"), true); err != nil || st.Accepted != 11 {
		t.Errorf("repeated after the end: %+v, %v", st, err)
	}
	if _, err := c.WriteStdin(ctx, spec.ID, 11, []byte("x"), false); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("after the end: %v", err)
	}
	if err := c.Signal(ctx, spec.ID, "SIGINT"); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("signal after the end: %v", err)
	}
	if err := c.Ack(ctx, spec.ID, 11); err != nil {
		t.Errorf("ack after the end: %v", err)
	}
	if err := c.Ack(ctx, spec.ID, 12); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("ack beyond the end: %v", err)
	}
}

func TestATerminalHasASize(t *testing.T) { need.EachRuntime(t, aTerminalHasASize) }

func aTerminalHasASize(t *testing.T, runtime string) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.NewOver(t, runtime)
	spec := hosttest.Sh(h.Box(), `stty size; trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.1; done`)
	spec.PTY = &api.Winsize{Rows: 7, Cols: 33}
	spec.Stdin = true
	h.Run(spec)
	hosttest.Eventually(t, "it is ready", func() bool {
		st, err := h.Client().Proc(ctx, spec.ID)
		return err == nil && st.Log.Next >= int64(len("7 33\r\nready\r\n"))
	})
	if err := h.Client().Resize(ctx, spec.ID, api.Winsize{Rows: 9, Cols: 44}); err != nil {
		t.Fatal(err)
	}
	if out, _ := h.Output(spec.ID); string(out) != "7 33\r\nready\r\n9 44\r\n" {
		t.Errorf("output %q", out)
	}
	if err := h.Client().Resize(ctx, spec.ID, api.Winsize{Rows: 5000, Cols: 1}); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("absurd size: %v", err)
	}
}

func TestWatchTellsEveryProcessAndEveryChange(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	old := h.Run(hosttest.Sh(box, "true"))
	h.Phase(old.ID, wire.PhaseEnded)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	seen := make(chan wire.ProcState, 100)
	ended := make(chan error, 1)
	go func() { ended <- h.Client().Watch(ctx, func(st wire.ProcState) { seen <- st }) }()
	if st := <-seen; st.ID != old.ID || st.Phase != wire.PhaseEnded {
		t.Fatalf("first %+v", st)
	}
	spec := h.Run(hosttest.Sh(box, "exit 3"))
	var last wire.ProcState
	for !exited(last, 3) {
		st := <-seen
		if st.ID != spec.ID {
			t.Fatalf("state of %s", st.ID)
		}
		if st.Rev < last.Rev {
			t.Errorf("Rev went from %d to %d", last.Rev, st.Rev)
		}
		last = st
	}
	cancel()
	if err := <-ended; err != context.Canceled {
		t.Errorf("watch ended with %v", err)
	}
}

func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			spec := h.Run(hosttest.Sh(box, fmt.Sprintf("echo %d; exit %d", i, i)))
			if out, _ := h.Output(spec.ID); string(out) != fmt.Sprintf("%d\n", i) {
				t.Errorf("%d said %q", i, out)
			}
			if st := h.Phase(spec.ID, wire.PhaseEnded); !exited(st, i) {
				t.Errorf("%d: %+v", i, st.Exit)
			}
		})
	}
	wg.Wait()
}
