package gate

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/restart"
)

func TestMain(m *testing.M) { need.Main(m) }

func policy(concurrent, threshold, circuits int) restart.Policy {
	return restart.Policy{Concurrent: concurrent, Threshold: threshold, Window: 30 * time.Second, Open: 60 * time.Second, MaxCircuits: circuits}
}

// bubble runs a test with its own clock and holds that nothing is left in the gate.
func bubble(t *testing.T, p restart.Policy, f func(t *testing.T, g *Gate)) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := New(p)
		f(t, g)
		synctest.Wait()
		if s := g.Snapshot(); s.ActiveLaunches != 0 || s.LaunchesWaiting != 0 || s.GateWaiters != 0 || len(g.waiters) != 0 || g.timer != nil {
			t.Errorf("left in the gate: %+v, %d waiters, timer %v", s, len(g.waiters), g.timer)
		}
	})
}

func acquire(t *testing.T, g *Gate, key string) *Permit {
	t.Helper()
	p, err := g.Acquire(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// ask acquires in the background; the permit comes when it is admitted, and nil
// when cancel was called first.
func ask(t *testing.T, g *Gate, key string) (permit <-chan *Permit, cancel func()) {
	ctx, stop := context.WithCancel(t.Context())
	ch := make(chan *Permit, 1)
	go func() {
		p, err := g.Acquire(ctx, key)
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		ch <- p
	}()
	synctest.Wait()
	return ch, stop
}

// now returns the permit if it is there.
func now(ch <-chan *Permit) *Permit {
	synctest.Wait()
	select {
	case p := <-ch:
		return p
	default:
		return nil
	}
}

// open makes the key's circuit open by failures.
func open(t *testing.T, g *Gate, key string) {
	t.Helper()
	for range g.rules.Policy().Threshold {
		acquire(t, g, key).Fail()
	}
}

// RC-01.
func TestThirdLaunchWaitsForReady(t *testing.T) {
	bubble(t, policy(2, 8, 10), func(t *testing.T, g *Gate) {
		a, b := acquire(t, g, "a"), acquire(t, g, "b")
		third, _ := ask(t, g, "c")
		time.Sleep(time.Hour)
		if now(third) != nil || g.Snapshot().ActiveLaunches != 2 {
			t.Fatal("a third launch began")
		}
		a.Ready()
		c := now(third)
		if c == nil {
			t.Fatal("a free slot was not used")
		}
		b.Ready()
		c.Ready()
		if s := g.Snapshot(); s.ActiveLaunches != 0 || s.AttemptsTotal != 3 {
			t.Errorf("%+v", s)
		}
		for _, p := range []*Permit{a, b, c} {
			p.Abandon()
		}
	})
}

// RC-02 and RC-03: an open circuit holds back its own key and holds no slot.
func TestOpenCircuitDelaysNobodyElse(t *testing.T) {
	bubble(t, policy(1, 2, 10), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		held, cancel := ask(t, g, "a")
		if s := g.Snapshot(); s.State != restart.StateOpen || s.OpenCircuits != 1 || s.TrackedCircuits != 1 || s.OpenRemaining != 60 || s.GateWaiters != 1 || s.ActiveLaunches != 0 {
			t.Errorf("%+v", s)
		}
		b := acquire(t, g, "b") // returns at once, or the bubble's clock would run
		if s := g.Snapshot(); s.OpenRemaining != 60 || b.Probe() {
			t.Errorf("b waited: %+v", s)
		}
		b.Ready()
		b.Stable()
		cancel()
		if <-held != nil {
			t.Error("the circuit let a launch through")
		}
	})
}

// RC-04 and RC-11: the threshold opens once, one launch probes, the others wait
// until it is stable, and the record is forgotten.
func TestOneProbe(t *testing.T) {
	bubble(t, policy(2, 2, 10), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		first, _ := ask(t, g, "a")
		second, _ := ask(t, g, "a")
		time.Sleep(60*time.Second - 1)
		if now(first) != nil || now(second) != nil {
			t.Fatal("let through before the open time was over")
		}
		time.Sleep(time.Nanosecond)
		probe := now(first)
		if probe == nil || !probe.Probe() || now(second) != nil {
			t.Fatal("exactly the first one probes")
		}
		probe.Ready()
		if s := g.Snapshot(); now(second) != nil || s.State != restart.StateHalfOpen || !s.ProbeInflight || s.HalfOpenCircuits != 1 || s.ActiveLaunches != 0 {
			t.Fatalf("while the probe runs: %+v", s)
		}
		time.Sleep(restart.Stable)
		probe.Stable()
		p := now(second)
		if p == nil || p.Probe() {
			t.Fatal("a closed circuit lets every launch through")
		}
		if s := g.Snapshot(); s.State != restart.StateClosed || s.FailuresInWindow != 0 || s.TrackedCircuits != 0 || s.CircuitOpenTotal != 1 {
			t.Errorf("%+v", s)
		}
		p.Fail()
	})
}

