package broker

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

func millis(n int64) *int64 { return &n }

func (r *rig) close(handle string, grace int64) api.CloseResponse {
	r.t.Helper()
	c, err := r.b.Close(r.ctx, r.run, handle, api.CloseRequest{Reason: "enough", GraceMillis: millis(grace)})
	r.ok(err)
	return c
}

func TestCloseGivesAReceipt(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		c := r.close(p.Handle, 1000)
		if !c.Quiescent || c.Fence != nil || c.Process.State != api.StateClosed || c.Process.Reason != "enough" {
			r.t.Fatalf("got %+v", c)
		}
		checkReceipt(r.t, c.Process)
		again := r.close(p.Handle, 0)
		if again.Receipt == nil || again.Receipt.ID != c.Receipt.ID || again.Process.Reason != "enough" {
			r.t.Fatalf("the second close differs: %+v", again)
		}
	})
}

func TestConcurrentClosesShare(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		ids := make([]string, 20)
		var wg sync.WaitGroup
		for i := range ids {
			wg.Go(func() {
				c, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{GraceMillis: millis(int64(i))})
				if err == nil && c.Receipt != nil {
					ids[i] = c.Receipt.ID
				}
			})
		}
		wg.Wait()
		for _, id := range ids {
			if id == "" || id != ids[0] {
				r.t.Fatalf("receipts %v", ids)
			}
		}
	})
}

func TestCloseUnprovenFencesUntilProof(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.set(func() { r.host.unproven = true })
		c := r.close(p.Handle, 0)
		if c.Quiescent || c.Receipt != nil || c.Fence == nil || c.Fence.Reason == "" || c.Process.State != api.StateFenced || c.Process.Cleanup != api.CleanupUnproven {
			r.t.Fatalf("got %+v", c)
		}
		if c.Fence.Evidence["host"] != r.host.hostID || c.Fence.Evidence["last_phase"] != "ended" {
			r.t.Errorf("evidence %v", c.Fence.Evidence)
		}
		_, err := r.b.Open(r.ctx, r.run, request("two", "true"))
		r.code(err, errdefs.Fenced)
		r.restart()
		r.up()
		_, err = r.b.Open(r.ctx, r.run, request("two", "true"))
		r.code(err, errdefs.Fenced)
		_, err = r.b.Write(r.ctx, r.run, p.Handle, 0, []byte("x"), false)
		r.code(err, errdefs.Fenced)

		r.restart()
		r.up()
		r.host.prove(p.Handle)
		r.eventually("nobody asked, and it is closed", func() bool {
			rec, err := r.ledger.Process(r.ctx, everything(), p.Handle)
			return err == nil && rec.State == api.StateClosed
		})
		q := r.get(p.Handle)
		checkReceipt(r.t, q)
		if q.Cleanup != api.CleanupQuiescent || q.Fence != "" {
			r.t.Fatalf("got %+v", q)
		}
		f, err := r.b.Fence(r.ctx, r.admin, c.Fence.ID)
		r.ok(err)
		if f.ClearedAt == nil || f.ClearedBy != "proof" {
			r.t.Errorf("the fence: %+v", f)
		}
		r.open("two")
	})
}

func TestOperatorClearsAFence(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.set(func() { r.host.unproven = true })
		c := r.close(p.Handle, 0)
		_, err := r.b.ClearFence(r.ctx, r.key, c.Fence.ID, api.ClearFenceRequest{Reason: "I looked at the machine"})
		r.code(err, errdefs.Denied)
		_, err = r.b.ClearFence(r.ctx, r.admin, c.Fence.ID, api.ClearFenceRequest{Reason: "short"})
		r.code(err, errdefs.Invalid)
		f, err := r.b.ClearFence(r.ctx, r.admin, c.Fence.ID, api.ClearFenceRequest{Reason: "I looked at the machine"})
		r.ok(err)
		if f.ClearedBy != r.admin.Key || f.ClearReason != "I looked at the machine" || f.ClearedAt == nil {
			r.t.Fatalf("got %+v", f)
		}
		q := r.get(p.Handle)
		if q.State != api.StateClosed || q.Cleanup != api.CleanupUnproven || q.Receipt != nil || q.Exit == nil {
			r.t.Fatalf("got %+v", q)
		}
		acts, err := r.b.Audit(r.ctx, r.admin, "w", store.Page{})
		r.ok(err)
		if acts.Items[0].Action != "fence.clear" || acts.Items[0].Actor != r.admin.Key {
			r.t.Errorf("the last act is %+v", acts.Items[0])
		}
		list, err := r.b.Fences(r.ctx, r.key, true, store.Page{})
		r.ok(err)
		if len(list.Items) != 0 {
			r.t.Errorf("fences stand: %+v", list)
		}
		again, err := r.b.ClearFence(r.ctx, r.admin, c.Fence.ID, api.ClearFenceRequest{Reason: "I looked once more"})
		r.ok(err)
		if again.ClearReason != "I looked at the machine" {
			r.t.Error("the second clear changed the record")
		}
		r.open("two")
	})
}

