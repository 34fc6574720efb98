package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Page asks for one page of a list. Zero is the first page of the server's
// default size.
type Page struct {
	Limit int    // 1 to 1000
	After string // List.Next of the page before
}

func (p Page) query() url.Values {
	q := url.Values{}
	if p.Limit > 0 {
		q.Set("limit", strconv.Itoa(p.Limit))
	}
	if p.After != "" {
		q.Set("after", p.After)
	}
	return q
}

// Metrics returns the server's metrics in the Prometheus text form (admin).
func (c *Client) Metrics(ctx context.Context) ([]byte, error) {
	return c.raw(ctx, "/v1/metrics", "text/plain")
}

// OpenAPI returns the server's OpenAPI document.
func (c *Client) OpenAPI(ctx context.Context) ([]byte, error) {
	return c.raw(ctx, "/openapi.json", "application/json")
}

func (c *Client) raw(ctx context.Context, path, accept string) ([]byte, error) {
	resp, err := c.send(ctx, call{method: http.MethodGet, path: path, accept: accept, safe: true})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, errdefs.Wrap(err, Unavailable, "the answer was cut off: %v", err)
	}
	return b, nil
}

// Targets lists the targets.
func (c *Client) Targets(ctx context.Context) ([]Target, error) {
	l, err := get[List[Target]](ctx, c, "/v1/targets", nil)
	return l.Items, err
}

// Target returns one target.
func (c *Client) Target(ctx context.Context, name string) (Target, error) {
	return get[Target](ctx, c, "/v1/targets/"+seg(name), nil)
}

// UpdateTarget changes a target (admin).
func (c *Client) UpdateTarget(ctx context.Context, name string, u TargetUpdate) (Target, error) {
	return doJSON[Target](ctx, c, call{method: http.MethodPatch, path: "/v1/targets/" + seg(name)}, u)
}

// AcquireBox returns the box with the request's key, or a new one. It is safe to
// repeat, and repeated by itself, only if the request has a key.
func (c *Client) AcquireBox(ctx context.Context, r BoxRequest) (Box, error) {
	return doJSON[Box](ctx, c, call{method: http.MethodPost, path: "/v1/boxes", safe: r.Key != ""}, r)
}

// Boxes lists boxes, newest first.
func (c *Client) Boxes(ctx context.Context, p Page) (List[Box], error) {
	return get[List[Box]](ctx, c, "/v1/boxes", p.query())
}

// Box returns one box.
func (c *Client) Box(ctx context.Context, id string) (Box, error) {
	return get[Box](ctx, c, "/v1/boxes/"+seg(id), nil)
}

// RemoveBox removes a box with everything in it. It is a conflict while a
// process or a run is in it.
func (c *Client) RemoveBox(ctx context.Context, id string) error {
	return doNone(ctx, c, call{method: http.MethodDelete, path: "/v1/boxes/" + seg(id), safe: true, gone: true}, nil)
}

// PutFiles unpacks a tar stream below path in a box (relative to the workspace).
// The reader is read once; the call is not repeated.
func (c *Client) PutFiles(ctx context.Context, box, path string, tar io.Reader) error {
	return doNone(ctx, c, call{method: http.MethodPut, path: "/v1/boxes/" + seg(box) + "/files",
		query: url.Values{"path": {path}}, stream: tar, ctype: "application/x-tar"}, nil)
}

// GetFiles returns path of a box as a tar stream, which the caller closes. Its names begin
// with the last element of path, or are below it where that is a dot. A tar
// that ends without its end marker was cut off, which archive/tar does not always say.
func (c *Client) GetFiles(ctx context.Context, box, path string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, call{method: http.MethodGet, path: "/v1/boxes/" + seg(box) + "/files",
		query: url.Values{"path": {path}}, accept: "application/x-tar", safe: true})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// LoadImage sends an image to a target: a tar of an OCI layout, or of docker
// save. Name may be empty: then the names in the archive hold. target may be
// empty for the local one.
func (c *Client) LoadImage(ctx context.Context, target, name string, tar io.Reader) ([]Image, error) {
	q := url.Values{}
	if target != "" {
		q.Set("target", target)
	}
	if name != "" {
		q.Set("name", name)
	}
	l, err := doJSON[List[Image]](ctx, c, call{method: http.MethodPut, path: "/v1/images", query: q, stream: tar, ctype: "application/x-tar"}, nil)
	return l.Items, err
}

