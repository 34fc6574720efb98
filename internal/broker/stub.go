package broker

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/store"
)

func todo() error { return errdefs.New(errdefs.Internal, "not built yet") }

// Broker owns runs, processes and fences.
type Broker struct{}

// New checks the configuration and makes a broker that does nothing yet.
func New(cfg Config) (*Broker, error) { return &Broker{}, cfg.check() }

// Start begins.
func (b *Broker) Start(ctx context.Context) error { return todo() }

// Stop ends the broker, not the processes.
func (b *Broker) Stop(ctx context.Context) error { return todo() }

// Host returns the client of a target's host program (not_found, unavailable
// before Start); package box uses it.
func (b *Broker) Host(target string) (*host.Client, error) { return nil, todo() }

// Stats is what the metrics show.
type Stats struct {
	Owners       int // processes that may be running, and fenced ones
	Unclassified int // of those, not heard of since this server started
	Streams      int // calls that read a log now
}

// Stats counts.
func (b *Broker) Stats() Stats { return Stats{} }

// Open starts a process.
func (b *Broker) Open(ctx context.Context, p authz.Principal, req api.OpenRequest) (api.Process, error) {
	return api.Process{}, todo()
}

// Write writes input.
func (b *Broker) Write(ctx context.Context, p authz.Principal, handle string, offset int64, data []byte, eof bool) (api.StdinState, error) {
	return api.StdinState{}, todo()
}

// ReadQuery says which part of a log to read.
type ReadQuery struct {
	Cursor   string        // "" is the oldest kept byte
	MaxBytes int64         // 0: MaxRead
	Wait     time.Duration // at most MaxWait, for the first byte
	Ack      bool          // everything before Cursor may be dropped at the log's cap
}

// Read reads.
func (b *Broker) Read(ctx context.Context, p authz.Principal, handle string, q ReadQuery) (api.ReadResponse, error) {
	return api.ReadResponse{}, todo()
}

// StreamQuery says which part of a log to stream.
type StreamQuery struct {
	Cursor string        // "" is the oldest kept byte
	Follow bool          // go on until the end of the log
	Wait   time.Duration // as in ReadQuery, when not following
	Ack    bool
}

// LogStream is a log as frames.
type LogStream struct{}

// Next returns frames.
func (s *LogStream) Next() ([]byte, error) { return nil, todo() }

// Close ends it.
func (s *LogStream) Close() error { return nil }

// Stream streams a log.
func (b *Broker) Stream(ctx context.Context, p authz.Principal, handle string, q StreamQuery) (*LogStream, error) {
	return nil, todo()
}

// Ack says that everything before cursor was taken.
func (b *Broker) Ack(ctx context.Context, p authz.Principal, handle, cursor string) error {
	return todo()
}

// Get returns a process.
func (b *Broker) Get(ctx context.Context, p authz.Principal, handle string) (api.Process, error) {
	return api.Process{}, todo()
}

// GetByRequest returns the process of the caller's run with a request id.
func (b *Broker) GetByRequest(ctx context.Context, p authz.Principal, requestID string) (api.Process, error) {
	return api.Process{}, todo()
}

// ListQuery selects processes.
type ListQuery struct {
	Run   string // "" is every run in the caller's scope
	Box   string
	Live  bool // only those that may be running
	Limit int  // 1 to 1000; 0 is 100
	After string
}

// List lists processes.
func (b *Broker) List(ctx context.Context, p authz.Principal, q ListQuery) (api.List[api.Process], error) {
	return api.List[api.Process]{}, todo()
}

// Close ends a process.
func (b *Broker) Close(ctx context.Context, p authz.Principal, handle string, req api.CloseRequest) (api.CloseResponse, error) {
	return api.CloseResponse{}, todo()
}

// CloseByRequest ends, or forbids, the process of the caller's run with a request id.
func (b *Broker) CloseByRequest(ctx context.Context, p authz.Principal, req api.CloseByRequest) (api.CloseResponse, error) {
	return api.CloseResponse{}, todo()
}

// Signal sends a polite signal.
func (b *Broker) Signal(ctx context.Context, p authz.Principal, handle, signal string) error {
	return todo()
}

// Resize sets the size of the terminal.
func (b *Broker) Resize(ctx context.Context, p authz.Principal, handle string, size api.Winsize) error {
	return todo()
}

// CreateRun begins a run.
func (b *Broker) CreateRun(ctx context.Context, p authz.Principal, req api.RunRequest) (api.RunCreated, error) {
	return api.RunCreated{}, todo()
}

// Run returns a run.
func (b *Broker) Run(ctx context.Context, p authz.Principal, id string) (api.Run, error) {
	return api.Run{}, todo()
}

// Runs lists runs.
func (b *Broker) Runs(ctx context.Context, p authz.Principal, page store.Page) (api.List[api.Run], error) {
	return api.List[api.Run]{}, todo()
}

// FinishRun ends a run.
func (b *Broker) FinishRun(ctx context.Context, p authz.Principal, id string, req api.FinishRequest) (api.FinishResponse, error) {
	return api.FinishResponse{}, todo()
}

// Fences lists fences.
func (b *Broker) Fences(ctx context.Context, p authz.Principal, standing bool, page store.Page) (api.List[api.Fence], error) {
	return api.List[api.Fence]{}, todo()
}

// Fence returns a fence with its evidence.
func (b *Broker) Fence(ctx context.Context, p authz.Principal, id string) (api.Fence, error) {
	return api.Fence{}, todo()
}

// ClearFence lifts a fence by an operator's word.
func (b *Broker) ClearFence(ctx context.Context, p authz.Principal, id string, req api.ClearFenceRequest) (api.Fence, error) {
	return api.Fence{}, todo()
}

// Targets lists targets.
func (b *Broker) Targets(ctx context.Context, p authz.Principal) (api.List[api.Target], error) {
	return api.List[api.Target]{}, todo()
}

// Target returns a target.
func (b *Broker) Target(ctx context.Context, p authz.Principal, name string) (api.Target, error) {
	return api.Target{}, todo()
}

// UpdateTarget changes a target.
func (b *Broker) UpdateTarget(ctx context.Context, p authz.Principal, name string, u api.TargetUpdate) (api.Target, error) {
	return api.Target{}, todo()
}

// Audit lists recorded acts; workspace "" is all.
func (b *Broker) Audit(ctx context.Context, p authz.Principal, workspace string, page store.Page) (api.List[api.AuditEvent], error) {
	return api.List[api.AuditEvent]{}, todo()
}
