package process

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// Step returns what the record becomes when the event is learned, and what the
// owner must then do. Events that say nothing new return r unchanged; an event
// may come late, twice or not at all. now is used only where the event brings no
// time of its own.
func Step(r Record, e Event, now time.Time) (Record, []Effect) {
	if r.Final() {
		return r, nil
	}
	switch e := e.(type) {
	case Dispatch:
		return dispatch(r, e)
	case Reported:
		return reported(r, e, now)
	case Refused:
		return refused(r, e, now)
	case Missing:
		return missing(r, e, now)
	case Lost:
		return lost(r)
	case Gone:
		if r.HostID == "" || e.HostID == r.HostID {
			return r, nil
		}
		return fence(r, "the target now has another host program, which cannot be asked about it")
	case CloseAsked:
		return closeAsked(r, e, now)
	case GaveUp:
		if r.State != api.StateClosing {
			return r, nil
		}
		return fence(r, e.Detail)
	case Cleared:
		return cleared(r, now)
	}
	return r, nil
}

// Recover returns what a new owner does about a record it found in the ledger.
// It changes nothing and may be called at any time. For a record in state
// requested, which no host was told of, the owner makes a Dispatch instead.
func Recover(r Record) []Effect {
	switch {
	case r.Final() || r.State == api.StateRequested:
		return nil
	case r.CloseAsked:
		return []Effect{closeHost(r)}
	default:
		return []Effect{AskHost{}}
	}
}

func dispatch(r Record, e Dispatch) (Record, []Effect) {
	if r.State != api.StateRequested || e.HostID == "" {
		return r, nil
	}
	r.State, r.HostID, r.BootID = api.StateStarting, e.HostID, e.BootID
	return r, []Effect{StartHost{}}
}

func reported(r Record, e Reported, now time.Time) (Record, []Effect) {
	if r.HostID == "" {
		return r, nil // no host was told: whoever reports it is not believed
	}
	if e.HostID != r.HostID {
		return fence(r, "another host program reports it than the one that was told")
	}
	if e.State.Phase == wire.PhaseEnded {
		return ended(r, e, now)
	}
	if r.Acked() && e.BootID != r.BootID {
		// A tree cannot outlive its machine, so the report cannot be true.
		return fence(r, "the host reports it as alive although its machine was restarted since it started")
	}
	r.BootID = e.BootID
	if at := e.State.Started; at != nil {
		r.Started = at
	} else if r.Started == nil {
		r.Started = &now
	}
	switch {
	case r.State == api.StateFenced || r.State == api.StateClosing:
		return r, []Effect{closeHost(r)} // what is fenced has lost its right to go on
	case e.State.Phase == wire.PhaseRunning || e.State.Phase == wire.PhaseStopping:
		r.State = api.StateRunning
	case r.State == api.StateUnknown:
		r.State = api.StateStarting
	}
	return r, nil
}

// ended: the keeper's record of the end is durable.
func ended(r Record, e Reported, now time.Time) (Record, []Effect) {
	if p := e.State.Proof; r.Acked() && p != nil && p.Method == MethodNeverStarted && e.State.Box == "" {
		// The host forbids an id that it does not know. It did know this one.
		return missing(r, Missing{HostID: e.HostID, BootID: e.BootID}, now)
	}
	rebooted := r.Acked() && e.BootID != r.BootID
	if !r.Acked() {
		r.BootID = e.BootID // it ran under this boot, whichever was told
	}
	if at := e.State.Started; at != nil {
		r.Started = at
	}
	exit := e.State.Exit
	if exit == nil {
		exit = &api.Exit{Kind: api.ExitUnknown, Detail: "the host reported the end without saying how"}
	}
	if p := e.State.Proof; p != nil && p.Method == MethodNeverStarted && e.State.Box == "" && exit.Kind == api.ExitSpawnFailed {
		// A forbidden id: nothing was tried, so nothing failed.
		exit = &api.Exit{Kind: api.ExitUnknown}
	}
	if r.Exit == nil || r.Exit.Kind == api.ExitUnknown {
		r.Exit = exit
	}
	if r.Exited == nil {
		at := now
		if e.State.Ended != nil {
			at = *e.State.Ended
		}
		r.Exited = &at
	}
	switch p := e.State.Proof; {
	case believable(p, r.Exit):
		return prove(r, *p, now)
	case rebooted:
		return prove(r, rebootProof(e.BootID, now), now)
	}
	reason := e.State.Unproven
	if reason == "" {
		reason = "its end was reported without proof that the whole tree is gone"
	}
	return fence(r, reason)
}

// believable refuses a proof of an unknown method, and one that says nothing
// started beside an exit status that only a started process has.
func believable(p *wire.Proof, exit *api.Exit) bool {
	if p == nil {
		return false
	}
	switch p.Method {
	case MethodPIDNamespace, MethodCgroup, MethodReboot:
		return true
	case MethodNeverStarted:
		return exit.Kind == api.ExitUnknown || exit.Kind == api.ExitSpawnFailed
	}
	return false
}

