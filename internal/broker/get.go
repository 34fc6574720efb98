package broker

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/store"
)

// correctTime bounds how long a get waits for the host before it answers from
// the ledger alone.
const correctTime = 2 * time.Second

// Get returns a process: its record, corrected by its host where that answers.
func (b *Broker) Get(ctx context.Context, p authz.Principal, handle string) (api.Process, error) {
	rec, o, err := b.find(ctx, p, authz.ProcessRead, handle)
	if err != nil {
		return api.Process{}, err
	}
	return b.got(ctx, rec, o)
}

// GetByRequest is Get for the process of the caller's run with a request id.
func (b *Broker) GetByRequest(ctx context.Context, p authz.Principal, requestID string) (api.Process, error) {
	if err := authz.Check(p, authz.ProcessReadByRequest); err != nil {
		return api.Process{}, err
	}
	if err := ident.CheckName("request_id", requestID); err != nil {
		return api.Process{}, err
	}
	rec, err := b.cfg.Store.ProcessByRequest(ctx, p.Scope(), p.Run, requestID)
	if errdefs.Is(err, errdefs.NotFound) {
		return api.Process{}, errdefs.New(errdefs.NotFound, "the run never opened a request %s", requestID).
			WithNext("open it; or close it by this id so that it can never start")
	}
	if err != nil {
		return api.Process{}, err
	}
	return b.Get(ctx, p, rec.Handle)
}

func (b *Broker) got(ctx context.Context, rec store.Process, o *owner) (api.Process, error) {
	if o == nil {
		return b.process(ctx, rec, nil)
	}
	o.correct(ctx)
	v := o.view.Load()
	if v.err != nil {
		return api.Process{}, v.err
	}
	return b.process(ctx, v.rec, v)
}

// correct asks the host for news and lets the owner take it in, as far as that
// goes within correctTime.
func (o *owner) correct(ctx context.Context) {
	v := o.view.Load()
	if v.err != nil || v.final() || !lifeOf(v.rec).Acked() {
		return // the owner is asking already, or there is nothing to ask about
	}
	l, err := o.b.linkTo(v.rec)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, correctTime)
	defer cancel()
	st, err := l.client.Proc(ctx, o.handle)
	if err != nil {
		if errors.Is(err, host.ErrAnswered) && errdefs.Is(err, errdefs.NotFound) {
			o.post(func(in *inbox) { in.ask = true })
		}
		return
	}
	r, err := reportOf(v.rec, l.info.HostID, l.info.BootID, st)
	if err != nil {
		return
	}
	// Another change may be published first; what counts is that this one is in.
	before := o.view.Load()
	o.report(r)
	_, _ = o.wait(ctx, func(now *view) bool { return now != before && now.rec.Log.Next >= st.Log.Next })
}

// process is a record as callers see it. v, if given, brings what the record's
// owner knows beside it.
func (b *Broker) process(ctx context.Context, rec store.Process, v *view) (api.Process, error) {
	var receipt *api.Receipt
	if v != nil {
		receipt = v.receipt
	}
	if receipt == nil && rec.Receipt != "" {
		kept, err := b.cfg.Store.Receipt(ctx, rec.Handle)
		if err != nil {
			return api.Process{}, err
		}
		receipt = &kept.Body
	}
	return shape(rec, receipt)
}

func shape(rec store.Process, receipt *api.Receipt) (api.Process, error) {
	spec, err := specOf(rec)
	if err != nil {
		return api.Process{}, err
	}
	return api.Process{
		Handle: rec.Handle, RequestID: rec.RequestID, Workspace: rec.Workspace, Run: rec.Run,
		Target: rec.Target, Box: rec.Box, Generation: rec.Generation, State: rec.State,
		Argv: append([]string{}, spec.Argv...), Cwd: spec.Cwd, PTY: spec.PTY != nil,
		Limits: api.Limits{DeadlineMillis: spec.DeadlineMillis, SpoolBytes: spec.SpoolBytes, Overflow: spec.Overflow,
			MemoryBytes: spec.MemoryBytes, Pids: spec.Pids},
		IO:        IOLimits(),
		CreatedAt: rec.Created, StartedAt: rec.Started, ExitedAt: rec.Exited, ClosedAt: rec.Closed,
		Exit: rec.Exit, Cleanup: rec.Cleanup, Reason: rec.Reason, Fence: rec.Fence, Receipt: receipt,
		Stdin: rec.Stdin, Log: rec.Log, Cursor: cursorAt(rec.Handle, rec.Log.Next),
	}, nil
}

