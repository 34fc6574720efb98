package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Process is a process of a server, by its handle. It holds no connection, and
// may be used from many goroutines.
type Process struct {
	c      *Client
	handle string
	info   ProcessInfo
}

// Open starts a process, or returns the one that was started with the same
// request id and arguments before, also when that was before a crash of the
// caller. It is repeated until it is answered.
func (c *Client) Open(ctx context.Context, r OpenRequest) (*Process, error) {
	info, err := doJSON[ProcessInfo](ctx, c, call{method: http.MethodPost, path: "/v1/processes", safe: true}, r)
	if err != nil {
		return nil, err
	}
	return &Process{c: c, handle: info.Handle, info: info}, nil
}

// Process returns a process by its handle, without asking the server.
func (c *Client) Process(handle string) *Process { return &Process{c: c, handle: handle} }

// ProcessByRequest finds a process by the request id it was opened with.
func (c *Client) ProcessByRequest(ctx context.Context, requestID string) (*Process, error) {
	info, err := get[ProcessInfo](ctx, c, "/v1/processes/by-request", url.Values{"request_id": {requestID}})
	if err != nil {
		return nil, err
	}
	return &Process{c: c, handle: info.Handle, info: info}, nil
}

// ProcessFilter selects processes. Zero fields select all.
type ProcessFilter struct {
	Run  string
	Box  string
	Live bool // only those that may still be running
	Page Page
}

// Processes lists processes, newest first.
func (c *Client) Processes(ctx context.Context, f ProcessFilter) (List[ProcessInfo], error) {
	q := f.Page.query()
	for k, v := range map[string]string{"run": f.Run, "box": f.Box} {
		if v != "" {
			q.Set(k, v)
		}
	}
	if f.Live {
		q.Set("live", "true")
	}
	return get[List[ProcessInfo]](ctx, c, "/v1/processes", q)
}

// CloseByRequest closes a process by its request id; one that was never opened
// is forbidden to start.
func (c *Client) CloseByRequest(ctx context.Context, r CloseByRequest) (CloseResponse, error) {
	return doJSON[CloseResponse](ctx, c, call{method: http.MethodPost, path: "/v1/processes/close", safe: true}, r)
}

// Handle is the process's handle.
func (p *Process) Handle() string { return p.handle }

// Info is what the server said of the process when this value was made by Open
// or ProcessByRequest; zero otherwise. See Get.
func (p *Process) Info() ProcessInfo { return p.info }

func (p *Process) path(more string) string { return "/v1/processes/" + seg(p.handle) + more }

// Get returns the process as it is now.
func (p *Process) Get(ctx context.Context) (ProcessInfo, error) {
	return get[ProcessInfo](ctx, p.c, p.path(""), nil)
}

// Write writes input at an offset, and its end after it if eof. It returns how
// far the input was accepted, which may be less than all. Nothing accepted
// because the child does not read is exhausted. See Stdin for a writer.
func (p *Process) Write(ctx context.Context, offset int64, data []byte, eof bool) (StdinState, error) {
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}}
	if eof {
		q.Set("eof", "true")
	}
	if data == nil {
		data = []byte{}
	}
	return doJSON[StdinState](ctx, p.c, call{method: http.MethodPut, path: p.path("/stdin"), query: q,
		body: data, ctype: "application/octet-stream", safe: true}, nil)
}

// ReadOptions says what to read.
type ReadOptions struct {
	Cursor   string        // where to read from; empty is the oldest kept
	MaxBytes int64         // 0 is the server's default
	Wait     time.Duration // how long to wait for output if there is none at the cursor
	Ack      bool          // also acknowledge everything before the cursor
}

// Read reads a piece of the log. See Output for a stream.
func (p *Process) Read(ctx context.Context, o ReadOptions) (ReadResponse, error) {
	q := url.Values{}
	if o.Cursor != "" {
		q.Set("cursor", o.Cursor)
	}
	if o.MaxBytes > 0 {
		q.Set("max_bytes", strconv.FormatInt(o.MaxBytes, 10))
	}
	if o.Wait > 0 {
		q.Set("wait_ms", millis(o.Wait))
	}
	if o.Ack {
		q.Set("ack", "true")
	}
	return get[ReadResponse](ctx, p.c, p.path("/log"), q)
}

// Ack tells the server that everything before the cursor was received, so that
// it may be dropped when the log is at its cap.
func (p *Process) Ack(ctx context.Context, cursor string) error {
	return doNone(ctx, p.c, call{method: http.MethodPost, path: p.path("/ack"), query: url.Values{"cursor": {cursor}}, safe: true}, nil)
}

// Close stops the process and answers when its tree is proven gone, or when that
// proof was given up and a fence stands.
func (p *Process) Close(ctx context.Context, r CloseRequest) (CloseResponse, error) {
	return doJSON[CloseResponse](ctx, p.c, call{method: http.MethodPost, path: p.path("/close"), safe: true}, r)
}

// Signal sends a polite signal, such as "SIGINT". It is not repeated.
func (p *Process) Signal(ctx context.Context, name string) error {
	return doNone(ctx, p.c, call{method: http.MethodPost, path: p.path("/signal")}, map[string]string{"signal": name})
}

// Resize sets the size of the process's terminal.
func (p *Process) Resize(ctx context.Context, w Winsize) error {
	return doNone(ctx, p.c, call{method: http.MethodPost, path: p.path("/resize"), safe: true}, w)
}

// Receipt returns the signed proof that the process is gone; not_found while
// there is none.
func (p *Process) Receipt(ctx context.Context) (Receipt, error) {
	return get[Receipt](ctx, p.c, p.path("/receipt"), nil)
}

// Wait waits until it is known how the process ended. The kind "unknown" is
// never success. A process that was closed before it started is a conflict.
func (p *Process) Wait(ctx context.Context) (Exit, error) {
	delay := 10 * time.Millisecond
	cursor := ""
	for {
		info, err := p.Get(ctx)
		if err != nil {
			return Exit{}, err
		}
		if info.Exit != nil {
			return *info.Exit, nil
		}
		switch info.State {
		case StateNeverStarted:
			return Exit{}, errdefs.New(Conflict, "the process was closed before it started")
		case StateFenced, StateClosed:
			return Exit{Kind: ExitUnknown, Detail: "no exit status was recorded"}, nil
		}
		// The end of the log is the usual sign of the end, and can be waited for.
		if !info.Log.EOF && delay > 100*time.Millisecond {
			if cursor = info.Cursor; cursor != "" {
				if _, err := p.Read(ctx, ReadOptions{Cursor: cursor, MaxBytes: 1, Wait: 10 * time.Second}); err != nil {
					return Exit{}, err
				}
			}
		}
		if !sleep(ctx, delay) {
			return Exit{}, errdefs.Wrap(context.Cause(ctx), Unavailable, "waiting for the process was given up")
		}
		delay = min(delay*2, 400*time.Millisecond)
	}
}
