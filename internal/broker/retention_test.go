package broker

import (
	"fmt"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// A host that cannot forget one log, whichever it is and for however long, still
// forgets all the others, of old logs and of those beyond a workspace's share.
func TestALogThatCannotBeForgottenHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	for what, limits := range map[string]Limits{
		"old":    {LogRetention: time.Hour, RetentionEvery: 10 * time.Second, trimPiece: 3},
		"excess": {LogRetention: 1000 * time.Hour, KeptLogs: 1, trimPiece: 3},
	} {
		t.Run(what, func(t *testing.T) {
			inBubble(t, limits, func(r *rig) {
				stuck := map[string]bool{}
				var last string
				for i := range 6 {
					p := r.open(fmt.Sprint("p", i))
					r.host.output(p.Handle, wire.KindStdout, "0123456789")
					r.host.exit(p.Handle, 0)
					r.becomes(p.Handle, api.StateClosed)
					// As many as are looked at together, and first: the newest of old logs, the
					// oldest of too many.
					if what == "old" && i >= 3 || what == "excess" && i < 3 {
						stuck[p.Handle] = true
					}
					last = p.Handle
				}
				r.host.set(func() {
					r.host.fault = func(op, id string) fault {
						if op == "forget" && stuck[id] {
							return busy
						}
						return none
					}
				})
				time.Sleep(2 * time.Hour)
				r.eventually("the others are forgotten", func() bool {
					r.host.mu.Lock()
					defer r.host.mu.Unlock()
					for id := range r.host.procs {
						if !stuck[id] && !(what == "excess" && id == last) {
							return false
						}
					}
					return true
				})
				r.host.set(func() { r.host.fault = nil })
				r.eventually("all are forgotten", func() bool {
					r.host.mu.Lock()
					defer r.host.mu.Unlock()
					return len(r.host.procs) <= 1
				})
			})
		})
	}
}

// A clock that is set forward makes nothing old, for as long as that takes.
func TestAClockThatJumpsMakesNothingOld(t *testing.T) {
	t.Parallel()
	var p past
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	is := func(age, since time.Duration) {
		t.Helper()
		if got := p.before(age); !got.Equal(start.Add(since)) {
			t.Errorf("%v ago it was %v, want %v", age, got, start.Add(since))
		}
	}
	const day = 24 * time.Hour
	l := Limits{}.withDefaults()
	step := func(onClock, inTruth time.Duration) { // as look does
		at := p.now.Add(onClock)
		p.passed(onClock, inTruth, at)
		p.now = time.Time{}
		p.look(at, l)
	}
	p.look(start, l)
	is(day, -day)
	step(10*time.Minute, 10*time.Minute)
	is(day, 10*time.Minute-day)
	step(100*day, 0) // of these there was nothing
	is(day, 10*time.Minute-day)
	is(0, 100*day+10*time.Minute)
	step(2*time.Hour, time.Hour) // and again
	is(time.Minute, 100*day+10*time.Minute+time.Hour-time.Minute)
	is(2*time.Hour, 10*time.Minute-time.Hour)
	step(day, day)
	is(day-time.Second, 100*day+10*time.Minute+2*time.Hour+time.Second)
	is(day+time.Minute, 100*day+10*time.Minute+time.Hour-time.Minute)
	step(-time.Hour, time.Hour) // set back: what is told is younger
	is(day, 100*day+10*time.Minute)
	step(l.AuditRetention+day, l.AuditRetention+day)
	if len(p.jumps) != 0 {
		t.Errorf("kept for nothing: %v", p.jumps)
	}
}