// ListQuery selects processes.
type ListQuery struct {
	Run   string // "" is every run in the caller's scope
	Box   string
	Live  bool // only those that may be running
	Limit int  // 1 to 1000; 0 is 100
	After string
}

// refreshTime bounds how long a list waits for hosts in all, refreshLanes how many of
// its processes are asked about at the same time.
const (
	refreshTime  = time.Second
	refreshLanes = 16
)

// refresh lets the owners of live processes hear how far those are. What the
// hosts do not say before ctx ends is listed as it was last known.
func (b *Broker) refresh(ctx context.Context, recs []store.Process) {
	var lanes errgroup.Group
	lanes.SetLimit(refreshLanes)
	for _, rec := range recs {
		if o := b.owner(rec.Handle); o != nil {
			lanes.Go(func() error {
				if ctx.Err() == nil {
					o.correct(ctx)
				}
				return nil
			})
		}
	}
	_ = lanes.Wait()
}

// List returns a page of processes in the caller's scope, newest first, without
// their receipts and with long arguments cut, which Get has. Live ones are corrected by their hosts where
// those answer at once.
func (b *Broker) List(ctx context.Context, p authz.Principal, q ListQuery) (api.List[api.Process], error) {
	out := api.List[api.Process]{Items: []api.Process{}}
	if err := authz.Check(p, authz.ProcessList); err != nil {
		return out, err
	}
	page, err := pageOf(q.Limit, q.After)
	if err != nil {
		return out, err
	}
	scope := p.Scope()
	if q.Run != "" && q.Run != scope.Run {
		run, err := b.cfg.Store.Run(ctx, scope, q.Run)
		if err != nil {
			return out, err
		}
		scope = authz.Scope{Workspace: run.Workspace, Run: run.ID}
	}
	hosts, cancel := context.WithTimeout(ctx, refreshTime)
	defer cancel()
	f := store.ProcessFilter{Box: q.Box, Live: q.Live, Page: page}
	for more := true; more && len(out.Items) < page.Limit; {
		f.Page.Limit = min(pieceOf, page.Limit-len(out.Items))
		recs, err := b.cfg.Store.Processes(ctx, scope, f)
		if err != nil {
			return out, err
		}
		b.refresh(hosts, recs)
		for _, rec := range recs {
			if o := b.owner(rec.Handle); o != nil {
				// The owner may know more than was worth saving.
				if v := o.view.Load(); v != nil && v.err == nil {
					rec = v.rec
				}
			}
			one, err := shape(rec, nil)
			if err != nil {
				return out, err
			}
			one.Argv = brief(one.Argv)
			out.Items = append(out.Items, one)
		}
		if more = len(recs) == f.Page.Limit; more {
			f.Page.After = recs[len(recs)-1].Handle
		}
	}
	if len(out.Items) == page.Limit {
		out.Next = out.Items[page.Limit-1].Handle
	}
	return out, nil
}

// pieceOf is how many records are read at once where arguments come along, each
// of which may have a mebibyte.
const pieceOf = 32

// walk calls f for every process in the scope, newest first, holding few of them
// in memory.
func (b *Broker) walk(ctx context.Context, scope authz.Scope, filter store.ProcessFilter, f func(store.Process) error) error {
	for filter.Page.Limit = pieceOf; ; {
		recs, err := b.cfg.Store.Processes(ctx, scope, filter)
		if err != nil {
			return err
		}
		for _, rec := range recs {
			if err := f(rec); err != nil {
				return err
			}
		}
		if len(recs) < filter.Page.Limit {
			return nil
		}
		filter.Page.After = recs[len(recs)-1].Handle
	}
}

// maxBrief is how many bytes of arguments a process has in a list.
const maxBrief = 1024

// brief cuts arguments to what a list shows; what is left out is an ellipsis.
func brief(argv []string) []string {
	left := maxBrief
	for i, a := range argv {
		if len(a) > left {
			return append(append([]string{}, argv[:i]...), cutTo(a, left))
		}
		if left -= len(a) + 1; left <= 0 && i+1 < len(argv) {
			return append(append([]string{}, argv[:i+1]...), "…")
		}
	}
	return argv
}

func pageOf(limit int, after string) (store.Page, error) {
	if limit == 0 {
		limit = 100
	}
	if limit < 1 || limit > 1000 {
		return store.Page{}, errdefs.New(errdefs.Invalid, "a page of %d is not possible, the limits are 1 and 1000", limit)
	}
	return store.Page{Limit: limit, After: after}, nil
}
