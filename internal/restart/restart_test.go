package restart

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

// defaults is the policy of a host that sets nothing.
var defaults = Policy{Concurrent: 1, Threshold: 8, Window: 30 * time.Second, Open: 60 * time.Second, MaxCircuits: 1024}

func TestBackoffSequence(t *testing.T) {
	t.Parallel()
	var b Backoff
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60} {
		low, _ := b.Next(0, 0)
		high, next := b.Next(Lasted-1, 1)
		if low != want*800*time.Millisecond || high != want*1200*time.Millisecond || b.Delay() != want*time.Second {
			t.Errorf("want %d s, got %v to %v", want, low, high)
		}
		b = next
	}
	if wait, next := b.Next(Lasted, 0.5); wait != time.Second || next.Delay() != 2*time.Second {
		t.Errorf("after a long attempt: %v, then %v", wait, next.Delay())
	}
}

func TestBackoffLaws(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var b Backoff
		for _, lasted := range rapid.SliceOfN(rapid.Int64Range(-5, 120), 1, 50).Draw(t, "lasted") {
			before, jitter := b.Delay(), rapid.Float64Range(-1, 2).Draw(t, "jitter")
			long := time.Duration(lasted)*time.Second >= Lasted
			var wait time.Duration
			wait, b = b.Next(time.Duration(lasted)*time.Second, jitter)
			if long {
				before = FirstDelay
			}
			if wait < 800*time.Millisecond || wait > 72*time.Second || wait < before*8/10 || wait > before*12/10 || b.Delay() != min(2*before, MaxDelay) {
				t.Fatalf("waits %v for a delay of %v, then %v", wait, before, b.Delay())
			}
		}
	})
}

// TestBackoffAloneOpensNoCircuit holds what the package comment says: with the
// default numbers one supervisor that keeps its backoff never opens a circuit.
func TestBackoffAloneOpensNoCircuit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		c, now := NewCoordinator(defaults), time.Unix(0, 0)
		var b Backoff
		for range rapid.IntRange(1, 100).Draw(t, "crashes") {
			c.Ask("a")
			l := c.Admit(now)[0]
			lasted := time.Duration(rapid.SampledFrom([]int64{0, 0, 0, 1, 59, 60}).Draw(t, "lasted")) * time.Second
			now = now.Add(lasted)
			c.Fail(l, now)
			if s := c.Snapshot(now); s.State != StateClosed {
				t.Fatalf("open: %+v", s)
			}
			var wait time.Duration
			wait, b = b.Next(lasted, rapid.SampledFrom([]float64{0, 0, 0.99}).Draw(t, "jitter"))
			now = now.Add(wait)
		}
	})
}

// TestCrashLoopDelaysNobody: whatever a key does, another key's launch begins at
// once if a slot is free.
func TestCrashLoopDelaysNobody(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := defaults
		p.Threshold, p.Concurrent, p.MaxCircuits = rapid.IntRange(1, 4).Draw(t, "threshold"), rapid.IntRange(1, 3).Draw(t, "concurrent"), rapid.IntRange(1, 3).Draw(t, "circuits")
		c, now := NewCoordinator(p), time.Unix(0, 0)
		for range rapid.IntRange(1, 60).Draw(t, "rounds") {
			key := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "key")
			for range rapid.IntRange(0, 3).Draw(t, "asks") {
				c.Ask(key)
			}
			for _, l := range c.Admit(now) {
				switch rapid.IntRange(0, 9).Draw(t, "how") {
				case 0:
					c.Abandon(l)
				case 1:
					c.Ready(l)
					c.Stable(l)
				default:
					c.Fail(l, now)
				}
			}
			now = now.Add(time.Duration(rapid.IntRange(0, 90).Draw(t, "seconds")) * time.Second)
			for ended := true; ended; { // every launch that begins is over soon
				ended = false
				for _, l := range c.Admit(now) {
					c.Abandon(l)
					ended = true
				}
			}
			id := c.Ask("healthy")
			i := slices.IndexFunc(c.Admit(now), func(l Launch) bool { return l.ID == id && !l.Probe })
			if i < 0 {
				t.Fatalf("the healthy plugin waits: %+v", c.Snapshot(now))
			}
			c.Stable(Launch{ID: id, Key: "healthy"})
		}
	})
}

