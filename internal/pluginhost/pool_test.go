package pluginhost

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

const inPool = pluginwire.ModeShared

// pair is two installations in one pool, running.
func (r *rig) pair() (p pkg, a, b pluginwire.Context) {
	r.t.Helper()
	p = pack(r.t, "toy", "1")
	a, b = p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
	r.run(a, p, inPool)
	r.run(b, p, inPool)
	return p, a, b
}

func (r *rig) slots(digest string) []string {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	p := r.m.pools[digest]
	if p == nil {
		return nil
	}
	out := []string{}
	for b := range p.slots {
		out = append(out, b.InstallationUUID)
	}
	slices.Sort(out)
	return out
}

// IM-02, IM-04, IM-08, SW-01, SW-05: two slots share a process; the first may
// leave, though it started the pool; the last one stops it.
func TestPoolLives(t *testing.T) {
	for _, wrapped := range []bool{false, true} {
		name := map[bool]string{false: "bare container", true: "wrapped container"}[wrapped]
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
				r.launcher.set(func(w *puppet) { w.wrapped = wrapped; w.behave() })
				r.host.set(map[string]string{"inst-a": `{"who":"a"}`, "inst-b": `{"who":"b"}`})
				p, a, b := r.pair()
				w := r.launcher.nth(0)
				if r.launcher.count() != 1 || r.call(a) != 0 || r.call(b) != 0 {
					r.t.Fatal("not one process")
				}
				if w.spec.Private != nil || w.spec.Scratch == "" || strings.Contains(w.spec.TransferDir, "installations") {
					r.t.Errorf("the pool's worker was started with %+v", w.spec)
				}
				if !strings.Contains(w.setting(a), `"who":"a"`) || !strings.Contains(w.setting(b), `"who":"b"`) {
					r.t.Errorf("settings: %s, %s", w.setting(a), w.setting(b))
				}
				if slices.Contains(w.actions(), pluginwire.ActionInitializePlugin) {
					r.t.Error("a pool got initialize_plugin")
				}
				if c := r.plugin(b).Container(); c.Priority != 1 {
					r.t.Errorf("the priority is %d, not LangBot's", c.Priority)
				}
				r.remove(a)
				if got := r.slots(p.digest); !slices.Equal(got, []string{"inst-b"}) || w.setting(a) != "" {
					r.t.Fatalf("slots %v, setting %q", got, w.setting(a))
				}
				if r.call(b) != 0 {
					r.t.Error("the sibling noticed")
				}
				if _, err := w.ask(pluginwire.ActionGetBots, struct{}{}, a); err == nil || !strings.Contains(err.Error(), "not attached") {
					r.t.Errorf("a detached slot may ask: %v", err)
				}
				r.remove(b)
				if got := r.slots(p.digest); got != nil {
					r.t.Errorf("the pool is still there: %v", got)
				}
				if _, err := os.Stat(filepath.Join(r.dir, "plugin-runtime", "shared-transfers", p.digest)); !os.IsNotExist(err) {
					r.t.Errorf("the pool's transfers: %v", err)
				}
				if acts := w.actions(); acts[len(acts)-1] != pluginwire.ActionShutdown || len(w.signalled()) != 0 {
					r.t.Errorf("stopped by %v, signals %v", acts, w.signalled())
				}
			})
		})
	}
}

// IM-05: a new revision of A replaces A's slot alone.
func TestPoolRevision(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p, a, b := r.pair()
		next := p.bind("inst-a", 1, 2)
		r.run(next, p, inPool)
		if r.launcher.count() != 1 || r.call(next) != 0 || r.call(b) != 0 {
			r.t.Error("the process was replaced")
		}
		if len(r.m.Plugins(a)) != 0 {
			r.t.Error("the old binding still sees a plugin")
		}
		isCode(r.t, r.m.Authorise(a), errdefs.Denied)
	})
}

