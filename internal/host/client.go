package host

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"mime"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// What a client accepts from a host, which it does not trust.
const (
	maxJSON    = 1 << 20  // one JSON answer
	maxProblem = 64 << 10 // one error answer
	maxText    = 4 << 10  // one text inside an error answer
	maxHeader  = 64 << 10 // the header of an answer
)

// Times a call may take when the caller's context gives no earlier end. They
// bound calls to a host that accepts a connection and then says nothing.
const (
	shortCall = 30 * time.Second
	startCall = 2 * time.Minute  // PUT of a process or a box on a loaded machine
	bulkCall  = 30 * time.Minute // files and images
	closeCall = 2 * time.Minute  // beyond the grace period
)

// ErrAnswered is matched by every error that the host itself answered, as
// opposed to one of the connection.
var ErrAnswered = errors.New("answered by the host program")

// Refused reports whether err is a definite refusal: the host answered, and it
// did not do what was asked. After a refused Start the host neither runs nor
// keeps the process, except for conflict, which says that the id is in use by
// another spec.
func Refused(err error) bool {
	if !errors.Is(err, ErrAnswered) {
		return false
	}
	code := errdefs.CodeOf(err)
	return code != errdefs.Indeterminate && code != errdefs.Internal
}

// Client speaks the host API to one host. It is safe for concurrent use. Each
// method is bounded in time even if the context is not, except Watch and a
// following Log.
type Client struct {
	http       *http.Client
	streams    *http.Client // a connection for each: a stream cannot be sent twice
	dial       func(context.Context) (net.Conn, error)
	generation string
	frames     *sync.Pool // large buffers of the readers of its logs
}

// NewClient makes a client that opens its connections with dial and sends
// generation on every request. Generation 0 sends none, which a host allows
// only for Info. Idle connections are pooled; call CloseIdle to drop them.
func NewClient(dial func(context.Context) (net.Conn, error), generation int64) *Client {
	connect := func(keep bool) *http.Client {
		return &http.Client{
			Transport: &http.Transport{
				DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
				DisableKeepAlives:      !keep,
				MaxIdleConns:           64,
				MaxIdleConnsPerHost:    64,
				IdleConnTimeout:        90 * time.Second,
				MaxResponseHeaderBytes: maxHeader,
				// Thousands of connections wait for output at once; what is large goes past
				// these buffers anyway.
				ReadBufferSize:     1 << 10,
				WriteBufferSize:    1 << 10,
				DisableCompression: true,
				// A host that knows at once that it will not take a stream says so before it is sent.
				ExpectContinueTimeout: 5 * time.Second,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	c := &Client{http: connect(true), streams: connect(false), dial: dial, frames: newFrameBuffers()}
	if generation > 0 {
		c.generation = strconv.FormatInt(generation, 10)
	}
	return c
}

// CloseIdle closes the pooled connections. The client may be used on.
func (c *Client) CloseIdle() { c.http.CloseIdleConnections() }

// call is one request.
type call struct {
	method string
	path   string
	query  url.Values
	json   any       // body as JSON, or
	bytes  []byte    // body as bytes, or
	stream io.Reader // body as a stream
	// repeatable marks a request that is harmless to send twice: it is then sent
	// again by itself when a pooled connection turns out to be dead.
	repeatable bool
}

func (k call) request(ctx context.Context, generation string) (*http.Request, error) {
	var body io.Reader
	kind := ""
	switch {
	case k.json != nil:
		b, err := json.Marshal(k.json)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Internal, "a host request could not be encoded")
		}
		body, kind = bytes.NewReader(b), "application/json"
	case k.bytes != nil:
		body, kind = bytes.NewReader(k.bytes), "application/octet-stream"
	case k.stream != nil:
		body, kind = k.stream, "application/octet-stream"
	}
	u := url.URL{Scheme: "http", Host: "host", Path: k.path, RawQuery: k.query.Encode()}
	r, err := http.NewRequestWithContext(ctx, k.method, u.String(), body)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the host request %s %s cannot be formed", k.method, k.path)
	}
	if kind != "" {
		r.Header.Set("Content-Type", kind)
	}
	if k.stream != nil {
		r.Header.Set("Expect", "100-continue")
	}
	if generation != "" {
		r.Header.Set(wire.GenerationHeader, generation)
	}
	if k.repeatable {
		// An empty list marks the request as idempotent for the transport and is not sent.
		r.Header["Idempotency-Key"] = []string{}
	}
	return r, nil
}

// do sends the request and returns an answer of status 2xx, whose body the
// caller must close, or an error as the package promises.
func (c *Client) do(ctx context.Context, k call) (*http.Response, error) {
	// WroteHeaders runs on the transport's own goroutine.
	var sent atomic.Bool
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	r, err := k.request(traced, c.generation)
	if err != nil {
		return nil, err
	}
	via := c.http
	if k.stream != nil {
		via = c.streams
	}
	resp, err := via.Do(r)
	if err != nil {
		return nil, broken(err, k.method, sent.Load())
	}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, answered(resp, k.method)
}