// TestFailuresExpire: below the threshold failures leave the window, and their
// circuit is forgotten.
func TestFailuresExpire(t *testing.T) {
	t.Parallel()
	c, now := NewCoordinator(defaults), time.Unix(0, 0)
	for range 7 {
		fail(c, "a", now)
	}
	if s := c.Snapshot(now.Add(30 * time.Second)); s.FailuresInWindow != 7 || s.TrackedCircuits != 1 || s.State != StateClosed {
		t.Errorf("at the end of the window: %+v", s)
	}
	if s := c.Snapshot(now.Add(30*time.Second + 1)); s.FailuresInWindow != 0 || s.TrackedCircuits != 0 {
		t.Errorf("after the window: %+v", s)
	}
}

// TestCircuitsAreBounded: more failing keys than circuits. Closed ones make room,
// oldest first; open ones stay; what launches is not bounded by it.
func TestCircuitsAreBounded(t *testing.T) {
	t.Parallel()
	p := defaults
	p.MaxCircuits, p.Threshold = 2, 2
	c, now := NewCoordinator(p), time.Unix(0, 0)
	for i, key := range []string{"a", "b", "c"} {
		fail(c, key, now.Add(time.Duration(i)*time.Second))
	}
	if c.circuits["a"] != nil || c.circuits["b"] == nil || c.circuits["c"] == nil {
		t.Errorf("remembered: %v", c.circuits)
	}
	now = now.Add(3 * time.Second)
	fail(c, "b", now)
	fail(c, "c", now)
	fail(c, "d", now)
	s := c.Snapshot(now)
	if s.OpenCircuits != 2 || s.TrackedCircuits != 2 || s.CircuitsForgotten != 2 || s.FailuresTotal != 6 {
		t.Errorf("%+v", s)
	}
}

func fail(c *Coordinator, key string, now time.Time) {
	c.Ask(key)
	for _, l := range c.Admit(now) {
		c.Fail(l, now)
	}
}

func TestSnapshotFields(t *testing.T) {
	t.Parallel()
	p := defaults
	p.Threshold = 1
	c := NewCoordinator(p)
	fail(c, "a", time.Unix(0, 0))
	c.Ask("a")
	c.Admit(time.Unix(15, 0))
	got, err := json.Marshal(c.Snapshot(time.Unix(15, 0)))
	want := `{"configured":true,"state":"open","active_launches":0,"gate_waiters":1,"max_concurrent_restarts":1,"failures_in_window":1,` +
		`"failure_threshold":1,"open_remaining_seconds":45,"half_open_probe_inflight":false,"open_circuits":1,"half_open_circuits":0,` +
		`"tracked_circuits":1,"restart_attempts_total":1,"restart_failures_total":1,"circuit_open_total":1,"circuits_forgotten_total":0,"launches_waiting":1}`
	if err != nil || string(got) != want {
		t.Errorf("%v\n%s\n%s", err, got, want)
	}
	if got, err := json.Marshal(Snapshot{}); err != nil || string(got) != `{"configured":false}` {
		t.Errorf("nothing configured: %s, %v", got, err)
	}
}

func TestTimeRunsForward(t *testing.T) {
	t.Parallel()
	p := defaults
	p.Threshold = 1
	c := NewCoordinator(p)
	fail(c, "a", time.Unix(100, 0))
	c.Ask("a")
	if len(c.Admit(time.Unix(50, 0))) != 0 || len(c.Admit(time.Unix(159, 0))) != 0 || len(c.Admit(time.Unix(160, 0))) != 1 {
		t.Error("a clock that was set back moved the end of the open time")
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	if err := defaults.Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*Policy){
		"max_concurrent_restarts": func(p *Policy) { p.Concurrent = 0 }, "restart_failure_threshold": func(p *Policy) { p.Threshold = -1 },
		"restart_failure_window_seconds": func(p *Policy) { p.Window = 0 }, "restart_circuit_open_seconds": func(p *Policy) { p.Open = 0 },
		"max_pending_registrations": func(p *Policy) { p.MaxCircuits = 0 },
	} {
		p := defaults
		change(&p)
		if err := p.Validate(); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
