package relay

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// toolsEnd is how long the end of a job waits for tool calls that ignore their
// context. They have no rights left and cannot answer.
const toolsEnd = 2 * time.Second

// Job is one job, from its dispatch on. Its methods may be called from any
// goroutine; of several that call Next at once each gets different events.
type Job struct {
	hub      *Hub
	id       string
	target   *target
	link     *link
	payload  json.RawMessage // nil once it was handed over
	tools    *toolbox
	queue    *queue
	waiting  atomic.Bool // the daemon is not read until the consumer reads
	started  time.Time
	deadline time.Time

	unsent bool          // Hub.mu: the connection did not take its run.start
	end    End           // Hub.mu, until ended is closed
	fence  *Fence        // the same: the evidence, when the end is a fence
	ended  chan struct{} // closed when the fence's rules say that it ended

	askMu sync.Mutex
	over  bool           // it ended: nobody can ask for it any more
	code  relaywire.Code // why it was asked to end, "" while it was not
	cause string
	asked chan struct{} // closed by the first ask

	begun    chan struct{} // closed when it was dispatched or refused
	refused  error         // before begun
	settled  chan struct{} // closed at the very end
	outcome  Outcome       // before settled
	ctxEnds  func() bool   // stops the drop at the context's end; before settled
	nextMu   sync.Mutex
	nextOnes []json.RawMessage
}

func newJobID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return base64.RawURLEncoding.EncodeToString(b[:])
}