// doAlone is do over a connection of its own, which nobody but the reader of the
// answer reads. A transport has two goroutines for each connection: where
// thousands of logs that say nothing are followed, a seventh of the server's memory.
func (c *Client) doAlone(ctx context.Context, k call) (*http.Response, error) {
	r, err := k.request(ctx, c.generation)
	if err != nil {
		return nil, err
	}
	r.Close = true
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, broken(err, k.method, false)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	end := func() {
		stop()
		conn.Close()
	}
	in := &io.LimitedReader{R: conn, N: maxHeader}
	var resp *http.Response
	if err = r.Write(conn); err == nil {
		resp, err = http.ReadResponse(bufio.NewReaderSize(in, lineBuffer), nil)
	}
	if err != nil {
		end()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, broken(err, k.method, true)
	}
	in.N = math.MaxInt64
	resp.Body = &aloneBody{resp.Body, end}
	if resp.StatusCode >= 200 && resp.StatusCode < 300 {
		return resp, nil
	}
	defer end()
	return nil, answered(resp, k.method)
}

// lineBuffer holds a line of a header or a chunk's; what is large is read past it.
const lineBuffer = 512

// aloneBody ends its connection when it is closed.
type aloneBody struct {
	io.Reader
	end func()
}

func (b *aloneBody) Close() error {
	b.end()
	return nil
}

// broken classifies an error of the connection.
func broken(err error, method string, sent bool) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok && !sent {
		return e // the dialer knows best why there is no connection
	}
	if sent && method != http.MethodGet {
		return errdefs.Wrap(err, errdefs.Indeterminate, "the connection to the host program broke before it answered").
			WithNext("ask the host what it knows, or repeat the request")
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the host program does not answer").
		WithNext("it is tried again when the host is back")
}

// answered turns an error answer into an error. Texts are cut: the host is not
// trusted to be brief.
func answered(resp *http.Response, method string) error {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	var p api.Problem
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || kind != api.ProblemType || json.Unmarshal(body, &p) != nil {
		code := errdefs.Unavailable
		if method != http.MethodGet {
			code = errdefs.Indeterminate
		}
		return errdefs.New(code, "the host program answered with status %d and no explanation", resp.StatusCode).
			WithNext("check that a stockade-host answers there")
	}
	cause := fmt.Errorf("%w: %s", ErrAnswered, http.StatusText(resp.StatusCode))
	known, _ := errors.AsType[*errdefs.Error](p.Err())
	e := errdefs.Wrap(cause, known.Code, "%s", cut(p.Detail))
	if p.Next != "" {
		e = e.WithNext("%s", cut(p.Next))
	}
	for k, v := range p.Facts {
		if len(e.Detail) == 16 {
			break
		}
		e = e.With(cut(k), cut(v))
	}
	return e
}

// cut bounds a foreign text and makes it one harmless line.
func cut(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}

// exchange sends a request and decodes a JSON answer into out, if out is not nil.
func (c *Client) exchange(ctx context.Context, limit time.Duration, k call, out any) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	resp, err := c.do(ctx, k)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	// Reading to the end lets the connection be used again.
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxJSON+1))
	if err != nil {
		return broken(err, k.method, true)
	}
	if out == nil {
		return nil
	}
	if len(body) > maxJSON {
		return unreadable(nil, k.method, "more than %d bytes", maxJSON)
	}
	if err := json.Unmarshal(body, out); err != nil {
		return unreadable(err, k.method, "something that is not the JSON it should be")
	}
	return nil
}

// unreadable is the error for an answer that makes no sense: what was asked may
// have been done.
func unreadable(err error, method, format string, args ...any) error {
	code := errdefs.Unavailable
	if method != http.MethodGet {
		code = errdefs.Indeterminate
	}
	return errdefs.Wrap(err, code, "the host program answered %s", fmt.Sprintf(format, args...)).
		WithNext("check that its version matches the server's")
}

// Info says who the host is.
func (c *Client) Info(ctx context.Context) (wire.HostInfo, error) {
	var out wire.HostInfo
	err := c.exchange(ctx, shortCall, call{method: "GET", path: "/v1/info"}, &out)
	return out, err
}

// SetLease lets processes go on for another span without a server.
func (c *Client) SetLease(ctx context.Context, span time.Duration) error {
	return c.exchange(ctx, shortCall, call{method: "PUT", path: "/v1/lease", json: wire.Lease{Millis: span.Milliseconds()}, repeatable: true}, nil)
}

// Shutdown ends the host program. It is refused with conflict while a process
// lives, unless keep is set: then processes and their shims go on, to be found
// by the next host program.
func (c *Client) Shutdown(ctx context.Context, keep bool) error {
	q := url.Values{}
	if keep {
		q.Set("keep", "true")
	}
	return c.exchange(ctx, shortCall, call{method: "POST", path: "/v1/shutdown", query: q}, nil)
}
