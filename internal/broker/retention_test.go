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
