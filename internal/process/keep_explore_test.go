package process

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// The explorer walks every reachable state of the keeper's machine with every
// event, in every order: lost, repeated, early, late and nonsensical ones too.
//
// Time is abstracted: between two steps any subset of the set times may become
// past, and afterwards each that is still set counts as future again. That allows
// every order in which real timers can fire, and some that they cannot.
var (
	past   = time.Unix(1_000, 0)
	now    = time.Unix(2_000, 0)
	future = time.Unix(3_000, 0)
)

// timers are the fields the abstraction applies to.
func timers(s *KeepState) []*time.Time {
	return []*time.Time{&s.DeadlineAt, &s.LeaseUntil, &s.KillAt, &s.ProofBy, &s.RecheckAt, &s.DrainBy, &s.RecordAt}
}

// normal maps a state to its abstraction: comparable, and one of finitely many.
// Texts that only go into the detail of the exit are left out: what conclude
// makes of every evidence is TestConcludeExhaustively.
func normal(s KeepState) KeepState {
	for _, t := range timers(&s) {
		if !t.IsZero() {
			*t = future
		}
	}
	for _, t := range []*time.Time{&s.StartedAt, &s.EndedAt, &s.EmptyAt} {
		if !t.IsZero() {
			*t = past
		}
	}
	s.Armed = time.Time{} // follows from the others, which is checked at each step
	s.Reason, s.LogDetail, s.DrainDetail, s.FailDetail = "", "", "", ""
	return s
}

// ripen returns the state with each subset of its set times past, Armed being
// what it must be before the step.
func ripen(s KeepState) []KeepState {
	s.Armed = first(s)
	all := []KeepState{s}
	for i := range timers(&s) {
		for _, v := range slices.Clone(all) {
			if t := timers(&v)[i]; !t.IsZero() {
				*t = past
				v.Armed = first(v)
				all = append(all, v)
			}
		}
	}
	return all
}

// first is the earliest time a state wants.
func first(s KeepState) (at time.Time) {
	for _, t := range s.wanted() {
		if !t.IsZero() && (at.IsZero() || t.Before(at)) {
			at = t
		}
	}
	return at
}

// keepEvents is every event, with every argument that can lead another way.
func keepEvents() []KeepEvent {
	return []KeepEvent{
		Begin{}, Begin{Deadline: time.Minute, Lease: future}, Begin{Lease: past},
		Started{},
		RuntimeFailed{Detail: "no"}, RuntimeFailed{Detail: "no", MayHaveRun: true},
		InitReport{Kind: api.ExitExited}, InitReport{Kind: api.ExitSignalled, Signal: "SIGKILL"}, InitReport{Kind: "nonsense"},
		ReportClosed{},
		Reaped{}, Reaped{Code: 128 + sigkill}, Reaped{Signal: sigkill},
		KeepClose{Reason: "r", Grace: time.Second}, KeepClose{Grace: -time.Second},
		LogFailed{Detail: "full"},
		Tick{},
		LeaseRead{Until: future}, LeaseRead{},
		OOMRead{}, OOMRead{Kills: 2},
		Emptied{}, NotEmpty{Detail: "busy"},
		Drained{},
		Recorded{}, RecordFailed{Detail: "full"},
	}
}

// graph is what was explored: the states, and each one's predecessors by number.
type graph struct {
	number map[KeepState]int32
	states []KeepState
	back   [][]int32
	steps  int
}

func (g *graph) add(s KeepState) int32 {
	n, ok := g.number[s]
	if !ok {
		n = int32(len(g.states))
		g.number[s] = n
		g.states = append(g.states, s)
		g.back = append(g.back, nil)
	}
	return n
}