// RunJob sends a job to a connected daemon and returns when its run.start is on its
// way. ctx governs the whole job: when it ends the job is settled. So is it by
// Cancel, when its time is over, and when the hub stops.
//
// Refusals: daemon_fenced, daemon_cancelling, daemon_offline, daemon_busy (the hub's
// jobs, or what waits to be sent to this daemon), daemon_state_failed (no marker, so
// no job), payload_invalid, payload_too_large, daemon_hub_conflict (another token),
// daemon_hub_not_started.
func (h *Hub) RunJob(ctx context.Context, req JobRequest) (*Job, error) {
	id, err := h.checkID(req.DaemonID)
	if err != nil {
		return nil, err
	}
	if req.Token != "" && !sameToken(req.Token, h.cfg.Token) {
		return nil, h.conflict("with another token")
	}
	if int64(len(req.Payload)) > h.lim.MessageBytes {
		return nil, h.errorf(relaywire.CodePayloadTooLarge, "the job's payload has %d bytes, limit %d",
			len(req.Payload), h.lim.MessageBytes).WithNext("pass large files by reference, or raise the limit on both sides")
	}
	if f, err := relaywire.DecodePayload(req.Payload); err != nil || !relaywire.IsObject(f) {
		return nil, h.errorf(relaywire.CodePayloadInvalid, "the job's payload is not a JSON object")
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	timeout := req.Timeout
	if timeout == 0 {
		timeout = h.lim.RunTimeout
	}
	timeout = max(timeout, relaywire.MinRunTimeout)

	j := &Job{
		hub: h, id: newJobID(), payload: req.Payload, started: time.Now(),
		ended: make(chan struct{}), asked: make(chan struct{}), begun: make(chan struct{}), settled: make(chan struct{}),
		queue: newQueue(h.lim.QueueBytes, &spill{dir: h.spills, max: h.lim.SpillBytes, total: &h.spilled, limit: h.lim.SpillTotal}),
	}
	j.deadline = j.started.Add(timeout)
	j.tools = newToolbox(j, req.Tools)
	if err := h.enter(j, id); err != nil {
		return nil, err
	}
	go func() {
		defer h.wg.Done()
		j.own(ctx, timeout)
	}()
	<-j.begun
	if j.refused != nil {
		<-j.settled
		return nil, j.refused
	}
	return j, nil
}

// enter admits the job. After nil, Hub.wg counts its owner.
func (h *Hub) enter(j *Job, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stopping {
		return h.notStarted()
	}
	t := h.targets[keyOf(id)]
	if t == nil {
		return h.refusal(relaywire.CodeOffline, id)
	}
	if len(h.jobs) >= h.lim.Jobs {
		if _, _, refused := FenceStep(t.step, FenceEvent{Kind: JobAsked, Job: j.id}); refused != "" {
			return h.refusal(refused, id)
		}
		return h.errorf(relaywire.CodeBusy, "the relay runs %d jobs, its limit", h.lim.Jobs).
			WithNext("wait for one to end, or raise the limit")
	}
	h.jobs[j.id] = j
	if refused := h.apply(t, FenceEvent{Kind: JobAsked, Job: j.id}); refused != "" {
		delete(h.jobs, j.id)
		return h.refusal(refused, id)
	}
	j.target, j.link = t, t.link
	t.use()
	h.wg.Add(1)
	return nil
}

// dispatch hands run.start to the connection. Hub.mu is held.
func (j *Job) dispatch() bool {
	j.link.add(j)
	return j.link.out.put(relaywire.Frame{Type: relaywire.Start, JobID: j.id, Payload: j.payload}, false)
}

// endJob is told by the rules that the job ended. Hub.mu is held.
func (h *Hub) endJob(j *Job, end End) {
	j.end = end
	if end == EndUnacknowledged || end == EndDisconnected {
		// Now: an operator may have cleared it before the job is settled.
		f := j.target.fence.clone()
		j.fence = &f
	}
	j.link.remove(j.id, end)
	j.askMu.Lock()
	j.over = true
	j.askMu.Unlock()
	close(j.ended)
}

// step applies an event about this job.
func (j *Job) step(kind EventKind) {
	j.hub.mu.Lock()
	defer j.hub.mu.Unlock()
	j.hub.apply(j.target, FenceEvent{Kind: kind, Job: j.id})
}

// ask asks the owner to end the job. The first one counts. A job that has ended, and is
// only not settled yet, did so by itself: it answers false.
func (j *Job) ask(code relaywire.Code, cause string) bool {
	j.askMu.Lock()
	defer j.askMu.Unlock()
	if j.over {
		return false
	}
	if j.code == "" {
		j.code, j.cause = code, cause
		close(j.asked)
	}
	return true
}

// own is the job's owner goroutine, from its admission to its settlement.
func (j *Job) own(ctx context.Context, timeout time.Duration) {
	h := j.hub
	err := h.settleDisk(j.target) // the marker, before anything is sent
	switch {
	case err != nil:
		h.log.Error("relay: a marker cannot be written", "daemon", j.target.id, "error", err)
		j.refused = errdefs.Wrap(err, errdefs.Unavailable, "no marker for daemon %q can be written, so no job may start", j.target.id).
			WithNext("look at the relay's state directory").With("relay_code", h.code(relaywire.CodeStateFailed))
		j.step(MarkFailed)
	case ctx.Err() != nil:
		j.refused = context.Cause(ctx)
		j.step(CancelAsked)
	default:
		j.step(Marked)
	}
	j.payload = nil
	h.mu.Lock()
	if j.end == EndNeverStarted && j.refused == nil {
		switch step := j.target.step; {
		case j.unsent && step.Socket != 0:
			j.refused = h.errorf(relaywire.CodeBusy, "daemon %q does not take what is sent to it", j.target.id).
				WithNext("wait until it reads, or restart it")
		case step.Fenced:
			j.refused = h.refusal(relaywire.CodeFenced, j.target.id)
		case step.cancelling():
			j.refused = h.refusal(relaywire.CodeCancelling, j.target.id)
		default:
			j.refused = h.refusal(relaywire.CodeOffline, j.target.id)
		}
	}
	h.mu.Unlock()
	close(j.begun)
	if j.refused == nil {
		j.settle(ctx, timeout)
	}
	j.tools.revoke()
	if !j.tools.wait(toolsEnd) {
		h.log.Warn("relay: a tool call goes on after it was revoked", "job", j.id)
	}
	h.diskWork(j.target)
	j.conclude()
	j.ctxEnds = context.AfterFunc(ctx, j.queue.drop)
	h.mu.Lock()
	delete(h.jobs, j.id)
	h.mu.Unlock()
	h.unuse(j.target)
	close(j.settled)
}

// settle waits for the end of the job, or for a reason to end it and then for the
// acknowledgement or the fence.
func (j *Job) settle(ctx context.Context, timeout time.Duration) {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	asked := true
	select {
	case <-j.ended:
		return
	case <-ctx.Done():
		asked = j.ask(relaywire.CodeCancelled, "its caller left: "+context.Cause(ctx).Error())
	case <-timer.C:
		asked = j.ask(relaywire.CodeTimeout, "it ran longer than "+timeout.String())
	case <-j.asked:
	}
	if !asked {
		<-j.ended
		return
	}
	j.queue.finish(nil) // what comes from now on is of no interest
	j.step(CancelAsked)
	ack := time.NewTimer(j.hub.lim.CancelTimeout)
	defer ack.Stop()
	select {
	case <-j.ended:
	case <-ack.C:
		j.step(AckTimedOut)
		<-j.ended
	}
}

// conclude makes the outcome and lets the queue end.
func (j *Job) conclude() {
	h := j.hub
	o := &j.outcome
	h.mu.Lock()
	end := j.end
	o.Acknowledged, o.Fence = end == EndFinished || end == EndNeverStarted, j.fence
	h.mu.Unlock()
	j.askMu.Lock()
	code, cause := j.code, j.cause
	j.askMu.Unlock()
	var last []byte
	switch {
	case code != "":
		o.Code, o.Cause = h.code(code), cause
	case end == EndDisconnected:
		o.Code, o.Cause = h.code(relaywire.CodeDisconnected), "its daemon disconnected"
		last = relaywire.FailedEvent(o.Code, "the daemon disconnected before it confirmed the end of the job", false)
	}
	j.queue.finish(last)
}

// ID returns the job's id, 22 characters.
func (j *Job) ID() string { return j.id }

// Next returns the next event, as the daemon sent it; the caller may keep it. After
// the last one: io.EOF when the job finished or its daemon disconnected (the last
// event then is a run.failed with code daemon_disconnected), otherwise the error
// that ended it (daemon_timeout, daemon_cancelled, job_overflow). When Next says
// that a job ended, it is settled. ctx ends the waiting only.
func (j *Job) Next(ctx context.Context) (json.RawMessage, error) {
	j.nextMu.Lock()
	defer j.nextMu.Unlock()
	if len(j.nextOnes) == 0 {
		var b batch
		if err := j.take(ctx, &b); err != nil {
			return nil, err
		}
		j.nextOnes = b.events
	}
	one := j.nextOnes[0]
	if j.nextOnes = j.nextOnes[1:]; len(j.nextOnes) == 0 {
		j.nextOnes = nil
	}
	return one, nil
}

// NextBatch is Next for all events that are there, at least one.
func (j *Job) NextBatch(ctx context.Context) ([]json.RawMessage, error) {
	j.nextMu.Lock()
	defer j.nextMu.Unlock()
	if ones := j.nextOnes; ones != nil {
		j.nextOnes = nil
		return ones, nil
	}
	var b batch
	err := j.take(ctx, &b)
	return b.events, err
}

// Stream gives every event to f, as many at once as are there, and returns what Next
// says at the end, io.EOF being nil, or the first error of f. It is the fast way: the
// events lie in memory that is used again, so f may not keep them.
func (j *Job) Stream(ctx context.Context, f func(events []json.RawMessage) error) error {
	j.nextMu.Lock()
	defer j.nextMu.Unlock()
	if ones := j.nextOnes; ones != nil {
		j.nextOnes = nil
		if err := f(ones); err != nil {
			return err
		}
	}
	var b batch
	for {
		err := j.take(ctx, &b)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		err = f(b.events)
		b.free()
		if err != nil {
			return err
		}
	}
}

// take fills b with at least one event, or says why there will be none.
func (j *Job) take(ctx context.Context, b *batch) error {
	for ended := false; ; {
		err := j.queue.take(ctx, b)
		switch {
		case err != nil && ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			j.hub.log.Error("relay: events on disk cannot be read", "job", j.id, "error", err)
			return j.hub.errorf(relaywire.CodeStateFailed, "events of the job that were kept on disk cannot be read")
		case len(b.events) > 0:
			return nil
		case ended:
			j.ctxEnds()
			j.queue.drop()
			return j.failure()
		}
		select {
		case <-j.settled:
			ended = true // once more: the last event of a lost connection comes late
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// failure is what Next says at the end.
func (j *Job) failure() error {
	j.askMu.Lock()
	code, cause := j.code, j.cause
	j.askMu.Unlock()
	if code == "" {
		return io.EOF
	}
	e := j.hub.errorf(code, "the job was ended: %s", cause)
	if j.outcome.Fence != nil {
		return e.WithNext("its daemon did not confirm the end and is fenced: verify its machine, then clear the fence")
	}
	return e
}

// Cancel settles the job and says how that went. It returns when the daemon
// acknowledged or is fenced, at most Limits.CancelTimeout later (and 2 s, when a tool
// ignores its context), and does not stop for ctx: clean-up is never left half done.
// A job that ended by itself meanwhile is not cancelled. Repeating it is harmless. Events that
// were not read are dropped.
func (j *Job) Cancel(_ context.Context, cause string) (Outcome, error) {
	select {
	case <-j.settled:
	default:
		j.ask(relaywire.CodeCancelled, cause)
	}
	<-j.settled
	j.ctxEnds()
	j.queue.drop()
	return j.outcome, nil
}

// Done is closed when the job is settled.
func (j *Job) Done() <-chan struct{} { return j.settled }

// Outcome is how the job ended; zero before Done.
func (j *Job) Outcome() Outcome {
	select {
	case <-j.settled:
		return j.outcome
	default:
		return Outcome{}
	}
}

// CancelJob is Job.Cancel by id, for callers that did not start it: not_found when
// there is no such job. The one who started it can still read what is there.
func (h *Hub) CancelJob(_ context.Context, jobID, cause string) (Outcome, error) {
	h.mu.Lock()
	j := h.jobs[jobID]
	h.mu.Unlock()
	if j == nil {
		return Outcome{}, errdefs.New(errdefs.NotFound, "the relay runs no job %q", jobID)
	}
	j.ask(relaywire.CodeCancelled, cause)
	<-j.settled
	return j.outcome, nil
}
