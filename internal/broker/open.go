package broker

import (
	"context"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// maxSpec bounds the recorded arguments, environment included, as JSON. It is
// above what the bounds of argv and env allow for ordinary text; only text that
// is mostly control characters grows beyond it when encoded.
const maxSpec = 3 << 20

// Open starts a process in the run's box and answers once the host keeps it, or
// has definitely refused it. Everything but the command comes from the
// principal's run (P6). Repeating a request with the same request_id and
// arguments gives the same handle, or the same refusal, for as long as the run's
// record is kept; with other arguments it is a conflict (P1).
//
// Errors: invalid, conflict, fenced, cancelling (a close in the box is not
// proven yet), exhausted, unavailable (nothing was started), indeterminate (not
// known yet: repeat the request).
func (b *Broker) Open(ctx context.Context, p authz.Principal, req api.OpenRequest) (api.Process, error) {
	if err := authz.Check(p, authz.ProcessOpen); err != nil {
		return api.Process{}, err
	}
	req, err := checkOpen(req, b.cfg.Limits)
	if err != nil {
		return api.Process{}, err
	}
	run, err := b.cfg.Store.Run(ctx, p.Scope(), p.Run)
	if err != nil {
		return api.Process{}, err
	}
	if req.Box != "" && req.Box != run.Box {
		return api.Process{}, errdefs.New(errdefs.NotFound, "the run has no box %s", cutTo(req.Box, ident.MaxName)).
			WithNext("leave box out: a run has one box, the one it was created in")
	}
	digest := digestOf(req, run.Box)
	rec, effects, err := b.intent(ctx, req, run, digest)
	created := false
	if err == nil {
		capacity := store.Capacity{PerTarget: b.cfg.Limits.PerTarget, PerWorkspace: b.cfg.Limits.PerWorkspace, PerRun: b.cfg.Limits.PerRun, Kept: b.cfg.Limits.kept()}
		rec, created, err = b.cfg.Store.CreateProcess(ctx, rec, capacity, b.audit(p, run.Workspace, string(authz.ProcessOpen), rec.Handle,
			map[string]string{"request_id": rec.RequestID, "run": run.ID, "box": run.Box}))
	}
	if err != nil {
		// What was recorded before is answered from its record, whatever stands
		// against something new now.
		old, oldErr := b.cfg.Store.ProcessByRequest(ctx, p.Scope(), run.ID, req.RequestID)
		if oldErr != nil {
			return api.Process{}, err
		}
		return b.reopened(ctx, old, digest)
	}
	if !created {
		return b.reopened(ctx, rec, digest)
	}
	o, err := b.created(rec, effects)
	if err != nil {
		return api.Process{}, err
	}
	return b.opened(ctx, o)
}

// intent is the record of a process that is about to be told to its host, and
// what to do once it is saved.
func (b *Broker) intent(ctx context.Context, req api.OpenRequest, run store.Run, digest [32]byte) (store.Process, []process.Effect, error) {
	at := now()
	t := b.targetOf(run.Target)
	rec := store.Process{
		Handle: secret.ID(ident.Process), RequestID: req.RequestID, Digest: digest,
		Workspace: run.Workspace, Run: run.ID, Target: run.Target, Box: run.Box,
		Generation: t.generation(), State: api.StateRequested, Cleanup: api.CleanupPending, Created: at,
		Stdin: api.StdinState{Window: StdinWindow},
	}
	if !run.Expires.After(at) {
		return rec, nil, errdefs.New(errdefs.Conflict, "the run expired at %s", run.Expires.Format("2006-01-02 15:04:05 MST")).WithNext("create a new run")
	}
	here, err := t.reach()
	if err != nil {
		return rec, nil, err
	}
	models, err := b.modelEnv(ctx, run, here)
	if err != nil {
		return rec, nil, err
	}
	if rec.Spec, err = json.Marshal(specFor(rec.Handle, run.Box, req, models, b.cfg.Limits)); err != nil {
		return rec, nil, errdefs.Wrap(err, errdefs.Internal, "the arguments cannot be recorded")
	}
	if len(rec.Spec) > maxSpec {
		return rec, nil, errdefs.New(errdefs.Invalid, "argv and env have %d bytes as they are recorded, the limit is %d", len(rec.Spec), maxSpec).
			WithNext("put long values into a file").With("limit", decimal(maxSpec))
	}
	life, effects := process.Step(lifeOf(rec), dispatchOf(here), at)
	return withLife(rec, life, at), effects, nil
}

// wasOpened reports whether an open made the record: a close of an unknown request
// id makes one as well, of a command that nobody knows.
func wasOpened(rec store.Process) bool { return rec.Digest != [32]byte{} }

// reopened answers a request id that is recorded already.
func (b *Broker) reopened(ctx context.Context, kept store.Process, digest [32]byte) (api.Process, error) {
	if !wasOpened(kept) {
		return api.Process{}, errdefs.New(errdefs.Conflict, "request %s was closed before it was opened, so it never starts", kept.RequestID).
			WithNext("open with a new request_id").With("handle", kept.Handle)
	}
	if kept.Digest != digest {
		return api.Process{}, errdefs.New(errdefs.Conflict, "request %s was opened with other arguments", kept.RequestID).
			WithNext("use a new request_id for another command").With("handle", kept.Handle)
	}
	if kept.State == api.StateClosed || kept.State == api.StateNeverStarted {
		if err := refusedError(kept); err != nil {
			return api.Process{}, err
		}
		return b.process(ctx, kept, nil)
	}
	o, err := b.adopt(kept.Handle)
	if err != nil {
		return api.Process{}, err
	}
	return b.opened(ctx, o)
}

// opened waits until it is known whether the host keeps the process.
func (b *Broker) opened(ctx context.Context, o *owner) (api.Process, error) {
	bounded, cancel := context.WithTimeout(ctx, b.cfg.Limits.OpenWait)
	defer cancel()
	v, err := o.wait(bounded, func(v *view) bool {
		switch v.rec.State {
		case api.StateRequested, api.StateUnknown:
			return false
		case api.StateStarting:
			return lifeOf(v.rec).Acked()
		case api.StateClosing:
			return !isRefusal(v.rec.Reason) // a refusal is an answer once its id is forbidden
		}
		return true
	})
	if err != nil {
		if errdefs.Is(err, errdefs.Unavailable) {
			return api.Process{}, again(err, o.handle)
		}
		return api.Process{}, errdefs.Wrap(err, errdefs.Indeterminate, "the host has not said yet whether it started the process").
			WithNext("repeat the same request, or get it by its request_id").With("handle", o.handle)
	}
	if err := refusedError(v.rec); err != nil {
		return api.Process{}, err
	}
	return b.process(ctx, v.rec, v)
}

// again says that repeating the open is the way on: it cannot start twice.
func again(err error, handle string) error {
	e, ok := err.(*errdefs.Error)
	if !ok {
		return err
	}
	return e.WithNext("repeat the same request with the same request_id: it starts once at most").With("handle", handle)
}
