package broker

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// Bounds of a run.
const (
	maxModels  = 16
	firstPort  = 20_000 // ports of the gateway inside a box are drawn from here …
	lastPort   = 32_000 // … to here: below the kernel's own range, above the usual servers
	portTries  = 3
	finishTime = 15 * time.Minute // one attempt to finish a run: the longest grace and its proof
	closeLanes = 32               // processes of one run that are closed at the same time
)

// CreateRun begins a run in a box of the caller's workspace and returns its
// token, which is shown this once. A run with models has the box to itself.
// Errors: invalid, not_found (box, model provider), conflict (the box is not
// ready or is taken), unavailable.
func (b *Broker) CreateRun(ctx context.Context, p authz.Principal, req api.RunRequest) (api.RunCreated, error) {
	if err := authz.Check(p, authz.RunCreate); err != nil {
		return api.RunCreated{}, err
	}
	ttl := b.cfg.Limits.DefaultRunTTL
	if most := b.cfg.Limits.MaxRunTTL.Milliseconds(); req.TTLMillis < 0 || req.TTLMillis > most {
		return api.RunCreated{}, errdefs.New(errdefs.Invalid, "ttl_ms is %d, the limits are 0 and %d", req.TTLMillis, most).With("limit", decimal(most))
	}
	if req.TTLMillis > 0 {
		ttl = time.Duration(req.TTLMillis) * time.Millisecond
	}
	if !ident.Valid(ident.Box, req.Box) {
		return api.RunCreated{}, errdefs.New(errdefs.NotFound, "there is no box %s", cutTo(req.Box, ident.MaxName)).WithNext("acquire one first")
	}
	box, err := b.cfg.Store.Box(ctx, p.Scope(), req.Box)
	if err != nil {
		return api.RunCreated{}, err
	}
	if err := b.checkModels(req.Models); err != nil {
		return api.RunCreated{}, err
	}
	for try := 1; ; try++ {
		created, again, err := b.createRun(ctx, p, req, box, ttl)
		if err == nil || !again || try == portTries {
			return created, err
		}
	}
}

func (b *Broker) checkModels(models []string) error {
	if len(models) == 0 {
		return nil
	}
	if len(models) > maxModels {
		return errdefs.New(errdefs.Invalid, "%d models are named, the limit is %d", len(models), maxModels).With("limit", decimal(maxModels))
	}
	for i, m := range models {
		if err := ident.CheckName("the name of a model provider", m); err != nil {
			return err
		}
		if slices.Contains(models[:i], m) {
			return errdefs.New(errdefs.Invalid, "the model provider %q is named twice", m)
		}
	}
	if b.cfg.Gateway == nil {
		return errdefs.New(errdefs.NotFound, "this server has no model providers").WithNext("configure one, or create the run without models")
	}
	return b.cfg.Gateway.Check(models)
}

// createRun records the run, then opens its routes: the right to the box is
// checked before any listener exists (P11). again says that another port may work.
func (b *Broker) createRun(ctx context.Context, p authz.Principal, req api.RunRequest, box store.Box, ttl time.Duration) (out api.RunCreated, again bool, err error) {
	at := now()
	id := secret.ID(ident.Run)
	token, hash := secret.NewKey(id)
	run := store.Run{
		ID: id, Workspace: box.Workspace, Box: box.ID, Target: box.Target, State: api.RunActive, TokenHash: hash,
		Exclusive: len(req.Models) > 0, AutoFinish: req.AutoFinish, Installation: req.Installation, Created: at, Expires: at.Add(ttl).Truncate(time.Microsecond),
	}
	port := firstPort + rand.IntN(lastPort-firstPort)
	for _, m := range req.Models {
		run.Models = append(run.Models, store.ModelGrant{Provider: m, Port: port})
	}
	var here *link
	if len(run.Models) > 0 {
		if here, err = b.targetOf(box.Target).reach(); err != nil {
			return out, false, err
		}
	}
	if err := b.cfg.Store.CreateRun(ctx, run, store.Capacity{PerWorkspace: b.cfg.Limits.RunsPerWorkspace, Kept: b.cfg.Limits.kept()}); err != nil {
		return out, false, err
	}
	if here != nil {
		routes, err := b.openRoutes(ctx, run, here)
		if err == nil && slices.ContainsFunc(routes, func(r gateway.Route) bool { return r.Port != port }) {
			// A restart could not restore another port than the recorded one.
			again, err = true, errdefs.New(errdefs.Unavailable, "port %d in the box is taken by a process of an earlier run", port).
				WithNext("close what still runs in the box, or acquire a new one")
		}
		if err != nil {
			b.abandon(ctx, run)
			return out, again, err
		}
	}
	if err := b.cfg.Store.AppendAudit(ctx, b.audit(p, run.Workspace, string(authz.RunCreate), run.ID, runDetail(run))); err != nil {
		b.abandon(ctx, run)
		return out, false, err
	}
	// From here on nothing may fail: a run whose token nobody sees would keep its box.
	return api.RunCreated{Run: b.runOf(run), Token: token}, false, nil
}

