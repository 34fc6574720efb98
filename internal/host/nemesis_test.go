package host_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

// Hosts and shims are killed at random while processes are started and repeated
// by callers that believe no answer they did not get. Whatever happens, an id
// runs at most once, and exactly once unless its shim was killed.
func TestNothingRunsTwice(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	box := h.Box()
	specs := make([]wire.ProcSpec, 24)
	for i := range specs {
		specs[i] = hosttest.Sh(box, fmt.Sprintf("echo %d >> /workspace/ran; sleep 0.0%d", i, i%10))
	}
	var wg sync.WaitGroup
	for _, spec := range specs {
		wg.Go(func() {
			hosttest.Eventually(t, "started twice with an answer", func() bool {
				_, err := h.Client().Start(ctx, spec)
				if err != nil && !errdefs.Is(err, errdefs.Unavailable) && !errdefs.Is(err, errdefs.Indeterminate) {
					t.Errorf("start: %v", err)
				}
				if err == nil {
					_, err = h.Client().Start(ctx, spec)
				}
				return err == nil
			})
		})
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		rnd := rand.New(rand.NewPCG(1, 2))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rnd.IntN(60)) * time.Millisecond):
			}
			if shims := h.Programs("shim"); len(shims) > 0 && rnd.IntN(2) == 0 {
				_ = unix.Kill(shims[rnd.IntN(len(shims))], unix.SIGKILL)
			} else {
				h.Restart()
			}
		}
	}()
	wg.Wait()
	close(stop)
	<-stopped
	kinds := map[api.ExitKind]int{}
	for i, spec := range specs {
		st := h.Phase(spec.ID, wire.PhaseEnded)
		hosttest.Eventually(t, "it is proven gone", func() bool {
			var err error
			st, err = h.Client().Proc(ctx, spec.ID)
			return err == nil && st.Proof != nil
		})
		kinds[st.Exit.Kind]++
		if st.Exit.Kind == api.ExitExited && *st.Exit.Code != 0 {
			t.Errorf("%d: exit %+v", i, st.Exit)
		}
		ran := 0
		for _, line := range strings.Fields(string(h.File(box, "/workspace/ran"))) {
			if line == fmt.Sprint(i) {
				ran++
			}
		}
		if ran > 1 || ran == 0 && st.Exit.Kind == api.ExitExited {
			t.Errorf("%d ran %d times, exit %+v", i, ran, st.Exit)
		}
	}
	t.Logf("exits: %v", kinds)
}

// The runtime may outlive its shim in the middle of a start. What it would still
// bring up must not run after the host has said that the tree is gone.
func TestARuntimeThatOutlivesItsShimStartsNothing(t *testing.T) {
	need.EachRuntime(t, aRuntimeThatOutlivesItsShimStartsNothing)
}

func aRuntimeThatOutlivesItsShimStartsNothing(t *testing.T, runtime string) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	h.Kill()
	dir := t.TempDir()
	slow := filepath.Join(dir, "slow")
	script := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *' run '*) touch %s/at; read x < %s/go;; esac\nexec %s \"$@\"\n", dir, dir, runtime)
	if err := os.WriteFile(slow, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "go"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.Runtime = slow
	h.Start()
	spec := h.Run(hosttest.Sh(box, "echo ran >> /workspace/ran"))
	hosttest.Eventually(t, "the runtime is in the middle", func() bool { _, err := os.Stat(dir + "/at"); return err == nil })
	_ = unix.Kill(h.Shim(spec.ID), unix.SIGKILL)
	st := h.Phase(spec.ID, wire.PhaseEnded)
	if st.Exit.Kind != api.ExitUnknown || st.Proof == nil {
		t.Errorf("%+v %+v", st, st.Exit)
	}
	// Nobody reads the other end any more: the runtime is dead.
	if fd, err := unix.Open(filepath.Join(dir, "go"), unix.O_WRONLY|unix.O_NONBLOCK, 0); err == nil {
		unix.Close(fd)
		t.Error("the runtime still waits to go on")
	}
	if again, err := h.Client().Start(ctx, spec); err != nil || again.Phase != wire.PhaseEnded {
		t.Errorf("%+v, %v", again, err)
	}
	if got := h.File(box, "/workspace/ran"); len(got) > 0 {
		t.Errorf("it ran: %q", got)
	}
}

func TestAFullDiskRefusesAndLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	h := hosttest.New(t)
	box := h.Box()
	h.Kill()
	procs := filepath.Join(h.Dir, "procs")
	if err := unix.Mount("tmpfs", procs, "tmpfs", 0, "size=2m"); err != nil {
		t.Fatal(err)
	}
	h.Start()
	t.Cleanup(func() { _ = unix.Unmount(procs, unix.MNT_DETACH) })
	fill := filepath.Join(procs, "fill")
	f, err := os.Create(fill)
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := f.Write(make([]byte, 4096)); err != nil {
			break
		}
	}
	f.Close()
	spec := hosttest.Sh(box, "echo ran")
	_, err = h.Client().Start(ctx, spec)
	if !errdefs.Is(err, errdefs.Exhausted) || !host.Refused(err) {
		t.Errorf("on a full disk: %v", err)
	}
	if left, _ := os.ReadDir(procs); len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	h.Run(spec)
	if out, _ := h.Output(spec.ID); !bytes.Equal(out, []byte("ran\n")) {
		t.Errorf("it said %q", out)
	}
	st := h.Phase(spec.ID, wire.PhaseEnded)
	if _, err := h.Client().CloseProc(ctx, spec.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Errorf("%+v, %v", st, err)
	}
	if err := h.Client().Forget(ctx, spec.ID); err != nil {
		t.Error(err)
	}
	h.Kill()
	if err := unix.Unmount(procs, 0); err != nil {
		t.Errorf("unmount: %v", err)
	}
	h.Start()
}