// RC-05.
func TestFailedProbeOpensAgain(t *testing.T) {
	bubble(t, policy(1, 1, 10), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		probe := acquire(t, g, "a") // after a minute
		probe.Ready()
		probe.Fail()
		if s := g.Snapshot(); s.State != restart.StateOpen || s.OpenRemaining != 60 || s.FailuresTotal != 2 || s.CircuitOpenTotal != 2 || s.ProbeInflight {
			t.Errorf("%+v", s)
		}
	})
}

// RC-06, RC-07, RC-10: abandoning is a step that nobody can cancel.
func TestAbandonedProbe(t *testing.T) {
	bubble(t, policy(1, 1, 10), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		ctx, cancel := context.WithCancel(t.Context())
		probe, err := g.Acquire(ctx, "a")
		if err != nil || !probe.Probe() {
			t.Fatal(err)
		}
		cancel() // the context was for the waiting
		next, _ := ask(t, g, "a")
		for range 3 {
			probe.Abandon()
		}
		p := now(next)
		if p == nil || !p.Probe() {
			t.Fatal("the abandoned probe is in the way")
		}
		if s := g.Snapshot(); s.FailuresTotal != 1 || s.CircuitOpenTotal != 1 {
			t.Errorf("abandoning counted: %+v", s)
		}
		probe.Fail() // ended long ago
		p.Stable()
		if s := g.Snapshot(); s.FailuresTotal != 1 || s.State != restart.StateClosed {
			t.Errorf("%+v", s)
		}
	})
}

// RC-08, also at the very moment of admission.
func TestCancelledAcquireLeaksNothing(t *testing.T) {
	bubble(t, policy(1, 8, 10), func(t *testing.T, g *Gate) {
		dead, cancel := context.WithCancelCause(t.Context())
		reason := errors.New("fenced")
		cancel(reason)
		if _, err := g.Acquire(dead, "a"); !errors.Is(err, reason) {
			t.Errorf("a context that is over: %v", err)
		}
		held := acquire(t, g, "a")
		waiting, cancelWaiting := ask(t, g, "b")
		cancelWaiting()
		if <-waiting != nil {
			t.Error("admitted beyond the limit")
		}
		for range 50 {
			// Both ends of the wait are there before the waiter runs.
			ch, stop := ask(t, g, "b")
			g.mu.Lock()
			stop()
			held.ended = true
			g.rules.Abandon(held.launch)
			g.admit()
			g.mu.Unlock()
			if p := <-ch; p != nil {
				held = p
			} else {
				held = acquire(t, g, "a")
			}
		}
		held.Abandon()
	})
}

// RC-09.
func TestHundredWaiters(t *testing.T) {
	bubble(t, policy(2, 1, 10), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		var all []<-chan *Permit
		var stops []func()
		for range 100 {
			ch, stop := ask(t, g, "a")
			all, stops = append(all, ch), append(stops, stop)
		}
		if s := g.Snapshot(); s.GateWaiters != 2 || s.ActiveLaunches != 0 || s.LaunchesWaiting != 100 {
			t.Errorf("%+v", s)
		}
		for _, stop := range stops {
			stop()
		}
		for _, ch := range all {
			if <-ch != nil {
				t.Error("let through")
			}
		}
	})
}