// runDetail is what the audit record says of a run.
func runDetail(r store.Run) map[string]string {
	detail := map[string]string{"box": r.Box}
	if i := r.Installation; i != nil {
		detail["installation"] = i.InstallationUUID
		detail["installation_workspace"] = i.WorkspaceUUID
		detail["artifact_digest"] = i.ArtifactDigest
	}
	return detail
}

// abandon takes back a run whose token nobody has seen. What fails here is
// finished by the sweep when the run expires.
func (b *Broker) abandon(ctx context.Context, run store.Run) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if _, err := b.finish(ctx, run, actorServer, "it could not be begun", 0); err != nil {
		b.log.Warn("a run that could not be begun was not finished", "run", run.ID, "error", err)
	}
}

// Run returns one run with the use of its models.
func (b *Broker) Run(ctx context.Context, p authz.Principal, id string) (api.Run, error) {
	run, err := b.findRun(ctx, p, authz.RunRead, id)
	if err != nil {
		return api.Run{}, err
	}
	return b.run(ctx, run)
}

func (b *Broker) findRun(ctx context.Context, p authz.Principal, action authz.Action, id string) (store.Run, error) {
	if err := authz.Check(p, action); err != nil {
		return store.Run{}, err
	}
	if !ident.Valid(ident.Run, id) {
		return store.Run{}, errdefs.New(errdefs.NotFound, "there is no run %s", cutTo(id, ident.MaxName))
	}
	return b.cfg.Store.Run(ctx, p.Scope(), id)
}

// Runs returns a page of the runs in the caller's scope, newest first.
func (b *Broker) Runs(ctx context.Context, p authz.Principal, page store.Page) (api.List[api.Run], error) {
	out := api.List[api.Run]{Items: []api.Run{}}
	if err := authz.Check(p, authz.RunList); err != nil {
		return out, err
	}
	page, err := pageOf(page.Limit, page.After)
	if err != nil {
		return out, err
	}
	runs, err := b.cfg.Store.Runs(ctx, p.Scope(), page)
	if err != nil {
		return out, err
	}
	for _, r := range runs {
		shown, err := b.run(ctx, r)
		if err != nil {
			return out, err
		}
		out.Items = append(out.Items, shown)
	}
	if len(runs) == page.Limit {
		out.Next = runs[len(runs)-1].ID
	}
	return out, nil
}

// runOf is a run as it is shown, without the count of its processes.
func (b *Broker) runOf(r store.Run) api.Run {
	out := api.Run{ID: r.ID, Workspace: r.Workspace, Box: r.Box, State: r.State, AutoFinish: r.AutoFinish, Installation: r.Installation, CreatedAt: r.Created, ExpiresAt: r.Expires, FinishedAt: r.Finished}
	routes := b.routesOf(r.ID)
	for _, m := range r.Models {
		route := api.ModelRoute{Provider: m.Provider, Env: map[string]string{}, Requests: m.Requests, BytesUp: m.BytesUp, BytesDown: m.BytesDown}
		if i := slices.IndexFunc(routes, func(x gateway.Route) bool { return x.Provider == m.Provider }); i >= 0 {
			route.BaseURL, route.Env = routes[i].BaseURL, routes[i].Env
		}
		out.Models = append(out.Models, route)
	}
	return out
}

