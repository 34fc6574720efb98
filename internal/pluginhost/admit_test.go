package pluginhost

import (
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// PH-01, PH-04, PH-07 and the reference's rules for messages of workers, one line
// each.
func TestAdmit(t *testing.T) {
	t.Parallel()
	b := pack(t, "toy", "1").bind("inst-a", 1, 1)
	sibling := pack(t, "toy", "1").bind("inst-b", 1, 1)
	foreign := pack(t, "toy", "2").bind("inst-a", 1, 1)
	newer := pack(t, "toy", "1").bind("inst-a", 1, 2)
	ws := b.Workspace()
	half := ws
	half.InstallationUUID = "inst-a"
	other := b
	other.WorkspaceUUID = "ws-2"
	none := pluginwire.Context{}
	reg, bots, ping := pluginwire.ActionRegisterPlugin, pluginwire.ActionGetBots, pluginwire.ActionPing
	yes := func(pluginwire.Context) bool { return true }
	no := func(pluginwire.Context) bool { return false }
	only := func(want pluginwire.Context) func(pluginwire.Context) bool {
		return func(c pluginwire.Context) bool { return c == want }
	}
	for name, c := range map[string]struct {
		claim
		want pluginwire.Context
		text string // of the refusal; "" is admitted
	}{
		"register, fresh":                  {claim{action: reg}, none, ""},
		"register with a context":          {claim{action: reg, given: b}, none, "must not carry a context"},
		"register again":                   {claim{action: reg, phase: phaseRegistered, bound: b}, none, "already registered"},
		"register while registering":       {claim{action: reg, phase: phaseRegistering}, none, "already registered"},
		"register in a pool again":         {claim{action: reg, kind: kindPool, phase: phaseRegistered}, none, "already registered"},
		"ping, fresh":                      {claim{action: ping}, none, ""},
		"ping with a context, fresh":       {claim{action: ping, given: b}, none, "must register"},
		"anything, fresh":                  {claim{action: bots}, none, "must register"},
		"anything with a context, fresh":   {claim{action: bots, given: b}, none, "must register"},
		"anything in a fresh pool":         {claim{action: bots, kind: kindPool, given: b}, none, "must register"},
		"bound, no context":                {claim{action: bots, phase: phaseRegistered, bound: b}, b, ""},
		"bound, its own context":           {claim{action: bots, phase: phaseRegistered, bound: b, given: b}, b, ""},
		"bound, while it initialises":      {claim{action: bots, phase: phaseRegistering, bound: b}, b, ""},
		"bound, Workspace only":            {claim{action: bots, phase: phaseRegistered, bound: b, given: ws}, none, "does not match connection plugin installation"},
		"bound, legacy form":               {claim{action: bots, phase: phaseRegistered, bound: b, given: half}, none, "does not match installation revision or artifact"},
		"bound, other Workspace":           {claim{action: bots, phase: phaseRegistered, bound: b, given: other}, none, "does not match connection Workspace"},
		"bound, sibling":                   {claim{action: bots, phase: phaseRegistered, bound: b, given: sibling}, none, "does not match connection plugin installation"},
		"bound, newer revision":            {claim{action: bots, phase: phaseRegistered, bound: b, given: newer}, none, "does not match installation revision or artifact"},
		"bound, fenced":                    {claim{action: bots, phase: phaseRegistered, bound: b, current: no}, none, "revoked"},
		"ended":                            {claim{action: bots, phase: phaseEnded, bound: b}, none, "revoked"},
		"register after the end":           {claim{action: reg, phase: phaseEnded}, none, "revoked"},
		"legacy, no context":               {claim{action: bots, phase: phaseRegistered, bound: half, current: no}, half, ""},
		"legacy, its Workspace and itself": {claim{action: bots, phase: phaseRegistered, bound: half, given: half, current: no}, half, ""},
		"legacy, a full binding":           {claim{action: bots, phase: phaseRegistered, bound: half, given: b, current: yes}, none, "does not match"},
		"pool, its slot":                   {claim{action: bots, kind: kindPool, phase: phaseRegistered, given: b}, b, ""},
		"pool, no context":                 {claim{action: bots, kind: kindPool, phase: phaseRegistered}, none, "full installation binding"},
		"pool, Workspace and installation": {claim{action: bots, kind: kindPool, phase: phaseRegistered, given: half}, none, "full installation binding"},
		"pool, another artifact":           {claim{action: bots, kind: kindPool, phase: phaseRegistered, given: foreign}, none, "artifact"},
		"pool, a slot not attached":        {claim{action: bots, kind: kindPool, phase: phaseRegistered, given: sibling, attached: only(b)}, none, "not attached"},
		"pool, a fenced slot":              {claim{action: bots, kind: kindPool, phase: phaseRegistered, given: b, current: no}, none, "revoked"},
		"pool, an upload for a sibling":    {claim{action: pluginwire.ActionFileChunk, kind: kindPool, phase: phaseRegistered, given: sibling, attached: only(b)}, none, "not attached"},
		"pool, ping without a context":     {claim{action: ping, kind: kindPool, phase: phaseRegistered}, none, "full installation binding"},
	} {
		if c.current == nil {
			c.current = yes
		}
		if c.attached == nil {
			c.attached = yes
		}
		c.digest = b.ArtifactDigest
		got, err := admit(c.claim)
		switch {
		case c.text == "" && (err != nil || got != c.want):
			t.Errorf("%s: %+v, %v", name, got, err)
		case c.text != "" && (err == nil || !strings.Contains(err.Error(), c.text)):
			t.Errorf("%s: %v, want %q", name, err, c.text)
		case c.text != "" && !got.IsZero():
			t.Errorf("%s: refused with a context %+v", name, got)
		}
	}
}
