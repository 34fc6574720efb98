package restart

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

// The explorer walks every reachable state of the coordinator with two keys and a
// few launches outstanding, with every call in every order. Time is counted in
// ticks of a second; the window and the open time are two of them.

// world is a coordinator and what its caller knows.
type world struct {
	c    *Coordinator
	now  time.Time
	live []Launch        // admitted and not ended
	slot map[uint64]bool // of those, which are not ready
}

func (w world) clone() world {
	c := *w.c
	c.waiting = slices.Clone(c.waiting)
	c.slots = maps.Clone(c.slots)
	c.circuits = map[string]*circuit{}
	for key, k := range w.c.circuits {
		copied := *k
		copied.failures = slices.Clone(k.failures)
		c.circuits[key] = &copied
	}
	return world{&c, w.now, slices.Clone(w.live), maps.Clone(w.slot)}
}

// code is the world as one of finitely many: ids by their order, times by their
// distance.
func (w world) code() string {
	b := make([]byte, 0, 128)
	ids := map[uint64]byte{}
	all := slices.Concat(w.live, w.c.waiting)
	slices.SortFunc(all, func(x, y Launch) int { return int(x.ID) - int(y.ID) })
	for i, l := range all {
		ids[l.ID] = byte('1' + i)
		b = append(b, l.Key[0])
		if slices.Contains(w.live, l) {
			b = append(b, '!')
		}
		if w.slot[l.ID] {
			b = append(b, 's')
		}
		if l.Probe {
			b = append(b, 'p')
		}
	}
	for _, key := range []string{"a", "b"} {
		b = append(b, '/')
		k := w.c.circuits[key]
		if k == nil {
			continue
		}
		for _, f := range k.failures {
			b = append(b, byte('0'+w.now.Sub(f)/time.Second))
		}
		if k.open {
			b = append(b, 'o', byte('0'+max(0, k.until.Sub(w.now))/time.Second))
		}
		if k.probe != 0 {
			b = append(b, 'P', ids[k.probe])
		}
	}
	return string(b)
}