func (b *Broker) run(ctx context.Context, r store.Run) (api.Run, error) {
	out := b.runOf(r)
	if r.State != api.RunFinished {
		live, err := b.cfg.Store.Processes(ctx, authz.Scope{Workspace: r.Workspace, Run: r.ID}, store.ProcessFilter{Live: true, NoSpec: true, Page: store.Page{Limit: 1000}})
		if err != nil {
			return out, err
		}
		out.Processes = len(live)
	}
	return out, nil
}

// FinishRun ends a run: its rights are revoked, calls in flight included (P8),
// then its processes are closed, then it is finished. It may be repeated, and
// then tells how it ended. If ctx ends first the finishing goes on.
func (b *Broker) FinishRun(ctx context.Context, p authz.Principal, id string, req api.FinishRequest) (api.FinishResponse, error) {
	grace, reason, err := b.closing(api.CloseRequest(req))
	if err != nil {
		return api.FinishResponse{}, err
	}
	run, err := b.findRun(ctx, p, authz.RunFinish, id)
	if err != nil {
		return api.FinishResponse{}, err
	}
	if run.State == api.RunActive {
		if err := b.cfg.Store.AppendAudit(ctx, b.audit(p, run.Workspace, string(authz.RunFinish), run.ID, map[string]string{"reason": reason})); err != nil {
			return api.FinishResponse{}, err
		}
	}
	if reason == "" {
		reason = "its run was finished"
	}
	if run.State != api.RunFinished {
		if run, err = b.finish(ctx, run, p.String(), reason, grace); err != nil {
			return api.FinishResponse{}, err
		}
	}
	return b.finished(ctx, run)
}

// finishing is one attempt to finish a run, shared by all who want it.
type finishing struct {
	done chan struct{}
	run  store.Run
	err  error
}

// finish runs or joins an attempt. The attempt outlives ctx.
func (b *Broker) finish(ctx context.Context, run store.Run, actor, reason string, grace int64) (store.Run, error) {
	b.mu.Lock()
	if !b.running {
		b.mu.Unlock()
		return run, stopping()
	}
	f := b.ending[run.ID]
	if f == nil {
		f = &finishing{done: make(chan struct{})}
		b.ending[run.ID] = f
		b.wg.Go(func() {
			ctx, cancel := context.WithTimeout(b.ctx, finishTime)
			defer cancel()
			f.run, f.err = b.attempt(ctx, run, actor, reason, grace)
			b.mu.Lock()
			delete(b.ending, run.ID)
			b.mu.Unlock()
			close(f.done)
		})
	} else {
		b.mu.Unlock()
		// A shorter grace counts for an attempt that is under way.
		for _, o := range b.ownersOf(func(v *view) bool { return v.rec.Run == run.ID }) {
			o.wishClose(actor, reason, grace)
		}
		return f.wait(ctx, run)
	}
	b.mu.Unlock()
	return f.wait(ctx, run)
}

func (f *finishing) wait(ctx context.Context, run store.Run) (store.Run, error) {
	select {
	case <-f.done:
		return f.run, f.err
	case <-ctx.Done():
		return run, errdefs.Wrap(ctx.Err(), errdefs.Cancelling, "the run is being finished, not all of its processes are proven gone yet").
			WithNext("finish it again to learn how it ended")
	}
}

func (b *Broker) attempt(ctx context.Context, run store.Run, actor, reason string, grace int64) (store.Run, error) {
	run, err := b.cfg.Store.SetRunState(ctx, run.ID, api.RunFinishing, now())
	if err != nil || run.State == api.RunFinished {
		return run, err
	}
	if b.cfg.Gateway != nil && len(run.Models) > 0 {
		if err := b.cfg.Gateway.CloseRun(ctx, run.ID); err != nil {
			return run, err
		}
		b.setRoutes(run.ID, nil)
	}
	if err := b.closeAll(ctx, run, actor, reason, grace); err != nil {
		return run, err
	}
	return b.cfg.Store.SetRunState(ctx, run.ID, api.RunFinished, now())
}

