package broker

import (
	"context"
	"maps"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/store"
)

// everything is the scope of the server itself.
func everything() authz.Scope { return authz.Scope{All: true} }

// Fences returns a page of fences in the caller's scope, newest first; standing
// ones only if asked.
func (b *Broker) Fences(ctx context.Context, p authz.Principal, standing bool, page store.Page) (api.List[api.Fence], error) {
	out := api.List[api.Fence]{Items: []api.Fence{}}
	if err := authz.Check(p, authz.FenceRead); err != nil {
		return out, err
	}
	page, err := pageOf(page.Limit, page.After)
	if err != nil {
		return out, err
	}
	fences, err := b.cfg.Store.Fences(ctx, p.Scope(), standing, page)
	if err != nil {
		return out, err
	}
	for _, f := range fences {
		out.Items = append(out.Items, fenceOf(f))
	}
	if len(fences) == page.Limit {
		out.Next = fences[len(fences)-1].ID
	}
	return out, nil
}

// Fence returns a fence with its evidence.
func (b *Broker) Fence(ctx context.Context, p authz.Principal, id string) (api.Fence, error) {
	if err := authz.Check(p, authz.FenceRead); err != nil {
		return api.Fence{}, err
	}
	f, err := b.findFence(ctx, p, id)
	if err != nil {
		return api.Fence{}, err
	}
	return fenceOf(f), nil
}

func (b *Broker) findFence(ctx context.Context, p authz.Principal, id string) (store.Fence, error) {
	if !ident.Valid(ident.Fence, id) {
		return store.Fence{}, errdefs.New(errdefs.NotFound, "there is no fence %s", cutTo(id, ident.MaxName))
	}
	return b.cfg.Store.Fence(ctx, p.Scope(), id)
}

// ClearFence lifts a fence on the word of an operator who has looked; it is
// audited with the reason. Clearing one that is lifted already changes nothing.
func (b *Broker) ClearFence(ctx context.Context, p authz.Principal, id string, req api.ClearFenceRequest) (api.Fence, error) {
	if err := authz.Check(p, authz.FenceClear); err != nil {
		return api.Fence{}, err
	}
	if len(req.Reason) < 8 || len(req.Reason) > maxText {
		return api.Fence{}, errdefs.New(errdefs.Invalid, "a reason of %d bytes is not accepted, the limits are 8 and %d", len(req.Reason), maxText).
			WithNext("say what you checked: it is kept in the audit record")
	}
	f, err := b.findFence(ctx, p, id)
	if err != nil || f.Cleared != nil {
		return fenceOf(f), err
	}
	o, err := b.adopt(f.Handle)
	if err != nil {
		return api.Fence{}, err
	}
	if _, err := o.wait(ctx, func(*view) bool { return true }); err != nil {
		return api.Fence{}, err
	}
	o.post(func(in *inbox) { in.clear = &wish{actor: p.String(), reason: cut(req.Reason)} })
	if _, err := o.wait(ctx, func(v *view) bool { return v.rec.Fence != id }); err != nil {
		return api.Fence{}, err
	}
	if f, err = b.cfg.Store.Fence(ctx, p.Scope(), id); err != nil {
		return api.Fence{}, err
	}
	if f.Cleared == nil {
		return api.Fence{}, errdefs.New(errdefs.Internal, "the fence %s stands although its process is closed", id)
	}
	return fenceOf(f), nil
}

func fenceOf(f store.Fence) api.Fence {
	out := api.Fence{ID: f.ID, Workspace: f.Workspace, Target: f.Target, Box: f.Box, Handle: f.Handle, Reason: f.Reason,
		Evidence: maps.Clone(f.Evidence), CreatedAt: f.Created, ClearedAt: f.Cleared, ClearedBy: f.ClearedBy, ClearReason: f.ClearReason}
	if out.Evidence == nil {
		out.Evidence = map[string]string{}
	}
	return out
}

// Audit returns a page of recorded acts of a workspace, or of all if it is "",
// newest first.
func (b *Broker) Audit(ctx context.Context, p authz.Principal, workspace string, page store.Page) (api.List[api.AuditEvent], error) {
	out := api.List[api.AuditEvent]{Items: []api.AuditEvent{}}
	if err := authz.Check(p, authz.AuditRead); err != nil {
		return out, err
	}
	page, err := pageOf(page.Limit, page.After)
	if err != nil {
		return out, err
	}
	acts, err := b.cfg.Store.Audit(ctx, workspace, page)
	if err != nil {
		return out, err
	}
	for _, a := range acts {
		out.Items = append(out.Items, api.AuditEvent{ID: a.ID, At: a.At, Actor: a.Actor, Workspace: a.Workspace, Action: a.Action, Object: a.Object, Detail: a.Detail})
	}
	if len(acts) == page.Limit {
		out.Next = acts[len(acts)-1].ID
	}
	return out, nil
}
