package httpapi

import (
	"context"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

const intro = `Stockade runs coding agents and other programs on behalf of many tenants, each inside its own authority.

**Credentials.** Send ` + "`Authorization: Bearer KEY`" + `. There are three kinds: the *admin key* of the operator, *workspace keys* of tenants, and *run tokens*, which open processes. Each operation says which it takes. Another tenant's record is answered exactly like a missing one.

**Errors.** Every error is ` + "`application/problem+json`" + ` with a stable ` + "`code`" + `, what was refused (` + "`detail`" + `), what to do (` + "`next`" + `) and the limits it hit (` + "`facts`" + `). Branch on ` + "`code`" + `. ` + "`exhausted` and `unavailable`" + ` come with ` + "`Retry-After`" + `.

**Repeating.** Opening and closing a process, writing its input at an offset and reading its log at a cursor may be repeated at will: a repetition changes nothing and answers the same.

**Lists** are newest first. ` + "`next`" + ` of one page is ` + "`after`" + ` of the following.`

func tags() []*huma.Tag {
	return []*huma.Tag{
		{Name: "processes", Description: "Start, feed, read and stop programs."},
		{Name: "runs", Description: "One active invocation in one box. Its token opens processes."},
		{Name: "boxes", Description: "A tenant's envelope: volumes, a network namespace without a route, limits."},
		{Name: "images", Description: "Root file systems a box can be made from."},
		{Name: "targets", Description: "Places where boxes live."},
		{Name: "fences", Description: "Durable records that something may still be running."},
		{Name: "relay", Description: "Jobs for daemons on users' machines, which connect to the relay's own listener."},
		{Name: "tenants", Description: "Workspaces, their keys, and what was done."},
		{Name: "server", Description: "The server itself."},
	}
}

// register registers every operation. A newcomer looking for one finds its
// handler here or, for streams, in the file named beside it.
func (h *Handler) register(b *builder) {
	if h.cfg.Broker != nil {
		h.registerProcesses(b)
		h.registerInput(b)  // stdin.go
		h.registerLog(b)    // log.go
		h.registerAttach(b) // attach.go
		h.registerRuns(b)
		h.registerBoxes(b)
		h.registerFiles(b) // files.go: files and images
		h.registerTargets(b)
		h.registerFences(b)
		h.registerTenants(b)
		h.registerMetrics(b) // server.go
	}
	h.registerRelay(b)  // relay.go
	h.registerServer(b) // server.go
}

// answer is the output of an operation that answers JSON.
type answer[T any] struct{ Body T }

func reply[T any](v T, err error) (*answer[T], error) {
	if err != nil {
		return nil, err
	}
	return &answer[T]{Body: v}, nil
}

// replyList is reply for lists, whose items are never null.
func replyList[T any](l api.List[T], err error) (*answer[api.List[T]], error) {
	if l.Items == nil {
		l.Items = []T{}
	}
	return reply(l, err)
}

// nothing is the input or output of an operation that has none.
type nothing struct{}

// PageIn, HandleIn and IDIn are parts of inputs, exported because huma looks only
// into exported embedded fields.
type PageIn struct {
	Limit int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Most records on this page."`
	After string `query:"after" maxLength:"256" doc:"The next of the page before."`
}

func (p PageIn) page() store.Page { return store.Page{Limit: p.Limit, After: p.After} }

// HandleIn names a process.
type HandleIn struct {
	Handle string `path:"handle" doc:"The process's handle."`
}

// IDIn names a record.
type IDIn struct {
	ID string `path:"id" doc:"The record's id."`
}

func (h *Handler) registerRuns(b *builder) {
	type createIn struct{ Body api.RunRequest }
	jsonOp(b, spec{id: "create-run", method: http.MethodPost, path: "/v1/runs", action: authz.RunCreate, tag: "runs", created: true,
		summary:     "Begin a run in a box",
		description: "Binds a run to a box and returns its token, which is shown only now and opens processes. Not safe to repeat: each call is a new run.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Fenced, errdefs.Exhausted}},
		func(ctx context.Context, p authz.Principal, in *createIn) (*answer[api.RunCreated], error) {
			return reply(h.cfg.Broker.CreateRun(ctx, p, in.Body))
		})
	jsonOp(b, spec{id: "list-runs", method: http.MethodGet, path: "/v1/runs", action: authz.RunList, tag: "runs",
		summary: "List runs", description: "The runs the credential may see.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *PageIn) (*answer[api.List[api.Run]], error) {
			return replyList(h.cfg.Broker.Runs(ctx, p, in.page()))
		})
	jsonOp(b, spec{id: "get-run", method: http.MethodGet, path: "/v1/runs/{id}", action: authz.RunRead, tag: "runs",
		summary: "Get a run", description: "One run, with what went through its model routes.",
		errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *IDIn) (*answer[api.Run], error) {
			return reply(h.cfg.Broker.Run(ctx, p, in.ID))
		})
	type finishIn struct {
		IDIn
		Body api.FinishRequest
	}
	jsonOp(b, spec{id: "finish-run", method: http.MethodPost, path: "/v1/runs/{id}/finish", action: authz.RunFinish, tag: "runs",
		summary:     "Finish a run",
		description: "Revokes the run's rights, model calls in flight included, then closes its processes. Answers when each is proven gone or given up, and lists the newest 1,000 and all that are not proven gone. Safe to repeat; the run's own token ends with the run, so afterwards ask with the workspace key.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *finishIn) (*answer[api.FinishResponse], error) {
			r, err := h.cfg.Broker.FinishRun(ctx, p, in.ID, in.Body)
			if r.Processes == nil {
				r.Processes = []api.CloseResponse{}
			}
			return reply(r, err)
		})
}

func (h *Handler) registerBoxes(b *builder) {
	type acquireIn struct{ Body api.BoxRequest }
	jsonOp(b, spec{id: "acquire-box", method: http.MethodPost, path: "/v1/boxes", action: authz.BoxAcquire, tag: "boxes", maxBody: maxMount,
		summary:     "Acquire a box",
		description: "Returns the box with the request's key, or makes one. Without a key every call makes a new box.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Fenced, errdefs.Exhausted, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *acquireIn) (*answer[api.Box], error) {
			return reply(h.cfg.Boxes.Acquire(ctx, p, in.Body))
		})
	jsonOp(b, spec{id: "list-boxes", method: http.MethodGet, path: "/v1/boxes", action: authz.BoxRead, tag: "boxes",
		summary: "List boxes", description: "The boxes of the workspace; an admin sees all.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *PageIn) (*answer[api.List[api.Box]], error) {
			return replyList(h.cfg.Boxes.List(ctx, p, in.page()))
		})
	jsonOp(b, spec{id: "get-box", method: http.MethodGet, path: "/v1/boxes/{id}", action: authz.BoxRead, tag: "boxes",
		summary: "Get a box", description: "One box.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *IDIn) (*answer[api.Box], error) {
			return reply(h.cfg.Boxes.Get(ctx, p, in.ID))
		})
	jsonOp(b, spec{id: "remove-box", method: http.MethodDelete, path: "/v1/boxes/{id}", action: authz.BoxRemove, tag: "boxes",
		summary:     "Remove a box",
		description: "Removes the box with its volumes. A conflict while a process or an active run is in it.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Fenced, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *IDIn) (*nothing, error) {
			return nil, h.cfg.Boxes.Remove(ctx, p, in.ID)
		})
}

func (h *Handler) registerTargets(b *builder) {
	type NameIn struct {
		Name string `path:"name" doc:"The target's name."`
	}
	jsonOp(b, spec{id: "list-targets", method: http.MethodGet, path: "/v1/targets", action: authz.TargetRead, tag: "targets",
		summary: "List targets", description: "Every target and whether its host program answers."},
		func(ctx context.Context, p authz.Principal, _ *nothing) (*answer[api.List[api.Target]], error) {
			return replyList(h.cfg.Broker.Targets(ctx, p))
		})
	jsonOp(b, spec{id: "get-target", method: http.MethodGet, path: "/v1/targets/{name}", action: authz.TargetRead, tag: "targets",
		summary: "Get a target", description: "One target.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *NameIn) (*answer[api.Target], error) {
			return reply(h.cfg.Broker.Target(ctx, p, in.Name))
		})
	type updateIn struct {
		NameIn
		Body api.TargetUpdate
	}
	jsonOp(b, spec{id: "update-target", method: http.MethodPatch, path: "/v1/targets/{name}", action: authz.TargetUpdate, tag: "targets",
		summary: "Change a target", description: "Each change raises the target's generation. A disabled target starts nothing new; what runs there goes on.",
		errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *updateIn) (*answer[api.Target], error) {
			return reply(h.cfg.Broker.UpdateTarget(ctx, p, in.Name, in.Body))
		})
}

func (h *Handler) registerFences(b *builder) {
	type listIn struct {
		Cleared bool `query:"cleared" doc:"Show cleared fences too."`
		PageIn
	}
	jsonOp(b, spec{id: "list-fences", method: http.MethodGet, path: "/v1/fences", action: authz.FenceRead, tag: "fences",
		summary: "List fences", description: "Fences that stand, or with cleared=true all.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *listIn) (*answer[api.List[api.Fence]], error) {
			return replyList(h.cfg.Broker.Fences(ctx, p, !in.Cleared, in.page()))
		})
	jsonOp(b, spec{id: "get-fence", method: http.MethodGet, path: "/v1/fences/{id}", action: authz.FenceRead, tag: "fences",
		summary: "Get a fence", description: "One fence with its evidence.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *IDIn) (*answer[api.Fence], error) {
			return reply(h.cfg.Broker.Fence(ctx, p, in.ID))
		})
	type clearIn struct {
		IDIn
		Body api.ClearFenceRequest
	}
	jsonOp(b, spec{id: "clear-fence", method: http.MethodPost, path: "/v1/fences/{id}/clear", action: authz.FenceClear, tag: "fences",
		summary:     "Clear a fence",
		description: "An operator's statement, kept in the audit record, that nothing runs there any more. Look at the evidence first.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict}},
		func(ctx context.Context, p authz.Principal, in *clearIn) (*answer[api.Fence], error) {
			return reply(h.cfg.Broker.ClearFence(ctx, p, in.ID, in.Body))
		})
}

func (h *Handler) registerTenants(b *builder) {
	type createIn struct{ Body api.WorkspaceRequest }
	jsonOp(b, spec{id: "create-workspace", method: http.MethodPost, path: "/v1/workspaces", action: authz.WorkspaceCreate, tag: "tenants", created: true,
		summary: "Create a workspace", description: "A workspace is a tenant. Its name is for ever.", errors: []errdefs.Code{errdefs.Conflict}},
		func(ctx context.Context, p authz.Principal, in *createIn) (*answer[api.Workspace], error) {
			return reply(h.cfg.Tenants.CreateWorkspace(ctx, p, in.Body))
		})
	jsonOp(b, spec{id: "list-workspaces", method: http.MethodGet, path: "/v1/workspaces", action: authz.WorkspaceList, tag: "tenants",
		summary: "List workspaces", description: "Every tenant, by name."},
		func(ctx context.Context, p authz.Principal, in *PageIn) (*answer[api.List[api.Workspace]], error) {
			return replyList(h.cfg.Tenants.Workspaces(ctx, p, in.Limit, in.After))
		})
	type WorkspaceIn struct {
		Workspace string `path:"workspace" doc:"The workspace's name."`
	}
	type keyIn struct {
		WorkspaceIn
		Body api.KeyRequest
	}
	jsonOp(b, spec{id: "create-key", method: http.MethodPost, path: "/v1/workspaces/{workspace}/keys", action: authz.KeyCreate, tag: "tenants", created: true,
		summary: "Create a key of a workspace", description: "The secret is in this answer and nowhere else.", errors: []errdefs.Code{errdefs.NotFound, errdefs.Exhausted}},
		func(ctx context.Context, p authz.Principal, in *keyIn) (*answer[api.KeyCreated], error) {
			return reply(h.cfg.Tenants.CreateKey(ctx, p, in.Workspace, in.Body))
		})
	type keysIn struct {
		WorkspaceIn
		PageIn
	}
	jsonOp(b, spec{id: "list-keys", method: http.MethodGet, path: "/v1/workspaces/{workspace}/keys", action: authz.KeyList, tag: "tenants",
		summary: "List the keys of a workspace", description: "Records only; secrets are not kept.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *keysIn) (*answer[api.List[api.Key]], error) {
			return replyList(h.cfg.Tenants.Keys(ctx, p, in.Workspace, in.Limit, in.After))
		})
	jsonOp(b, spec{id: "revoke-key", method: http.MethodDelete, path: "/v1/keys/{id}", action: authz.KeyRevoke, tag: "tenants",
		summary: "Revoke a key", description: "At once and for ever. What goes on with it, such as a followed log, ends within seconds; nothing sent over an open socket is obeyed. Safe to repeat.", errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict}},
		func(ctx context.Context, p authz.Principal, in *IDIn) (*answer[api.Key], error) {
			return reply(h.cfg.Tenants.RevokeKey(ctx, p, in.ID))
		})
	type auditIn struct {
		Workspace string `query:"workspace" maxLength:"128" doc:"Only this workspace; empty is all."`
		PageIn
	}
	jsonOp(b, spec{id: "list-audit", method: http.MethodGet, path: "/v1/audit", action: authz.AuditRead, tag: "tenants",
		summary: "List recorded acts", description: "Who did what to which record, newest first.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *auditIn) (*answer[api.List[api.AuditEvent]], error) {
			return replyList(h.cfg.Broker.Audit(ctx, p, in.Workspace, in.page()))
		})
}
