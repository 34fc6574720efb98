package restart

import (
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Policy is the numbers of a [Coordinator]; the host sends them as part of its
// worker policy. All are at least 1 or above zero.
type Policy struct {
	Concurrent  int           // launches at once (max_concurrent_restarts, 1 by default)
	Threshold   int           // failures that open a circuit (8 by default)
	Window      time.Duration // in which they must fall (30 s by default)
	Open        time.Duration // how long a circuit stays open (60 s by default)
	MaxCircuits int           // keys whose failures are remembered (1024 by default)
}

// Validate says which number of a policy is out of its range.
func (p Policy) Validate() error {
	for _, n := range []struct {
		name string
		ok   bool
	}{
		{"max_concurrent_restarts", p.Concurrent > 0}, {"restart_failure_threshold", p.Threshold > 0},
		{"restart_failure_window_seconds", p.Window > 0}, {"restart_circuit_open_seconds", p.Open > 0},
		{"max_pending_registrations", p.MaxCircuits > 0},
	} {
		if !n.ok {
			return errdefs.New(errdefs.Invalid, "%s must be above zero", n.name).WithNext("correct the worker policy")
		}
	}
	return nil
}

// Launch is the leave to start a worker once. It holds a launch slot until
// [Coordinator.Ready] or its end. It ends by exactly one of Fail, Abandon and
// Stable.
type Launch struct {
	ID    uint64 // unique in its coordinator, in the order of asking
	Key   string
	Probe bool // the one launch of a half-open circuit
}

// Coordinator decides which launches may begin. It is a value machine: methods
// take the time and return what is now admitted. It is not safe for concurrent
// use, and time must not run backwards between calls (it is then taken as the
// latest seen). See [NewCoordinator].
type Coordinator struct {
	policy   Policy
	now      time.Time // the latest seen
	last     uint64
	waiting  []Launch            // in the order of asking; Probe is not decided yet
	slots    map[uint64]struct{} // launches that are not ready yet
	circuits map[string]*circuit // of keys with failures, only

	attempts, failures, opened, untracked uint64
}

type circuit struct {
	failures []time.Time // within the window, oldest first; at most threshold are kept
	open     bool        // open or half-open
	until    time.Time   // of open: when it becomes half-open
	probe    uint64      // the launch that probes, 0 for none
}

// NewCoordinator returns a coordinator without a launch. The policy must be valid.
func NewCoordinator(p Policy) *Coordinator {
	return &Coordinator{policy: p, slots: map[uint64]struct{}{}, circuits: map[string]*circuit{}}
}

// Policy returns what the coordinator was made with.
func (c *Coordinator) Policy() Policy { return c.policy }

// Ask puts a launch of a key at the end of the order and returns its id. It is
// admitted by this or a later call of [Coordinator.Admit].
func (c *Coordinator) Ask(key string) uint64 {
	c.last++
	c.waiting = append(c.waiting, Launch{ID: c.last, Key: key})
	return c.last
}

// Cancel takes back a launch that was asked for. It reports false if the launch
// does not wait, because it was admitted: then it must be ended.
func (c *Coordinator) Cancel(id uint64) bool {
	i := slices.IndexFunc(c.waiting, func(l Launch) bool { return l.ID == id })
	if i < 0 {
		return false
	}
	c.waiting = slices.Delete(c.waiting, i, i+1)
	return true
}

// Admit returns the launches that may begin now, in the order of asking. To be
// called after every other method, and at the time of [Coordinator.Wake].
func (c *Coordinator) Admit(now time.Time) []Launch {
	c.advance(now)
	if len(c.slots) >= c.policy.Concurrent {
		return nil
	}
	var admitted []Launch
	rest := c.waiting[:0]
	for i, l := range c.waiting {
		if len(c.slots) >= c.policy.Concurrent {
			rest = append(rest, c.waiting[i:]...)
			break
		}
		k := c.circuits[l.Key]
		if k.blocks(c.now) {
			rest = append(rest, l)
			continue
		}
		if k != nil && k.open {
			l.Probe, k.probe = true, l.ID
		}
		c.slots[l.ID] = struct{}{}
		c.attempts++
		admitted = append(admitted, l)
	}
	clear(c.waiting[len(rest):])
	c.waiting = rest
	return admitted
}

func (k *circuit) blocks(now time.Time) bool {
	return k != nil && k.open && (now.Before(k.until) || k.probe != 0)
}

// Wake returns when time alone will let a waiting launch through: the earliest
// end of an open time that one waits for. Where a slot or a probe is waited for,
// ok is false.
func (c *Coordinator) Wake() (at time.Time, ok bool) {
	if len(c.circuits) == 0 {
		return at, false
	}
	for _, l := range c.waiting {
		k := c.circuits[l.Key]
		if k != nil && k.open && k.probe == 0 && c.now.Before(k.until) && (!ok || k.until.Before(at)) {
			at, ok = k.until, true
		}
	}
	return at, ok
}

// Ready frees the slot of a launch whose worker runs; the launch has not ended.
// It reports false if the launch holds no slot: a fault of the caller.
func (c *Coordinator) Ready(l Launch) bool {
	_, held := c.slots[l.ID]
	delete(c.slots, l.ID)
	return held
}

// Fail ends a launch whose worker did not become ready or exited while it should
// run. It opens the key's circuit if the launch was its probe, or it is open
// already, or the failures within the window reach the threshold; an open time
// is never shortened.
func (c *Coordinator) Fail(l Launch, now time.Time) {
	c.advance(now)
	delete(c.slots, l.ID)
	c.failures++
	k := c.circuits[l.Key]
	if k == nil {
		if !c.room() {
			c.untracked++
			return
		}
		k = &circuit{}
		c.circuits[l.Key] = k
	}
	k.failures = append(k.failures, c.now)
	if n := len(k.failures) - c.policy.Threshold; n > 0 {
		k.failures = slices.Delete(k.failures, 0, n) // one more says nothing that the threshold does not
	}
	if l.Probe && k.probe == l.ID {
		k.probe = 0 // and the circuit, which is half-open, opens again
	}
	if !k.open && len(k.failures) < c.policy.Threshold {
		return
	}
	// A failed probe opens its circuit again: that is a transition from half-open.
	if !k.open || !c.now.Before(k.until) {
		c.opened++
	}
	k.open = true
	if until := c.now.Add(c.policy.Open); until.After(k.until) {
		k.until = until
	}
}

// room makes room for one more circuit, and reports whether there is.
func (c *Coordinator) room() bool {
	if len(c.circuits) < c.policy.MaxCircuits {
		return true
	}
	var oldest string
	var when time.Time
	for key, k := range c.circuits {
		if last := k.failures; !k.open && (oldest == "" || last[len(last)-1].Before(when) || last[len(last)-1].Equal(when) && key < oldest) {
			oldest, when = key, last[len(last)-1]
		}
	}
	if oldest == "" {
		return false
	}
	delete(c.circuits, oldest)
	c.untracked++
	return true
}

// Abandon ends a launch that nobody wants any more, as after its binding was
// fenced. It counts nothing; the circuit of a probe takes the next one.
func (c *Coordinator) Abandon(l Launch) {
	delete(c.slots, l.ID)
	if k := c.circuits[l.Key]; k != nil && l.Probe && k.probe == l.ID {
		k.probe = 0
	}
}

// Stable ends a launch that has run for the stable time. The circuit of a probe
// is closed and forgotten; for any other launch nothing changes.
func (c *Coordinator) Stable(l Launch) {
	delete(c.slots, l.ID)
	if k := c.circuits[l.Key]; k != nil && l.Probe && k.probe == l.ID {
		delete(c.circuits, l.Key)
	}
}

// advance forgets failures that left the window, and circuits with nothing to
// remember.
func (c *Coordinator) advance(now time.Time) {
	if now.After(c.now) {
		c.now = now
	}
	for key, k := range c.circuits {
		n := 0
		for n < len(k.failures) && c.now.Sub(k.failures[n]) > c.policy.Window {
			n++
		}
		k.failures = slices.Delete(k.failures, 0, n)
		if len(k.failures) == 0 && !k.open {
			delete(c.circuits, key)
		}
	}
}