// IM-06: applying a slot again gives it fresh settings, in the same process and to
// it alone; a change that comes while it attaches is not missed.
func TestPoolUpdate(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p, a, b := r.pair()
		w := r.launcher.nth(0)
		handle := r.plugin(a)
		before := len(r.host.made(pluginwire.ActionGetPluginSettings))
		gate := make(chan struct{})
		w.mu.Lock()
		w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action == pluginwire.ActionAttachPluginSlot {
				<-gate
			}
			return nil, nil, false
		}
		w.mu.Unlock()
		r.host.set(map[string]string{"inst-a": `{"v":2}`})
		r.apply(a, p, true, inPool)
		synctest.Wait()
		r.host.set(map[string]string{"inst-a": `{"v":3}`})
		r.apply(a, p, true, inPool)
		r.apply(a, p, true, inPool)
		synctest.Wait()
		close(gate)
		synctest.Wait()
		if !strings.Contains(w.setting(a), `"v":3`) || strings.Contains(w.setting(b), `"v"`) {
			r.t.Errorf("settings: %s, %s", w.setting(a), w.setting(b))
		}
		if r.launcher.count() != 1 || r.plugin(a) != handle {
			r.t.Error("an update replaced the process or the handle")
		}
		if asked := len(r.host.made(pluginwire.ActionGetPluginSettings)) - before; asked != 2 {
			r.t.Errorf("settings were asked %d times, want 2: the second request coalesces the third", asked)
		}
	})
}

// IM-07: a slot that is removed while LangBot is asked for its settings is never
// attached.
func TestPoolRemovalDuringSettings(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		r.run(b, p, inPool)
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action == pluginwire.ActionGetPluginSettings && in.Context == a {
				<-ctx.Done()
				return nil, ctx.Err(), true
			}
			return nil, nil, false
		})
		r.apply(a, p, true, inPool)
		synctest.Wait()
		r.remove(a)
		synctest.Wait()
		w := r.launcher.nth(0)
		w.mu.Lock()
		defer w.mu.Unlock()
		for i, act := range w.seen {
			if act == pluginwire.ActionAttachPluginSlot && w.contexts[i] == a {
				r.t.Error("the removed slot was attached")
			}
		}
	})
}

// IM-09, IM-56, SW-04: a pool that crashes comes back and attaches every slot
// again, with fresh settings and its own binding; one failure is counted.
func TestPoolCrash(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		_, a, b := r.pair()
		r.host.set(map[string]string{"inst-a": `{"v":"a2"}`, "inst-b": `{"v":"b2"}`})
		first := r.launcher.nth(0)
		handle := r.plugin(a)
		hung := make(chan error, 1)
		first.mu.Lock()
		first.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action == pluginwire.ActionCallTool {
				<-ctx.Done()
				return nil, ctx.Err(), true
			}
			return nil, nil, false
		}
		first.mu.Unlock()
		go func() {
			_, err := handle.Call(context.Background(), pluginwire.ActionCallTool, struct{}{}, -1)
			hung <- err
		}()
		synctest.Wait()
		first.exit(worker.Exit{Text: "ended by signal 9", Code: -1})
		synctest.Wait()
		if err := <-hung; !errdefs.Is(err, errdefs.Unavailable) {
			r.t.Errorf("the call in flight ended with %v", err)
		}
		for _, x := range []pluginwire.Context{a, b} {
			if st, code, msg := r.record(x); st != pluginwire.StateFailed || code != pluginwire.ErrorWorkerLaunch || !strings.Contains(msg, "signal 9") {
				r.t.Errorf("%s: %s %s %s", x.InstallationUUID, st, code, msg)
			}
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		r.state(a, pluginwire.StateRunning)
		r.state(b, pluginwire.StateRunning)
		second := r.launcher.nth(1)
		if r.call(a) != 1 || r.call(b) != 1 || !strings.Contains(second.setting(a), "a2") || !strings.Contains(second.setting(b), "b2") {
			r.t.Errorf("settings: %s, %s", second.setting(a), second.setting(b))
		}
		if s := r.m.gate.Snapshot(); s.FailuresTotal != 1 {
			r.t.Errorf("%d failures", s.FailuresTotal)
		}
	})
}