// The methods of proof.
const (
	MethodPIDNamespace = "pid_namespace"
	MethodCgroup       = "cgroup"
	MethodReboot       = "reboot"
	MethodNeverStarted = "never_started"
)

func rebootProof(boot string, now time.Time) wire.Proof {
	return wire.Proof{Method: MethodReboot, BootID: boot, EmptyAt: now}
}

// prove ends the life with proof.
func prove(r Record, p wire.Proof, now time.Time) (Record, []Effect) {
	effects := []Effect{IssueReceipt{}}
	if r.Fenced {
		r.Fenced = false
		effects = append(effects, LiftFence{By: ByProof})
	}
	r.State, r.Cleanup, r.Proof, r.Closed = api.StateClosed, api.CleanupQuiescent, &p, &now
	if p.Method == MethodNeverStarted && r.Exit.Kind == api.ExitUnknown {
		// There was no exit, so none is shown.
		r.State, r.Exit, r.Exited, r.Started = api.StateNeverStarted, nil, nil, nil
	}
	return r, effects
}

// neverStarted ends a life that did not begin.
func neverStarted(r Record, reason string, now time.Time) (Record, []Effect) {
	r.State, r.Cleanup, r.Closed = api.StateNeverStarted, api.CleanupQuiescent, &now
	r.Proof = &wire.Proof{Method: MethodNeverStarted, BootID: r.BootID, EmptyAt: now}
	if r.Reason == "" {
		r.Reason = reason
	}
	return r, []Effect{IssueReceipt{}}
}

// refused: that request started nothing, but one that a connection or a proxy
// repeated may still be on its way. So the id is forbidden at the host, whose
// word then is the proof.
func refused(r Record, e Refused, now time.Time) (Record, []Effect) {
	switch {
	case r.Acked():
		return r, []Effect{AskHost{}} // it contradicts what the host said before
	case r.State == api.StateStarting || r.State == api.StateUnknown:
		return closeAsked(r, CloseAsked{Reason: e.Detail}, now)
	}
	return r, nil // closing and fenced: the answer to CloseHost decides
}

func missing(r Record, e Missing, now time.Time) (Record, []Effect) {
	switch {
	case r.HostID == "":
		return r, nil
	case e.HostID != r.HostID:
		return fence(r, "the target now has another host program, which cannot be asked about it")
	case !r.Acked() && (r.CloseAsked || r.Fenced):
		return r, []Effect{closeHost(r)}
	case !r.Acked():
		r.State, r.BootID = api.StateUnknown, e.BootID
		return r, []Effect{StartHost{}}
	case e.BootID != r.BootID:
		if r.Exit == nil {
			r.Exit = &api.Exit{Kind: api.ExitUnknown, Detail: "its machine was restarted and the host has no record of it"}
			r.Exited = &now
		}
		return prove(r, rebootProof(e.BootID, now), now)
	}
	return fence(r, "the host said that it keeps the process and now has no record of it")
}

func lost(r Record) (Record, []Effect) {
	if r.State == api.StateStarting {
		r.State = api.StateUnknown
	}
	return r, Recover(r)
}

func closeAsked(r Record, e CloseAsked, now time.Time) (Record, []Effect) {
	grace := max(e.GraceMillis, 0)
	if r.Reason == "" {
		r.Reason = e.Reason
	}
	if r.State == api.StateRequested {
		return neverStarted(r, e.Reason, now)
	}
	again := r.CloseAsked && grace >= r.GraceMillis
	if !again {
		r.CloseAsked, r.GraceMillis = true, grace
	}
	if r.State != api.StateFenced {
		if r.State == api.StateClosing && again {
			return r, nil
		}
		r.State = api.StateClosing
	}
	return r, []Effect{closeHost(r)}
}

func cleared(r Record, now time.Time) (Record, []Effect) {
	if !r.Fenced {
		return r, nil
	}
	if r.Exit == nil {
		r.Exit = &api.Exit{Kind: api.ExitUnknown, Detail: "its fence was cleared by an operator"}
	}
	r.State, r.Cleanup, r.Closed, r.Fenced = api.StateClosed, api.CleanupUnproven, &now, false
	return r, []Effect{LiftFence{By: ByOperator}}
}

func fence(r Record, reason string) (Record, []Effect) {
	if r.Fenced {
		return r, nil
	}
	if reason == "" {
		reason = "it could not be proven gone"
	}
	r.State, r.Cleanup, r.Fenced = api.StateFenced, api.CleanupUnproven, true
	return r, []Effect{RaiseFence{Reason: reason}}
}

func closeHost(r Record) Effect {
	return CloseHost{GraceMillis: r.GraceMillis, Reason: r.Reason}
}
