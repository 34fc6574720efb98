package broker

import (
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

func TestOpenRunsToItsReceipt(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		if p.State != api.StateRunning || p.StartedAt == nil || p.Cleanup != api.CleanupPending || p.Argv[0] != "sleep" {
			r.t.Fatalf("got %+v", p)
		}
		r.host.exit(p.Handle, 3)
		p = r.becomes(p.Handle, api.StateClosed)
		if p.Exit == nil || p.Exit.Kind != api.ExitExited || *p.Exit.Code != 3 || p.Cleanup != api.CleanupQuiescent {
			r.t.Fatalf("got %+v", p)
		}
		checkReceipt(r.t, p)
		if n := r.host.ran(p.Handle); n != 1 {
			r.t.Errorf("executed %d times", n)
		}
	})
}

func checkReceipt(t testing.TB, p api.Process) {
	t.Helper()
	if p.Receipt == nil || p.Receipt.Handle != p.Handle || !secret.Verify(p.Receipt.PublicKey, p.Receipt.Payload, p.Receipt.Signature) {
		t.Fatalf("no valid receipt: %+v", p.Receipt)
	}
}

func TestOpenIsIdempotent(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		first := r.open("one")
		if again := r.open("one"); again.Handle != first.Handle {
			r.t.Fatal("another handle for the same request")
		}
		other := request("one", "sleep", "2")
		_, err := r.b.Open(r.ctx, r.run, other)
		r.code(err, errdefs.Conflict)
		r.host.exit(first.Handle, 0)
		r.becomes(first.Handle, api.StateClosed)
		if again := r.open("one"); again.Handle != first.Handle || again.State != api.StateClosed || again.Receipt == nil {
			r.t.Fatalf("after the end: %+v", again)
		}
		r.restart()
		r.up()
		if again := r.open("one"); again.Handle != first.Handle {
			r.t.Fatal("another handle after a restart")
		}
		// Even when nothing could start now, what is recorded is answered.
		r.host.stop()
		r.eventually("down", func() bool { return r.b.targets["local"].here() == nil })
		if again := r.open("one"); again.Handle != first.Handle {
			r.t.Fatal("another handle while the host is away")
		}
		_, err = r.b.Open(r.ctx, r.run, request("two", "true"))
		r.code(err, errdefs.Unavailable)
		r.host.start()
		if n := r.host.ran(first.Handle); n != 1 {
			r.t.Errorf("executed %d times", n)
		}
	})
}

func TestConcurrentOpensStartOnce(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		var wg sync.WaitGroup
		handles := make([]string, 16)
		for i := range handles {
			wg.Go(func() {
				p, err := r.b.Open(r.ctx, r.run, request("same", "true"))
				if err == nil {
					handles[i] = p.Handle
				}
			})
		}
		wg.Wait()
		for _, h := range handles {
			if h == "" || h != handles[0] {
				r.t.Fatalf("handles %v", handles)
			}
		}
		if n := r.host.ran(handles[0]); n != 1 {
			r.t.Errorf("executed %d times", n)
		}
	})
}

// Each way in which the host's answer to a start can be lost.
func TestOpenThroughLostReplies(t *testing.T) {
	t.Parallel()
	for name, what := range map[string]fault{"before": loseFirst, "after": loseAfter, "late": late, "busy": busy} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, Limits{}, func(r *rig) {
				left := 3
				r.host.set(func() {
					r.host.fault = func(op, _ string) fault {
						if op == "start" && left > 0 {
							left--
							return what
						}
						return none
					}
				})
				p := r.open("one")
				if p.State != api.StateRunning {
					r.t.Fatalf("got %s", p.State)
				}
				if n := r.host.ran(p.Handle); n != 1 {
					r.t.Errorf("executed %d times", n)
				}
			})
		})
	}
}

func TestRefusedOpenAnswersTheSameForEver(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "start" {
					return refuse
				}
				return none
			}
		})
		_, err := r.b.Open(r.ctx, r.run, request("one", "true"))
		r.code(err, errdefs.Invalid)
		first := err.Error()
		r.host.set(func() { r.host.fault = nil })
		_, err = r.b.Open(r.ctx, r.run, request("one", "true"))
		r.code(err, errdefs.Invalid)
		r.restart()
		r.up()
		_, err = r.b.Open(r.ctx, r.run, request("one", "true"))
		if err == nil || err.Error() != first {
			r.t.Fatalf("first %q, then %v", first, err)
		}
		e := err.(*errdefs.Error)
		p := r.get(e.Detail["handle"])
		if p.State != api.StateNeverStarted || p.Exit != nil || p.Cleanup != api.CleanupQuiescent {
			r.t.Fatalf("got %+v", p)
		}
		checkReceipt(r.t, p)
		if n := r.host.ran(p.Handle); n != 0 {
			r.t.Errorf("executed %d times", n)
		}
	})
}

