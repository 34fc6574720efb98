package pluginhost

import (
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// A change of mode stops the worker of the old one first. IM-03.
func TestModeChange(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p, a, b := r.pair()
		r.run(a, p, pluginwire.ModeDedicated)
		if r.call(a) != 1 || r.call(b) != 0 || !slices.Equal(r.slots(p.digest), []string{"inst-b"}) {
			r.t.Error("A did not leave the pool alone")
		}
		r.run(a, p, inPool)
		if r.call(a) != 0 {
			r.t.Error("A did not come back to the pool")
		}
		select {
		case <-r.launcher.nth(1).ended:
		default:
			r.t.Error("A's own worker lives")
		}
	})
}

// Two slots of one pool need one dependency tree.
func TestPoolTreeChanged(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p, a, _ := r.pair()
		r.trees.mu.Lock()
		r.trees.suffix = "-new"
		r.trees.mu.Unlock()
		c := p.bind("inst-c", 1, 1)
		if res := r.apply(c, p, true, inPool); res.State != pluginwire.StateFailed || !strings.Contains(res.Message, "environment changed") {
			r.t.Fatalf("%+v", res)
		}
		r.call(a)
	})
}