// The host is away for the whole bounded time, then comes back.
func TestCloseWhileTheHostIsAway(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{ProofWait: 30 * time.Second}, func(r *rig) {
		p := r.open("one")
		r.host.stop()
		begun := time.Now()
		c := r.close(p.Handle, 2000)
		if took := time.Since(begun); took < 32*time.Second || took > 33*time.Second {
			r.t.Errorf("the close took %v of virtual time", took)
		}
		if c.Quiescent || c.Fence == nil {
			r.t.Fatalf("got %+v", c)
		}
		// One more close answers at once: there is nobody to ask.
		if c := r.close(p.Handle, 0); c.Fence == nil {
			r.t.Fatalf("got %+v", c)
		}
		r.host.start()
		q := r.becomes(p.Handle, api.StateClosed)
		checkReceipt(r.t, q)
		if a := r.host.alive(); len(a) != 0 {
			r.t.Errorf("alive: %v", a)
		}
	})
}

func TestCloseOfAFencedProcessTriesAgain(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.set(func() { r.host.unproven = true })
		if c := r.close(p.Handle, 0); c.Fence == nil {
			r.t.Fatalf("got %+v", c)
		}
		// The fence may be known before the first try has ended; a close in between
		// would share that try.
		synctest.Wait()
		asked := r.host.count("close")
		if c := r.close(p.Handle, 0); c.Fence == nil {
			r.t.Fatalf("got %+v", c)
		}
		if r.host.count("close") == asked {
			r.t.Error("the host was not asked again")
		}
		r.host.prove(p.Handle)
		if c := r.close(p.Handle, 0); !c.Quiescent || c.Receipt == nil {
			r.t.Fatalf("got %+v", c)
		}
	})
}

func TestServerDiesWhileClosing(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{ProofWait: 20 * time.Second}, func(r *rig) {
		p := r.open("one")
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "close" {
					return loseFirst
				}
				return none
			}
		})
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{}) })
		r.becomes(p.Handle, api.StateClosing)
		_, err := r.b.Write(r.ctx, r.run, p.Handle, 0, []byte("x"), false)
		r.code(err, errdefs.Cancelling)
		r.code(r.b.Signal(r.ctx, r.run, p.Handle, "SIGINT"), errdefs.Cancelling)
		r.host.set(func() { r.host.fault = nil })
		r.restart()
		wg.Wait()
		checkReceipt(r.t, r.becomes(p.Handle, api.StateClosed))
	})
}

func TestShorterGraceIsToldAtOnce(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		polite := true
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "close" && polite {
					polite = false
					// The first close hangs as long as its grace: the child ignores SIGTERM.
					r.host.mu.Unlock()
					time.Sleep(5 * time.Minute)
					r.host.mu.Lock()
				}
				return none
			}
		})
		var wg sync.WaitGroup
		wg.Go(func() { r.close(p.Handle, 300_000) })
		r.becomes(p.Handle, api.StateClosing)
		begun := time.Now()
		if c := r.close(p.Handle, 0); !c.Quiescent {
			r.t.Fatalf("got %+v", c)
		}
		if took := time.Since(begun); took > time.Minute {
			r.t.Errorf("the second close waited %v behind the first", took)
		}
		wg.Wait()
		time.Sleep(5 * time.Minute) // the first request ends
	})
}

func TestRebootIsProof(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p, q := r.open("one"), r.open("two")
		r.host.forgetRecord(q.Handle) // the reboot took its record too
		r.host.reboot("boot-2")
		for _, h := range []string{p.Handle, q.Handle} {
			got := r.becomes(h, api.StateClosed)
			if got.Exit == nil || got.Exit.Kind != api.ExitUnknown || got.Receipt == nil || got.Receipt.Method != "reboot" || got.Receipt.BootID != "boot-2" {
				r.t.Fatalf("got %+v, exit %+v", got, got.Exit)
			}
		}
	})
}

func TestLostRecordFences(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.forgetRecord(p.Handle)
		got := r.becomes(p.Handle, api.StateFenced)
		if got.Exit != nil || got.Cleanup != api.CleanupUnproven {
			r.t.Fatalf("got %+v", got)
		}
		if n := r.host.ran(p.Handle); n != 1 {
			r.t.Errorf("executed %d times", n)
		}
	})
}

