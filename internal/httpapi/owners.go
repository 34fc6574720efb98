package httpapi

import (
	"context"
	"io"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/store"
)

// The queries of the broker, under the names used here.
type (
	ReadQuery   = broker.ReadQuery
	StreamQuery = broker.StreamQuery
	ListQuery   = broker.ListQuery
)

// Broker is what the API needs of *broker.Broker.
type Broker interface {
	Open(ctx context.Context, p authz.Principal, req api.OpenRequest) (api.Process, error)
	Write(ctx context.Context, p authz.Principal, handle string, offset int64, data []byte, eof bool) (api.StdinState, error)
	Read(ctx context.Context, p authz.Principal, handle string, q ReadQuery) (api.ReadResponse, error)
	Stream(ctx context.Context, p authz.Principal, handle string, q StreamQuery) (*broker.LogStream, error)
	Ack(ctx context.Context, p authz.Principal, handle, cursor string) error
	Get(ctx context.Context, p authz.Principal, handle string) (api.Process, error)
	GetByRequest(ctx context.Context, p authz.Principal, requestID string) (api.Process, error)
	List(ctx context.Context, p authz.Principal, q ListQuery) (api.List[api.Process], error)
	Close(ctx context.Context, p authz.Principal, handle string, req api.CloseRequest) (api.CloseResponse, error)
	CloseByRequest(ctx context.Context, p authz.Principal, req api.CloseByRequest) (api.CloseResponse, error)
	Signal(ctx context.Context, p authz.Principal, handle, signal string) error
	Resize(ctx context.Context, p authz.Principal, handle string, size api.Winsize) error

	CreateRun(ctx context.Context, p authz.Principal, req api.RunRequest) (api.RunCreated, error)
	Run(ctx context.Context, p authz.Principal, id string) (api.Run, error)
	Runs(ctx context.Context, p authz.Principal, page store.Page) (api.List[api.Run], error)
	FinishRun(ctx context.Context, p authz.Principal, id string, req api.FinishRequest) (api.FinishResponse, error)

	Fences(ctx context.Context, p authz.Principal, standing bool, page store.Page) (api.List[api.Fence], error)
	Fence(ctx context.Context, p authz.Principal, id string) (api.Fence, error)
	ClearFence(ctx context.Context, p authz.Principal, id string, req api.ClearFenceRequest) (api.Fence, error)

	Targets(ctx context.Context, p authz.Principal) (api.List[api.Target], error)
	Target(ctx context.Context, p authz.Principal, name string) (api.Target, error)
	UpdateTarget(ctx context.Context, p authz.Principal, name string, u api.TargetUpdate) (api.Target, error)

	Audit(ctx context.Context, p authz.Principal, workspace string, page store.Page) (api.List[api.AuditEvent], error)
	Stats() broker.Stats
}

// LogStream is what the API needs of *broker.LogStream: batches of whole frames,
// the last of them a status frame, then io.EOF. A batch is valid until the next
// call.
type LogStream interface {
	Next() ([]byte, error)
	Close() error
}

// Boxes is what the API needs of *box.Service.
type Boxes interface {
	Acquire(ctx context.Context, p authz.Principal, req api.BoxRequest) (api.Box, error)
	Get(ctx context.Context, p authz.Principal, id string) (api.Box, error)
	List(ctx context.Context, p authz.Principal, page store.Page) (api.List[api.Box], error)
	Remove(ctx context.Context, p authz.Principal, id string) error
	PutFiles(ctx context.Context, p authz.Principal, id, path string, tar io.Reader) error
	GetFiles(ctx context.Context, p authz.Principal, id, path string, w io.Writer) error
	LoadImage(ctx context.Context, p authz.Principal, target, name string, tar io.Reader) ([]api.Image, error)
	Images(ctx context.Context, p authz.Principal, target string) (api.List[api.Image], error)
	RemoveImage(ctx context.Context, p authz.Principal, target, ref string) error
}

// Tenants is what the API needs of *tenant.Service.
type Tenants interface {
	Authenticate(ctx context.Context, credential string) (authz.Principal, error)
	CreateWorkspace(ctx context.Context, p authz.Principal, req api.WorkspaceRequest) (api.Workspace, error)
	Workspaces(ctx context.Context, p authz.Principal, limit int, after string) (api.List[api.Workspace], error)
	CreateKey(ctx context.Context, p authz.Principal, workspace string, req api.KeyRequest) (api.KeyCreated, error)
	Keys(ctx context.Context, p authz.Principal, workspace string, limit int, after string) (api.List[api.Key], error)
	RevokeKey(ctx context.Context, p authz.Principal, id string) (api.Key, error)
}

func brokerStream(b Broker) func(context.Context, authz.Principal, string, StreamQuery) (LogStream, error) {
	return func(ctx context.Context, p authz.Principal, handle string, q StreamQuery) (LogStream, error) {
		s, err := b.Stream(ctx, p, handle, q)
		if err != nil {
			return nil, err // not s: a nil *LogStream would be a non-nil interface
		}
		return s, nil
	}
}
