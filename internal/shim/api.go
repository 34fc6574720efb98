package shim

import (
	"context"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

var errTodo = errdefs.New(errdefs.Internal, "not written yet")

// Main is the body of `stockade-host shim --dir DIR`; it returns the exit code.
func Main(dir string) int { return 1 }

// InitMain is the body of `stockade-host init [--cwd DIR] -- COMMAND [ARG…]`.
func InitMain(args []string) int { return 1 }

// Start spawns a shim for a process directory and waits until its socket answers.
func Start(ctx context.Context, exe, dir string) error { return errTodo }

// Client talks to the shim of one process directory.
type Client struct{}

// NewClient makes a client; it connects on use.
func NewClient(dir string) *Client { return &Client{} }

// State returns the process's state now.
func (c *Client) State(ctx context.Context) (wire.ProcState, error) { return wire.ProcState{}, errTodo }

// Wait returns when the state differs from rev, or (log ≥ 0) the log goes beyond log.
func (c *Client) Wait(ctx context.Context, rev uint64, log int64) (wire.ProcState, error) {
	return wire.ProcState{}, errTodo
}

// WriteStdin writes input at an offset.
func (c *Client) WriteStdin(ctx context.Context, offset int64, data []byte, eof bool) (api.StdinState, error) {
	return api.StdinState{}, errTodo
}

// Signal sends a polite signal to the child.
func (c *Client) Signal(ctx context.Context, name string) error { return errTodo }

// Resize sets the terminal's size.
func (c *Client) Resize(ctx context.Context, size api.Winsize) error { return errTodo }

// Close ends the process and returns when it ended, proven or not.
func (c *Client) Close(ctx context.Context, req wire.Close) (wire.ProcState, error) {
	return wire.ProcState{}, errTodo
}

// Ack says that output before cursor may be dropped at the cap.
func (c *Client) Ack(ctx context.Context, cursor int64) error { return errTodo }

// Forget lets the shim of an ended process exit.
func (c *Client) Forget(ctx context.Context) error { return errTodo }

// CloseIdle closes idle connections.
func (c *Client) CloseIdle() {}
