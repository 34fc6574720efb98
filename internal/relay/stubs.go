package relay

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Tools answers the tool calls of one job.
type Tools interface {
	// Call answers one JSON-RPC message or a batch; nil for a notification. Calls
	// come at the same time from several goroutines. ctx ends when the job's tools
	// are revoked or Limits.MCPTimeout is over; an answer after that is dropped.
	Call(ctx context.Context, payload json.RawMessage) (json.RawMessage, error)
}

// Hub hands jobs to daemons. Its methods may be called from any goroutine.
type Hub struct{}

// Job is one running job. See RunJob.
type Job struct{}

// Endpoint is where a hub listens by itself.
type Endpoint struct {
	Host  string // 127.0.0.1 when empty
	Port  int    // 0: any free one
	Token string // must be the hub's
}

var errStub = errdefs.New(errdefs.Internal, "not built yet")

// NewHub checks the configuration, locks the state directory and loads its fences.
// Call Stop when done.
func NewHub(cfg HubConfig) (*Hub, error) { return nil, errStub }

// Start listens at the endpoint and serves daemons there until Stop; it returns the
// WebSocket URL. Equal calls, however many at once, make one listener; another
// endpoint is refused as daemon_hub_conflict.
func (h *Hub) Start(ctx context.Context, at Endpoint) (url string, err error) { return "", errStub }

// ServeHTTP upgrades a request to WebSocket and takes the daemon in.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {}

// WaitForDaemon returns when the daemon is connected and may be given a job.
// timeout: Limits.ConnectTimeout when zero, at least 100 ms.
func (h *Hub) WaitForDaemon(ctx context.Context, id string, timeout time.Duration) error {
	return errStub
}

// RunJob sends a job to a connected daemon. ctx governs the whole job: when it ends
// the job is settled. So is it by Cancel, and when its time is over.
func (h *Hub) RunJob(ctx context.Context, req JobRequest) (*Job, error) { return nil, errStub }

// Daemons lists the connected daemons by id.
func (h *Hub) Daemons() []DaemonInfo { return nil }

// Jobs lists the jobs that are not settled, oldest first.
func (h *Hub) Jobs() []JobInfo { return nil }

// CancelJob is Job.Cancel by id, for callers that did not start it: not_found when
// there is no such job.
func (h *Hub) CancelJob(ctx context.Context, jobID, cause string) (Outcome, error) {
	return Outcome{}, errStub
}

// Fences lists the fences with their evidence, oldest first.
func (h *Hub) Fences() []Fence { return nil }

// ClearFence lifts a fence after a person verified that nothing runs there. id is a
// daemon id, or the fence's Key. Operator and reason are required and written, with
// the evidence, to the audit log before the fence is lifted.
func (h *Hub) ClearFence(ctx context.Context, id, operator, reason string) (Fence, error) {
	return Fence{}, errStub
}

// Stop refuses new jobs and daemons, settles every job while daemons can still
// answer, then closes the connections with 1001 and frees the state directory.
func (h *Hub) Stop(ctx context.Context) error { return nil }

// ID returns the job's id, 22 characters.
func (j *Job) ID() string { return "" }

// Next returns the next event, as the daemon sent it; the caller may keep it. After
// the last one: io.EOF when the job finished or its daemon disconnected (the last
// event then is a run.failed with code daemon_disconnected), otherwise the error
// that ended it (daemon_timeout, daemon_cancelled, job_overflow). When Next says
// that a job ended, it is settled. ctx ends the waiting only.
func (j *Job) Next(ctx context.Context) (json.RawMessage, error) { return nil, errStub }

// NextBatch is Next for all events that are there, at least one.
func (j *Job) NextBatch(ctx context.Context) ([]json.RawMessage, error) { return nil, errStub }

// Cancel settles the job and says how that went. It returns when the daemon
// acknowledged or is fenced, at most Limits.CancelTimeout later, and does not stop
// for ctx: clean-up is never left half done. Repeating it is harmless. Events that
// were not read are dropped.
func (j *Job) Cancel(ctx context.Context, cause string) (Outcome, error) { return Outcome{}, errStub }

// Done is closed when the job is settled.
func (j *Job) Done() <-chan struct{} { return nil }

// Outcome is how the job ended; zero before Done.
func (j *Job) Outcome() Outcome { return Outcome{} }
