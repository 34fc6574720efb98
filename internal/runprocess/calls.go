package runprocess

import (
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Answer answers one process action of a worker. conn is the worker's connection and
// is only compared; plugin is what it registered as, and binding the context that
// was admitted for this message: nothing the worker sends says who it is. To a plugin
// that is not granted processes the action is unknown. Every other error has its code
// as data, in the SDK's shape of run API errors.
func (k *Keeper) Answer(ctx context.Context, conn any, plugin string, binding pluginwire.Context, action string, data json.RawMessage) (any, error) {
	if !k.Granted(plugin, binding) {
		return nil, pluginwire.UnknownAction(action)
	}
	out, err := k.answer(ctx, conn, binding, action, data)
	if err != nil {
		if errdefs.CodeOf(err) == errdefs.Internal && ctx.Err() == nil {
			k.log.Error("a process action failed", "action", action, "err", err)
		}
		return nil, told(action, err)
	}
	return out, nil
}

func (k *Keeper) answer(ctx context.Context, conn any, binding pluginwire.Context, action string, data json.RawMessage) (any, error) {
	p, err := decode(action, data)
	if err != nil {
		return nil, err
	}
	runID := p.text("run_id", 1, maxRunID)
	ask, within := p.request(action)
	if p.err != nil {
		return nil, p.err
	}
	poll := action == pluginwire.ActionReadRunProcess && within > otherWithin
	r, err := k.enter(conn, binding, runID, poll)
	if err != nil {
		return nil, err
	}
	defer k.leave(conn, r, poll)
	ctx, cancel := context.WithTimeoutCause(ctx, within, errdefs.New(errdefs.Unavailable, "the process broker did not answer within %s", within).WithNext("try again"))
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.ctx, func() { end(context.Cause(r.ctx)) })
	defer func() { stop(); end(nil) }()
	a, err := r.ready(ctx)
	if err == nil {
		var out any
		if out, err = ask(ctx, r, a); err == nil {
			return out, nil
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, r.ofBroker(err, a != nil && a.err == nil)
}

// request reads what an action asks for, and how long that may take.
func (p *payload) request(action string) (ask func(context.Context, *Run, *attempt) (any, error), within time.Duration) {
	switch action {
	case pluginwire.ActionOpenRunProcess:
		req, target := p.open()
		return func(ctx context.Context, r *Run, a *attempt) (any, error) {
			if target != "" && target != a.box.Target {
				return nil, errdefs.New(errdefs.NotFound, "no target %q is granted to this run", cut(target)).WithNext("leave target_ref out for the one that is")
			}
			r.k.mu.Lock()
			r.used = true
			if b := r.k.boxes[a.box.ID]; b != nil { // nil: the run has ended meanwhile
				b.used = true
			}
			r.k.mu.Unlock()
			out, err := a.calls.Open(ctx, req)
			return processOf(out), err
		}, openWithin
	case pluginwire.ActionWriteRunProcess:
		handle, offset, b, eof := p.text("handle", 1, maxName), p.number("offset", 0, 0, api.MaxOffset), p.data("data_base64"), p.truth("eof")
		if !p.has("offset") {
			p.fail("offset is missing")
		}
		return func(ctx context.Context, _ *Run, a *attempt) (any, error) {
			return a.calls.Write(ctx, handle, offset, b, eof)
		}, otherWithin
	case pluginwire.ActionReadRunProcess:
		handle, read := p.text("handle", 1, maxName), p.read()
		return func(ctx context.Context, r *Run, a *attempt) (any, error) {
			read.Ack = r.received(handle, read.Cursor)
			out, err := a.calls.Read(ctx, handle, read)
			if err != nil {
				return nil, err
			}
			if read.MaxBytes > 1 { // a read of one byte is how runners wait for news, not how they receive it
				r.handed(handle, read.Cursor, out.Next)
			}
			return outputOf(out), nil
		}, otherWithin + read.Wait
	case pluginwire.ActionGetRunProcess:
		name := p.name()
		return func(ctx context.Context, _ *Run, a *attempt) (any, error) {
			out, err := a.calls.Get(ctx, name)
			return processOf(out), err
		}, otherWithin
	default:
		name := p.name()
		req := api.CloseRequest{Reason: p.text("reason", 0, maxReason)}
		grace := defaultGrace
		if p.has("grace_ms") {
			ms := p.number("grace_ms", 0, 0, maxGrace.Milliseconds())
			req.GraceMillis, grace = &ms, time.Duration(ms)*time.Millisecond
		}
		return func(ctx context.Context, _ *Run, a *attempt) (any, error) {
			out, err := a.calls.Close(ctx, name, req)
			return closedOf(out), err
		}, closeWithin + grace
	}
}

// cursors are how far each reader of one log has been handed it without a gap from
// its beginning. A cursor that a reader comes back with is one that it received all
// bytes before, which the broker may then drop when the log is full. A read from
// anywhere else, such as one that waits at the end for the end, acknowledges nothing.
type cursors struct{ at []string }

// Bounds of what is remembered of a run's readers: beyond it, nothing is acknowledged.
const (
	maxReaders = 8
	maxLogs    = 256
)

func (r *Run) received(handle, cursor string) bool {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	c := r.read[handle]
	return cursor != "" && c != nil && slices.Contains(c.at, cursor)
}

func (r *Run) handed(handle, from, next string) {
	r.k.mu.Lock()
	defer r.k.mu.Unlock()
	c := r.read[handle]
	if c == nil {
		if from != "" || len(r.read) >= maxLogs {
			return
		}
		c = &cursors{}
		r.read[handle] = c
	}
	// The cursor stays, in case the answer is lost and the reader comes again.
	if from != "" && !slices.Contains(c.at, from) || slices.Contains(c.at, next) {
		return
	}
	if len(c.at) == maxReaders {
		c.at = slices.Delete(c.at, 0, 1)
	}
	c.at = append(c.at, next)
}
