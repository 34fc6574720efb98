package relay

import "github.com/stockade-run/stockade/internal/relaywire"

// Target is all that decides whether a daemon id may connect and be given a job.
// It changes by [FenceStep] only.
type Target struct {
	Socket uint64      // the registered incarnation, 0: not connected
	Fenced bool        // something may still be running there
	Jobs   []TargetJob // not settled, in the order of their admission
}

// TargetJob is one job that is not settled.
type TargetJob struct {
	ID    string
	Phase Phase
}

// Phase is where a job stands.
type Phase uint8

// The phases of a job that is not settled.
const (
	Marking    Phase = iota // its marker is being written; nothing was sent
	Running                 // run.start was handed to the connection
	Cancelling              // tools revoked, run.cancel handed to the connection
)

// FenceEvent is what happened to a target.
type FenceEvent struct {
	Kind   EventKind
	Socket uint64 // Connected, Disconnected, Finished: whose
	Job    string // all of a job
}

// EventKind names a [FenceEvent].
type EventKind uint8

// What can happen to a target.
const (
	Connected    EventKind = iota // a hello that passed the other checks
	Disconnected                  // the connection is gone, or a write on it failed
	JobAsked                      // a caller wants to run a job
	Marked                        // the job's marker is on disk and synced
	MarkFailed                    // it could not be written
	Finished                      // run.finished came
	CancelAsked                   // the caller left, the time is over, or the hub stops
	Withdrawn                     // run.start was still waiting in the hub and was taken back
	AckTimedOut                   // run.cancel was not answered in time
	Cleared                       // an operator verified that nothing runs there
)

// Effect is what the hub must do, in the order given, after a step.
type Effect struct {
	Kind EffectKind
	Job  string
	End  End // EndJob: how
}

// EffectKind names an [Effect].
type EffectKind uint8

// What a step asks for.
const (
	Mark     EffectKind = iota // write and sync the marker, then say Marked or MarkFailed
	Dispatch                   // hand run.start to the connection
	Revoke                     // the job's tools answer no more
	SendStop                   // hand run.cancel to the connection
	SetFence                   // keep the evidence; the marker is there already
	EndJob                     // the job is settled, as End says
	Unmark                     // the marker is no longer wanted
)

// End is how a job ended, as far as the fence is concerned.
type End uint8

// How a job can end.
const (
	EndNone           End = iota
	EndFinished           // run.finished came from its own connection
	EndNeverStarted       // run.start never left the hub
	EndUnacknowledged     // fenced: no run.finished in time
	EndDisconnected       // fenced: the connection was lost
)

