package pluginhost

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// counters are the numbers of health. They name nobody.
type counters struct {
	poolStarts, poolRegistrations, poolFailures, poolLate, refusedPools, poolStops    atomic.Int64
	attaches, attached, attachFailures, attachTimeouts, detaches, workerStarts, lates atomic.Int64

	mu      sync.Mutex
	waiting map[bool]time.Duration // by ownProcess: the waits that run now, together
	waited  map[bool]time.Duration // all waits
}

func (c *counters) started(k linkKind) {
	c.workerStarts.Add(1)
	if k == kindPool {
		c.poolStarts.Add(1)
	}
}

func (c *counters) late(k linkKind) {
	c.lates.Add(1)
	if k == kindPool {
		c.poolLate.Add(1)
	}
}

// backoff counts a wait that begins; the function it returns says that it ended.
func (c *counters) backoff(own bool, wait time.Duration) func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		c.waiting, c.waited = map[bool]time.Duration{}, map[bool]time.Duration{}
	}
	c.waiting[own] += wait
	c.waited[own] += wait
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waiting[own] -= wait
	}
}

// Health returns the resources object of /healthz and get_debug_info, with the
// names of the published SDK 0.7; there is no identity and no digest in it.
// event_loop and blocking_executor, which describe Python, are not there.
func (m *Manager) Health() map[string]any {
	now := time.Now()
	states := map[string]int{pluginwire.StateRunning: 0, pluginwire.StateStarting: 0, pluginwire.StateFailed: 0, pluginwire.StateDisabled: 0, "other": 0}
	modes := map[string]int{string(pluginwire.ModeDedicated): 0, string(pluginwire.ModeShared): 0}
	m.mu.Lock()
	handlers := len(m.others)
	for _, i := range m.installs {
		if _, ok := states[i.state]; ok {
			states[i.state]++
		} else {
			states["other"]++
		}
		modes[string(i.mode)]++
		if i.plugin != nil && i.slot == nil {
			handlers++
		}
	}
	poolsReady, draining, slots := 0, 0, 0
	for _, p := range m.pools {
		if p.link != nil {
			handlers++
		}
		if p.draining {
			draining++
		}
		slots += len(p.slots)
		for _, s := range p.slots {
			if s.ready {
				poolsReady++
				break
			}
		}
	}
	marks := 0
	if m.set {
		marks = len(m.table.Watermarks())
	}
	out := map[string]any{
		"plugin_handlers": handlers, "legacy_supervisors": len(m.legacy), "installation_runtimes": len(m.installs),
		"installation_states": states, "installations_by_mode": modes, "installation_watermarks": marks,
	}
	pools, capacity, g, pending, trees := len(m.pools), m.runtime.Policy.MaxWorkers, m.gate, m.pending, m.trees
	m.mu.Unlock()
	out["pending_registrations"] = 0
	if pending != nil {
		out["pending_registrations"] = pending.Count(now)
	}
	out["restart_coordinator"] = g.Snapshot()
	c := &m.counter
	out["shared_pool"] = map[string]any{
		"workers": pools, "capacity": capacity, "ready": poolsReady, "draining": draining, "slots": slots,
		"processes_started_total": c.poolStarts.Load(), "registrations_total": c.poolRegistrations.Load(),
		"launch_failures_total": c.poolFailures.Load(), "transport_timeouts_total": c.poolLate.Load(),
		"capacity_rejections_total": c.refusedPools.Load(), "stops_total": c.poolStops.Load(),
		"slot_attach_total": c.attaches.Load(), "slot_attach_success_total": c.attached.Load(),
		"slot_attach_failures_total": c.attachFailures.Load(), "slot_attach_timeouts_total": c.attachTimeouts.Load(),
		"slot_detach_total": c.detaches.Load(),
	}
	if t, ok := trees.(interface{ Counters() deptree.Counters }); ok {
		out["dependency_environment"] = t.Counters()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out["restart_backoff"] = map[string]float64{
		"shared_current_seconds": c.waiting[false].Seconds(), "shared_total_seconds": c.waited[false].Seconds(),
		"dedicated_current_seconds": c.waiting[true].Seconds(), "dedicated_total_seconds": c.waited[true].Seconds(),
	}
	return out
}