// A pool's scratch is of one process: the next one finds nothing of tenants that may
// have left, and with the pool it is gone.
func TestPoolScratch(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a := p.bind("inst-a", 1, 1)
		r.run(a, p, inPool)
		w := r.launcher.nth(0)
		mark := filepath.Join(w.spec.Scratch, "of-a-tenant")
		if err := os.WriteFile(mark, nil, 0o600); err != nil {
			r.t.Fatal(err)
		}
		w.exit(worker.Exit{Text: "ended by signal 9", Code: -1})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		r.state(a, pluginwire.StateRunning)
		if again := r.launcher.nth(1).spec.Scratch; again != w.spec.Scratch {
			r.t.Fatalf("the scratch moved to %s", again)
		}
		if _, err := os.Stat(mark); !os.IsNotExist(err) {
			r.t.Errorf("the next process finds what the last one left: %v", err)
		}
		if st, err := os.Stat(w.spec.Scratch); err != nil || st.Mode().Perm() != 0o700 {
			r.t.Errorf("%v, %v", st, err)
		}
		r.remove(a)
		if _, err := os.Stat(r.m.poolBase(p.digest)); !os.IsNotExist(err) {
			r.t.Errorf("the pool's directories: %v", err)
		}
		r.run(p.bind("inst-a", 1, 2), p, inPool)
	})
}

// What belonged to processes of a killed runtime goes when the next one is
// configured; what belongs to installations stays.
func TestLeftoversAreSwept(t *testing.T) {
	dir := t.TempDir()
	gone := []string{"shared-workers/d/tmp/x", "shared-transfers/d/x", "debug-transfers/7/x", "legacy-transfers/a__b/x", "installations/u/runtime-transfer/x",
		"installations/u/rpc-transfer/x", "installations/u/tmp/lbp-rpc/x"}
	kept := []string{"installations/u/home/x", "installations/u/data/x", "installations/u/tmp/x"}
	for _, name := range slices.Concat(gone, kept) {
		path := filepath.Join(dir, "plugin-runtime", filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := newRig(t, dir)
	defer r.close()
	if err := r.m.Configure(t.Context(), runtimeConfig(pluginwire.ProfileOSS, policy())); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Concat(gone, kept) {
		_, err := os.Stat(filepath.Join(dir, "plugin-runtime", filepath.FromSlash(name)))
		if os.IsNotExist(err) != slices.Contains(gone, name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// IM-46, IM-47, IM-41, IM-44: a slot that cannot attach fails alone, with the
// plugin's words, and is tried again by apply and reconcile on the same process.
func TestPoolSlotFailsAlone(t *testing.T) {
	for name, fail := range map[string]func(w *puppet, in *rpc.Inbound) (any, error, bool){
		"attach raises": func(w *puppet, in *rpc.Inbound) (any, error, bool) {
			return nil, pluginwire.WithClass("ValueError", errors.New("bad configuration")), in.Action == pluginwire.ActionAttachPluginSlot
		},
		"not initialised": func(w *puppet, in *rpc.Inbound) (any, error, bool) {
			return w.container("mounted"), nil, in.Action == pluginwire.ActionGetPluginSlotContainer
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
				p := pack(r.t, "toy", "1")
				a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
				broken := true
				r.launcher.set(func(w *puppet) {
					w.on = func(w *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
						w.mu.Lock()
						hit := broken && in.Context == b
						w.mu.Unlock()
						if hit {
							return fail(w, in)
						}
						return nil, nil, false
					}
					w.behave()
				})
				r.run(a, p, inPool)
				handle := r.plugin(a)
				r.apply(b, p, true, inPool)
				synctest.Wait()
				st, code, msg := r.record(b)
				if st != pluginwire.StateFailed || code != pluginwire.ErrorSlotAttach || !strings.Contains(msg, "bad configuration") && !strings.Contains(msg, "not initialized") {
					r.t.Fatalf("%s %s %s", st, code, msg)
				}
				if lines := r.m.Logs(b, "tester", "toy", 10, "ERROR"); len(lines) != 1 {
					r.t.Errorf("B's log: %v", lines)
				}
				if lines := r.m.Logs(a, "tester", "toy", 10, ""); len(lines) != 0 {
					r.t.Errorf("A reads of B: %v", lines)
				}
				w := r.launcher.nth(0)
				w.mu.Lock()
				broken = false
				w.mu.Unlock()
				if _, err := r.m.Reconcile(r.t.Context(), []pluginwire.DesiredState{
					{Binding: a, Enabled: true, Mode: inPool}, {Binding: b, Enabled: true, Mode: inPool}}); err != nil {
					r.t.Fatal(err)
				}
				synctest.Wait()
				r.state(b, pluginwire.StateRunning)
				if r.launcher.count() != 1 || r.plugin(a) != handle {
					r.t.Error("the healthy slot was disturbed")
				}
			})
		})
	}
}

// An update that fails before the worker hears of it ends the slot there too: what
// is failed does not live on in the worker.
func TestPoolUpdateFailsEarly(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p, a, b := r.pair()
		w := r.launcher.nth(0)
		handle := r.plugin(a)
		r.host.answer(func(_ context.Context, in *rpc.Inbound) (any, error, bool) {
			return nil, errors.New("no settings"), in.Action == pluginwire.ActionGetPluginSettings && in.Context == a
		})
		r.apply(a, p, true, inPool)
		synctest.Wait()
		if st, code, _ := r.record(a); st != pluginwire.StateFailed || code != pluginwire.ErrorSlotAttach {
			r.t.Fatalf("%s %s", st, code)
		}
		select {
		case <-handle.Gone():
		default:
			r.t.Error("the slot's handle lives on")
		}
		if w.setting(a) != "" || w.setting(b) == "" {
			r.t.Errorf("the worker has settings %q of the failed slot, %q of its sibling", w.setting(a), w.setting(b))
		}
		r.host.answer(nil)
		r.run(a, p, inPool)
		r.call(b)
	})
}