func TestAnotherHostFences(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		first := r.host.hostID
		r.host.stop()
		saved := r.host.procs
		r.host.set(func() { r.host.hostID, r.host.procs = secret.ID(ident.Host), map[string]*fakeProc{} })
		r.host.start()
		r.becomes(p.Handle, api.StateFenced)
		_, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
		r.code(err, errdefs.Unavailable)
		// Its directory is put back: what is fenced is ended, and that is the proof.
		r.host.stop()
		r.host.set(func() { r.host.hostID, r.host.procs = first, saved })
		r.host.start()
		checkReceipt(r.t, r.becomes(p.Handle, api.StateClosed))
		if a := r.host.alive(); len(a) != 0 {
			r.t.Errorf("alive: %v", a)
		}
	})
}

// A host that lies is not believed, whatever it says.
func TestHostileHost(t *testing.T) {
	t.Parallel()
	code := 0
	over := func(st *wire.ProcState) {
		at := time.Now()
		st.Phase, st.Ended, st.Exit = wire.PhaseEnded, &at, &api.Exit{Kind: api.ExitExited, Code: &code}
		st.Proof = &wire.Proof{Method: "cgroup", EmptyAt: at}
	}
	for name, lie := range map[string]func(*wire.ProcState){
		"another id":          func(st *wire.ProcState) { st.ID = "proc_aaaaaaaaaaaaaaaaaaaaaaaaaa"; over(st) },
		"another box":         func(st *wire.ProcState) { st.Box = "box_aaaaaaaaaaaaaaaaaaaaaaaaaa"; over(st) },
		"an unknown phase":    func(st *wire.ProcState) { st.Phase = "done" },
		"an exit while alive": func(st *wire.ProcState) { st.Exit = &api.Exit{Kind: api.ExitExited, Code: &code} },
		"an unknown exit kind": func(st *wire.ProcState) {
			st.Phase, st.Exit = wire.PhaseEnded, &api.Exit{Kind: "success"}
		},
		"an exit without code": func(st *wire.ProcState) {
			st.Phase, st.Exit = wire.PhaseEnded, &api.Exit{Kind: api.ExitExited}
		},
		"a proof while alive": func(st *wire.ProcState) { st.Proof = &wire.Proof{Method: "cgroup", EmptyAt: time.Now()} },
		"negative positions":  func(st *wire.ProcState) { st.Log.Next = -1 },
		"a strange signal": func(st *wire.ProcState) {
			st.Phase, st.Exit = wire.PhaseEnded, &api.Exit{Kind: api.ExitSignalled, Signal: "<script>"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, Limits{}, func(r *rig) {
				p := r.open("one")
				r.host.set(func() { r.host.lie = lie; r.host.procs[p.Handle].state.Rev++ })
				r.host.restart()
				r.up()
				got := r.get(p.Handle)
				if got.State != api.StateRunning || got.Exit != nil {
					r.t.Fatalf("believed: %+v", got)
				}
				r.host.set(func() { r.host.lie = nil })
				if c := r.close(p.Handle, 0); !c.Quiescent {
					r.t.Fatalf("got %+v", c)
				}
			})
		})
	}
}

// A proof of an unknown kind, or one that contradicts the exit, proves nothing.
func TestUnbelievableProofFences(t *testing.T) {
	t.Parallel()
	code := 0
	for _, method := range []string{"", "trust_me", "never_started"} {
		inBubble(t, Limits{}, func(r *rig) {
			p := r.open("one")
			r.host.set(func() {
				r.host.lie = func(st *wire.ProcState) {
					at := time.Now()
					st.Phase, st.Ended, st.Exit = wire.PhaseEnded, &at, &api.Exit{Kind: api.ExitExited, Code: &code}
					st.Proof = &wire.Proof{Method: method, EmptyAt: at}
				}
			})
			if c := r.close(p.Handle, 0); c.Quiescent || c.Fence == nil {
				r.t.Fatalf("%q: got %+v", method, c)
			}
		})
	}
}

// What runs although its record is closed is ended.
func TestStraysAreEnded(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.set(func() { r.host.unproven = true })
		c := r.close(p.Handle, 0)
		_, err := r.b.ClearFence(r.ctx, r.admin, c.Fence.ID, api.ClearFenceRequest{Reason: "I believe it is gone"})
		r.ok(err)
		foreign := secret.ID(ident.Process)
		r.host.set(func() {
			r.host.unproven = false
			st := &r.host.procs[p.Handle].state
			st.Phase, st.Exit, st.Proof, st.Unproven = wire.PhaseRunning, nil, nil, ""
			r.host.create(wire.ProcSpec{ID: foreign, Box: r.box})
		})
		r.host.restart()
		r.eventually("the stray is ended", func() bool { return len(r.host.alive()) == 1 })
		if a := r.host.alive(); a[0] != foreign {
			r.t.Errorf("what the ledger does not know is the operator's: %v", a)
		}
	})
}
