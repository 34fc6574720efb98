package drivertest

import (
	"context"
	"crypto/rand"
	"fmt"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/wire"
)

// bench is one test's target and what it holds.
type bench struct {
	Target
	t *testing.T
	c *host.Client
}

func (b *bench) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

func (b *bench) client(generation int64) *host.Client {
	c := host.NewClient(b.Driver.Dial, generation)
	b.t.Cleanup(c.CloseIdle)
	return c
}

func (b *bench) cleanup() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := b.Driver.Ensure(ctx); err != nil {
		b.t.Errorf("clean up: %v", err)
		return
	}
	c := host.NewClient(b.Driver.Dial, 1<<40)
	defer c.CloseIdle()
	procs, err := c.Procs(ctx)
	if err != nil {
		b.t.Errorf("clean up: %v", err)
	}
	for _, p := range procs {
		if st, err := c.CloseProc(ctx, p.ID, wire.Close{Reason: "test ends"}); err != nil || st.Proof == nil {
			b.t.Errorf("clean up: close %s: %+v, %v", p.ID, st, err)
		} else if err := c.Forget(ctx, p.ID); err != nil {
			b.t.Errorf("clean up: forget %s: %v", p.ID, err)
		}
	}
	boxes, err := c.Boxes(ctx)
	if err != nil {
		b.t.Errorf("clean up: %v", err)
	}
	for _, box := range boxes {
		if err := c.RemoveBox(ctx, box.Spec.ID); err != nil {
			b.t.Errorf("clean up: box %s: %v", box.Spec.ID, err)
		}
	}
}

func newID(kind ident.Kind) string {
	var r [16]byte
	rand.Read(r[:])
	return ident.From(kind, r)
}

func (b *bench) box() string {
	b.t.Helper()
	id := newID(ident.Box)
	_, err := b.c.PutBox(b.ctx(), wire.BoxSpec{ID: id, Limits: api.BoxLimits{CPUMillis: 2000, MemoryBytes: 1 << 30, Pids: 512}})
	if err != nil {
		b.t.Fatalf("box: %v", err)
	}
	return id
}

func sh(box, script string) wire.ProcSpec {
	return wire.ProcSpec{
		ID: newID(ident.Process), Box: box, Argv: []string{"/bin/sh", "-c", script}, Env: []string{"HOME=/home/agent"},
		DeadlineMillis: (10 * time.Minute).Milliseconds(), SpoolBytes: 64 << 20, Overflow: api.OverflowBlock,
	}
}

func (b *bench) start(spec wire.ProcSpec) wire.ProcSpec {
	b.t.Helper()
	if _, err := b.c.Start(b.ctx(), spec); err != nil {
		b.t.Fatalf("start: %v", err)
	}
	return spec
}

// eventually waits for a condition.
func (b *bench) eventually(what string, cond func() bool) {
	b.t.Helper()
	end := time.Now().Add(time.Minute)
	for wait := time.Millisecond; !cond(); wait = min(2*wait, 50*time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatalf("it never came true: %s", what)
		}
		<-time.After(wait)
	}
}

// until waits for a state of a process, as a server does: what fails is asked
// again.
func (b *bench) until(id string, what string, cond func(wire.ProcState) bool) wire.ProcState {
	b.t.Helper()
	var st wire.ProcState
	b.eventually(id+" "+what, func() bool {
		var err error
		st, err = b.c.Proc(b.ctx(), id)
		return err == nil && cond(st)
	})
	return st
}

func (b *bench) ended(id string) wire.ProcState {
	b.t.Helper()
	return b.until(id, "ends", func(st wire.ProcState) bool { return st.Phase == wire.PhaseEnded })
}

func (b *bench) said(id string, n int64) {
	b.t.Helper()
	b.until(id, fmt.Sprintf("has said %d bytes", n), func(st wire.ProcState) bool { return st.Log.Next >= n })
}

// read reads a log to its end, going on where it broke off.
func (b *bench) read(id string) (stdout, stderr []byte) {
	b.t.Helper()
	var cursor int64
	done := false
	b.eventually("the log of "+id+" ends", func() bool {
		body, err := b.c.Log(b.ctx(), id, host.LogQuery{Cursor: cursor, Follow: true})
		if err != nil {
			if !errdefs.Is(err, errdefs.Unavailable) {
				b.t.Errorf("log: %v", err)
				return true
			}
			return false
		}
		defer body.Close()
		r := host.NewFrameReader(body, cursor)
		for {
			batch, err := r.Next()
			if err != nil {
				if !errdefs.Is(err, errdefs.Unavailable) {
					b.t.Errorf("log: %v", err)
					return true
				}
				return false
			}
			for h, p := range host.Frames(batch.Frames) {
				if h.Kind == wire.KindStdout {
					stdout = append(stdout, p...)
				} else {
					stderr = append(stderr, p...)
				}
			}
			cursor = r.Cursor()
			if batch.Gap != nil {
				b.t.Errorf("gap %+v", batch.Gap)
			}
			if batch.Status != nil {
				done = batch.Status.EOF
				return done
			}
		}
	})
	return stdout, stderr
}
