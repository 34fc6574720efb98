package pluginhost

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/restart"
	"github.com/stockade-run/stockade/internal/worker"
)

// A plugin that crashes opens its circuit and waits, and delays nobody; one probe
// is let through, which closes the circuit after running for a minute; the exit of
// a stable worker is counted all the same. RC-02, RC-03, RC-04, RC-11.
func TestCircuit(t *testing.T) {
	for _, mode := range []pluginwire.Mode{pluginwire.ModeDedicated, pluginwire.ModeShared} {
		t.Run(string(mode), func(t *testing.T) {
			pol := policy()
			pol.RestartFailureThreshold, pol.RestartFailureWindow, pol.MaxConcurrentRestarts = 2, 600, 1
			inBubble(t, pluginwire.ProfileShared, pol, func(r *rig) {
				bad, good := pack(r.t, "toy", "bad"), pack(r.t, "toy", "good")
				b, g := bad.bind("inst-bad", 1, 1), good.bind("inst-good", 1, 1)
				r.launcher.set(func(w *puppet) { w.exit(worker.Exit{Text: "exited with code 1", Code: 1}) })
				r.apply(b, bad, true, mode)
				time.Sleep(5 * time.Second)
				synctest.Wait()
				if s := r.m.gate.Snapshot(); s.State != restart.StateOpen || r.launcher.count() != 2 {
					r.t.Fatalf("after two crashes: %+v, %d launches", s, r.launcher.count())
				}
				r.launcher.set(nil)
				r.run(g, good, mode) // the other's circuit holds no place
				r.state(b, pluginwire.StateFailed)
				time.Sleep(57 * time.Second)
				synctest.Wait()
				r.state(b, pluginwire.StateRunning)
				if s := r.m.gate.Snapshot(); s.State != restart.StateHalfOpen || !s.ProbeInflight {
					r.t.Errorf("the probe: %+v", s)
				}
				time.Sleep(StableAfter)
				synctest.Wait()
				if s := r.m.gate.Snapshot(); s.State != restart.StateClosed || s.FailuresTotal != 2 {
					r.t.Errorf("after the probe: %+v", s)
				}
				r.launcher.nth(r.launcher.count() - 1).exit(worker.Exit{Text: "exited with code 2", Code: 2})
				synctest.Wait()
				if s := r.m.gate.Snapshot(); s.FailuresTotal != 3 {
					r.t.Errorf("a stable worker's exit: %+v", s)
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				r.state(b, pluginwire.StateRunning)
			})
		})
	}
}

// A fenced exit is no failure. IM-35.
func TestFencedExitIsNotCounted(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.launcher.set(func(w *puppet) { // never registers
			_ = w.conn.Run(context.Background())
			w.exit(worker.Exit{Text: "exited with code 0"})
		})
		r.apply(b, p, true, pluginwire.ModeDedicated)
		synctest.Wait()
		r.remove(b)
		time.Sleep(5 * time.Minute)
		if s := r.m.gate.Snapshot(); s.FailuresTotal != 0 || s.ActiveLaunches != 0 || r.launcher.count() != 1 {
			r.t.Errorf("%+v, %d launches", s, r.launcher.count())
		}
	})
}