// FenceStep is the rule book of fences: what an event does to a target. It returns
// the target after it, what to do, and the code of a refusal (Connected, JobAsked and
// Cleared may be refused, and then nothing changes). An event about a job or a socket
// that the target does not have changes nothing: it came too late, or from a
// stranger. t.Jobs is never written to.
func FenceStep(t Target, e FenceEvent) (Target, []Effect, relaywire.Code) {
	switch e.Kind {
	case Connected:
		// A live identity is never replaced, and one with unfinished jobs is fenced.
		if t.Socket != 0 || t.Fenced {
			return t, nil, relaywire.CodeFenced
		}
		t.Socket = e.Socket
		return t, nil, ""

	case Disconnected:
		if t.Socket == 0 || t.Socket != e.Socket {
			return t, nil, ""
		}
		t.Socket = 0
		var ends, effects []Effect
		for _, j := range t.Jobs {
			if j.Phase == Marking {
				ends = append(ends, Effect{Kind: EndJob, Job: j.ID, End: EndNeverStarted})
				continue
			}
			t.Fenced = true
			effects = append(effects, Effect{Kind: Revoke, Job: j.ID})
			ends = append(ends, Effect{Kind: EndJob, Job: j.ID, End: EndDisconnected})
		}
		if len(effects) > 0 {
			effects = append(effects, Effect{Kind: SetFence})
		}
		had := len(t.Jobs) > 0
		t.Jobs = nil
		effects = append(effects, ends...)
		if had && !t.Fenced {
			effects = append(effects, Effect{Kind: Unmark})
		}
		return t, effects, ""

	case JobAsked:
		switch {
		case t.Fenced:
			return t, nil, relaywire.CodeFenced
		case t.cancelling():
			return t, nil, relaywire.CodeCancelling
		case t.Socket == 0:
			return t, nil, relaywire.CodeOffline
		}
		t.Jobs = append(t.Jobs[:len(t.Jobs):len(t.Jobs)], TargetJob{e.Job, Marking})
		return t, []Effect{{Kind: Mark, Job: e.Job}}, ""

	case Marked:
		// Somebody may have been fenced or cancelled in the meantime: a job that was
		// admitted before that is not sent after it.
		if phase, ok := t.phase(e.Job); !ok || phase != Marking {
			return t, nil, ""
		}
		if t.Fenced || t.cancelling() {
			t, effects := t.without(e.Job, EndNeverStarted)
			return t, effects, ""
		}
		return t.with(e.Job, Running), []Effect{{Kind: Dispatch, Job: e.Job}}, ""

	case MarkFailed:
		if phase, ok := t.phase(e.Job); !ok || phase != Marking {
			return t, nil, ""
		}
		t, effects := t.without(e.Job, EndNeverStarted)
		return t, effects, ""

	case Finished:
		phase, ok := t.phase(e.Job)
		if !ok || phase == Marking || t.Socket != e.Socket {
			return t, nil, ""
		}
		t, effects := t.without(e.Job, EndFinished)
		return t, append([]Effect{{Kind: Revoke, Job: e.Job}}, effects...), ""

	case CancelAsked:
		switch phase, ok := t.phase(e.Job); {
		case ok && phase == Marking:
			t, effects := t.without(e.Job, EndNeverStarted)
			return t, effects, ""
		case ok && phase == Running:
			return t.with(e.Job, Cancelling), []Effect{{Kind: Revoke, Job: e.Job}, {Kind: SendStop, Job: e.Job}}, ""
		}
		return t, nil, ""

	case Withdrawn:
		if phase, ok := t.phase(e.Job); !ok || phase != Cancelling {
			return t, nil, ""
		}
		t, effects := t.without(e.Job, EndNeverStarted)
		return t, effects, ""

	case AckTimedOut:
		if phase, ok := t.phase(e.Job); !ok || phase != Cancelling {
			return t, nil, ""
		}
		t.Fenced = true
		t, effects := t.without(e.Job, EndUnacknowledged)
		return t, append([]Effect{{Kind: SetFence}}, effects...), ""

	case Cleared:
		if len(t.Jobs) > 0 {
			return t, nil, relaywire.CodeCancelling
		}
		if !t.Fenced {
			return t, nil, ""
		}
		t.Fenced = false
		return t, []Effect{{Kind: Unmark}}, ""
	}
	return t, nil, ""
}

// wantsMarker reports whether a hub that died now must find a marker.
func (t Target) wantsMarker() bool { return t.Fenced || len(t.Jobs) > 0 }

func (t Target) phase(job string) (Phase, bool) {
	for _, j := range t.Jobs {
		if j.ID == job {
			return j.Phase, true
		}
	}
	return 0, false
}

func (t Target) cancelling() bool {
	for _, j := range t.Jobs {
		if j.Phase == Cancelling {
			return true
		}
	}
	return false
}

func (t Target) with(job string, phase Phase) Target {
	jobs := make([]TargetJob, len(t.Jobs))
	for i, j := range t.Jobs {
		if j.ID == job {
			j.Phase = phase
		}
		jobs[i] = j
	}
	t.Jobs = jobs
	return t
}

func (t Target) without(job string, end End) (Target, []Effect) {
	var jobs []TargetJob
	for _, j := range t.Jobs {
		if j.ID != job {
			jobs = append(jobs, j)
		}
	}
	t.Jobs = jobs
	effects := []Effect{{Kind: EndJob, Job: job, End: end}}
	if !t.wantsMarker() {
		effects = append(effects, Effect{Kind: Unmark})
	}
	return t, effects
}
