package broker

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// saveTime bounds one commit. It is not cut short when the broker stops.
const saveTime = 15 * time.Second

// owner is the one goroutine that may change one process's record. Fields in the
// first group belong to it alone.
type owner struct {
	rec       store.Process
	lanes     [laneCount]lane
	giveUp    time.Time  // when a close without proof becomes a fence; zero: not closing
	lastPhase wire.Phase // of the host's last report, as evidence
	lastError string     // of the last failed request, as evidence
	stopTries int        // answers, or failures, of the close lane
	target    *target    // set when the record is known

	b      *Broker
	handle string
	view   atomic.Pointer[view]
	wake   chan struct{} // 1: something is in the inbox
	done   chan struct{} // closed when the goroutine is gone

	mu      sync.Mutex // guards the rest
	in      inbox
	changed chan struct{} // closed and replaced at each new view
}

// inbox holds what the owner has not looked at yet. It is bounded by its form:
// reports replace one another, wishes to close merge, each lane has one answer.
type inbox struct {
	report  *process.Reported
	ask     bool // the host's list lacks it, or its state should be looked at: ask
	again   bool // the host can be reached again: forget pauses
	close   *process.CloseAsked
	closer  string
	clear   *wish
	answers [laneCount]*answer
}

// view is what everybody else may read of a process. It is never changed.
type view struct {
	rec       store.Process
	receipt   *api.Receipt // set when it was issued by this owner
	fence     *store.Fence // set when it was raised by this owner
	heard     bool         // the host has been heard of it since this server started
	stopTries int
	err       error // the owner has stopped without having finished
}

// final: nothing changes any more.
func (v *view) final() bool {
	return v.rec.State == api.StateClosed || v.rec.State == api.StateNeverStarted
}

// own is the owner's life. known is its record if it was just created or loaded
// with no owner before; otherwise the ledger is asked. first is what to do about
// a record that was just created.
func (o *owner) own(ctx context.Context, known *store.Process, first []process.Effect) {
	var failed error
	var lanes sync.WaitGroup
	defer close(o.done)
	defer func() {
		o.b.ownerEnded(o, failed)
		if failed != nil {
			o.publish(&view{rec: o.rec, err: failed})
		}
		lanes.Wait()
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	if failed = o.takeUp(ctx, known, first); failed != nil || o.view.Load().final() {
		return
	}
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next := o.schedule(ctx, &lanes, time.Now())
		var tick <-chan time.Time
		if !next.IsZero() {
			timer.Reset(max(time.Until(next), 0))
			tick = timer.C
		}
		select {
		case <-ctx.Done():
			failed = errdefs.New(errdefs.Unavailable, "the server is stopping").WithNext("try again when it is up")
			return
		case <-o.wake:
		case <-tick:
		}
		timer.Stop()
		if failed = o.turn(ctx); failed != nil || o.view.Load().final() {
			return
		}
	}
}

// takeUp is what an owner does before its first turn. It is apart from own, whose
// stack waits with every idle process.
func (o *owner) takeUp(ctx context.Context, known *store.Process, first []process.Effect) error {
	if known == nil {
		rec, err := o.b.load(ctx, o.handle)
		if err != nil {
			return err
		}
		known = &rec
	}
	o.rec, o.target = *known, o.b.targetOf(known.Target)
	o.publish(&view{rec: o.rec})
	if o.view.Load().final() {
		return nil
	}
	if first == nil {
		first = process.Recover(lifeOf(o.rec))
	}
	o.rearm(time.Now())
	o.want(first)
	if o.rec.State == api.StateRequested {
		o.post(func(*inbox) {}) // a turn dispatches it
	}
	if o.target.generation() > o.rec.Generation && o.rec.CloseAsked == nil {
		o.wishClose(actorServer, "its target was changed", o.b.cfg.Limits.DefaultGrace.Milliseconds())
	}
	return nil
}

// turn takes everything from the inbox, and the time.
func (o *owner) turn(ctx context.Context) error {
	o.mu.Lock()
	in := o.in
	o.in = inbox{}
	o.mu.Unlock()

	if in.again {
		o.resume()
	}
	if in.ask {
		o.wantAsk()
	}
	if o.rec.State == api.StateRequested {
		if here := o.target.here(); here != nil {
			if err := o.learn(ctx, dispatchOf(here), wish{}); err != nil {
				return err
			}
		}
	}
	if in.close != nil {
		if err := o.learn(ctx, *in.close, wish{actor: in.closer}); err != nil {
			return err
		}
	}
	if in.report != nil {
		o.lastPhase = in.report.State.Phase
		if err := o.learn(ctx, *in.report, wish{}); err != nil {
			return err
		}
	}
	for k, a := range in.answers {
		if a == nil {
			continue
		}
		if e := o.answered(laneKind(k), a); e != nil {
			if err := o.learn(ctx, e, wish{}); err != nil {
				return err
			}
		}
	}
	if in.clear != nil {
		if err := o.learn(ctx, process.Cleared{}, *in.clear); err != nil {
			return err
		}
	}
	if !o.giveUp.IsZero() && !time.Now().Before(o.giveUp) {
		o.giveUp = time.Time{}
		detail := "the tree was not proven gone in time"
		if o.lastError != "" {
			detail += ": " + o.lastError
		}
		return o.learn(ctx, process.GaveUp{Detail: cut(detail)}, wish{})
	}
	return nil
}

