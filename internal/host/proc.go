package host

import (
	"context"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// proc is one process as the host keeps it. Its owner goroutine (own) is the
// only one that changes its phase; log polls and handlers may only carry over
// newer counters that the shim told them.
type proc struct {
	reg    *registry
	id     string
	box    string
	dir    string
	spec   wire.ProcSpec
	text   []byte // canonical spec; nil when spec.json is damaged
	client *shim.Client
	// tombstone: it was forbidden to start and has no spec.
	tombstone bool
	calls     chan struct{} // holds a token for each question to the shim, see ask
	owned     chan struct{} // closed when the owner has nothing more to do
	poke      chan struct{} // capacity 1: the owner of an unproven process tries again at once

	mu      sync.Mutex
	st      wire.ProcState
	up      bool          // the shim answers
	known   bool          // the owner has published what it found
	counted bool          // counts as living in its box
	changed chan struct{} // closed and replaced at every change of what is above
	waiters int           // readers waiting for more log
	poll    *logPoll
}

// logPoll is one question to a shim for more log.
type logPoll struct{ cancel context.CancelFunc }

// state is what was last known, without asking the shim.
func (p *proc) state() wire.ProcState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.st
}

func (p *proc) ended() bool { return p.state().Phase == wire.PhaseEnded }

// refresh asks the shim of a live process for its counters, and is content with
// what is known if it does not answer soon.
func (p *proc) refresh(ctx context.Context) wire.ProcState {
	p.mu.Lock()
	ask := p.up && p.st.Phase != wire.PhaseEnded
	p.mu.Unlock()
	if ask {
		_ = p.ask(ctx, refreshTime, func(ctx context.Context) error {
			st, err := p.client.State(ctx)
			if err == nil {
				p.carry(st)
			}
			return err
		})
	}
	return p.state()
}

// refreshTime bounds the wait for a shim's newest counters.
const refreshTime = 2 * time.Second

// maxCalls is how many questions a shim is asked at once, besides the owner's
// and the log's long polls. It serves 64 connections.
const maxCalls = 24

// ask puts a question to the shim, bounded in time, the wait for a turn included.
func (p *proc) ask(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	select {
	case p.calls <- struct{}{}:
	case <-ctx.Done():
		return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "too many calls for the process %s are under way", p.id).
			WithNext("try again")
	}
	defer func() { <-p.calls }()
	return f(ctx)
}

// carry takes over the counters of a state that the shim told. Phases are taken
// over by the owner alone, so that nobody sees an end that it has not checked.
func (p *proc) carry(st wire.ProcState) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.st.Phase == wire.PhaseEnded || st.ID != p.id {
		return
	}
	before := p.st.Log
	p.st.Log, p.st.Stdin = newerLog(before, st.Log), newerStdin(p.st.Stdin, st.Stdin)
	if p.st.Log.Next != before.Next || p.st.Log.EOF != before.EOF {
		p.wakeLocked()
	}
}

// newerLog picks the later of two states of one log. Answers of a shim may
// overtake each other; what was seen must not be unseen.
func newerLog(a, b api.LogState) api.LogState {
	if b.Next < a.Next || b.Oldest < a.Oldest || a.EOF && !b.EOF {
		return a
	}
	return b
}

func newerStdin(a, b api.StdinState) api.StdinState {
	if b.Accepted < a.Accepted || a.EOF && !b.EOF {
		return a
	}
	return b
}

// publish sets the state; only the owner calls it. Watchers are told when Rev or
// the phase changed.
func (p *proc) publish(st wire.ProcState) {
	p.mu.Lock()
	told := st.Rev != p.st.Rev || st.Phase != p.st.Phase
	if st.Phase != wire.PhaseEnded { // the end's own counters are final
		st.Log, st.Stdin = newerLog(p.st.Log, st.Log), newerStdin(p.st.Stdin, st.Stdin)
	}
	p.st, p.known = st, true
	left := p.counted && st.Phase == wire.PhaseEnded && st.Proof != nil
	if left {
		p.counted = false
	}
	p.wakeLocked()
	p.mu.Unlock()
	if left {
		p.reg.left(p.box)
	}
	if told {
		p.reg.hub.changed(p.id)
	}
}

func (p *proc) setUp() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.up {
		p.up = true
		p.wakeLocked()
	}
}

func (p *proc) wakeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// await returns when cond, called with p.mu held, holds.
func (p *proc) await(ctx context.Context, cond func() bool) error {
	for {
		p.mu.Lock()
		ok, changed := cond(), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the process %s did not get that far in time", p.id).
				WithNext("try again")
		}
	}
}

// ready waits until the shim answers or the process has ended.
func (p *proc) ready(ctx context.Context) error {
	return p.await(ctx, func() bool { return p.up || p.st.Phase == wire.PhaseEnded })
}

// awaitLog waits until the log goes beyond cursor, or is at its end for good. It
// returns the state then. All waiting readers of a process share one long poll
// of its shim, which is given up with the last of them.
func (p *proc) awaitLog(ctx context.Context, cursor int64) (wire.ProcState, error) {
	p.mu.Lock()
	p.waiters++
	for {
		if p.st.Log.Next > cursor || p.st.Log.EOF || p.st.Phase == wire.PhaseEnded {
			break
		}
		if p.poll == nil && p.up {
			p.pollLocked()
		}
		changed := p.changed
		p.mu.Unlock()
		select {
		case <-changed:
			p.mu.Lock()
			continue
		case <-ctx.Done():
		}
		p.mu.Lock()
		break
	}
	p.waiters--
	if p.waiters == 0 && p.poll != nil {
		p.poll.cancel()
		p.poll = nil
	}
	st := p.st
	p.mu.Unlock()
	return st, ctx.Err()
}

// pollLocked starts the long poll that waits for more log.
func (p *proc) pollLocked() {
	ctx, cancel := context.WithCancel(p.reg.ctx)
	poll := &logPoll{cancel}
	p.poll = poll
	rev, next := p.st.Rev, p.st.Log.Next
	p.reg.wg.Go(func() {
		defer cancel()
		st, err := p.client.Wait(ctx, rev, next)
		if err != nil {
			// The owner notices a dead shim by itself; until then, do not spin.
			pause(ctx, firstPause)
		} else {
			p.carry(st)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.poll == poll {
			p.poll = nil
			p.wakeLocked() // whoever still waits starts the next poll
		}
	})
}

// pause waits, or not if ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// endedStdin answers a write of input after the end: a pure repeat is harmless.
func endedStdin(st wire.ProcState, offset int64, n int, eof bool) (api.StdinState, error) {
	if offset >= 0 && offset+int64(n) <= st.Stdin.Accepted && (n > 0 || st.Stdin.EOF) && (!eof || st.Stdin.EOF) {
		return st.Stdin, nil
	}
	return st.Stdin, errdefs.New(errdefs.Conflict, "the process has ended; its input was accepted up to offset %d", st.Stdin.Accepted)
}
