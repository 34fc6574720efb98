package restart

import (
	"encoding/json"
	"time"
)

// Snapshot is the coordinator in numbers, in the shape of the published SDK's
// health; it names no key. The zero Snapshot is that of no coordinator.
type Snapshot struct {
	Configured        bool    `json:"configured"`
	State             string  `json:"state"` // of the worst circuit: open, half_open, closed
	ActiveLaunches    int     `json:"active_launches"`
	GateWaiters       int     `json:"gate_waiters"` // launches a circuit holds back; counts at most MaxConcurrent
	MaxConcurrent     int     `json:"max_concurrent_restarts"`
	FailuresInWindow  int     `json:"failures_in_window"` // of all keys
	FailureThreshold  int     `json:"failure_threshold"`
	OpenRemaining     float64 `json:"open_remaining_seconds"` // of the circuit that is open longest
	ProbeInflight     bool    `json:"half_open_probe_inflight"`
	OpenCircuits      int     `json:"open_circuits"`
	HalfOpenCircuits  int     `json:"half_open_circuits"`
	TrackedCircuits   int     `json:"tracked_circuits"`
	AttemptsTotal     uint64  `json:"restart_attempts_total"`
	FailuresTotal     uint64  `json:"restart_failures_total"`
	CircuitOpenTotal  uint64  `json:"circuit_open_total"`       // transitions from not open
	CircuitsForgotten uint64  `json:"circuits_forgotten_total"` // ours: records given up for the bound on circuits
	LaunchesWaiting   int     `json:"launches_waiting"`         // ours: for a slot or a circuit
}

// MarshalJSON says only that nothing is configured where that is so.
func (s Snapshot) MarshalJSON() ([]byte, error) {
	if !s.Configured {
		return []byte(`{"configured":false}`), nil
	}
	type plain Snapshot
	return json.Marshal(plain(s))
}

// States of a [Snapshot].
const (
	StateOpen     = "open"
	StateHalfOpen = "half_open"
	StateClosed   = "closed"
)

// Snapshot returns the numbers at a time.
func (c *Coordinator) Snapshot(now time.Time) Snapshot {
	c.advance(now)
	s := Snapshot{
		Configured: true, State: StateClosed, ActiveLaunches: len(c.slots), MaxConcurrent: c.policy.Concurrent,
		FailureThreshold: c.policy.Threshold, TrackedCircuits: len(c.circuits), LaunchesWaiting: len(c.waiting),
		AttemptsTotal: c.attempts, FailuresTotal: c.failures, CircuitOpenTotal: c.opened, CircuitsForgotten: c.untracked,
	}
	for _, k := range c.circuits {
		s.FailuresInWindow += len(k.failures)
		s.ProbeInflight = s.ProbeInflight || k.probe != 0
		switch {
		case !k.open:
		case c.now.Before(k.until):
			s.OpenCircuits++
			s.OpenRemaining = max(s.OpenRemaining, k.until.Sub(c.now).Seconds())
		default:
			s.HalfOpenCircuits++
		}
	}
	switch {
	case s.OpenCircuits > 0:
		s.State = StateOpen
	case s.HalfOpenCircuits > 0:
		s.State = StateHalfOpen
	}
	for _, l := range c.waiting {
		if s.GateWaiters < s.MaxConcurrent && c.circuits[l.Key].blocks(c.now) {
			s.GateWaiters++
		}
	}
	return s
}
