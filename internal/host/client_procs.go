package host

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// MaxList bounds the JSON of a list a client accepts, in bytes: 16,384 processes
// of 8 KiB, which is 1 KiB of text in an exit, each byte written as six.
const MaxList = 128 << 20

// LogQuery says which part of a log to read. The zero value reads what is there
// from the oldest kept byte on, at most the host's default, without waiting.
type LogQuery struct {
	// Cursor is the position to read from. Lower than the oldest kept position
	// yields a gap, higher than the end is invalid.
	Cursor int64
	// MaxBytes bounds the output in the answer; 0 is 1 MiB, or no bound when following.
	MaxBytes int64
	// Wait is how long the host may wait for the first byte, at most 30 s. It is
	// ignored when following.
	Wait time.Duration
	// Follow streams until the end of the log.
	Follow bool
}

// list reads a list, whose bound is wider than that of other answers.
func (c *Client) list(ctx context.Context, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, shortCall)
	defer cancel()
	resp, err := c.do(ctx, call{method: "GET", path: path})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body := &io.LimitedReader{R: resp.Body, N: MaxList + 1}
	if err := json.NewDecoder(body).Decode(out); err != nil {
		if body.N <= 0 {
			return unreadable(err, "GET", "a list of more than %d bytes", MaxList)
		}
		return unreadable(err, "GET", "something that is not the list it should be")
	}
	_, _ = io.Copy(io.Discard, body) // lets the connection be used again
	return nil
}

// Start starts a process, exactly once per id (P1): repeating it with an equal
// spec returns the state of the first, another spec of the same id is a
// conflict. It returns once the spec is durable and the bundle checked; the
// phase is then accepted or later. See [Refused] for its errors.
func (c *Client) Start(ctx context.Context, spec wire.ProcSpec) (wire.ProcState, error) {
	var out wire.ProcState
	err := c.exchange(ctx, startCall, call{method: "PUT", path: procPath(spec.ID, ""), json: spec, repeatable: true}, &out)
	return out, err
}

// Proc returns the state of one process, or not_found.
func (c *Client) Proc(ctx context.Context, id string) (wire.ProcState, error) {
	var out wire.ProcState
	err := c.exchange(ctx, shortCall, call{method: "GET", path: procPath(id, "")}, &out)
	return out, err
}

// Procs returns the state of every process the host keeps.
func (c *Client) Procs(ctx context.Context) ([]wire.ProcState, error) {
	var out []wire.ProcState
	err := c.list(ctx, "/v1/procs", &out)
	return out, err
}

// Watch calls f with the state of every process once, then again after each
// change of a process's Rev, in order per process; changes that f was too slow
// for are left out, never the last. It returns when ctx ends, with ctx's error,
// or when the connection breaks (unavailable) or a newer generation came (denied
// on the next call).
func (c *Client) Watch(ctx context.Context, f func(wire.ProcState)) error {
	resp, err := c.do(ctx, call{method: "GET", path: "/v1/watch"})
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 0, 4096), maxJSON)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue // keeps the connection warm
		}
		var st wire.ProcState
		if err := json.Unmarshal(lines.Bytes(), &st); err != nil {
			return unreadable(err, "GET", "a state that cannot be read")
		}
		f(st)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	err = lines.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		return unreadable(err, "GET", "a state of more than %d bytes", maxJSON)
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the host program stopped reporting states").WithNext("watch again")
}

// Log opens a part of a process's log. What it returns are frames, to be read
// with [NewFrameReader] and closed by the caller. Without Follow the whole call
// is bounded by Wait and a minute.
func (c *Client) Log(ctx context.Context, id string, q LogQuery) (io.ReadCloser, error) {
	v := url.Values{"cursor": {strconv.FormatInt(q.Cursor, 10)}}
	if q.MaxBytes > 0 {
		v.Set("max_bytes", strconv.FormatInt(q.MaxBytes, 10))
	}
	if q.Wait > 0 {
		v.Set("wait_ms", strconv.FormatInt(q.Wait.Milliseconds(), 10))
	}
	send := c.do
	var cancel context.CancelFunc
	if q.Follow {
		v.Set("follow", "true")
		send = c.doAlone
		ctx, cancel = context.WithCancel(ctx)
	} else {
		ctx, cancel = context.WithTimeout(ctx, q.Wait+time.Minute)
	}
	resp, err := send(ctx, call{method: "GET", path: procPath(id, "/log"), query: v})
	if err != nil {
		cancel()
		return nil, err
	}
	if got := resp.Header.Get("Content-Type"); got != wire.FramesType {
		resp.Body.Close()
		cancel()
		return nil, unreadable(nil, "GET", "a log of an unknown type")
	}
	return &logBody{resp.Body, cancel, c.frames}, nil
}

// logBody ends the request with the body.
type logBody struct {
	io.ReadCloser
	cancel context.CancelFunc
	frames *sync.Pool
}

func (b *logBody) frameBuffers() *sync.Pool { return b.frames }

func (b *logBody) Close() error {
	b.cancel()
	return b.ReadCloser.Close()
}

// Ack tells the host that output before cursor has been taken, so that it may
// be dropped when room is needed.
func (c *Client) Ack(ctx context.Context, id string, cursor int64) error {
	return c.exchange(ctx, shortCall, call{method: "POST", path: procPath(id, "/ack"), query: url.Values{"cursor": {strconv.FormatInt(cursor, 10)}}, repeatable: true}, nil)
}

// WriteStdin writes input at an offset, and its end after it if eof is set. It
// returns how far the input was accepted: less than offset+len(data) means that
// the rest did not fit.
func (c *Client) WriteStdin(ctx context.Context, id string, offset int64, data []byte, eof bool) (api.StdinState, error) {
	v := url.Values{"offset": {strconv.FormatInt(offset, 10)}}
	if eof {
		v.Set("eof", "true")
	}
	if data == nil {
		data = []byte{}
	}
	var out api.StdinState
	err := c.exchange(ctx, shortCall, call{method: "PUT", path: procPath(id, "/stdin"), query: v, bytes: data, repeatable: true}, &out)
	return out, err
}

// Signal sends a polite signal, such as "SIGINT", to the child's process group.
func (c *Client) Signal(ctx context.Context, id, signal string) error {
	return c.exchange(ctx, shortCall, call{method: "POST", path: procPath(id, "/signal"), json: wire.Signal{Signal: signal}}, nil)
}

// Resize sets the size of a process's terminal.
func (c *Client) Resize(ctx context.Context, id string, size api.Winsize) error {
	return c.exchange(ctx, shortCall, call{method: "POST", path: procPath(id, "/resize"), json: size, repeatable: true}, nil)
}

// CloseProc ends a process and returns its state once the tree is empty or the
// bounded time for proving it (grace, then about a minute) has passed. It may be
// called any number of times, at the same time too.
func (c *Client) CloseProc(ctx context.Context, id string, k wire.Close) (wire.ProcState, error) {
	var out wire.ProcState
	limit := time.Duration(max(k.GraceMillis, 0))*time.Millisecond + closeCall
	err := c.exchange(ctx, limit, call{method: "POST", path: procPath(id, "/close"), json: k, repeatable: true}, &out)
	return out, err
}

// Forget removes an ended process and its log; conflict while it lives. A
// process the host does not have is forgotten already.
func (c *Client) Forget(ctx context.Context, id string) error {
	return c.exchange(ctx, shortCall, call{method: "DELETE", path: procPath(id, ""), repeatable: true}, nil)
}

func procPath(id, rest string) string { return "/v1/procs/" + url.PathEscape(id) + rest }