// walk explores everything reachable and calls check on every step.
func walk(t *testing.T, events []KeepEvent, check func(from KeepState, ev KeepEvent, to KeepState, effects []KeepEffect) error) *graph {
	t.Helper()
	g := &graph{number: map[KeepState]int32{}}
	g.add(normal(NewKeep()))
	for at := int32(0); at < int32(len(g.states)); at++ {
		if len(g.states) > 1_000_000 {
			t.Fatalf("the machine is not finite enough: %d states", len(g.states))
		}
		for _, from := range ripen(g.states[at]) {
			for _, ev := range events {
				g.steps++
				to, effects := KeepStep(from, ev, now)
				if err := check(from, ev, to, effects); err != nil {
					t.Fatalf("%v\nevent %T%+v\nfrom %+v\nto   %+v\neffects %+v", err, ev, ev, from, to, effects)
				}
				n := g.add(normal(to))
				if b := g.back[n]; n != at && (len(b) == 0 || b[len(b)-1] != at) {
					g.back[n] = append(b, at)
				}
			}
		}
	}
	return g
}

func TestKeepExhaustively(t *testing.T) {
	t.Parallel()
	g := walk(t, keepEvents(), checkKeep)
	t.Logf("%d states, %d steps", len(g.states), g.steps)

	// From every state the end can be reached: nothing is stuck for good.
	reached := make([]bool, len(g.states))
	var queue []int32
	for n, s := range g.states {
		if s.Phase == wire.PhaseEnded {
			reached[n] = true
			queue = append(queue, int32(n))
		}
	}
	for len(queue) > 0 {
		n := queue[0]
		queue = queue[1:]
		for _, p := range g.back[n] {
			if !reached[p] {
				reached[p] = true
				queue = append(queue, p)
			}
		}
	}
	if n := slices.Index(reached, false); n >= 0 {
		t.Fatalf("the end cannot be reached from %+v", g.states[n])
	}
}

// checkKeep holds the promises of the machine at one step.
func checkKeep(from KeepState, ev KeepEvent, to KeepState, effects []KeepEffect) error {
	if from.Phase == wire.PhaseEnded && (to != from || len(effects) > 0) {
		return fmt.Errorf("an ended process changed")
	}
	if order(to.Phase) < order(from.Phase) || to.Stage < from.Stage {
		return fmt.Errorf("it went back")
	}
	if from.Cause != CauseNone && to.Cause != from.Cause {
		return fmt.Errorf("the cause of the stop changed")
	}
	if from.HasReport && to.Report != from.Report || from.Reaped && to.Status != from.Status || !from.StartedAt.IsZero() && !to.StartedAt.Equal(from.StartedAt) {
		return fmt.Errorf("evidence changed")
	}
	if to.Failed && (to.Reaped || !to.StartedAt.IsZero()) {
		return fmt.Errorf("it failed to start and yet it ran")
	}
	if to.Phase == wire.PhaseEnded && from.Phase != wire.PhaseEnded {
		if _, ok := ev.(Recorded); !ok || !from.Recording {
			return fmt.Errorf("it ended without a durable record")
		}
	}
	armed := from.Armed
	if _, tick := ev.(Tick); tick {
		armed = time.Time{}
	}
	for _, e := range effects {
		switch e := e.(type) {
		case LaunchContainer:
			if from.Phase != wire.PhaseAccepted || from.Begun || from.Cause != CauseNone {
				return fmt.Errorf("launched twice, or after a close")
			}
		case SignalTree:
			if to.StartedAt.IsZero() || to.Reaped || to.Cause == CauseNone || from.Stage >= StageSignalled {
				return fmt.Errorf("SIGTERM at the wrong time")
			}
		case KillTree:
			if err := checkKill(from, ev, to); err != nil {
				return err
			}
		case ReadOOM, CheckEmpty, LiftCap, CutPipes:
			if to.Stage != StageEnding {
				return fmt.Errorf("%T before the end", e)
			}
		case WriteExitRecord:
			if err := checkRecord(to, e); err != nil {
				return err
			}
			if from.Recording {
				if _, again := ev.(RecordFailed); !again {
					return fmt.Errorf("a second record while one is under way")
				}
			}
		case ArmTimer:
			armed = e.At
		}
	}
	return checkTimer(to, armed)
}

func order(p wire.Phase) int {
	return slices.Index([]wire.Phase{wire.PhaseAccepted, wire.PhaseStarting, wire.PhaseRunning, wire.PhaseStopping, wire.PhaseEnded}, p)
}