// admit lets the coordinator admit and checks the order: nothing is admitted
// that a circuit holds back, and nothing before an earlier one that none does.
func (w *world) admit(t *testing.T) {
	waiting := slices.Clone(w.c.waiting)
	free := w.c.policy.Concurrent - len(w.c.slots)
	w.c.advance(w.now)
	blocked := map[string]bool{}
	for key, k := range w.c.circuits {
		blocked[key] = k.open && (w.now.Before(k.until) || k.probe != 0)
	}
	var want []uint64
	halfOpen := map[string]bool{}
	for key, k := range w.c.circuits {
		halfOpen[key] = k.open && !blocked[key]
	}
	for _, l := range waiting {
		if len(want) < free && !blocked[l.Key] {
			want = append(want, l.ID)
			blocked[l.Key] = halfOpen[l.Key] // its probe blocks the rest
		}
	}
	admitted := w.c.Admit(w.now)
	var got []uint64
	for _, l := range admitted {
		got = append(got, l.ID)
		w.live = append(w.live, l)
		w.slot[l.ID] = true
		if l.Probe != halfOpen[l.Key] {
			t.Errorf("launch %v: is its circuit half-open? %v", l, halfOpen[l.Key])
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("admitted %v, want %v of %v", got, want, waiting)
	}
}

func (w *world) end(l Launch) {
	w.live = slices.DeleteFunc(w.live, func(o Launch) bool { return o == l })
	delete(w.slot, l.ID)
}

func (w world) invariants(t *testing.T) {
	c := w.c
	if len(c.slots) > c.policy.Concurrent || len(c.slots) != len(w.slot) {
		t.Errorf("%d slots are held, the callers hold %d", len(c.slots), len(w.slot))
	}
	if len(c.circuits) > c.policy.MaxCircuits {
		t.Errorf("%d circuits of %d", len(c.circuits), c.policy.MaxCircuits)
	}
	probes := map[string]int{}
	for _, l := range w.live {
		if k := c.circuits[l.Key]; l.Probe {
			probes[l.Key]++
			if k == nil || k.probe != l.ID {
				t.Errorf("the probe %v is not its circuit's", l)
			}
		}
	}
	for key, k := range c.circuits {
		if (k.probe != 0) != (probes[key] == 1) || probes[key] > 1 {
			t.Errorf("key %s: probe %d, and %d are live", key, k.probe, probes[key])
		}
		if k.probe != 0 && !k.open {
			t.Errorf("key %s has a probe and is closed", key)
		}
		if !k.open && (len(k.failures) == 0 || len(k.failures) >= c.policy.Threshold) {
			t.Errorf("key %s is closed with %d failures", key, len(k.failures))
		}
	}
	// Whatever waits will go on: a slot will be freed, a probe will end, or the
	// coordinator wants to be called when the open time ends.
	wake, ok := c.Wake()
	timed := false
	for _, l := range c.waiting {
		k := c.circuits[l.Key]
		switch {
		case k.blocks(w.now) && k.probe == 0:
			timed = true
			if !ok || wake.After(k.until) || !wake.After(w.now) {
				t.Errorf("%v waits for its circuit and nothing wakes it (%v, %v)", l, wake, ok)
			}
		case !k.blocks(w.now) && len(w.slot) < c.policy.Concurrent:
			t.Errorf("%v waits for nothing", l)
		}
	}
	if ok != timed {
		t.Errorf("a timer is wanted: %v; something waits for time: %v", ok, timed)
	}
	s := c.Snapshot(w.now)
	if s.ActiveLaunches != len(w.slot) || s.LaunchesWaiting != len(c.waiting) || s.GateWaiters > c.policy.Concurrent ||
		s.ProbeInflight != (len(probes) > 0) || s.OpenCircuits+s.HalfOpenCircuits > s.TrackedCircuits ||
		(s.State == StateClosed) != (s.OpenCircuits+s.HalfOpenCircuits == 0) || (s.State == StateOpen) != (s.OpenCircuits > 0) {
		t.Errorf("the snapshot %+v", s)
	}
}

// steps returns every world that one call leads to.
func (w world) steps(t *testing.T, outstanding int) (next []world) {
	do := func(what string, f func(*world)) {
		n := w.clone()
		f(&n)
		n.admit(t)
		n.invariants(t)
		if t.Failed() {
			t.Fatalf("%s in %q", what, w.code())
		}
		next = append(next, n)
	}
	do("tick", func(n *world) { n.now = n.now.Add(time.Second) })
	if len(w.live)+len(w.c.waiting) < outstanding {
		for _, key := range []string{"a", "b"} {
			do("ask "+key, func(n *world) { n.c.Ask(key) })
		}
	}
	for _, l := range w.c.waiting {
		do("cancel", func(n *world) {
			if !n.c.Cancel(l.ID) || n.c.Cancel(l.ID) {
				t.Error("what waits can be cancelled, once")
			}
		})
	}
	for _, l := range w.live {
		do("ready", func(n *world) {
			if n.c.Cancel(l.ID) {
				t.Error("what was admitted cannot be cancelled")
			}
			if got := n.c.Ready(l); got != w.slot[l.ID] {
				t.Errorf("ready: %v", got)
			}
			delete(n.slot, l.ID)
		})
		do("abandon", func(n *world) {
			n.c.Abandon(l)
			n.end(l)
			if n.c.failures != w.c.failures || n.c.opened != w.c.opened {
				t.Error("abandoning counted")
			}
		})
		do("stable", func(n *world) {
			n.c.Stable(l)
			n.end(l)
			if _, tracked := n.c.circuits[l.Key]; l.Probe && tracked {
				t.Error("a stable probe left its circuit")
			}
			if !l.Probe && len(n.c.circuits) != len(w.c.circuits) {
				t.Error("a stable launch closed a circuit")
			}
		})
		do("fail", func(n *world) {
			before := w.clone().c
			before.advance(w.now)
			n.c.Fail(l, n.now)
			n.end(l)
			checkFail(t, w, l, before, n.c)
		})
	}
	return next
}

func checkFail(t *testing.T, w world, l Launch, before, after *Coordinator) {
	was, is := before.circuits[l.Key], after.circuits[l.Key]
	for key, k := range before.circuits {
		if k.open && after.circuits[key] == nil {
			t.Error("an open circuit was forgotten")
		}
	}
	if is == nil {
		if was != nil || len(before.circuits) < before.policy.MaxCircuits {
			t.Error("a failure was not remembered, and there was room")
		}
		for _, k := range before.circuits {
			if !k.open {
				t.Error("a failure was not remembered, and a closed circuit was")
			}
		}
		return
	}
	count := 1
	if was != nil {
		count += len(was.failures)
	}
	open := l.Probe || was != nil && was.open || count >= before.policy.Threshold
	if is.open != open {
		t.Errorf("after %d failures, probe %v: open is %v", count, l.Probe, is.open)
	}
	if open && !is.until.Equal(w.now.Add(before.policy.Open)) {
		t.Errorf("open until %v at %v", is.until, w.now)
	}
	shut := was != nil && was.open && w.now.Before(was.until)
	if want := before.opened + 1; open && !shut && after.opened != want || (!open || shut) && after.opened != before.opened {
		t.Errorf("%d openings after %d", after.opened, before.opened)
	}
}

func TestEveryState(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		p           Policy
		outstanding int
	}{
		{Policy{Concurrent: 1, Threshold: 2, MaxCircuits: 2}, 3},
		{Policy{Concurrent: 2, Threshold: 2, MaxCircuits: 2}, 3},
		{Policy{Concurrent: 1, Threshold: 1, MaxCircuits: 2}, 4},
		{Policy{Concurrent: 2, Threshold: 2, MaxCircuits: 1}, 3},
	} {
		c.p.Window, c.p.Open = 2*time.Second, 2*time.Second
		t.Run(fmt.Sprintf("%d at once, threshold %d, %d circuits", c.p.Concurrent, c.p.Threshold, c.p.MaxCircuits), func(t *testing.T) {
			t.Parallel()
			start := world{NewCoordinator(c.p), time.Unix(1000, 0), nil, map[uint64]bool{}}
			seen, todo, steps := map[string]bool{start.code(): true}, []world{start}, 0
			for len(todo) > 0 {
				w := todo[0]
				todo = todo[1:]
				for _, n := range w.steps(t, c.outstanding) {
					steps++
					if k := n.code(); !seen[k] {
						seen[k] = true
						todo = append(todo, n)
					}
				}
			}
			t.Logf("%d states, %d steps", len(seen), steps)
		})
	}
}