// closeAll closes every live process of a run. Since the run is not active any
// more no new one can appear. Fenced ones stay: their fence outlives the run.
func (b *Broker) closeAll(ctx context.Context, run store.Run, actor, reason string, grace int64) error {
	live, err := b.cfg.Store.Processes(ctx, authz.Scope{Workspace: run.Workspace, Run: run.ID}, store.ProcessFilter{Live: true, NoSpec: true, Page: store.Page{Limit: 1000}})
	if err != nil || len(live) == 0 {
		return err
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, closeLanes)
	errs := make([]error, len(live))
	for i, rec := range live {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			o, err := b.adopt(rec.Handle)
			if err == nil {
				_, err = o.wait(ctx, func(*view) bool { return true })
			}
			if err == nil {
				_, err = b.close(ctx, actor, rec, o, reason, grace)
			}
			errs[i] = err
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	if len(live) == 1000 {
		return b.closeAll(ctx, run, actor, reason, grace)
	}
	return nil
}

// maxFinished bounds the processes that the answer to a finish lists. Those that
// are not proven gone are listed in any case.
const maxFinished = 1000

// finished tells how the processes of a run ended: whether all are gone, however
// many there were, and of the newest how each did.
func (b *Broker) finished(ctx context.Context, run store.Run) (api.FinishResponse, error) {
	shown, err := b.run(ctx, run)
	if err != nil {
		return api.FinishResponse{}, err
	}
	out := api.FinishResponse{Run: shown, Quiescent: true, Processes: []api.CloseResponse{}}
	err = b.walk(ctx, authz.Scope{Workspace: run.Workspace, Run: run.ID}, store.ProcessFilter{}, func(rec store.Process) error {
		gone := rec.Cleanup == api.CleanupQuiescent
		out.Quiescent = out.Quiescent && gone
		if gone && len(out.Processes) >= maxFinished {
			return nil
		}
		one, err := b.closed(ctx, rec, nil)
		one.Process.Argv = brief(one.Process.Argv)
		out.Processes = append(out.Processes, one)
		return err
	})
	return out, err
}

// over says whether a run that finishes by itself has had a process and none of
// them lives.
func (b *Broker) over(ctx context.Context, run store.Run) bool {
	if !run.AutoFinish {
		return false
	}
	scope := authz.Scope{Workspace: run.Workspace, Run: run.ID}
	count := func(live bool) int {
		recs, err := b.cfg.Store.Processes(ctx, scope, store.ProcessFilter{Live: live, NoSpec: true, Page: store.Page{Limit: 1}})
		if err != nil {
			return -1 // looked at again by the next sweep
		}
		return len(recs)
	}
	return count(true) == 0 && count(false) == 1
}

// sweep finishes runs that have expired, those that are over, and those whose
// finishing was cut short.
func (b *Broker) sweep(ctx context.Context) {
	runs, err := b.cfg.Store.UnfinishedRuns(ctx)
	if err != nil {
		if ctx.Err() == nil {
			b.log.Warn("expired runs could not be looked for", "error", err)
		}
		return
	}
	at := now()
	for _, run := range runs {
		reason := "its run expired"
		switch {
		case run.State == api.RunFinishing:
			reason = "its run was finished"
		case !run.Expires.After(at):
		case b.over(ctx, run):
			reason = "its run was over"
		default:
			continue
		}
		b.mu.Lock()
		busy := b.ending[run.ID] != nil
		b.mu.Unlock()
		if busy {
			continue
		}
		// Begun here, waited for by its own goroutine.
		gone, cancel := context.WithCancel(ctx)
		cancel()
		_, _ = b.finish(gone, run, actorServer, reason, b.cfg.Limits.DefaultGrace.Milliseconds())
	}
}
