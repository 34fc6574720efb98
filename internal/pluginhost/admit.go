package pluginhost

import (
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// claim is one message of a worker and what is known of its connection.
type claim struct {
	action   string
	given    pluginwire.Context // zero: the message has none
	kind     linkKind
	phase    phase
	bound    pluginwire.Context // zero: not bound
	digest   string             // of the pool
	attached func(pluginwire.Context) bool
	current  func(pluginwire.Context) bool
}

// admit decides under which context a message of a worker acts, or why it does
// not. It is the whole authority of a worker; nothing else a worker sends is.
func admit(c claim) (pluginwire.Context, error) {
	none := pluginwire.Context{}
	if c.phase == phaseEnded {
		return none, errdefs.New(errdefs.Denied, "this worker connection was revoked")
	}
	if c.action == pluginwire.ActionRegisterPlugin {
		switch {
		case c.phase != phaseFresh:
			return none, errdefs.New(errdefs.Denied, "this worker connection is already registered")
		case !c.given.IsZero():
			return none, errdefs.New(errdefs.Denied, "register_plugin must not carry a context")
		}
		return none, nil
	}
	if c.kind == kindPool && c.phase == phaseRegistered {
		return admitSlot(c)
	}
	if c.bound.IsZero() {
		if c.action == pluginwire.ActionPing && c.given.IsZero() {
			return none, nil
		}
		return none, errdefs.New(errdefs.Denied, "a worker must register before it may send %s", c.action)
	}
	if err := matches(c.bound, c.given); err != nil {
		return none, err
	}
	if c.bound.IsBinding() && !c.current(c.bound) {
		return none, errdefs.New(errdefs.Denied, "the worker's installation binding was revoked")
	}
	return c.bound, nil
}

// admitSlot admits a message of a pool: it names its slot by a full binding.
func admitSlot(c claim) (pluginwire.Context, error) {
	var why string
	switch {
	case !c.given.IsBinding():
		why = "a shared worker must send the full installation binding with every action"
	case c.given.ArtifactDigest != c.digest:
		why = "the binding's artifact is not the one of this shared worker"
	case !c.attached(c.given):
		why = "the binding's slot is not attached to this shared worker"
	case !c.current(c.given):
		why = "the slot's installation binding was revoked"
	default:
		return c.given, nil
	}
	return pluginwire.Context{}, errdefs.New(errdefs.Denied, "%s", why)
}

// matches says whether a message's context is the one its connection is bound to;
// none at all is.
func matches(bound, given pluginwire.Context) error {
	switch {
	case given.IsZero():
		return nil
	case !given.SameWorkspace(bound):
		return errdefs.New(errdefs.Denied, "the action's context does not match connection Workspace")
	case bound.InstallationUUID != "" && given.InstallationUUID != bound.InstallationUUID:
		return errdefs.New(errdefs.Denied, "the action's context does not match connection plugin installation")
	case bound.IsBinding() && given != bound:
		return errdefs.New(errdefs.Denied, "the action's context does not match installation revision or artifact")
	case !bound.IsBinding() && given.IsBinding():
		return errdefs.New(errdefs.Denied, "the action's context does not match connection plugin installation")
	}
	return nil
}

// admit is asked for every message of the connection, before it is handled.
func (l *link) admit(in *rpc.Inbound) error {
	if l.kind == kindDebug {
		if err := l.recheck(time.Now()); err != nil {
			return err
		}
	}
	m := l.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing {
		return errClosing()
	}
	effective, err := admit(l.claimLocked(in.Action, in.Context))
	if err != nil {
		return err
	}
	in.Context = effective
	return nil
}

// claimLocked is a message and what is known of its connection; mu is held, and has
// to be while it is decided.
func (l *link) claimLocked(action string, given pluginwire.Context) claim {
	c := claim{action: action, given: given, kind: l.kind, phase: l.phase, bound: l.bound, current: l.m.currentLocked}
	if l.pool != nil {
		c.digest = l.pool.digest
		c.attached = func(b pluginwire.Context) bool { return l.pool.slots[b] != nil }
	}
	return c
}