// learn is the heart: what the event means is saved, then published, then acted
// upon. A failed save changes nothing and ends the owner.
func (o *owner) learn(ctx context.Context, e process.Event, w wish) error {
	old := o.view.Load()
	if old.final() {
		return nil
	}
	c := o.plan(e, w, now())
	v := &view{rec: c.rec, receipt: c.receipt, fence: old.fence, heard: old.heard, stopTries: o.stopTries}
	switch e.(type) {
	case process.Reported, process.Missing, process.Gone, process.Refused:
		v.heard = true
	}
	if c.fence != nil {
		v.fence = c.fence
	}
	if c.save {
		save, cancel := context.WithTimeout(context.WithoutCancel(ctx), saveTime)
		version, err := o.b.cfg.Store.SaveProcess(save, c.rec, c.change)
		cancel()
		if err != nil {
			o.b.log.Error("the record of a process could not be saved; its owner stops and begins again from the ledger",
				"handle", o.handle, "error", err)
			return errdefs.Wrap(err, errdefs.Unavailable, "the record of %s cannot be saved now", o.handle).
				WithNext("try again; nothing was done without being recorded")
		}
		c.rec.Version = version
		v.rec = c.rec
	}
	if c.rec.CloseAsked != nil && (o.rec.CloseAsked == nil || c.rec.GraceMillis != o.rec.GraceMillis) {
		o.rec = c.rec
		o.rearm(time.Now())
	}
	o.rec = c.rec
	if o.rec.State != api.StateClosing {
		o.giveUp = time.Time{}
	}
	o.b.logChange(old.rec, v)
	o.publish(v)
	o.want(c.later)
	return nil
}

// rearm sets the end of the bounded time for a close, from now on.
func (o *owner) rearm(from time.Time) {
	if o.rec.State == api.StateClosing {
		o.giveUp = from.Add(time.Duration(o.rec.GraceMillis)*time.Millisecond + o.b.cfg.Limits.ProofWait)
	}
}

func (o *owner) publish(v *view) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.view.Store(v)
	close(o.changed)
	o.changed = make(chan struct{})
}

// post puts something into the inbox.
func (o *owner) post(f func(*inbox)) {
	o.mu.Lock()
	f(&o.in)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// home is the name of the process's target, "" while the ledger is being read.
func (o *owner) home() string {
	if v := o.view.Load(); v != nil {
		return v.rec.Target
	}
	return ""
}

func (o *owner) report(r process.Reported) {
	o.post(func(in *inbox) {
		if old := in.report; old == nil || !newer(*old, r) {
			in.report = &r
		}
	})
}

// newer reports whether a was said after b, of two reports of one host in one
// boot: an answer and the watch may overtake each other.
func newer(a, b process.Reported) bool {
	if a.HostID != b.HostID || a.BootID != b.BootID {
		return false
	}
	return a.State.Rev > b.State.Rev || a.State.Rev == b.State.Rev && a.State.Log.Next > b.State.Log.Next
}

// wishClose merges with a wish not looked at yet: the first reason, the shorter grace.
func (o *owner) wishClose(actor, reason string, grace int64) {
	o.post(func(in *inbox) {
		if in.close == nil {
			in.close, in.closer = &process.CloseAsked{Reason: reason, GraceMillis: grace}, actor
			return
		}
		in.close = &process.CloseAsked{Reason: in.close.Reason, GraceMillis: min(grace, in.close.GraceMillis)}
	})
}

// wait returns the first view for which ok holds, now or later, or the last view
// and why there will be none: ctx ended, or the owner stopped.
func (o *owner) wait(ctx context.Context, ok func(*view) bool) (*view, error) {
	for {
		o.mu.Lock()
		v, changed := o.view.Load(), o.changed
		o.mu.Unlock()
		if v != nil {
			if v.err != nil {
				return v, v.err
			}
			if ok(v) {
				return v, nil
			}
			if v.final() {
				return v, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return v, ctx.Err()
		}
	}
}