// IM-41, IM-50: a connection that was not made by the pool's launch cannot
// register with its capability, and does not use it up.
func TestPoolCapabilityIsOfItsLaunch(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		let := make(chan struct{})
		r.launcher.set(func(w *puppet) { <-let; w.behave() })
		r.apply(a, p, true, inPool)
		synctest.Wait()
		stolen := r.launcher.nth(0).spec.Capability
		other := pack(r.t, "toy", "2")
		c := other.bind("inst-c", 1, 1)
		thief := make(chan error, 1)
		r.launcher.set(func(w *puppet) {
			go func() { _, err := w.register(stolen); thief <- err; w.exit(worker.Exit{}) }()
			_ = w.conn.Run(context.Background())
		})
		r.apply(c, other, true, inPool)
		synctest.Wait()
		if err := <-thief; err == nil || !strings.Contains(err.Error(), "transport changed") {
			r.t.Errorf("the thief got %v", err)
		}
		close(let)
		synctest.Wait()
		r.state(a, pluginwire.StateRunning)
		_ = b
		r.remove(c)
	})
}

// IM-42, IM-45, IM-53, IM-54, IM-55: the pool's registration is answered at once,
// a slow slot neither stops the process at 30 s nor its own attach at 15 s; after
// 120 s it fails, its sibling attaches, and it can be removed meanwhile.
func TestPoolSlowSlot(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		registered := make(chan time.Duration, 1)
		r.launcher.set(func(w *puppet) {
			w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				if in.Action == pluginwire.ActionAttachPluginSlot && in.Context == a {
					<-ctx.Done()
					return nil, ctx.Err(), true
				}
				return nil, nil, false
			}
			go func() {
				start := time.Now()
				if _, err := w.register(w.spec.Capability); err == nil {
					registered <- time.Since(start)
				}
			}()
			_ = w.conn.Run(context.Background())
			w.exit(worker.Exit{})
		})
		r.apply(a, p, true, inPool)
		synctest.Wait()
		if took := <-registered; took > 100*time.Millisecond {
			r.t.Errorf("registering took %s", took)
		}
		r.apply(b, p, true, inPool)
		c := p.bind("inst-c", 1, 1)
		r.apply(c, p, true, inPool)
		synctest.Wait()
		asked := time.Now()
		r.remove(c)
		if took := time.Since(asked); took > time.Second {
			r.t.Errorf("a removal waited %s for a sibling's attach", took)
		}
		time.Sleep(AttachWithin - time.Second)
		synctest.Wait()
		r.state(a, pluginwire.StateStarting)
		r.state(b, pluginwire.StateStarting)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if st, code, msg := r.record(a); st != pluginwire.StateFailed || code != pluginwire.ErrorSlotAttach || !strings.Contains(msg, "within") {
			r.t.Errorf("A: %s %s %s", st, code, msg)
		}
		r.state(b, pluginwire.StateRunning)
		r.apply(a, p, true, inPool) // hangs again
		synctest.Wait()
		before := time.Now()
		r.remove(a)
		if took := time.Since(before); took > time.Second {
			r.t.Errorf("removing a hanging slot took %s", took)
		}
		if r.launcher.count() != 1 || r.call(b) != 0 {
			r.t.Error("the sibling noticed")
		}
	})
}