// TestQueueBehindACircuit: those that wait for a circuit are let through in their
// order, and those of other keys in between do not wait for them.
func TestQueueBehindACircuit(t *testing.T) {
	bubble(t, policy(1, 1, 10), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		a1, _ := ask(t, g, "a")
		a2, _ := ask(t, g, "a")
		b := acquire(t, g, "b")
		c, _ := ask(t, g, "c")
		time.Sleep(2 * time.Minute) // the circuit is half-open; b holds the slot
		b.Fail()
		p := now(a1)
		if p == nil || !p.Probe() || now(c) != nil {
			t.Fatal("the first of a asked before c")
		}
		p.Ready()
		pc := now(c)
		if pc == nil || now(a2) != nil {
			t.Fatal("c waits for no circuit")
		}
		p.Fail()
		pc.Ready()
		pc.Stable()
		time.Sleep(time.Minute)
		if p = now(a2); p == nil || !p.Probe() {
			t.Fatal("the second of a probes next")
		}
		p.Abandon()
	})
}

// RC-12 with the gate's own clock; RC-13 is told in package restart.
func TestFailuresExpire(t *testing.T) {
	bubble(t, policy(1, 3, 10), func(t *testing.T, g *Gate) {
		acquire(t, g, "a").Fail()
		acquire(t, g, "a").Fail()
		time.Sleep(30*time.Second + 1)
		if s := g.Snapshot(); s.FailuresInWindow != 0 || s.TrackedCircuits != 0 {
			t.Errorf("%+v", s)
		}
		acquire(t, g, "a").Fail()
		if s := g.Snapshot(); s.State != restart.StateClosed || s.FailuresTotal != 3 {
			t.Errorf("%+v", s)
		}
	})
}

// RC-13: more failing keys than circuits refuse nobody.
func TestManyFailingKeys(t *testing.T) {
	bubble(t, policy(1, 1, 2), func(t *testing.T, g *Gate) {
		open(t, g, "a")
		open(t, g, "b")
		acquire(t, g, "c").Fail()
		acquire(t, g, "c").Fail()
		if s := g.Snapshot(); s.TrackedCircuits != 2 || s.CircuitsForgotten != 2 {
			t.Errorf("%+v", s)
		}
	})
}

// RC-14.
func TestPolicyIsSetOnce(t *testing.T) {
	t.Parallel()
	g := New(policy(1, 8, 10))
	if err := g.Configure(policy(1, 8, 10)); err != nil {
		t.Error(err)
	}
	if err := g.Configure(policy(2, 8, 10)); !errdefs.Is(err, errdefs.Conflict) || !strings.Contains(err.Error(), "cannot be changed") {
		t.Errorf("another policy: %v", err)
	}
	if s := (*Gate)(nil).Snapshot(); s.Configured {
		t.Error("no gate is configured")
	}
}

// TestStableWorkerThatFails: after Stable the permit has ended, and the exit is
// said by the key.
func TestStableWorkerThatFails(t *testing.T) {
	bubble(t, policy(1, 1, 10), func(t *testing.T, g *Gate) {
		p := acquire(t, g, "a")
		p.Ready()
		p.Ready()
		p.Stable()
		p.Fail()
		if s := g.Snapshot(); s.FailuresTotal != 0 {
			t.Errorf("%+v", s)
		}
		g.Failed("a")
		if s := g.Snapshot(); s.State != restart.StateOpen {
			t.Errorf("%+v", s)
		}
	})
}

func BenchmarkAcquire(b *testing.B) {
	g := New(policy(1, 8, 1024))
	for b.Loop() {
		p, err := g.Acquire(b.Context(), "a")
		if err != nil {
			b.Fatal(err)
		}
		p.Ready()
		p.Abandon()
	}
}
