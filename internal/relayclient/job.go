package relayclient

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// The codes of a client's own failures, which begin so whatever the hub's prefix.
const (
	codeUnexpected = "agent_runtime.daemon_unexpected"
	codeCancelled  = "agent_runtime.daemon_cancelled"
	codeBusy       = "agent_runtime.daemon_busy"
)

// job is one job of one connection, from run.start until run.finished is about to be
// written.
type job struct {
	id     string
	lane   *lane
	ctx    context.Context // ends when the job is to stop; the owner's root
	cancel context.CancelCauseFunc
}

// start begins a job.
func (s *session) start(f relaywire.Frame) error {
	if f.JobID == "" || !relaywire.IsObject(f.Payload) {
		s.log.Warn("the hub sent a job without id or payload")
		return nil
	}
	s.mu.Lock()
	// While this program stops, the connection lives until the jobs have ended. The
	// hub must hear about one that comes meanwhile, or it has to fence this machine.
	leaving := s.stopping == errStopping
	if s.stopping != nil && !leaving {
		s.mu.Unlock()
		return nil // the connection is lost, and whoever lost it knows what that means
	}
	if s.live[f.JobID] != nil {
		s.mu.Unlock()
		return protocolError("the hub started a job a second time")
	}
	j := &job{id: f.JobID}
	j.lane = newLane(j)
	j.ctx, j.cancel = context.WithCancelCause(context.Background())
	busy := leaving || len(s.live) >= s.limits.Jobs
	full := len(s.live) >= 2*s.limits.Jobs // even refusals are bounded
	if !full {
		s.live[j.id] = j
	}
	if !full && !busy {
		s.jobs.Add(1)
	}
	s.mu.Unlock()
	switch {
	case full:
		j.cancel(errLost)
		return protocolError("the hub starts jobs faster than it takes their ends")
	case busy:
		j.cancel(errCancelled)
		why := "this machine runs as many jobs as it may"
		if leaving {
			why = "this machine takes no more jobs: its client stops"
		}
		s.finish(j, relaywire.FailedEvent(codeBusy, why, true))
	default:
		go s.run(j, f.Payload)
	}
	return nil
}

// run is the one goroutine of a job.
func (s *session) run(j *job, payload json.RawMessage) {
	defer s.jobs.Done()
	err := s.perform(j, payload)
	stopped := j.ctx.Err() != nil
	cause := context.Cause(j.ctx)
	j.cancel(nil)
	u, unconfirmed := errors.AsType[*UnconfirmedError](err)
	switch {
	case unconfirmed:
		s.halted(u) // and no run.finished, ever
	case stopped:
		s.log.Info("a job was stopped", "job", j.id, "cause", cause)
		s.finish(j, relaywire.FailedEvent(codeCancelled, "the job was stopped: "+cause.Error(), true))
	case err != nil:
		s.log.Warn("a job failed", "job", j.id, "error", err)
		s.finish(j, relaywire.FailedEvent(codeUnexpected, err.Error(), false))
	default:
		s.finish(j, nil)
	}
}

// perform runs the job and its tools; both are gone when it returns.
func (s *session) perform(j *job, payload json.RawMessage) error {
	s.log.Info("a job begins", "job", j.id)
	p, err := newProxy(s, j.id)
	if err != nil {
		return err
	}
	defer p.close()
	return s.runner.Run(j.ctx, j.id, payload, func(event json.RawMessage) error { return s.emit(j, event) }, p.mcp())
}

// emit sends one event and waits while the job's queue is full.
func (s *session) emit(j *job, event json.RawMessage) error {
	if int64(len(event)) > s.limits.MessageBytes {
		return errdefs.New(errdefs.Exhausted, "an event has %d bytes, the limit is %d", len(event), s.limits.MessageBytes)
	}
	event, err := relaywire.DecodePayload(event)
	if err != nil || !relaywire.IsObject(event) {
		return errdefs.New(errdefs.Internal, "an event is not a JSON object")
	}
	return s.out.event(j.ctx, j.lane, relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Event, JobID: j.id, Event: event}))
}

// finish queues the acknowledgement, after a last event.
func (s *session) finish(j *job, last json.RawMessage) {
	var frame []byte
	if last != nil {
		frame = relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Event, JobID: j.id, Event: last})
	}
	s.out.finish(j.lane, frame, relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Finished, JobID: j.id}))
}

func (s *session) forget(j *job) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live[j.id] == j {
		delete(s.live, j.id)
	}
}

// endJobs stops every job and waits for the clean-ups, however long they take: each
// has its own bound.
func (s *session) endJobs(cause error) {
	s.stopJobs(cause)
	s.jobs.Wait()
}

// stopJobs stops every job and takes no more.
func (s *session) stopJobs(cause error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping == nil {
		s.stopping = cause
	}
	for _, j := range s.live {
		j.cancel(cause)
	}
}
