package process

import (
	"fmt"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// The explorer: one process, one owner, one host, one network, every fault. It
// visits every state that these can reach together and checks the promises on
// every step. Nothing in it is random.

// truth is what really is on the host.
type truth uint8

const (
	tNone      truth = iota
	tAlive           // the child was executed and lives
	tLostAlive       // alive, but the host's record of it is lost
	tGone            // ended, proof recorded
	tUnproven        // ended as far as the keeper could see, no proof
	tRebooted        // ended by a restart of the machine, which is the proof
	tForbidden       // closed before it started: never starts
	tLostGone        // nothing lives, and the host's record of it is lost
)

// answer is what a lane brings back; boot is that of the host when it answered.
type answer struct {
	kind truth // as reported; tNone with refused or missing
	boot uint8
	what byte // 'r' reported, 'x' refused, 'm' missing, 'l' lost
}

type laneState uint8

const (
	idle laneState = iota
	sent
	back
)

type lane struct {
	state laneState
	ans   answer
}

// world is comparable: records hold only canonical pointers.
type world struct {
	rec              Record
	proc             truth
	execs            uint8
	boot             uint8 // of the host: 1, then 2
	swapped          bool  // another host program stands at the target
	start, ask, stop lane
	askAcked         bool // whether the record was acked when the ask began
	ghostStart       bool // a start request that was given up on, still on its way
	ghostStop        bool
	exitSeen         bool // the host reported a status that wait returned
	cleared          bool
	closeAsked       bool // somebody asked, for the check that no start follows
}

var (
	wNow   = time.Unix(1_700_000_000, 0).UTC()
	wZero  = 0
	wExits = map[api.ExitKind]*api.Exit{
		api.ExitExited:  {Kind: api.ExitExited, Code: &wZero},
		api.ExitUnknown: {Kind: api.ExitUnknown},
	}
)

func canon(r Record) Record {
	at := func(t *time.Time) *time.Time {
		if t == nil {
			return nil
		}
		return &wNow
	}
	r.Started, r.Exited, r.Closed = at(r.Started), at(r.Exited), at(r.Closed)
	if r.Exit != nil {
		r.Exit = wExits[r.Exit.Kind]
	}
	r.Proof, r.Reason = nil, ""
	return r
}

func bootName(b uint8) string { return fmt.Sprintf("boot%d", b) }

func hostName(w world) string {
	if w.swapped {
		return "host2"
	}
	return "host1"
}

// state is how the host reports a truth.
func (a answer) state() wire.ProcState {
	st := wire.ProcState{Phase: wire.PhaseEnded, Ended: &wNow}
	boot := bootName(a.boot)
	switch a.kind {
	case tAlive:
		return wire.ProcState{Phase: wire.PhaseRunning, Started: &wNow}
	case tGone:
		st.Started, st.Exit, st.Proof = &wNow, wExits[api.ExitExited], &wire.Proof{Method: MethodPIDNamespace, BootID: boot}
	case tUnproven:
		st.Started, st.Exit, st.Unproven = &wNow, wExits[api.ExitExited], "a member would not die"
	case tRebooted:
		st.Started, st.Exit, st.Proof = &wNow, wExits[api.ExitUnknown], &wire.Proof{Method: MethodReboot, BootID: boot}
	case tForbidden:
		st.Exit, st.Proof = wExits[api.ExitUnknown], &wire.Proof{Method: MethodNeverStarted, BootID: boot}
	}
	return st
}

func (a answer) event(host string) Event {
	switch a.what {
	case 'x':
		return Refused{Detail: "no"}
	case 'm':
		return Missing{HostID: host, BootID: bootName(a.boot)}
	case 'l':
		return Lost{Detail: "the connection broke"}
	}
	return Reported{HostID: host, BootID: bootName(a.boot), State: a.state()}
}

// look is the host's answer to any question now.
func (w world) look() answer {
	switch w.proc {
	case tNone, tLostAlive, tLostGone:
		return answer{what: 'm', boot: w.boot}
	}
	return answer{what: 'r', kind: w.proc, boot: w.boot}
}

type explorer struct {
	t     *testing.T
	seen  map[world]bool
	queue []world
	steps int
	hits  map[string]int
}

func (x *explorer) add(w world) {
	if !x.seen[w] {
		x.seen[w] = true
		x.queue = append(x.queue, w)
	}
}

func (x *explorer) fail(w world, format string, args ...any) {
	x.t.Helper()
	x.t.Fatalf("%s\nin %+v", fmt.Sprintf(format, args...), w)
}

// learn lets the owner take an event, checks the step, and adds both outcomes:
// the effects are carried out, or the server dies between save and effect.
func (x *explorer) learn(w world, e Event) {
	before := w.rec
	rec, effects := Step(before, e, wNow)
	x.steps++
	x.check(w, before, e, rec, effects)
	if r, ok := e.(Reported); ok && r.State.Exit != nil && r.State.Exit.Kind == api.ExitExited {
		w.exitSeen = true
	}
	switch e.(type) {
	case Cleared:
		w.cleared = true
	case CloseAsked:
		w.closeAsked = true
	}
	w.rec = canon(rec)
	x.add(x.act(w, effects))
	x.crash(w)
}

// crash: the server dies; its requests may still be on their way, answers are
// lost. The next owner recovers.
func (x *explorer) crash(w world) {
	w.ghostStart = w.ghostStart || w.start.state == sent
	w.ghostStop = w.ghostStop || w.stop.state == sent
	w.start, w.ask, w.stop, w.askAcked = lane{}, lane{}, lane{}, false
	if w.rec.State == api.StateRequested {
		x.add(w) // before its dispatch was saved
		return
	}
	x.add(x.act(w, Recover(w.rec)))
}

// act carries out effects as an owner does: a busy lane is not used twice, and
// nothing is asked while a start is under way.
func (x *explorer) act(w world, effects []Effect) world {
	for _, e := range effects {
		switch e.(type) {
		case StartHost:
			if w.start.state == idle {
				w.start = lane{state: sent}
			}
		case AskHost:
			if w.ask.state == idle && w.start.state == idle {
				w.ask, w.askAcked = lane{state: sent}, w.rec.Acked()
			}
		case CloseHost:
			if w.stop.state == idle {
				w.stop = lane{state: sent}
			}
		}
	}
	return w
}

func (x *explorer) check(w world, before Record, e Event, after Record, effects []Effect) {
	x.hits[string(after.State)]++
	receipt, raised, lifted := false, false, ""
	for _, f := range effects {
		switch f := f.(type) {
		case StartHost:
			if w.closeAsked || after.CloseAsked || after.Fenced || after.Final() {
				x.fail(w, "a start is sent after a close or under a fence (%T)", e)
			}
			if before.Acked() {
				x.fail(w, "a start is sent again after the host said that it keeps the process")
			}
		case IssueReceipt:
			receipt = true
			if after.Proof == nil {
				x.fail(w, "a receipt without proof (%T)", e)
			}
		case RaiseFence:
			raised = true
			if f.Reason == "" {
				x.fail(w, "a fence without a reason")
			}
		case LiftFence:
			lifted = f.By
		}
	}
	if before.Final() && (after != before || len(effects) != 0) {
		x.fail(w, "something changed after the end")
	}
	if (after.State == api.StateFenced) != after.Fenced {
		x.fail(w, "state %s, fenced %v", after.State, after.Fenced)
	}
	if raised != (!before.Fenced && after.Fenced) || (lifted != "") != (before.Fenced && !after.Fenced) {
		x.fail(w, "a fence changed without being recorded (%T)", e)
	}
	if lifted == ByProof && !receipt || lifted == ByOperator && !isCleared(e) {
		x.fail(w, "a fence was lifted by %q (%T)", lifted, e)
	}
	if receipt != (after.Cleanup == api.CleanupQuiescent && before.Cleanup != api.CleanupQuiescent) {
		x.fail(w, "receipt %v, clean-up %s", receipt, after.Cleanup)
	}
	if after.State == api.StateClosed && !receipt && !isCleared(e) && !before.Final() {
		x.fail(w, "closed without proof or an operator (%T)", e)
	}
	if after.State == api.StateExited {
		x.fail(w, "exited is never a resting state")
	}
	if after.Final() && after.Closed == nil || after.Final() && after.Cleanup == api.CleanupPending {
		x.fail(w, "final but not whole: %+v", after)
	}
	if after.State == api.StateNeverStarted && after.Exit != nil {
		x.fail(w, "never started, with an exit")
	}
}

func isCleared(e Event) bool { _, ok := e.(Cleared); return ok }

// invariants hold in every world, whatever happened before.
func (x *explorer) invariants(w world) {
	alive := w.proc == tAlive || w.proc == tLostAlive
	if w.execs > 1 {
		x.fail(w, "P1: executed %d times", w.execs)
	}
	if w.rec.Cleanup == api.CleanupQuiescent && (alive || w.proc == tUnproven) {
		x.fail(w, "P4: a receipt stands and the child may live")
	}
	if w.rec.State == api.StateNeverStarted && w.execs > 0 {
		x.fail(w, "P3: said to have never started, and was executed")
	}
	if w.rec.Exit != nil && w.rec.Exit.Kind != api.ExitUnknown && !w.exitSeen {
		x.fail(w, "P3: an exit that no keeper reported")
	}
	if w.rec.State == api.StateClosed && w.rec.Cleanup == api.CleanupUnproven && !w.cleared {
		x.fail(w, "P5: closed unproven without an operator")
	}
	if alive && w.rec.Final() && !w.cleared {
		x.fail(w, "the child lives and nothing stands against it")
	}
	// The bound of a close: when its time is up it is closed or fenced.
	if w.rec.CloseAsked && !w.rec.Final() {
		if after, _ := Step(w.rec, GaveUp{Detail: "time"}, wNow); after.State != api.StateFenced {
			x.fail(w, "a close whose time is up stays %s", after.State)
		}
	}
}

// next adds every world that can come after w.
func (x *explorer) next(w world) {
	x.owner(w)
	x.network(w)
	x.machine(w)
	x.crash(w)
	x.add(x.act(w, Recover(w.rec))) // recovering at any time is harmless
}

// owner: what callers, operators and clocks do.
func (x *explorer) owner(w world) {
	if w.rec.State == api.StateRequested && !w.swapped {
		x.learn(w, Dispatch{HostID: hostName(w), BootID: bootName(w.boot)})
	}
	for _, grace := range []int64{5000, 0} {
		x.learn(w, CloseAsked{Reason: "enough", GraceMillis: grace})
	}
	x.learn(w, GaveUp{Detail: "time"})
	if w.rec.Fenced {
		x.learn(w, Cleared{})
	}
	if w.swapped {
		x.learn(w, Gone{HostID: hostName(w), BootID: bootName(w.boot)})
	}
	// The host's own report of what it keeps, at any time.
	if a := w.look(); a.what == 'r' && !w.swapped {
		x.learn(w, a.event("host1"))
	}
}

// network: requests arrive or not, answers arrive or not.
func (x *explorer) network(w world) {
	if w.swapped {
		// The other host is never spoken to: its id is looked at first.
		x.answers(w)
		return
	}
	if w.start.state == sent {
		v := w.hostStart()
		v.start = lane{back, v.look()}
		x.add(v)
		if w.proc == tNone {
			v := w
			v.start = lane{back, answer{what: 'x'}}
			x.add(v)
			v.ghostStart = true // refused was a copy that the connection had made
			x.add(v)
		}
		v = w.hostStart() // carried out, answer lost
		v.start = lane{back, answer{what: 'l'}}
		x.add(v)
		v = w // given up on, still on its way
		v.start, v.ghostStart = lane{back, answer{what: 'l'}}, true
		x.add(v)
	}
	if w.ask.state == sent {
		v := w
		v.ask = lane{back, w.look()}
		x.add(v)
		v.ask = lane{back, answer{what: 'l'}}
		x.add(v)
	}
	if w.stop.state == sent {
		for _, v := range w.hostStop() {
			v.stop = lane{back, v.look()}
			x.add(v)
			v.stop = lane{back, answer{what: 'l'}}
			x.add(v)
		}
		v := w
		v.stop, v.ghostStop = lane{back, answer{what: 'l'}}, true
		x.add(v)
	}
	if w.ghostStart {
		v := w.hostStart()
		v.ghostStart = false
		x.add(v)
	}
	if w.ghostStop {
		for _, v := range w.hostStop() {
			v.ghostStop = false
			x.add(v)
		}
	}
	x.answers(w)
}

// answers reach the owner, late as they may be.
func (x *explorer) answers(w world) {
	if w.start.state == back {
		v := w
		v.start = lane{}
		x.learn(v, w.start.ans.event("host1"))
	}
	if w.ask.state == back {
		v := w
		v.ask, v.askAcked = lane{}, false
		if w.ask.ans.what == 'm' && !w.askAcked && w.rec.Acked() {
			// The host took it on after it was asked: ask again.
			x.add(x.act(v, []Effect{AskHost{}}))
		} else {
			x.learn(v, w.ask.ans.event("host1"))
		}
	}
	if w.stop.state == back {
		v := w
		v.stop = lane{}
		if w.stop.ans.what == 'm' {
			// A record that is lost: the host does not say so, it forbids the id.
			x.fail(w, "close answered missing")
		}
		x.learn(v, w.stop.ans.event("host1"))
	}
}

// hostStart: PUT is idempotent by id.
func (w world) hostStart() world {
	switch w.proc {
	case tNone:
		w.proc, w.execs = tAlive, w.execs+1
	case tLostAlive, tLostGone:
		w.proc, w.execs = tAlive, w.execs+1 // the host cannot know better: no start may be sent
	}
	return w
}

// hostStop: what lives is killed, what is unknown is forbidden.
func (w world) hostStop() []world {
	a, b := w, w
	switch w.proc {
	case tAlive:
		a.proc, b.proc = tGone, tUnproven
		return []world{a, b}
	case tNone, tLostGone:
		a.proc = tForbidden
	case tLostAlive:
		// It cannot find the tree: a host with a damaged directory. It knows that it
		// is damaged and proves nothing.
		a.proc = tUnproven
	}
	return []world{a}
}

// machine: what happens on the host by itself.
func (x *explorer) machine(w world) {
	if w.proc == tAlive {
		v := w
		v.proc = tGone
		x.add(v)
		// The host's directory is damaged. Only a record that the ledger knows of may
		// be lost, and only while no start is on its way: nobody can tell the other
		// cases from a request that never came.
		if w.rec.Acked() && !w.ghostStart && w.start.state != sent {
			v.proc = tLostAlive
			x.add(v)
		}
	}
	if w.proc == tLostAlive {
		v := w
		v.proc = tLostGone
		x.add(v)
	}
	if w.proc == tUnproven {
		v := w
		v.proc = tGone // the last member died later
		x.add(v)
	}
	if w.boot == 1 {
		v := w
		v.boot = 2
		switch w.proc {
		case tAlive, tUnproven:
			v.proc = tRebooted
		case tLostAlive:
			v.proc = tLostGone
		}
		x.add(v)
	}
	v := w
	v.swapped = !w.swapped
	x.add(v)
}

func TestExploreEverything(t *testing.T) {
	t.Parallel()
	x := &explorer{t: t, seen: map[world]bool{}, hits: map[string]int{}}
	x.add(world{rec: Record{State: api.StateRequested, Cleanup: api.CleanupPending}, boot: 1})
	for len(x.queue) > 0 {
		w := x.queue[len(x.queue)-1]
		x.queue = x.queue[:len(x.queue)-1]
		x.invariants(w)
		x.next(w)
	}
	t.Logf("%d worlds, %d steps, states after them %v", len(x.seen), x.steps, x.hits)
	for _, s := range []api.ProcessState{api.StateStarting, api.StateRunning, api.StateClosing, api.StateUnknown,
		api.StateFenced, api.StateClosed, api.StateNeverStarted} {
		if x.hits[string(s)] == 0 {
			t.Errorf("state %s was never reached: the exploration is not whole", s)
		}
	}
	for w := range x.seen {
		settles(t, w)
	}
}

// settles: from every world, once faults stop, a close ends; proven, unless the
// host has lost its record or cannot be asked.
func settles(t *testing.T, w world) {
	w.swapped = false
	if w.rec.State == api.StateRequested {
		return
	}
	rec, effects := Step(w.rec, CloseAsked{GraceMillis: 0}, wNow)
	for range 12 {
		rec = canon(rec)
		lost := w.proc == tLostAlive || w.proc == tUnproven || w.proc == tForbidden && rec.Acked()
		if rec.Final() || rec.State == api.StateFenced && lost {
			return
		}
		if len(effects) == 0 {
			effects = Recover(rec)
		}
		var e Event
		for _, f := range effects {
			switch f.(type) {
			case StartHost:
				w = w.hostStart()
				e = w.look().event("host1")
			case AskHost:
				e = w.look().event("host1")
			case CloseHost:
				w = w.hostStop()[0]
				e = w.look().event("host1")
			}
		}
		if e == nil {
			e = w.look().event("host1")
		}
		rec, effects = Step(rec, e, wNow)
	}
	t.Fatalf("a close did not end: %+v\nin %+v", rec, w)
}
