package process

import (
	"time"

	"github.com/stockade-run/stockade/internal/wire"
)

// KeepStep is the life of a process as its keeper sees it: given what is known
// and what happened, what is known now and what must be done, in order. It is
// total: an event that means nothing in a state changes nothing.
//
// It promises: the container is launched at most once, and never after a close;
// an exit record is ordered only after wait4 returned for the init, or when the
// runtime started nothing that can be waited for (P3); the phase becomes ended
// only after the record is durable, and the record is ordered only after the
// outputs are drained and the empty check is over (P4).
func KeepStep(s KeepState, ev KeepEvent, now time.Time) (KeepState, []KeepEffect) {
	if s.Phase == wire.PhaseEnded {
		return s, nil
	}
	k := keeper{KeepState: s, now: now}
	switch e := ev.(type) {
	case Begin:
		k.begin(e)
	case Started:
		k.started()
	case RuntimeFailed:
		k.runtimeFailed(e)
	case InitReport:
		if k.Begun && !k.HasReport && !k.ReportDone {
			k.HasReport, k.Report = true, e
			k.ReportFirst = k.Cause == CauseNone
		}
	case ReportClosed:
		k.ReportDone = k.ReportDone || k.Begun
	case Reaped:
		k.reaped(e)
	case KeepClose:
		k.stop(CauseClose, e.Reason, e.Grace)
	case LogFailed:
		if k.LogDetail == "" {
			k.LogDetail = e.Detail
		}
		k.stop(CauseLog, "", KeepGrace)
	case Tick:
		k.Armed = time.Time{} // it has fired: whatever is still wanted is armed anew
		k.tick()
	case LeaseRead:
		k.lease(e)
	case OOMRead:
		if k.Reaped && !k.OOMDone {
			k.OOMDone, k.OOMKills = true, max(e.Kills, 0)
		}
	case Emptied:
		if k.Stage == StageEnding && !k.Checked {
			k.checked(now, "")
		}
	case NotEmpty:
		k.notEmpty(e)
	case Drained:
		if k.Begun && !k.Drained {
			k.Drained, k.DrainDetail = true, e.Detail
		}
	case Recorded:
		if k.Recording {
			k.Phase, k.Recording = wire.PhaseEnded, false
		}
	case RecordFailed:
		if k.Recording {
			k.Recording, k.RecordAt = false, now.Add(KeepRetry)
		}
	}
	if k.Drained && k.ReportDone {
		k.DrainBy = time.Time{}
	}
	k.record()
	k.arm()
	return k.KeepState, k.effects
}

// keeper is one step under way.
type keeper struct {
	KeepState
	now     time.Time
	effects []KeepEffect
}

func (k *keeper) do(e ...KeepEffect) { k.effects = append(k.effects, e...) }

// due reports whether a time is set and has come.
func (k *keeper) due(t time.Time) bool { return !t.IsZero() && !k.now.Before(t) }

func (k *keeper) begin(e Begin) {
	if k.Phase != wire.PhaseAccepted {
		return // begun before, or closed before it began: the tombstone holds
	}
	k.Begun, k.Phase = true, wire.PhaseStarting
	k.Deadline, k.LeaseUntil = max(e.Deadline, 0), e.Lease
	k.do(LaunchContainer{})
}

func (k *keeper) started() {
	if !k.Begun || !k.StartedAt.IsZero() || k.Stage == StageEnding {
		return
	}
	k.StartedAt = k.now
	if k.Cause != CauseNone { // the stop was asked for while it was starting
		k.signal()
		return
	}
	k.Phase = wire.PhaseRunning
	if k.Deadline > 0 {
		k.DeadlineAt = k.now.Add(k.Deadline)
	}
}

func (k *keeper) runtimeFailed(e RuntimeFailed) {
	if !k.Begun || !k.StartedAt.IsZero() || k.Stage == StageEnding {
		return
	}
	k.Failed, k.FailDetail, k.MayHaveRun = true, e.Detail, e.MayHaveRun
	if e.MayHaveRun {
		k.do(KillTree{})
	}
	k.ending()
}

func (k *keeper) reaped(e Reaped) {
	if !k.Begun || k.Reaped || k.Failed {
		return
	}
	k.Reaped, k.Status = true, e
	if k.StartedAt.IsZero() { // wait4 is stronger evidence than the runtime's word
		k.StartedAt = k.now
	}
	k.ending()
	k.do(ReadOOM{})
}

// ending begins the last part: nothing is left to stop, what came out must be
// drained and the emptiness proven.
func (k *keeper) ending() {
	k.Phase, k.Stage = wire.PhaseStopping, StageEnding
	k.EndedAt, k.KillAt = k.now, time.Time{}
	k.unlimit()
	k.DrainBy, k.ProofBy = k.now.Add(KeepDrain), k.now.Add(KeepProof)
	k.do(LiftCap{}, CheckEmpty{})
}

// stop begins or hastens the end. The first cause stands; a later one can only
// shorten the grace.
func (k *keeper) stop(cause Cause, reason string, grace time.Duration) {
	if k.Stage == StageEnding {
		return
	}
	killAt := k.now.Add(max(grace, 0))
	if k.Cause == CauseNone {
		k.Cause, k.Reason = cause, reason
		if k.Phase == wire.PhaseAccepted {
			k.neverStarted()
			return
		}
		k.Phase, k.KillAt = wire.PhaseStopping, killAt
		k.unlimit()
		if !k.StartedAt.IsZero() {
			k.signal()
		}
		return
	}
	if k.Stage != StageKilled && killAt.Before(k.KillAt) {
		k.KillAt = killAt
		if !k.StartedAt.IsZero() && k.due(k.KillAt) {
			k.kill()
		}
	}
}

