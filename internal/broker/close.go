package broker

import (
	"context"
	"errors"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// fencedClose is how long a close of a fenced process waits for one more try.
const fencedClose = 10 * time.Second

// Close ends a process and answers when its whole tree is proven gone, with the
// receipt, or when the bounded time for that is over, with the fence that now
// stands (P4). It may be called in every state, any number of times, and at the
// same time: the first reason stands and the shortest grace counts. If ctx ends
// first the close goes on; call again to learn how it ended.
func (b *Broker) Close(ctx context.Context, p authz.Principal, handle string, req api.CloseRequest) (api.CloseResponse, error) {
	grace, reason, err := b.closing(req)
	if err != nil {
		return api.CloseResponse{}, err
	}
	rec, o, err := b.find(ctx, p, authz.ProcessClose, handle)
	if err != nil {
		return api.CloseResponse{}, err
	}
	return b.close(ctx, p.String(), rec, o, reason, grace)
}

// CloseByRequest closes the process of the caller's run with a request id. One
// that was never opened is recorded as never started, so that an open that is
// still on its way is refused when it comes.
func (b *Broker) CloseByRequest(ctx context.Context, p authz.Principal, req api.CloseByRequest) (api.CloseResponse, error) {
	grace, reason, err := b.closing(req.CloseRequest)
	if err != nil {
		return api.CloseResponse{}, err
	}
	if err := authz.Check(p, authz.ProcessCloseByRequest); err != nil {
		return api.CloseResponse{}, err
	}
	if err := ident.CheckName("request_id", req.RequestID); err != nil {
		return api.CloseResponse{}, err
	}
	rec, err := b.cfg.Store.ProcessByRequest(ctx, p.Scope(), p.Run, req.RequestID)
	if errdefs.Is(err, errdefs.NotFound) {
		rec, err = b.tombstone(ctx, p, req.RequestID, reason)
	}
	if err != nil {
		return api.CloseResponse{}, err
	}
	rec, o, err := b.find(ctx, p, authz.ProcessClose, rec.Handle)
	if err != nil {
		return api.CloseResponse{}, err
	}
	return b.close(ctx, p.String(), rec, o, reason, grace)
}

// closing checks what every close may say.
func (b *Broker) closing(req api.CloseRequest) (grace int64, reason string, err error) {
	grace = b.cfg.Limits.DefaultGrace.Milliseconds()
	if req.GraceMillis != nil {
		grace = *req.GraceMillis
	}
	if grace < 0 || grace > maxGrace.Milliseconds() {
		return 0, "", errdefs.New(errdefs.Invalid, "grace_ms is %d, the limits are 0 and %d", grace, maxGrace.Milliseconds()).With("limit", decimal(maxGrace.Milliseconds()))
	}
	if len(req.Reason) > maxText {
		return 0, "", errdefs.New(errdefs.Invalid, "reason has %d bytes, the limit is %d", len(req.Reason), maxText).With("limit", decimal(maxText))
	}
	return grace, cut(req.Reason), nil
}

// tombstone records that a request id must never start, or returns the record
// that an open made meanwhile.
func (b *Broker) tombstone(ctx context.Context, p authz.Principal, requestID, reason string) (store.Process, error) {
	run, err := b.cfg.Store.Run(ctx, p.Scope(), p.Run)
	if err != nil {
		return store.Process{}, err
	}
	at := now()
	life, _ := process.Step(process.Record{State: api.StateRequested, Cleanup: api.CleanupPending}, process.CloseAsked{Reason: reason}, at)
	rec := withLife(store.Process{
		Handle: secret.ID(ident.Process), RequestID: requestID, Workspace: run.Workspace, Run: run.ID, Target: run.Target, Box: run.Box,
		Generation: b.targetOf(run.Target).generation(), Created: at, CloseAsked: &at, LogGone: true,
	}, life, at)
	rec, _, err = b.cfg.Store.CreateProcess(ctx, rec, store.Capacity{Kept: b.cfg.Limits.kept()}, b.audit(p, run.Workspace, string(authz.ProcessCloseByRequest), rec.Handle,
		map[string]string{"request_id": requestID, "run": run.ID, "reason": reason}))
	return rec, err
}

func (b *Broker) close(ctx context.Context, actor string, rec store.Process, o *owner, reason string, grace int64) (api.CloseResponse, error) {
	if o == nil {
		return b.closed(ctx, rec, nil)
	}
	before := o.view.Load()
	o.wishClose(actor, reason, grace)
	bounded := ctx
	if rec.State == api.StateFenced {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, time.Duration(grace)*time.Millisecond+fencedClose)
		defer cancel()
	}
	v, err := o.wait(bounded, func(v *view) bool {
		if v.rec.State != api.StateFenced {
			return false
		}
		// One that was fenced before is tried once more, if its host is there.
		return rec.State != api.StateFenced || v.stopTries > before.stopTries || !o.canTry(v.rec)
	})
	switch {
	case err == nil:
		return b.closed(ctx, v.rec, v)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && v != nil:
		return b.closed(ctx, v.rec, v)
	case ctx.Err() != nil:
		return api.CloseResponse{}, errdefs.Wrap(err, errdefs.Cancelling, "the close of %s goes on, it is not proven yet", rec.Handle).
			WithNext("close it again to learn how it ended").With("handle", rec.Handle)
	}
	return api.CloseResponse{}, err
}

// canTry reports whether the host that keeps the process can be asked now.
func (o *owner) canTry(rec store.Process) bool {
	l := o.b.targetOf(rec.Target).here()
	return l != nil && l.info.HostID == rec.HostID
}

// closed is the answer for a process whose close has ended, one way or another.
func (b *Broker) closed(ctx context.Context, rec store.Process, v *view) (api.CloseResponse, error) {
	if rec.State == api.StateNeverStarted && rec.Receipt == "" {
		var err error
		if rec, err = b.receiptFor(ctx, rec); err != nil {
			return api.CloseResponse{}, err
		}
	}
	shaped, err := b.process(ctx, rec, v)
	if err != nil {
		return api.CloseResponse{}, err
	}
	out := api.CloseResponse{Quiescent: rec.Cleanup == api.CleanupQuiescent, Receipt: shaped.Receipt, Process: shaped}
	if rec.Fence != "" {
		f, err := b.cfg.Store.Fence(ctx, everything(), rec.Fence)
		if err != nil {
			return api.CloseResponse{}, err
		}
		shown := fenceOf(f)
		out.Fence = &shown
	}
	return out, nil
}

// receiptFor issues the receipt of a tombstone, which is created without one.
func (b *Broker) receiptFor(ctx context.Context, rec store.Process) (store.Process, error) {
	at := now()
	if rec.Closed != nil {
		at = *rec.Closed
	}
	r := b.sign(rec, wire.Proof{Method: process.MethodNeverStarted, EmptyAt: at})
	signed := rec
	signed.Receipt = r.ID
	version, err := b.cfg.Store.SaveProcess(ctx, signed, store.Change{Receipt: &store.Receipt{ID: r.ID, Handle: rec.Handle, Created: now(), Body: *r}})
	if errdefs.Is(err, errdefs.Conflict) {
		return b.load(ctx, rec.Handle) // somebody else did it
	}
	if err != nil {
		return rec, err
	}
	signed.Version = version
	return signed, nil
}
