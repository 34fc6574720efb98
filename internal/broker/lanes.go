package broker

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/wire"

	"github.com/stockade-run/stockade/internal/store"
)

// A lane carries one kind of request to the host, one at a time. They are apart
// so that a close never waits behind a start that hangs.
type laneKind int

const (
	laneStart laneKind = iota
	laneAsk
	laneClose
	laneCount
)

// Pauses between failed requests of one lane while the host can be reached.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = 15 * time.Second
)

// lane belongs to the owner's goroutine.
type lane struct {
	wanted bool
	busy   bool
	not    time.Time // not before
	fails  int
	epoch  int                // of the request under way; older answers are dropped
	cancel context.CancelFunc // of the request under way
	acked  bool               // ask: whether the host had acknowledged when it was asked
	grace  int64              // close: what the request under way says
	close  wire.Close         // close: what the next request says
}

// answer is what a request brought.
type answer struct {
	epoch int
	event process.Event
	err   error // for evidence and pauses; the event says what it means
}

// want notes the effects of a step; schedule carries them out.
func (o *owner) want(effects []process.Effect) {
	for _, e := range effects {
		switch e := e.(type) {
		case process.StartHost:
			o.lanes[laneStart].wanted = true
		case process.AskHost:
			o.wantAsk()
		case process.CloseHost:
			l := &o.lanes[laneClose]
			l.close = wire.Close{Reason: e.Reason, GraceMillis: e.GraceMillis}
			if l.busy && l.grace <= e.GraceMillis {
				l.wanted = true // should the one under way settle nothing
				continue
			}
			if l.busy { // less grace: say so at once
				l.cancel()
				l.busy, l.epoch, l.not = false, l.epoch+1, time.Time{}
			}
			l.wanted = true
		}
	}
	if o.rec.CloseAsked != nil || o.rec.Fence != "" {
		o.lanes[laneStart].wanted = false
	}
}

func (o *owner) wantAsk() { o.lanes[laneAsk].wanted = true }

// resume forgets pauses, because the host can be reached again.
func (o *owner) resume() {
	for k := range o.lanes {
		o.lanes[k].not, o.lanes[k].fails = time.Time{}, 0
	}
}

// schedule begins every request that is wanted and may go, and returns when to
// look again. While the host cannot be reached nothing goes; the target wakes
// the owner when it can.
func (o *owner) schedule(ctx context.Context, wg *sync.WaitGroup, at time.Time) time.Time {
	next := o.giveUp
	here := o.target.here()
	for k := range o.lanes {
		l := &o.lanes[k]
		if !l.wanted || l.busy || here == nil {
			continue
		}
		if laneKind(k) == laneAsk && o.lanes[laneStart].busy {
			continue // an answer from before the start would mislead
		}
		if l.not.After(at) {
			if next.IsZero() || l.not.Before(next) {
				next = l.not
			}
			continue
		}
		o.begin(ctx, wg, laneKind(k), here)
	}
	return next
}

func (o *owner) begin(ctx context.Context, wg *sync.WaitGroup, k laneKind, here *link) {
	l := &o.lanes[k]
	ctx, cancel := context.WithCancel(ctx)
	l.wanted, l.busy, l.cancel, l.acked, l.grace = false, true, cancel, lifeOf(o.rec).Acked(), l.close.GraceMillis
	rec, epoch, closing := o.rec, l.epoch, l.close
	wg.Go(func() {
		defer cancel()
		a := speak(ctx, k, here, rec, closing)
		a.epoch = epoch
		o.post(func(in *inbox) {
			if old := in.answers[k]; old == nil || old.epoch <= epoch {
				in.answers[k] = &a
			}
		})
	})
}

// speak sends one request to the host and says what its answer means.
func speak(ctx context.Context, k laneKind, here *link, rec store.Process, closing wire.Close) answer {
	hostID, bootID := here.info.HostID, here.info.BootID
	if hostID != rec.HostID {
		return answer{event: process.Gone{HostID: hostID, BootID: bootID}}
	}
	var st wire.ProcState
	var err error
	switch k {
	case laneStart:
		var spec wire.ProcSpec
		if spec, err = specOf(rec); err == nil {
			st, err = here.client.Start(ctx, spec)
		}
		if refusal(err) {
			return answer{event: process.Refused{Detail: refusalText(err)}, err: err}
		}
	case laneAsk:
		st, err = here.client.Proc(ctx, rec.Handle)
	case laneClose:
		st, err = here.client.CloseProc(ctx, rec.Handle, closing)
	}
	if k != laneStart && errors.Is(err, host.ErrAnswered) && errdefs.Is(err, errdefs.NotFound) {
		return answer{event: process.Missing{HostID: hostID, BootID: bootID}}
	}
	if err == nil {
		var r process.Reported
		if r, err = reportOf(rec, hostID, bootID, st); err == nil {
			return answer{event: r}
		}
	}
	return answer{event: process.Lost{Detail: cut(err.Error())}, err: err}
}

// answered frees the lane and returns the event that the answer is, or nil.
func (o *owner) answered(k laneKind, a *answer) process.Event {
	l := &o.lanes[k]
	if a.epoch != l.epoch || !l.busy {
		return nil // given up on since
	}
	l.busy, l.cancel = false, nil
	l.epoch++
	if k == laneClose {
		o.stopTries++
	}
	if a.err != nil {
		o.lastError = cut(a.err.Error())
	}
	if r, ok := a.event.(process.Reported); ok {
		o.lastPhase = r.State.Phase
		if k == laneAsk {
			l.fails = 0
			return a.event
		}
	}
	// Whatever this lane is asked for next, it pauses: an answer that settles the
	// matter is followed by no request.
	l.not = time.Now().Add(pause(l.fails))
	l.fails++
	if _, missing := a.event.(process.Missing); missing && k == laneAsk && !l.acked && lifeOf(o.rec).Acked() {
		o.wantAsk() // the host took it on after it was asked
		return nil
	}
	return a.event
}

// pause doubles from firstPause to lastPause, with a quarter of jitter.
func pause(fails int) time.Duration {
	d := firstPause << min(fails, 20)
	if d > lastPause || d <= 0 {
		d = lastPause
	}
	return d - time.Duration(rand.Int64N(int64(d)/4+1))
}