// unlimit ends the watch over deadline and lease: the stop has begun.
func (k *keeper) unlimit() {
	k.DeadlineAt, k.LeaseUntil, k.LeaseAsked = time.Time{}, time.Time{}, false
}

// lease takes what the lease file says. It matters only while nothing else stops
// the process.
func (k *keeper) lease(e LeaseRead) {
	if k.Phase != wire.PhaseStarting && k.Phase != wire.PhaseRunning || k.LeaseUntil.IsZero() {
		return
	}
	k.LeaseUntil, k.LeaseAsked = e.Until, false
	if !e.Until.After(k.now) {
		k.stop(CauseLease, "", KeepGrace)
	}
}

// checked ends the empty check, with the time of the proof or the reason why
// there is none.
func (k *keeper) checked(at time.Time, unproven string) {
	k.Checked, k.EmptyAt, k.Unproven = true, at, unproven
	k.RecheckAt, k.ProofBy = time.Time{}, time.Time{}
}

// neverStarted ends a process that was closed before it began: a tombstone.
func (k *keeper) neverStarted() {
	k.Phase, k.Stage = wire.PhaseStopping, StageEnding
	k.EndedAt, k.EmptyAt, k.Checked = k.now, k.now, true
}

// signal asks a started tree to end, or kills it if the grace is over.
func (k *keeper) signal() {
	if k.due(k.KillAt) {
		k.kill()
		return
	}
	k.Stage = StageSignalled
	k.do(SignalTree{Signal: "SIGTERM"})
}

func (k *keeper) kill() {
	if k.Stage != StageKilled {
		k.Stage, k.ProofBy = StageKilled, k.now.Add(KeepProof)
	}
	k.Killed, k.KillAt = true, k.now.Add(KeepRetry)
	k.do(KillTree{})
}

func (k *keeper) notEmpty(e NotEmpty) {
	if k.Stage != StageEnding || k.Checked {
		return
	}
	if k.due(k.ProofBy) {
		k.checked(time.Time{}, e.Detail)
		return
	}
	k.Unproven = e.Detail
	k.RecheckAt = k.now.Add(KeepRecheck)
	k.do(KillTree{})
}

func (k *keeper) tick() {
	if k.Stage == StageEnding {
		if k.due(k.RecheckAt) {
			k.RecheckAt = time.Time{}
			k.do(CheckEmpty{})
		}
		if k.due(k.DrainBy) {
			k.DrainBy = time.Time{}
			k.ReportDone = true // a report after this is not believed
			k.do(CutPipes{})
		}
		if k.due(k.RecordAt) {
			k.RecordAt = time.Time{}
		}
		return
	}
	if k.Phase == wire.PhaseStopping {
		if !k.StartedAt.IsZero() && k.due(k.KillAt) {
			k.kill()
		}
		if k.Stage == StageKilled && k.due(k.ProofBy) {
			k.ProofBy = time.Time{}
			k.Unproven = "the container's init was not reaped within " + KeepProof.String() + " of SIGKILL"
		}
		return
	}
	switch {
	case k.due(k.DeadlineAt):
		k.stop(CauseDeadline, "", KeepGrace)
	case k.due(k.LeaseUntil) && !k.LeaseAsked:
		// The file may say more than the keeper last heard of it.
		k.LeaseAsked = true
		k.do(ReadLease{})
	}
}

// record orders the exit record as soon as everything it rests on is known.
func (k *keeper) record() {
	if k.Stage != StageEnding || k.Phase == wire.PhaseEnded || k.Recording || !k.RecordAt.IsZero() || !k.Checked {
		return
	}
	if k.Begun && (!k.Drained || !k.ReportDone || k.Reaped && !k.OOMDone) {
		return
	}
	k.Recording = true
	w := WriteExitRecord{Exit: k.conclude(), Started: k.StartedAt, Ended: k.EndedAt, EmptyAt: k.EmptyAt, Unproven: k.Unproven}
	switch {
	case k.EmptyAt.IsZero():
	case !k.Begun:
		w.Method = "never_started"
	case k.Reaped:
		w.Method = "pid_namespace"
	default:
		w.Method = "cgroup"
	}
	k.do(w)
}

// wanted returns the times at which the state needs a Tick.
func (s KeepState) wanted() []time.Time {
	switch {
	case s.Phase == wire.PhaseEnded:
		return nil
	case s.Stage == StageEnding:
		return []time.Time{s.RecordAt, s.RecheckAt, s.DrainBy}
	case s.Phase == wire.PhaseStopping:
		if s.StartedAt.IsZero() {
			return nil // LaunchContainer is bounded and answers
		}
		w := []time.Time{s.KillAt}
		if s.Stage == StageKilled {
			w = append(w, s.ProofBy)
		}
		return w
	}
	if s.LeaseAsked {
		return []time.Time{s.DeadlineAt}
	}
	return []time.Time{s.DeadlineAt, s.LeaseUntil}
}

// arm orders one timer for the earliest wanted time, when that changed.
func (k *keeper) arm() {
	var at time.Time
	for _, t := range k.wanted() {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	if !at.Equal(k.Armed) {
		k.Armed = at
		k.do(ArmTimer{At: at})
	}
}
