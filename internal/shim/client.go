package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Client talks to the shim of one process directory. It connects when it is
// used, and its methods may be called from any goroutine. A refusal of the shim
// keeps its code. When the shim cannot be reached the error is
// errdefs.Unavailable: ask [Find] whether it lives. A signal whose answer was lost
// is errdefs.Indeterminate; everything else may be repeated.
type Client struct {
	dir     string
	http    *http.Client
	blocked atomic.Bool // what the last answer said, for the next Wait
}

// NewClient makes a client of the shim of a process directory.
func NewClient(dir string) *Client {
	path := filepath.Join(dir, socketFile)
	return &Client{dir: dir, http: &http.Client{Transport: &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return DialUnix(ctx, path) },
		MaxIdleConns:        2,
		MaxIdleConnsPerHost: 2,
		IdleConnTimeout:     30 * time.Second,
		DisableCompression:  true,
		ReadBufferSize:      4 << 10,
		WriteBufferSize:     4 << 10,
	}}}
}

// CloseIdle closes connections that are not in use.
func (c *Client) CloseIdle() { c.http.CloseIdleConnections() }

// State returns the process's state now.
func (c *Client) State(ctx context.Context) (wire.ProcState, error) {
	return c.state(ctx, "GET", "/state", nil, nil)
}

// Wait returns the state as soon as its Rev is not rev, or, with log ≥ 0, as
// soon as the log goes beyond cursor log, is at its end, or is blocked where this
// client last heard that it is not, or the other way round. After 30 seconds it returns the state in any case. It ends with
// errdefs.Unavailable in the moment in which the shim dies.
func (c *Client) Wait(ctx context.Context, rev uint64, log int64) (wire.ProcState, error) {
	q := url.Values{"rev": {strconv.FormatUint(rev, 10)}, "log": {strconv.FormatInt(log, 10)}, "blocked": {strconv.FormatBool(c.blocked.Load())}}
	return c.state(ctx, "GET", "/wait", q, nil)
}

// WriteStdin writes input at an offset and returns how far the input is
// accepted then, which may be less than what was given: write on from there.
// What was accepted before is skipped, so repeating a write is harmless. eof ends
// the input after data.
//
// Errors: errdefs.Invalid for a negative offset or one beyond 2^53;
// errdefs.Conflict for an offset ahead of what was accepted, for input after its
// end, for a process without input or that has ended, and when the child closed
// its input; errdefs.Exhausted when the window is full. The facts "accepted" and
// "window_bytes" say where to go on.
func (c *Client) WriteStdin(ctx context.Context, offset int64, data []byte, eof bool) (api.StdinState, error) {
	if len(data) > StdinWindow { // more cannot be accepted at once in any case
		data, eof = data[:StdinWindow], false
	}
	q := url.Values{"offset": {strconv.FormatInt(offset, 10)}, "eof": {strconv.FormatBool(eof)}}
	var st api.StdinState
	return st, c.call(ctx, "PUT", "/stdin", q, data, &st)
}

// Signal sends one of the polite signals, such as "SIGINT", to the child's
// process group. One that comes before the child has started is sent then.
func (c *Client) Signal(ctx context.Context, name string) error {
	err := c.call(ctx, "POST", "/signal", nil, wire.Signal{Signal: name}, nil)
	if errors.Is(err, errLost) {
		return errdefs.Wrap(err, errdefs.Indeterminate, "the shim's answer was lost; %s may have been sent", name)
	}
	return err
}

// Resize sets the size of the child's terminal.
func (c *Client) Resize(ctx context.Context, size api.Winsize) error {
	return c.call(ctx, "POST", "/resize", nil, size, nil)
}

// Close stops the process: SIGTERM, after the grace SIGKILL to everything. It
// returns when the process has ended; or, with the reason in Unproven, when its
// end cannot be shown or recorded for now, in which case the shim goes on trying.
// Repeating it can only shorten the grace. If ctx ends first the stop goes on.
func (c *Client) Close(ctx context.Context, req wire.Close) (wire.ProcState, error) {
	return c.state(ctx, "POST", "/close", nil, req)
}

func (c *Client) state(ctx context.Context, method, path string, q url.Values, body any) (wire.ProcState, error) {
	var st wire.ProcState
	if err := c.call(ctx, method, path, q, body, &st); err != nil {
		return wire.ProcState{}, err
	}
	c.blocked.Store(st.Log.Blocked)
	return st, nil
}

// Ack says that output before cursor may be dropped when the log is at its cap.
func (c *Client) Ack(ctx context.Context, cursor int64) error {
	return c.call(ctx, "POST", "/ack", url.Values{"cursor": {strconv.FormatInt(cursor, 10)}}, nil, nil)
}

// forgetPatience bounds the wait for a forgotten shim to be gone.
const forgetPatience = 5 * time.Second

// Forget lets the shim of an ended process go, and returns when it is gone:
// then the directory may be removed. A process that has not ended is
// errdefs.Conflict.
func (c *Client) Forget(ctx context.Context) error {
	if err := c.call(ctx, "POST", "/forget", nil, nil, nil); err != nil {
		return err
	}
	c.CloseIdle()
	ctx, cancel := context.WithTimeout(ctx, forgetPatience)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		held, err := locked(c.dir)
		if err != nil {
			return err
		}
		if !held {
			bury(c.dir)
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "the shim does not end")
		}
	}
}

func (c *Client) call(ctx context.Context, method, path string, q url.Values, body, answer any) error {
	var rd io.Reader
	switch b := body.(type) {
	case nil:
	case []byte:
		rd = bytes.NewReader(b)
	default:
		enc, err := json.Marshal(b)
		if err != nil {
			return errdefs.Wrap(err, errdefs.Internal, "encode the request")
		}
		rd = bytes.NewReader(enc)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://shim"+path+"?"+q.Encode(), rd)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "make the request")
	}
	res, err := c.http.Do(req)
	if err != nil {
		return c.lost(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return c.lost(err)
	}
	if res.StatusCode >= 300 {
		var p api.Problem
		if err := json.Unmarshal(b, &p); err != nil || p.Code == "" {
			return errdefs.New(errdefs.Internal, "the shim answered %s", res.Status)
		}
		return p.Err()
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(b, answer); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the shim's answer makes no sense: %v", err)
	}
	return nil
}

// maxAnswer bounds an answer of the shim, whose state has a few kilobytes.
const maxAnswer = 1 << 20

// errLost is in the chain when a request may have reached the shim.
var errLost = errors.New("no answer came")

func (c *Client) lost(err error) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok { // from DialUnix: nothing was sent
		return e
	}
	return errdefs.Wrap(errors.Join(errLost, err), errdefs.Unavailable, "the shim of %s does not answer", filepath.Base(c.dir))
}

// bury reaps the dead shim of a directory if it was a child of this process. A
// shim is started by a host program and outlives it; as long as that lives it is
// the one that must take note of the death. The shim's lock must be free: then it
// is at least about to end.
func bury(dir string) {
	id, ok := readIdentity(dir)
	if !ok {
		return
	}
	for range 100 {
		if start, err := startTime(id.PID); err != nil || start != id.Start {
			return
		}
		pid, err := syscall.Wait4(id.PID, nil, syscall.WNOHANG, nil)
		if err != syscall.EINTR && (err != nil || pid != 0) {
			return
		}
		time.Sleep(time.Millisecond)
	}
}
