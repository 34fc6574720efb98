package broker

import (
	"context"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/store"
)

// Targets lists the configured targets in the order of the configuration.
func (b *Broker) Targets(ctx context.Context, p authz.Principal) (api.List[api.Target], error) {
	out := api.List[api.Target]{Items: []api.Target{}}
	if err := authz.Check(p, authz.TargetRead); err != nil {
		return out, err
	}
	counts, err := b.count(ctx)
	if err != nil {
		return out, err
	}
	for _, name := range b.order {
		if shown, ok := b.target(name, counts); ok {
			out.Items = append(out.Items, shown)
		}
	}
	return out, nil
}

// Target returns one target.
func (b *Broker) Target(ctx context.Context, p authz.Principal, name string) (api.Target, error) {
	if err := authz.Check(p, authz.TargetRead); err != nil {
		return api.Target{}, err
	}
	counts, err := b.count(ctx)
	if err != nil {
		return api.Target{}, err
	}
	shown, ok := b.target(name, counts)
	if !ok {
		return api.Target{}, noTarget(name)
	}
	return shown, nil
}

func noTarget(name string) error {
	return errdefs.New(errdefs.NotFound, "there is no target %q", cutTo(name, ident.MaxName)).WithNext("list the targets")
}

// counts is what stands at each target.
type counts struct{ boxes, processes, fences map[string]int }

func (b *Broker) count(ctx context.Context) (counts, error) {
	c := counts{map[string]int{}, map[string]int{}, map[string]int{}}
	for page := (store.Page{Limit: 1000}); ; {
		some, err := b.cfg.Store.Boxes(ctx, everything(), page)
		if err != nil {
			return c, err
		}
		for _, x := range some {
			c.boxes[x.Target]++
		}
		if len(some) < page.Limit {
			break
		}
		page.After = some[len(some)-1].ID
	}
	for page := (store.Page{Limit: 1000}); ; {
		some, err := b.cfg.Store.Fences(ctx, everything(), true, page)
		if err != nil {
			return c, err
		}
		for _, x := range some {
			c.fences[x.Target]++
		}
		if len(some) < page.Limit {
			break
		}
		page.After = some[len(some)-1].ID
	}
	for _, o := range b.ownersOf(func(v *view) bool { return v.rec.Live() }) {
		c.processes[o.home()]++
	}
	return c, nil
}

func (b *Broker) target(name string, c counts) (api.Target, bool) {
	t := b.targets[name]
	if t == nil || t.rec.Load() == nil {
		return api.Target{}, false
	}
	rec := t.rec.Load()
	out := api.Target{Name: name, Kind: rec.Kind, Generation: rec.Generation, Enabled: rec.Enabled, Host: rec.HostID, BootID: rec.BootID,
		Boxes: c.boxes[name], MaxBoxes: t.cfg.MaxBoxes, Processes: c.processes[name], Fences: c.fences[name]}
	if l := t.here(); l != nil {
		out.Up, out.Version = true, l.info.Version
		for i, problem := range l.info.Problems {
			if i > 0 {
				out.Problem += "; "
			}
			out.Problem += cut(problem)
		}
		out.Problem = cut(out.Problem)
	} else {
		out.Problem = *t.problem.Load()
	}
	return out, true
}

// UpdateTarget enables or disables a target. Every change raises its generation:
// what was opened under a lower one is closed, or fenced where that cannot be
// proven.
func (b *Broker) UpdateTarget(ctx context.Context, p authz.Principal, name string, u api.TargetUpdate) (api.Target, error) {
	if err := authz.Check(p, authz.TargetUpdate); err != nil {
		return api.Target{}, err
	}
	t := b.targets[name]
	if t == nil || t.rec.Load() == nil {
		return api.Target{}, noTarget(name)
	}
	if u.Enabled == nil {
		return api.Target{}, errdefs.New(errdefs.Invalid, "the update changes nothing").WithNext("set enabled to true or false")
	}
	if *u.Enabled != t.rec.Load().Enabled {
		detail := map[string]string{"enabled": "false"}
		if *u.Enabled {
			detail["enabled"] = "true"
		}
		rec, err := b.cfg.Store.SetTargetEnabled(ctx, name, *u.Enabled, b.audit(p, "", string(authz.TargetUpdate), name, detail))
		if err != nil {
			return api.Target{}, err
		}
		t.update(func(r *store.Target) { r.Enabled, r.Generation = rec.Enabled, max(r.Generation, rec.Generation) })
		grace := b.cfg.Limits.DefaultGrace.Milliseconds()
		for _, o := range b.ownersOf(func(v *view) bool {
			return v.rec.Target == name && v.rec.Generation < rec.Generation && v.rec.CloseAsked == nil
		}) {
			o.wishClose(p.String(), "its target was changed", grace)
		}
	}
	return b.Target(ctx, p, name)
}
