package runprocess

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/api"
)

// Broker is the server that has the ledger, asked with a workspace key. Its errors
// are *errdefs.Error; one that wraps another did not come from the server. What may
// be repeated is repeated by the keeper, so that a Broker should not, for long.
type Broker interface {
	AcquireBox(ctx context.Context, r api.BoxRequest) (api.Box, error)
	RemoveBox(ctx context.Context, id string) error
	// BeginRun records a run and returns what its token can do.
	BeginRun(ctx context.Context, r api.RunRequest) (api.Run, Processes, error)
	// FinishRun ends a run's rights and closes its processes; it may be repeated.
	FinishRun(ctx context.Context, id string, r api.FinishRequest) (api.FinishResponse, error)
}

// Processes is the broker, asked with the token of one run.
type Processes interface {
	Open(ctx context.Context, r api.OpenRequest) (api.Process, error)
	Write(ctx context.Context, handle string, offset int64, data []byte, eof bool) (api.StdinState, error)
	Read(ctx context.Context, handle string, r Read) (api.ReadResponse, error)
	Get(ctx context.Context, n Name) (api.Process, error)
	Close(ctx context.Context, n Name, r api.CloseRequest) (api.CloseResponse, error)
}

// Read is one read of a log.
type Read struct {
	Cursor   string // empty: the oldest byte that is kept
	MaxBytes int64
	Wait     time.Duration
	Ack      bool // everything before Cursor was received
}

// Name names a process: one of the two is set.
type Name struct{ Handle, RequestID string }
