package broker

import (
	"context"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/store"
)

func (b *Broker) routesOf(run string) []gateway.Route {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.routes[run]
}

func (b *Broker) setRoutes(run string, routes []gateway.Route) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if routes == nil {
		delete(b.routes, run)
		return
	}
	b.routes[run] = routes
}

// openRoutes opens the model routes of a run inside its box, on the recorded
// ports. Opening them again does nothing.
func (b *Broker) openRoutes(ctx context.Context, run store.Run, here *link) ([]gateway.Route, error) {
	if b.cfg.Gateway == nil {
		return nil, errdefs.New(errdefs.Unavailable, "the run was granted models, and this server has no model providers any more")
	}
	box, err := here.client.Box(ctx, run.Box)
	if err != nil {
		return nil, err
	}
	g := gateway.Grant{Run: run.ID, NetNS: box.NetNS, Ports: map[string]int{}}
	for _, m := range run.Models {
		g.Providers = append(g.Providers, m.Provider)
		g.Ports[m.Provider] = m.Port
	}
	routes, err := b.cfg.Gateway.Open(ctx, g)
	if err != nil {
		return nil, err
	}
	b.setRoutes(run.ID, routes)
	// The run may have been finished meanwhile, and its rights revoked before they
	// were given (P8): look again, and take them back.
	kept, err := b.cfg.Store.Run(ctx, everything(), run.ID)
	if err == nil && kept.State != api.RunActive {
		err = errdefs.New(errdefs.Conflict, "the run is %s", kept.State)
	}
	if err != nil {
		b.setRoutes(run.ID, nil)
		if cerr := b.cfg.Gateway.CloseRun(context.WithoutCancel(ctx), run.ID); cerr != nil {
			b.log.Warn("the model routes of a run were not closed", "run", run.ID, "error", cerr)
		}
		return nil, err
	}
	return routes, nil
}

// modelEnv is what leads a process of the run to its models.
func (b *Broker) modelEnv(ctx context.Context, run store.Run, here *link) (map[string]string, error) {
	if len(run.Models) == 0 {
		return nil, nil
	}
	routes := b.routesOf(run.ID)
	if routes == nil {
		var err error
		if routes, err = b.openRoutes(ctx, run, here); err != nil {
			return nil, err
		}
	}
	return b.cfg.Gateway.Env(routes), nil
}

// reopenRoutes restores the routes of active runs after a restart of this
// server. One that fails is tried again at the run's next open.
func (b *Broker) reopenRoutes(ctx context.Context, t *target, here *link) {
	if b.cfg.Gateway == nil {
		return
	}
	runs, err := b.cfg.Store.UnfinishedRuns(ctx)
	if err != nil {
		b.log.Warn("the model routes could not be restored", "target", t.cfg.Name, "error", err)
		return
	}
	for _, run := range runs {
		if ctx.Err() != nil {
			return
		}
		if run.Target != t.cfg.Name || run.State != api.RunActive || len(run.Models) == 0 || !run.Expires.After(now()) {
			continue
		}
		routes, err := b.openRoutes(ctx, run, here)
		if err != nil {
			b.log.Warn("the model routes of a run could not be restored", "run", run.ID, "error", err)
			continue
		}
		for i, r := range routes {
			if i < len(run.Models) && r.Port != run.Models[i].Port {
				b.log.Warn("the model routes of a run have another port now; its running processes do not know it",
					"run", run.ID, "port", r.Port)
			}
		}
	}
}
