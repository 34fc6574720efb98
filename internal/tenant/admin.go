package tenant

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// DefaultPage and MaxPage bound what a listing returns at once. MaxPage is one
// less than what the ledger gives in one go, so that one more can be asked for
// to know whether there is a next page.
const (
	DefaultPage = 100
	MaxPage     = 999
)

// CreateWorkspace makes a tenant. A name that is taken is a conflict. Needs the
// admin key; audited.
func (s *Service) CreateWorkspace(ctx context.Context, p authz.Principal, req api.WorkspaceRequest) (api.Workspace, error) {
	if err := authz.Check(p, authz.WorkspaceCreate); err != nil {
		return api.Workspace{}, err
	}
	if err := ident.CheckName("the workspace name", req.Name); err != nil {
		return api.Workspace{}, err
	}
	w := store.Workspace{Name: req.Name, Created: now()}
	a := event(p.String(), authz.WorkspaceCreate, w.Name, w.Name, w.Created)
	if err := s.store.CreateWorkspace(ctx, w, a); err != nil {
		return api.Workspace{}, err
	}
	s.log.InfoContext(ctx, "workspace created", "workspace", w.Name, "actor", p.String())
	return workspaceOf(w), nil
}

// Workspaces lists tenants by name, page by page. A limit of 0 is [DefaultPage].
// Needs the admin key.
func (s *Service) Workspaces(ctx context.Context, p authz.Principal, limit int, after string) (api.List[api.Workspace], error) {
	if err := authz.Check(p, authz.WorkspaceList); err != nil {
		return api.List[api.Workspace]{}, err
	}
	limit, err := pageLimit(limit)
	if err != nil {
		return api.List[api.Workspace]{}, err
	}
	ws, err := s.store.Workspaces(ctx, store.Page{Limit: limit + 1, After: after})
	if err != nil {
		return api.List[api.Workspace]{}, err
	}
	return list(ws, limit, workspaceOf, func(w store.Workspace) string { return w.Name }), nil
}

// CreateKey makes a key of a workspace. The secret in the answer is shown this
// once. Needs the admin key; audited.
func (s *Service) CreateKey(ctx context.Context, p authz.Principal, workspace string, req api.KeyRequest) (api.KeyCreated, error) {
	if err := authz.Check(p, authz.KeyCreate); err != nil {
		return api.KeyCreated{}, err
	}
	if err := ident.CheckName("the workspace name", workspace); err != nil {
		return api.KeyCreated{}, err
	}
	if req.Name != "" {
		if err := ident.CheckName("the key's name", req.Name); err != nil {
			return api.KeyCreated{}, err
		}
	}
	k, text := newKey(store.KeyWorkspace, workspace, req.Name, now())
	if err := s.store.CreateKey(ctx, k, keyEvent(p.String(), authz.KeyCreate, k, k.Created)); err != nil {
		return api.KeyCreated{}, err
	}
	s.log.InfoContext(ctx, "key created", "workspace", workspace, "key", k.ID, "actor", p.String())
	return api.KeyCreated{Key: keyOf(k), Secret: text}, nil
}

// Keys lists the keys of a workspace, revoked ones too, newest first; for the
// empty name those of the operator. A limit of 0 is [DefaultPage]. Needs the
// admin key.
func (s *Service) Keys(ctx context.Context, p authz.Principal, workspace string, limit int, after string) (api.List[api.Key], error) {
	if err := authz.Check(p, authz.KeyList); err != nil {
		return api.List[api.Key]{}, err
	}
	limit, err := pageLimit(limit)
	if err != nil {
		return api.List[api.Key]{}, err
	}
	if workspace != "" {
		if _, err := s.store.Workspace(ctx, workspace); err != nil {
			return api.List[api.Key]{}, err
		}
	}
	ks, err := s.store.Keys(ctx, workspace, store.Page{Limit: limit + 1, After: after})
	if err != nil {
		return api.List[api.Key]{}, err
	}
	return list(ks, limit, keyOf, func(k store.Key) string { return k.ID }), nil
}

// RevokeKey ends the right of a key at once; doing it again changes nothing. Run
// tokens made with it live on until their runs end. The operator's own key in
// use is a conflict: it would lock the operator out. Needs the admin key; audited.
func (s *Service) RevokeKey(ctx context.Context, p authz.Principal, id string) (api.Key, error) {
	if err := authz.Check(p, authz.KeyRevoke); err != nil {
		return api.Key{}, err
	}
	if id == p.Key {
		return api.Key{}, errdefs.New(errdefs.Conflict, "the key %s is the one in use and cannot revoke itself", id).
			WithNext("run 'stockade key reset-admin' to replace it")
	}
	k, err := s.store.Key(ctx, id)
	if err != nil {
		return api.Key{}, err
	}
	at := now()
	if err := s.store.RevokeKey(ctx, id, at, keyEvent(p.String(), authz.KeyRevoke, k, at)); err != nil {
		return api.Key{}, err
	}
	if k, err = s.store.Key(ctx, id); err != nil {
		return api.Key{}, err
	}
	s.log.InfoContext(ctx, "key revoked", "workspace", k.Workspace, "key", k.ID, "actor", p.String())
	return keyOf(k), nil
}

func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

func newKey(kind, workspace, name string, at time.Time) (store.Key, string) {
	id := secret.ID(ident.Key)
	text, hash := secret.NewKey(id)
	return store.Key{ID: id, Kind: kind, Workspace: workspace, Name: name, Hash: hash, Created: at}, text
}

func event(actor string, a authz.Action, workspace, object string, at time.Time) store.AuditEvent {
	return store.AuditEvent{ID: secret.ID(ident.Audit), At: at, Actor: actor, Workspace: workspace, Action: string(a), Object: object}
}

func keyEvent(actor string, a authz.Action, k store.Key, at time.Time) store.AuditEvent {
	e := event(actor, a, k.Workspace, k.ID, at)
	e.Detail = map[string]string{"kind": k.Kind}
	if k.Name != "" {
		e.Detail["name"] = k.Name
	}
	return e
}

func workspaceOf(w store.Workspace) api.Workspace {
	return api.Workspace{Name: w.Name, CreatedAt: w.Created}
}

func keyOf(k store.Key) api.Key {
	return api.Key{ID: k.ID, Kind: k.Kind, Workspace: k.Workspace, Name: k.Name, CreatedAt: k.Created, RevokedAt: k.Revoked}
}

func pageLimit(limit int) (int, error) {
	switch {
	case limit == 0:
		return DefaultPage, nil
	case limit < 0 || limit > MaxPage:
		return 0, errdefs.New(errdefs.Invalid, "a page of %d records was asked for, the limit is 1 to %d", limit, MaxPage)
	}
	return limit, nil
}

// list cuts what was read with a limit one higher than asked for.
func list[S, T any](items []S, limit int, as func(S) T, id func(S) string) api.List[T] {
	out := api.List[T]{Items: make([]T, 0, min(limit, len(items)))}
	for i, it := range items {
		if i == limit {
			out.Next = id(items[i-1])
			break
		}
		out.Items = append(out.Items, as(it))
	}
	return out
}