// Images lists the images of a target; empty is the local one.
func (c *Client) Images(ctx context.Context, target string) ([]Image, error) {
	l, err := get[List[Image]](ctx, c, "/v1/images", targetQuery(target))
	return l.Items, err
}

// RemoveImage removes an image by digest or name. It is a conflict while a box uses it.
func (c *Client) RemoveImage(ctx context.Context, target, ref string) error {
	q := targetQuery(target)
	q.Set("ref", ref)
	return doNone(ctx, c, call{method: http.MethodDelete, path: "/v1/images", query: q, safe: true, gone: true}, nil)
}

func targetQuery(target string) url.Values {
	q := url.Values{}
	if target != "" {
		q.Set("target", target)
	}
	return q
}

// CreateRun begins a run in a box and returns its token, which is shown only
// now. See WithKey.
func (c *Client) CreateRun(ctx context.Context, r RunRequest) (RunCreated, error) {
	return doJSON[RunCreated](ctx, c, call{method: http.MethodPost, path: "/v1/runs"}, r)
}

// Runs lists runs, newest first.
func (c *Client) Runs(ctx context.Context, p Page) (List[Run], error) {
	return get[List[Run]](ctx, c, "/v1/runs", p.query())
}

// Run returns one run.
func (c *Client) Run(ctx context.Context, id string) (Run, error) {
	return get[Run](ctx, c, "/v1/runs/"+seg(id), nil)
}

// FinishRun revokes the run's rights and closes its processes. It answers when
// each of them is proven gone or given up.
func (c *Client) FinishRun(ctx context.Context, id string, r FinishRequest) (FinishResponse, error) {
	return doJSON[FinishResponse](ctx, c, call{method: http.MethodPost, path: "/v1/runs/" + seg(id) + "/finish", safe: true}, r)
}

// FenceFilter selects fences.
type FenceFilter struct {
	Cleared bool // cleared ones too
	Page    Page
}

// Fences lists fences, newest first: by default only those that stand.
func (c *Client) Fences(ctx context.Context, f FenceFilter) (List[Fence], error) {
	q := f.Page.query()
	if f.Cleared {
		q.Set("cleared", "true")
	}
	return get[List[Fence]](ctx, c, "/v1/fences", q)
}

// Fence returns one fence.
func (c *Client) Fence(ctx context.Context, id string) (Fence, error) {
	return get[Fence](ctx, c, "/v1/fences/"+seg(id), nil)
}

// ClearFence is the statement of an operator that nothing runs there any more (admin).
func (c *Client) ClearFence(ctx context.Context, id string, r ClearFenceRequest) (Fence, error) {
	return doJSON[Fence](ctx, c, call{method: http.MethodPost, path: "/v1/fences/" + seg(id) + "/clear"}, r)
}

// CreateWorkspace creates a tenant (admin).
func (c *Client) CreateWorkspace(ctx context.Context, r WorkspaceRequest) (Workspace, error) {
	return doJSON[Workspace](ctx, c, call{method: http.MethodPost, path: "/v1/workspaces"}, r)
}

// Workspaces lists the tenants by name (admin).
func (c *Client) Workspaces(ctx context.Context, p Page) (List[Workspace], error) {
	return get[List[Workspace]](ctx, c, "/v1/workspaces", p.query())
}

// CreateKey creates a key of a workspace and returns its secret, which is shown
// only now (admin).
func (c *Client) CreateKey(ctx context.Context, workspace string, r KeyRequest) (KeyCreated, error) {
	return doJSON[KeyCreated](ctx, c, call{method: http.MethodPost, path: "/v1/workspaces/" + seg(workspace) + "/keys"}, r)
}

// Keys lists the keys of a workspace, newest first.
func (c *Client) Keys(ctx context.Context, workspace string, p Page) (List[Key], error) {
	return get[List[Key]](ctx, c, "/v1/workspaces/"+seg(workspace)+"/keys", p.query())
}

// RevokeKey makes a key worthless, at once and for ever (admin).
func (c *Client) RevokeKey(ctx context.Context, id string) (Key, error) {
	return doJSON[Key](ctx, c, call{method: http.MethodDelete, path: "/v1/keys/" + seg(id), safe: true}, nil)
}

// Audit lists recorded acts, newest first. An admin may leave the workspace
// empty to see all.
func (c *Client) Audit(ctx context.Context, workspace string, p Page) (List[AuditEvent], error) {
	q := p.query()
	if workspace != "" {
		q.Set("workspace", workspace)
	}
	return get[List[AuditEvent]](ctx, c, "/v1/audit", q)
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
