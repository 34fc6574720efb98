package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math/rand/v2"
	"mime"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// maxAnswer bounds a JSON answer. The largest the server gives is a read of
// 8 MiB in base 64.
const maxAnswer = 64 << 20

// firstPatience is how long a server is tried that has never answered.
const firstPatience = time.Second

// call is one request that can be made again.
type call struct {
	method string
	path   string // escaped, from /v1 on
	query  url.Values
	body   []byte    // may be sent again
	stream io.Reader // sent once; such a call is never repeated
	ctype  string
	accept string
	// safe: doing it twice is doing it once (by request id, offset, cursor, or
	// because it only reads).
	safe bool
	// gone: not_found means that an earlier attempt did it, if there was one that the
	// server may have seen.
	gone bool
	// also is a status besides 2xx that comes with an answer.
	also int
}

// send makes the call, repeating it where that is safe, and returns an answer of
// 2xx, whose body the caller closes. Every error is an *Error.
func (c *Client) send(ctx context.Context, q call) (*http.Response, error) {
	p := c.patience()
	seen := false // the server may have seen an earlier attempt
	for {
		resp, err, sent := c.once(ctx, q)
		if err == nil {
			return resp, nil
		}
		if seen && q.gone && IsCode(err, NotFound) {
			return &http.Response{StatusCode: http.StatusNoContent, Body: http.NoBody}, nil
		}
		if !IsCode(err, Unavailable) || q.stream != nil || (sent && !q.safe) || !p.wait(ctx) {
			return nil, err
		}
		seen = seen || sent
	}
}

// once makes one attempt. sent is false if the server certainly saw nothing.
func (c *Client) once(ctx context.Context, q call) (resp *http.Response, err error, sent bool) {
	req, err := c.request(ctx, q)
	if err != nil {
		return nil, err, false
	}
	resp, err = c.http.Do(req)
	if err != nil {
		return nil, c.transportError(ctx, q, err), !neverSent(err)
	}
	c.answered.Store(true)
	if resp.StatusCode/100 == 2 || resp.StatusCode == q.also && resp.Header.Get("Content-Type") == "application/json" {
		return resp, nil, true
	}
	defer resp.Body.Close()
	return nil, problemError(resp), true
}

func (c *Client) request(ctx context.Context, q call) (*http.Request, error) {
	var body io.Reader
	switch {
	case q.stream != nil:
		body = q.stream
	case q.body != nil:
		body = bytes.NewReader(q.body)
	}
	u := c.base.String() + q.path
	if len(q.query) > 0 {
		u += "?" + q.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, q.method, u, body)
	if err != nil {
		return nil, errdefs.Wrap(err, Invalid, "the request cannot be made: %v", err)
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	req.Header.Set("User-Agent", c.userAgent)
	if q.ctype != "" {
		req.Header.Set("Content-Type", q.ctype)
	}
	if q.accept != "" {
		req.Header.Set("Accept", q.accept)
	} else {
		req.Header.Set("Accept", "application/json, "+api.ProblemType)
	}
	return req, nil
}

// neverSent reports whether the connection could not even be made.
func neverSent(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "dial"
}

// transportError is what a caller sees when there was no answer. A context that
// ended is reported as such, so that errors.Is(err, context.Canceled) holds.
func (c *Client) transportError(ctx context.Context, q call, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return errdefs.Wrap(cause, Unavailable, "the call %s %s was given up: %v", q.method, q.path, cause)
	}
	if e, ok := errors.AsType[*Error](err); ok { // from the caller's own reader
		return e
	}
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = ue.Err
	}
	return errdefs.Wrap(err, Unavailable, "the server at %s does not answer: %v", c.base, err).
		WithNext("check that it runs and that the address is right")
}

// problemError reads the problem of a refused request.
func problemError(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if mt, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err == nil && mt == api.ProblemType {
		var p api.Problem
		if json.Unmarshal(b, &p) == nil && p.Code != "" {
			return p.Err()
		}
	}
	// Not from Stockade: a proxy, or another server altogether.
	code := Internal
	switch resp.StatusCode {
	case http.StatusUnauthorized:
		code = Unauthenticated
	case http.StatusForbidden:
		code = Denied
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		code = Unavailable
	case http.StatusTooManyRequests:
		code = Exhausted
	}
	return errdefs.New(code, "something other than a Stockade server answered: %s", resp.Status).
		WithNext("check the address, and any proxy on the way")
}

// patience spaces out repetitions and ends them.
type patience struct {
	end       time.Time
	delay     time.Duration
	waited    time.Duration
	onSilence func() // nil once it was told
}

func (c *Client) patience() *patience {
	d := c.retryFor
	if d > firstPatience && !c.answered.Load() {
		d = firstPatience
	}
	return &patience{end: time.Now().Add(d), delay: 25 * time.Millisecond, onSilence: c.onSilence}
}

// wait sleeps for the next delay, or reports that there is no patience left.
func (p *patience) wait(ctx context.Context) bool {
	d := p.delay/2 + rand.N(p.delay)
	p.delay = min(p.delay*2, time.Second)
	if time.Now().Add(d).After(p.end) {
		return false
	}
	if p.waited >= time.Second && p.onSilence != nil {
		p.onSilence()
		p.onSilence = nil
	}
	p.waited += d
	return sleep(ctx, d)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// get reads one JSON value.
func get[T any](ctx context.Context, c *Client, path string, query url.Values) (T, error) {
	return doJSON[T](ctx, c, call{method: http.MethodGet, path: path, query: query, safe: true}, nil)
}

// doJSON makes a call with a JSON body (unless in is nil) and decodes the answer.
func doJSON[T any](ctx context.Context, c *Client, q call, in any) (T, error) {
	var out T
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return out, errdefs.Wrap(err, Invalid, "the request cannot be encoded: %v", err)
		}
		q.body, q.ctype = b, "application/json"
	}
	p := c.patience()
	for {
		resp, err := c.send(ctx, q)
		if err != nil {
			return out, err
		}
		b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
		resp.Body.Close()
		if err == nil && len(b) > maxAnswer {
			return out, errdefs.New(Internal, "the answer is larger than %d bytes", maxAnswer)
		}
		if err != nil { // cut off in the middle of the answer
			err = c.transportError(ctx, q, err)
			if q.safe && q.stream == nil && p.wait(ctx) {
				continue
			}
			if !q.safe {
				return out, errdefs.Wrap(err, Indeterminate, "the answer was cut off: it cannot be told whether the request was carried out")
			}
			return out, err
		}
		if len(b) == 0 {
			return out, nil
		}
		if err := json.Unmarshal(b, &out); err != nil {
			return out, errdefs.Wrap(err, Internal, "the answer of the server cannot be read: %v", err)
		}
		return out, nil
	}
}

// none is the answer of calls that have none.
type none struct{}

func doNone(ctx context.Context, c *Client, q call, in any) error {
	_, err := doJSON[none](ctx, c, q, in)
	return err
}

// seg escapes one path segment. An empty one, or one that a server or proxy
// would take for a directory, becomes a name that cannot exist, so that it is
// answered with not_found instead of reaching another route.
func seg(s string) string {
	if strings.Trim(s, ".") == "" {
		return "-"
	}
	return url.PathEscape(s)
}
