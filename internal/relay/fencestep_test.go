package relay

import (
	"fmt"
	"testing"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// The explorer walks every reachable state of a target with two jobs, its daemon, its
// marker on disk, the hub's outbox and the hub's death, in every order of events:
// early, late, repeated, and from strangers.

const explored = 2 // jobs

// far is what really goes on at the daemon's machine for one job.
type far uint8

const (
	farNothing far = iota
	farQueued      // run.start is in the hub's outbox
	farAlive       // it was sent: something may run
	farGone        // confirmed by its own daemon, or verified by an operator
)

// worldJob is a job as the world sees it. Comparable.
type worldJob struct {
	known  bool // the hub was asked to run it
	phase  int8 // -1: the hub has it no more
	tools  bool // its tools answer
	ended  End
	far    far
	socket uint64 // it was dispatched to
}

type world struct {
	socket uint64 // of the target
	last   uint64
	fenced bool
	marker bool // on disk
	jobs   [explored]worldJob
}

func jobName(i int) string { return string(rune('a' + i)) }

func (w world) target() Target {
	t := Target{Socket: w.socket, Fenced: w.fenced}
	for i, j := range w.jobs {
		if j.known && j.phase >= 0 {
			t.Jobs = append(t.Jobs, TargetJob{jobName(i), Phase(j.phase)})
		}
	}
	return t
}

// step applies an event as Hub.apply does, and checks what must hold of the step.
func (w *world) step(t *testing.T, e FenceEvent) relaywire.Code {
	before := w.target()
	after, effects, refused := FenceStep(before, e)
	if refused != "" && (len(effects) > 0 || fmt.Sprint(before) != fmt.Sprint(after)) {
		t.Errorf("%+v with %+v was refused and changed something", before, e)
	}
	if before.Fenced && !after.Fenced && e.Kind != Cleared {
		t.Errorf("%+v lifted the fence of %+v", e, before)
	}
	w.socket, w.fenced = after.Socket, after.Fenced
	for i := range w.jobs {
		w.jobs[i].phase = -1
	}
	for _, j := range after.Jobs {
		w.jobs[j.ID[0]-'a'].phase = int8(j.Phase)
	}
	var withdrawn []string
	for _, f := range effects {
		var j *worldJob
		if f.Job != "" {
			j = &w.jobs[f.Job[0]-'a']
		}
		switch f.Kind {
		case Dispatch:
			if before.Fenced || before.cancelling() || !w.marker {
				t.Errorf("%+v: a job is dispatched with fence %v, cancelling %v, marker %v", e, before.Fenced, before.cancelling(), w.marker)
			}
			j.far, j.tools, j.socket = farQueued, true, w.socket
		case Revoke:
			j.tools = false
		case SendStop:
			if j.tools {
				t.Errorf("%+v: run.cancel is sent before the tools are revoked", e)
			}
			if j.far == farQueued {
				j.far = farNothing
				withdrawn = append(withdrawn, f.Job)
			}
		case EndJob:
			if j.tools {
				t.Errorf("%+v: the end is visible before the tools are revoked", e)
			}
			if j.ended != EndNone {
				t.Errorf("%+v: %s ends twice", e, f.Job)
			}
			j.ended = f.End
			if f.End == EndFinished && j.far == farAlive {
				j.far = farGone // its own daemon says so
			}
		}
	}
	for _, id := range withdrawn {
		w.step(t, FenceEvent{Kind: Withdrawn, Job: id})
	}
	return refused
}

// check is what must hold in every state.
func (w world) check(t *testing.T, how string) {
	for i, j := range w.jobs {
		if j.far != farAlive {
			continue
		}
		running := j.phase == int8(Running) || j.phase == int8(Cancelling)
		if !running && !w.fenced {
			t.Errorf("after %s: %s may be running and nobody knows: %+v", how, jobName(i), w)
		}
		if !w.marker {
			t.Errorf("after %s: %s may be running and a hub that dies now leaves no marker: %+v", how, jobName(i), w)
		}
	}
	if w.socket == 0 {
		for _, j := range w.jobs {
			if j.phase >= 0 {
				t.Errorf("after %s: a job without a connection: %+v", how, w)
			}
		}
	}
}

// moves are all things that can happen.
func (w world) moves(t *testing.T) map[string]world {
	out := map[string]world{}
	add := func(how string, f func(*world)) {
		n := w
		f(&n)
		out[how] = n
	}
	if w.last < 2 { // two incarnations show replacement and lateness
		add("connect", func(n *world) {
			alive := false
			for _, j := range n.jobs {
				alive = alive || j.far == farAlive
			}
			if n.step(t, FenceEvent{Kind: Connected, Socket: n.last + 1}) == "" {
				n.last++
				if alive || w.socket != 0 {
					t.Errorf("%+v: a daemon was let in beside what may be running", w)
				}
			}
		})
	}
	add("disconnect", func(n *world) { n.drop(t, w.socket) })
	add("disconnect of a stranger", func(n *world) { n.step(t, FenceEvent{Kind: Disconnected, Socket: 9}) })
	// The disk follows the state, at any time.
	add("settle disk", func(n *world) { n.marker = n.target().wantsMarker() })
	add("clear", func(n *world) {
		if !w.fenced {
			n.step(t, FenceEvent{Kind: Cleared})
			return
		}
		// The operator verified that nothing runs; a refusal means that it was not cleared.
		if n.step(t, FenceEvent{Kind: Cleared}) == "" {
			if len(w.target().Jobs) > 0 {
				t.Errorf("%+v was cleared although a job is not settled", w)
			}
			for i := range n.jobs {
				if n.jobs[i].far == farAlive {
					n.jobs[i].far = farGone
				}
			}
		}
	})
	add("hub dies", func(n *world) {
		n.socket, n.fenced = 0, n.marker
		for i := range n.jobs {
			j := &n.jobs[i]
			j.phase, j.tools = -1, false
			if j.far == farQueued {
				j.far = farNothing
			}
			if j.known && j.ended == EndNone {
				j.ended = EndDisconnected // nobody is left to tell
			}
		}
	})
	for i, j := range w.jobs {
		id := jobName(i)
		if !j.known {
			add("ask "+id, func(n *world) {
				if n.step(t, FenceEvent{Kind: JobAsked, Job: id}) == "" {
					n.jobs[i].known = true
					if n.fenced || n.socket == 0 || w.target().cancelling() {
						t.Errorf("%+v: a job was admitted", w)
					}
				}
			})
		}
		// The owner says Marked after it made the disk what the state wants.
		add("marked "+id, func(n *world) {
			n.marker = n.marker || n.target().wantsMarker()
			n.step(t, FenceEvent{Kind: Marked, Job: id})
		})
		add("mark failed "+id, func(n *world) { n.step(t, FenceEvent{Kind: MarkFailed, Job: id}) })
		if j.far == farQueued {
			add("sent "+id, func(n *world) { n.jobs[i].far = farAlive })
		}
		if j.far != farQueued { // a daemon cannot confirm what it was not sent
			add("finished "+id, func(n *world) { n.step(t, FenceEvent{Kind: Finished, Job: id, Socket: w.socket}) })
		}
		add("finished by a stranger "+id, func(n *world) {
			if n.step(t, FenceEvent{Kind: Finished, Job: id, Socket: 9}); n.jobs[i] != w.jobs[i] {
				t.Errorf("a stranger changed %+v", w)
			}
		})
		add("cancel "+id, func(n *world) { n.step(t, FenceEvent{Kind: CancelAsked, Job: id}) })
		add("no answer "+id, func(n *world) { n.step(t, FenceEvent{Kind: AckTimedOut, Job: id}) })
	}
	return out
}

// drop is the loss of a connection: what waits in its outbox is never sent, but the
// hub cannot know how much of it was.
func (w *world) drop(t *testing.T, socket uint64) {
	w.step(t, FenceEvent{Kind: Disconnected, Socket: socket})
	for i := range w.jobs {
		if w.jobs[i].far == farQueued {
			w.jobs[i].far = farNothing
		}
	}
}

func TestFenceStepExhaustively(t *testing.T) {
	t.Parallel()
	var start world
	for i := range start.jobs {
		start.jobs[i].phase = -1
	}
	seen := map[world]bool{start: true}
	todo := []world{start}
	steps := 0
	fenced, finished := false, false
	for len(todo) > 0 && !t.Failed() {
		w := todo[0]
		todo = todo[1:]
		for how, n := range w.moves(t) {
			steps++
			n.check(t, how)
			fenced = fenced || n.fenced
			finished = finished || n.jobs[0].ended == EndFinished
			if !seen[n] {
				seen[n] = true
				todo = append(todo, n)
			}
		}
	}
	t.Logf("%d states, %d steps", len(seen), steps)
	if !t.Failed() && (len(seen) < 1000 || !fenced || !finished) {
		t.Errorf("the explorer saw %d states, fenced %v, finished %v: it does not explore", len(seen), fenced, finished)
	}
}

// A step never writes to the jobs of the target it was given: states are values.
func TestFenceStepLeavesItsArgument(t *testing.T) {
	t.Parallel()
	jobs := make([]TargetJob, 2, 8)
	jobs[0], jobs[1] = TargetJob{"a", Running}, TargetJob{"b", Marking}
	for kind := Connected; kind <= Cleared; kind++ {
		for _, job := range []string{"", "a", "b", "c"} {
			FenceStep(Target{Socket: 1, Jobs: jobs}, FenceEvent{Kind: kind, Socket: 1, Job: job})
			if jobs[0] != (TargetJob{"a", Running}) || jobs[1] != (TargetJob{"b", Marking}) || jobs[:3][2] != (TargetJob{}) {
				t.Fatalf("event %d on %q wrote to its argument: %v", kind, job, jobs[:3])
			}
		}
	}
}