// checkKill: SIGKILL comes at once only when asked for, else after SIGTERM and
// its grace; or to what is left when the init is gone.
func checkKill(from KeepState, ev KeepEvent, to KeepState) error {
	switch ev := ev.(type) {
	case NotEmpty:
		if from.Stage == StageEnding && !to.Checked {
			return nil
		}
	case RuntimeFailed:
		if ev.MayHaveRun && from.Phase != wire.PhaseRunning {
			return nil
		}
	case KeepClose:
		if ev.Grace <= 0 && !from.StartedAt.IsZero() && from.Stage < StageKilled {
			return nil
		}
	case Tick, LogFailed, Started:
		if !from.KillAt.After(now) && from.Cause != CauseNone && to.Stage == StageKilled {
			return nil
		}
	}
	return fmt.Errorf("SIGKILL at the wrong time")
}

// checkRecord holds P3 and P4 for an exit record.
func checkRecord(s KeepState, r WriteExitRecord) error {
	never := !s.Begun
	switch {
	case never && (s.Reaped || !s.StartedAt.IsZero()):
		return fmt.Errorf("never begun and yet it ran")
	case !never && !s.Reaped && !s.Failed:
		return fmt.Errorf("a record without a wait status")
	case !never && (!s.Drained || !s.ReportDone || s.Reaped && !s.OOMDone):
		return fmt.Errorf("a record before everything was in")
	case !s.Checked:
		return fmt.Errorf("a record before the empty check was over")
	case (r.Method == "") == (r.Unproven == ""):
		return fmt.Errorf("a record with both or neither of proof and reason")
	case (r.Method == "") != r.EmptyAt.IsZero():
		return fmt.Errorf("a proof without a time, or a time without a proof")
	case r.Method == "pid_namespace" && !s.Reaped, r.Method == "never_started" && !never:
		return fmt.Errorf("the proof rests on what did not happen")
	}
	agreed := s.Reaped && s.HasReport && s.Status.Signal == 0 && s.Status.Code == InitStatus(s.Report)
	e := r.Exit
	if (e.Code != nil) != (e.Kind == api.ExitExited) || (e.Signal != "") != (e.Kind == api.ExitSignalled) {
		return fmt.Errorf("code or signal on the wrong kind: %+v", e)
	}
	switch e.Kind {
	case api.ExitExited:
		if !agreed || s.Report.Kind != api.ExitExited || *e.Code != s.Status.Code {
			return fmt.Errorf("exited without an agreeing wait status")
		}
	case api.ExitSignalled:
		if !(agreed && s.Report.Signal == e.Signal) && !(s.Status.Signal == 9 && s.Killed && e.Signal == "SIGKILL") {
			return fmt.Errorf("signalled without evidence")
		}
	case api.ExitOOM:
		if !s.Reaped || s.OOMKills < 1 || s.Killed {
			return fmt.Errorf("oom without a count, or after our own SIGKILL")
		}
	case api.ExitDeadline:
		if !s.Reaped || s.Cause != CauseDeadline && s.Cause != CauseLease {
			return fmt.Errorf("deadline without one, or without a wait status")
		}
	case api.ExitSpawnFailed:
		if !never && !(s.Failed && !s.MayHaveRun) && !(agreed && s.Report.Kind == api.ExitSpawnFailed) {
			return fmt.Errorf("spawn_failed, but it may have run")
		}
	case api.ExitUnknown:
		if e.Detail == "" {
			return fmt.Errorf("unknown without a word")
		}
	default:
		return fmt.Errorf("no exit kind")
	}
	return nil
}

// checkTimer: while anything waits for time, a timer is armed for the first of
// it; while nothing does, none is.
func checkTimer(s KeepState, armed time.Time) error {
	if want := first(s); !armed.Equal(want) || !s.Armed.Equal(want) {
		return fmt.Errorf("armed for %v, wanted at %v", armed, want)
	}
	if s.Phase == wire.PhaseStopping && s.Stage < StageEnding && !s.StartedAt.IsZero() && s.KillAt.IsZero() {
		return fmt.Errorf("a stop without a time to kill")
	}
	return nil
}