func TestCloseBeforeOpen(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		req := api.CloseByRequest{RequestID: "one", CloseRequest: api.CloseRequest{Reason: "changed my mind"}}
		c, err := r.b.CloseByRequest(r.ctx, r.run, req)
		r.ok(err)
		if !c.Quiescent || c.Receipt == nil || c.Receipt.Method != "never_started" || c.Process.State != api.StateNeverStarted {
			r.t.Fatalf("got %+v", c)
		}
		checkReceipt(r.t, c.Process)
		_, err = r.b.Open(r.ctx, r.run, request("one", "true"))
		r.code(err, errdefs.Conflict)
		again, err := r.b.CloseByRequest(r.ctx, r.run, req)
		r.ok(err)
		if again.Receipt == nil || again.Receipt.ID != c.Receipt.ID {
			r.t.Error("another receipt for the same tombstone")
		}
		// Nobody knows whether it would have had an input or a terminal.
		_, err = r.b.Write(r.ctx, r.run, c.Process.Handle, 0, []byte("x"), false)
		r.code(err, errdefs.Conflict)
		r.code(r.b.Resize(r.ctx, r.run, c.Process.Handle, api.Winsize{Rows: 2, Cols: 2}), errdefs.Conflict)
		r.code(r.b.Signal(r.ctx, r.run, c.Process.Handle, "SIGINT"), errdefs.Conflict)
		if r.host.count("start") != 0 {
			r.t.Error("the host was told")
		}
	})
}

// A close that overtakes the start on its way to the host.
func TestCloseDuringLateStart(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "start" {
					return late
				}
				return none
			}
		})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = r.b.Open(r.ctx, r.run, request("one", "true")) })
		r.eventually("recorded", func() bool {
			_, err := r.ledger.ProcessByRequest(r.ctx, everything(), r.run.Run, "one")
			return err == nil
		})
		c, err := r.b.CloseByRequest(r.ctx, r.run, api.CloseByRequest{RequestID: "one"})
		r.ok(err)
		wg.Wait()
		if !c.Quiescent || c.Receipt == nil {
			r.t.Fatalf("got %+v", c)
		}
		if a := r.host.alive(); len(a) != 0 {
			r.t.Errorf("alive after the receipt: %v", a)
		}
		r.host.late.Wait() // the start arrives now
		if a := r.host.alive(); len(a) != 0 {
			r.t.Errorf("alive after the receipt: %v", a)
		}
	})
}

// Every save fails once: nothing is done that was not recorded.
func TestEverySaveFailsOnce(t *testing.T) {
	t.Parallel()
	for n := 1; n <= 3; n++ {
		for _, after := range []bool{false, true} {
			inBubble(t, Limits{}, func(r *rig) {
				r.ledger.after = after
				r.ledger.set(func(i int, _ store.Process) error {
					if i == n {
						return errdefs.New(errdefs.Unavailable, "the disk is full")
					}
					return nil
				})
				p, err := r.b.Open(r.ctx, r.run, request("one", "true"))
				if err != nil {
					r.code(err, errdefs.Unavailable)
					r.eventually("open works again", func() bool {
						p, err = r.b.Open(r.ctx, r.run, request("one", "true"))
						return err == nil
					})
				}
				grace := int64(0)
				c, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{GraceMillis: &grace})
				if err != nil {
					r.code(err, errdefs.Unavailable)
					r.eventually("close works again", func() bool {
						c, err = r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{GraceMillis: &grace})
						return err == nil
					})
				}
				if !c.Quiescent || c.Receipt == nil {
					r.t.Fatalf("got %+v", c)
				}
				if n := r.host.ran(p.Handle); n != 1 {
					r.t.Errorf("executed %d times", n)
				}
			})
		}
	}
}

// While the close cannot be recorded the host is not told.
func TestNoEffectWithoutSave(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.ledger.set(func(int, store.Process) error { return errdefs.New(errdefs.Unavailable, "the disk is full") })
		_, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{})
		r.code(err, errdefs.Unavailable)
		if r.host.count("close") != 0 {
			r.t.Fatal("the host was told of a close that is not recorded")
		}
		if a := r.host.alive(); len(a) != 1 {
			r.t.Fatalf("alive: %v", a)
		}
		r.ledger.set(nil)
		r.eventually("close works again", func() bool {
			c, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{})
			return err == nil && c.Quiescent
		})
	})
}
