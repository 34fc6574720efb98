package relayclient

import (
	"context"
	"slices"
	"sync"
)

// outbox holds what waits for the writer. Any goroutine may add; one takes.
type outbox struct {
	perJob int64 // bytes of events one job may have waiting

	mu     sync.Mutex
	acks   []ack       // at most one per job
	calls  []*toolCall // at most as many as tool calls are under way
	ready  []*lane     // jobs with events, in turn
	closed bool
	wake   chan struct{} // one token when something was added
	idle   chan struct{} // closed when it is empty and flush was asked for
}

// toolCall is the frame of a tool call that somebody waits for.
type toolCall struct{ frame []byte }

type ack struct {
	frame []byte
	lane  *lane
}

// lane is the queue of one job. Its fields belong to the outbox's mutex.
type lane struct {
	job      *job
	frames   [][]byte
	bytes    int64
	queued   bool // in ready
	dropping bool // the hub wants no more events
	finish   []byte
	room     chan struct{} // closed and renewed when there is room
}

func newOutbox(perJob int64) *outbox {
	return &outbox{perJob: perJob, wake: make(chan struct{}, 1)}
}

func newLane(j *job) *lane { return &lane{job: j, room: make(chan struct{})} }

func (o *outbox) poke() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

func (o *outbox) enqueue(l *lane) {
	if !l.queued {
		l.queued = true
		o.ready = append(o.ready, l)
	}
	o.poke()
}

// event adds one frame of a job and waits for room: a frame goes in when the queue
// has room for it or is empty.
func (o *outbox) event(ctx context.Context, l *lane, frame []byte) error {
	for {
		o.mu.Lock()
		switch {
		case o.closed:
			o.mu.Unlock()
			return errLost
		case l.dropping || l.finish != nil:
			o.mu.Unlock()
			return errCancelled
		case l.bytes == 0 || l.bytes+int64(len(frame)) <= o.perJob:
			l.frames = append(l.frames, frame)
			l.bytes += int64(len(frame))
			o.enqueue(l)
			o.mu.Unlock()
			return nil
		}
		room := l.room
		o.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// finish adds the acknowledgement of a job behind its events, or before
// everything when the hub wants none of them.
func (o *outbox) finish(l *lane, last, frame []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if last != nil && !l.dropping {
		l.frames = append(l.frames, last) // beyond the bound by one
		l.bytes += int64(len(last))
	}
	l.finish = frame
	if l.dropping {
		o.acks = append(o.acks, ack{frame, l})
		o.poke()
		return
	}
	o.enqueue(l)
}

// drop throws the events of a job away, and lets its acknowledgement go first.
func (o *outbox) drop(l *lane) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if l.dropping {
		return
	}
	l.dropping = true
	l.frames, l.bytes = nil, 0
	o.release(l)
	if l.finish != nil && l.queued {
		o.acks = append(o.acks, ack{l.finish, l})
		o.poke()
	}
}

func (o *outbox) release(l *lane) {
	close(l.room)
	l.room = make(chan struct{})
}

// call adds a tool call. Whoever waits for the answer no more withdraws it.
func (o *outbox) call(c *toolCall) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return errLost
	}
	o.calls = append(o.calls, c)
	o.poke()
	return nil
}

// withdraw takes a call back if it still waits to be sent. Else a hub that reads
// slowly would be asked what nobody wants to know, for a job that may be over, and
// an agent that gives up quickly could fill the memory.
func (o *outbox) withdraw(c *toolCall) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if i := slices.Index(o.calls, c); i >= 0 {
		o.calls = slices.Delete(o.calls, i, i+1)
	}
}

// take returns the next frame, and the job that is over with it. It waits until
// there is one or ctx ends.
func (o *outbox) take(ctx context.Context) (frame []byte, over *job, err error) {
	for {
		if frame, over, ok := o.try(); ok {
			return frame, over, nil
		}
		select {
		case <-o.wake:
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		}
	}
}

func (o *outbox) try() ([]byte, *job, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.acks) > 0 {
		a := o.acks[0]
		o.acks = o.acks[1:]
		return a.frame, a.lane.job, true
	}
	if len(o.calls) > 0 {
		c := o.calls[0]
		o.calls = slices.Delete(o.calls, 0, 1)
		return c.frame, nil, true
	}
	for len(o.ready) > 0 {
		l := o.ready[0]
		o.ready = o.ready[1:]
		l.queued = false
		switch {
		case l.dropping: // its acknowledgement is, or comes, in acks
			continue
		case len(l.frames) == 0: // only the acknowledgement is left
			return l.finish, l.job, true
		}
		f := l.frames[0]
		l.frames[0] = nil
		l.frames = l.frames[1:]
		l.bytes -= int64(len(f))
		o.release(l)
		if len(l.frames) > 0 || l.finish != nil {
			l.queued = true
			o.ready = append(o.ready, l)
		}
		return f, nil, true
	}
	if o.idle != nil {
		close(o.idle)
		o.idle = nil
	}
	return nil, nil, false
}

// flushed returns a channel that is closed when the writer comes for more and
// finds nothing: everything before was written.
func (o *outbox) flushed() <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.idle = make(chan struct{})
	o.poke()
	return o.idle
}

// close refuses what comes and lets go of what waits.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	for _, l := range o.ready {
		o.release(l)
	}
}