// IM-48, IM-49: at most max_workers pools; a digest that has one may grow.
func TestPoolCapacity(t *testing.T) {
	pol := policy()
	pol.MaxWorkers = 1
	inBubble(t, pluginwire.ProfileShared, pol, func(r *rig) {
		one, two := pack(r.t, "toy", "1"), pack(r.t, "toy", "2")
		a, b, c := one.bind("inst-a", 1, 1), two.bind("inst-b", 1, 1), one.bind("inst-c", 1, 1)
		r.run(a, one, inPool)
		if res := r.apply(b, two, true, inPool); res.State != pluginwire.StateFailed || res.ErrorCode != pluginwire.ErrorWorkerLaunch || !strings.Contains(res.Message, "capacity reached") {
			r.t.Fatalf("%+v", res)
		}
		r.run(c, one, inPool)
		r.remove(a)
		r.remove(c)
		r.run(b, two, inPool)
	})
}

// IM-49, IM-43: a pool that is being stopped still counts; a slot that comes then
// starts the same pool again when the old process is gone.
func TestPoolRejoinsWhileDraining(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		r.launcher.set(func(w *puppet) {
			if w.n == 0 {
				w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
					if in.Action == pluginwire.ActionShutdown {
						<-ctx.Done()
						return nil, ctx.Err(), true
					}
					return nil, nil, false
				}
			}
			w.behave()
		})
		r.run(a, p, inPool)
		gone := make(chan struct{})
		go func() { r.remove(a); close(gone) }()
		synctest.Wait()
		r.apply(b, p, true, inPool)
		synctest.Wait()
		r.state(b, pluginwire.StateStarting)
		<-gone
		synctest.Wait()
		r.state(b, pluginwire.StateRunning)
		if r.call(b) != 1 || r.launcher.count() != 2 {
			r.t.Error("not the second process")
		}
	})
}

// IM-52: a pool's process that never registers is ended after 120 s.
func TestPoolNeverRegisters(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a := p.bind("inst-a", 1, 1)
		r.launcher.set(func(w *puppet) { _ = w.conn.Run(context.Background()); w.exit(worker.Exit{}) })
		r.apply(a, p, true, inPool)
		time.Sleep(RegisterWithin + 500*time.Millisecond)
		synctest.Wait()
		if st, _, msg := r.record(a); st != pluginwire.StateFailed || !strings.Contains(msg, "did not register") {
			r.t.Errorf("%s %s", st, msg)
		}
		select {
		case <-r.launcher.nth(0).ended:
		default:
			r.t.Error("the process lives")
		}
	})
}

// Detaching cancels what the slot's worker has asked for, and nothing of a sibling.
func TestDetachCancelsOwnRequestsOnly(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		_, a, b := r.pair()
		release := make(chan struct{})
		cancelled := make(chan pluginwire.Context, 2)
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action != pluginwire.ActionGetBots {
				return nil, nil, false
			}
			select {
			case <-ctx.Done():
				cancelled <- in.Context
				return nil, ctx.Err(), true
			case <-release:
				return map[string]any{"bots": []string{"x"}}, nil, true
			}
		})
		w := r.launcher.nth(0)
		ofB := make(chan error, 1)
		go func() { _, _ = w.ask(pluginwire.ActionGetBots, struct{}{}, a) }()
		go func() { _, err := w.ask(pluginwire.ActionGetBots, struct{}{}, b); ofB <- err }()
		synctest.Wait()
		r.remove(a)
		if n := r.host.near.Counters().Waiting; n != 1 {
			r.t.Errorf("%d requests run after the detach, want the sibling's", n)
		}
		close(release)
		synctest.Wait()
		if err := <-ofB; err != nil {
			r.t.Errorf("the sibling's request: %v", err)
		}
	})
}

// The process's own output is nobody's: no slot reads it. LF, logs.
func TestPoolOutputIsShownToNoTenant(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		_, a, b := r.pair()
		if _, err := r.launcher.nth(0).stderr.Write([]byte("a secret of somebody\n")); err != nil {
			r.t.Fatal(err)
		}
		synctest.Wait()
		for _, x := range []pluginwire.Context{a, b} {
			for _, line := range r.m.Logs(x, "tester", "toy", 100, "") {
				r.t.Errorf("%s reads %q", x.InstallationUUID, line.Text)
			}
		}
	})
}
