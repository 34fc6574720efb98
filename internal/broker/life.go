package broker

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// now is the time as records keep it: UTC, to the microsecond.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// lifeOf takes from a record the part that has a life.
func lifeOf(p store.Process) process.Record {
	return process.Record{
		State: p.State, HostID: p.HostID, BootID: p.BootID,
		Started: p.Started, Exited: p.Exited, Closed: p.Closed,
		Exit: p.Exit, Cleanup: p.Cleanup, Reason: p.Reason,
		CloseAsked: p.CloseAsked != nil, GraceMillis: p.GraceMillis, Fenced: p.Fence != "",
	}
}

// withLife puts a life back into its record. The fence and receipt ids are the
// caller's business.
func withLife(p store.Process, r process.Record, at time.Time) store.Process {
	p.State, p.HostID, p.BootID = r.State, r.HostID, r.BootID
	p.Started, p.Exited, p.Closed = trunc(r.Started), trunc(r.Exited), trunc(r.Closed)
	p.Exit, p.Cleanup, p.Reason, p.GraceMillis = r.Exit, r.Cleanup, r.Reason, r.GraceMillis
	if r.CloseAsked && p.CloseAsked == nil {
		p.CloseAsked = &at
	}
	return p
}

func trunc(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	v := t.UTC().Truncate(time.Microsecond)
	return &v
}

// sameLife reports whether saving b over a would change nothing.
func sameLife(a, b process.Record) bool {
	return a.State == b.State && a.HostID == b.HostID && a.BootID == b.BootID &&
		sameTime(a.Started, b.Started) && sameTime(a.Exited, b.Exited) && sameTime(a.Closed, b.Closed) &&
		(a.Exit == nil) == (b.Exit == nil) && (a.Exit == nil || sameExit(*a.Exit, *b.Exit)) &&
		a.Cleanup == b.Cleanup && a.Reason == b.Reason && a.CloseAsked == b.CloseAsked &&
		a.GraceMillis == b.GraceMillis && a.Fenced == b.Fenced
}

func sameTime(a, b *time.Time) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Truncate(time.Microsecond).Equal(b.Truncate(time.Microsecond))
}

func sameExit(a, b api.Exit) bool {
	if (a.Code == nil) != (b.Code == nil) || a.Code != nil && *a.Code != *b.Code {
		return false
	}
	return a.Kind == b.Kind && a.Signal == b.Signal && a.Detail == b.Detail
}

// wish is what somebody wants of a process, beside the event it makes.
type wish struct {
	actor  string // for the audit record
	reason string // of a clear
}

// commit is a new record with everything that is saved with it.
type commit struct {
	rec     store.Process
	change  store.Change
	receipt *api.Receipt
	fence   *store.Fence
	later   []process.Effect // to be carried out after the save
	save    bool
}

// plan turns the outcome of a step into a commit. It has no effect of its own.
func (o *owner) plan(e process.Event, w wish, at time.Time) commit {
	before := lifeOf(o.rec)
	after, effects := process.Step(before, e, at)
	c := commit{rec: withLife(o.rec, after, at), save: !sameLife(before, after)}
	if r, ok := e.(process.Reported); ok {
		c.rec.Stdin, c.rec.Log = r.State.Stdin, r.State.Log
	}
	for _, f := range effects {
		switch f := f.(type) {
		case process.RaiseFence:
			c.fence = o.raise(c.rec, f.Reason, at)
			c.rec.Fence, c.change.Fence = c.fence.ID, c.fence
			c.audit(o, at, actorServer, "fence.raise", map[string]string{"fence": c.fence.ID, "reason": f.Reason})
		case process.LiftFence:
			lift := &store.Clear{ID: o.rec.Fence, By: f.By, Reason: "the host proved the process tree gone", At: at}
			if f.By == process.ByOperator {
				lift.By, lift.Reason = w.actor, w.reason
			}
			c.rec.Fence, c.change.ClearFence = "", lift
			c.audit(o, at, orServer(w.actor), "fence.clear", map[string]string{"fence": lift.ID, "by": lift.By, "reason": lift.Reason})
		case process.IssueReceipt:
			c.receipt = o.b.sign(c.rec, *after.Proof)
			c.rec.Receipt = c.receipt.ID
			c.change.Receipt = &store.Receipt{ID: c.receipt.ID, Handle: o.handle, Created: at, Body: *c.receipt}
		default:
			c.later = append(c.later, f)
		}
	}
	if _, ok := e.(process.CloseAsked); ok && c.save && !before.CloseAsked {
		c.audit(o, at, orServer(w.actor), "process.close", map[string]string{"reason": c.rec.Reason})
	}
	if after.State == api.StateNeverStarted && after.HostID == "" {
		c.rec.LogGone = true // there never was one, nor a host to forget it
	}
	c.save = c.save || c.change.Receipt != nil || c.change.Fence != nil || c.change.ClearFence != nil
	return c
}

// actorServer stands in the audit record for what nobody asked for.
const actorServer = "server"

func orServer(actor string) string {
	if actor == "" {
		return actorServer
	}
	return actor
}

func (c *commit) audit(o *owner, at time.Time, actor, action string, detail map[string]string) {
	c.change.Audit = append(c.change.Audit, store.AuditEvent{
		ID: secret.ID(ident.Audit), At: at, Actor: actor, Workspace: o.rec.Workspace,
		Action: action, Object: o.handle, Detail: detail,
	})
}

// raise makes the fence with everything an operator needs to look for himself.
func (o *owner) raise(p store.Process, reason string, at time.Time) *store.Fence {
	ev := map[string]string{
		"host": p.HostID, "boot_id": p.BootID, "box": p.Box, "run": p.Run, "request_id": p.RequestID,
		"state_before": string(o.rec.State),
	}
	when := func(key string, t *time.Time) {
		if t != nil {
			ev[key] = t.Format(time.RFC3339Nano)
		}
	}
	when("started_at", p.Started)
	when("exited_at", p.Exited)
	when("close_asked_at", p.CloseAsked)
	if p.Exit != nil {
		ev["exit"] = string(p.Exit.Kind)
	}
	ev["log_next"], ev["stdin_accepted"] = decimal(p.Log.Next), decimal(p.Stdin.Accepted)
	if o.lastPhase != "" {
		ev["last_phase"] = string(o.lastPhase)
	}
	if o.lastError != "" {
		ev["last_error"] = o.lastError
	}
	if t := o.target.here(); t != nil {
		ev["host_now"], ev["boot_id_now"] = t.info.HostID, t.info.BootID
	}
	return &store.Fence{
		ID: secret.ID(ident.Fence), Workspace: p.Workspace, Target: p.Target, Box: p.Box, Handle: p.Handle,
		Reason: reason, Evidence: ev, Created: at,
	}
}

// reportOf is the event for a state a host told, or an error saying what in it
// makes no sense. The host is not trusted: nothing is taken over unchecked.
func reportOf(p store.Process, hostID, bootID string, st wire.ProcState) (process.Reported, error) {
	if err := checkState(p, &st); err != nil {
		return process.Reported{}, err
	}
	return process.Reported{HostID: hostID, BootID: bootID, State: st}, nil
}
