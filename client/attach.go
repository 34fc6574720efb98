package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Attachment is one WebSocket to a process: output, input, resizing and signals
// on one connection. One goroutine may call Next; the other methods may be
// called from any. It does not reconnect: offsets and cursors are those of the
// other methods, so a new Attach, or Output, goes on where it broke.
type Attachment struct {
	p    *Process
	conn *websocket.Conn

	// Only Next uses these.
	message []byte // frames not returned yet
	pos     int64
	known   bool
	status  api.StreamStatus

	mu    sync.Mutex
	stdin chan stdinAnswer // of the write that waits, or nil
	write sync.Mutex       // one write of input at a time
	ended error
}

type stdinAnswer struct {
	state StdinState
	err   error
}

// Attach opens a socket whose output begins at cursor; empty is the oldest byte
// that is kept. Output must be read with Next for anything else to be answered.
func (p *Process) Attach(ctx context.Context, cursor string) (*Attachment, error) {
	a := &Attachment{p: p}
	q := url.Values{}
	if cursor != "" {
		n, err := p.position(cursor)
		if err != nil {
			return nil, err
		}
		a.pos, a.known = n, true
		q.Set("cursor", cursor)
	}
	target := strings.Replace(p.c.base.String(), "http", "ws", 1) + p.path("/attach")
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	hc := *p.c.http
	hc.Timeout = 0 // it would end the socket
	conn, resp, err := websocket.Dial(ctx, target, &websocket.DialOptions{
		HTTPClient: &hc, Subprotocols: []string{api.AttachProtocol}, CompressionMode: websocket.CompressionDisabled,
		HTTPHeader: http.Header{"Authorization": {"Bearer " + p.c.key}, "User-Agent": {p.c.userAgent}}})
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, problemError(resp)
		}
		return nil, p.c.transportError(ctx, call{method: http.MethodGet, path: p.path("/attach")}, err)
	}
	p.c.answered.Store(true)
	if conn.Subprotocol() != api.AttachProtocol {
		_ = conn.CloseNow()
		return nil, errdefs.New(Internal, "the server does not speak %s", api.AttachProtocol)
	}
	conn.SetReadLimit(wire.HeaderSize + wire.MaxPayload)
	a.conn = conn
	return a, nil
}

// Next returns the next chunk of output, valid until the next call, or io.EOF
// when the log has ended. A socket that broke is unavailable: attach again at
// Cursor.
func (a *Attachment) Next(ctx context.Context) (Chunk, error) {
	for {
		for len(a.message) > 0 {
			c, ok, err := a.frame()
			if err != nil {
				return Chunk{}, a.end(err)
			}
			if ok {
				return c, nil
			}
		}
		t, b, err := a.conn.Read(ctx)
		if err != nil {
			return Chunk{}, a.end(a.readError(ctx, err))
		}
		if t == websocket.MessageBinary {
			a.message = b
			continue
		}
		if err := a.reply(b); err != nil {
			return Chunk{}, a.end(err)
		}
	}
}

// Cursor is where output goes on: everything before it was returned.
func (a *Attachment) Cursor() string {
	if !a.known {
		return ""
	}
	return a.p.cursor(a.pos)
}

// Exit is how the process ended, if that was known when the log ended.
func (a *Attachment) Exit() *Exit { return a.status.Exit }

// frame takes one frame off the message.
func (a *Attachment) frame() (c Chunk, ok bool, err error) {
	h, err := wire.ParseHeader(a.message)
	if err != nil || len(a.message) < wire.HeaderSize+h.Length {
		return c, false, errdefs.New(Internal, "what the server sent is not output")
	}
	payload := a.message[wire.HeaderSize : wire.HeaderSize+h.Length]
	a.message = a.message[wire.HeaderSize+h.Length:]
	if wire.Sum(payload) != h.Sum {
		return c, false, errdefs.New(Internal, "output at cursor %s arrived damaged", a.p.cursor(h.Cursor))
	}
	switch h.Kind {
	case wire.KindStatus:
		if err := json.Unmarshal(payload, &a.status); err != nil {
			return c, false, errdefs.Wrap(err, Internal, "the status of the output cannot be read: %v", err)
		}
		return c, false, nil
	case wire.KindGap:
		var g wire.GapFrame
		if err := json.Unmarshal(payload, &g); err != nil || g.From < 0 || g.To < g.From || (a.known && g.From != a.pos) {
			return c, false, errdefs.New(Internal, "the server named a gap that cannot be")
		}
		a.pos, a.known = g.To, true
		return Chunk{Next: a.p.cursor(g.To), Gap: &Gap{From: a.p.cursor(g.From), To: a.p.cursor(g.To), Bytes: g.To - g.From}}, true, nil
	}
	if a.known && h.Cursor != a.pos {
		return c, false, errdefs.New(Internal, "the server went from cursor %s to %s without naming a gap", a.Cursor(), a.p.cursor(h.Cursor))
	}
	a.pos, a.known = h.Cursor+int64(h.Length), true
	name := Stdout
	if h.Kind == wire.KindStderr {
		name = Stderr
	}
	return Chunk{Stream: name, Offset: h.Offset, Cursor: a.p.cursor(h.Cursor), Next: a.p.cursor(a.pos), Data: payload}, h.Length > 0, nil
}

// reply hands an answer to the write that waits for it. Refusals of resizing,
// signals and acknowledgements are not waited for and not reported.
func (a *Attachment) reply(b []byte) error {
	var r api.AttachReply
	if err := json.Unmarshal(b, &r); err != nil {
		return errdefs.Wrap(err, Internal, "a message of the server cannot be read: %v", err)
	}
	var ans stdinAnswer
	switch {
	case r.Type == "stdin" && r.Stdin != nil:
		ans.state = *r.Stdin
	case r.Type == "error" && r.Problem != nil && r.For == "output":
		return r.Problem.Err()
	case r.Type == "error" && r.Problem != nil && (r.For == "stdin" || r.For == "eof"):
		ans.err = r.Problem.Err()
	default:
		return nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stdin != nil {
		a.stdin <- ans // has room for one
		a.stdin = nil
	}
	return nil
}

func (a *Attachment) readError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return errdefs.Wrap(cause, Unavailable, "the attachment was given up: %v", cause)
	}
	ce, ok := errors.AsType[websocket.CloseError](err)
	switch {
	case ok && ce.Code == websocket.StatusNormalClosure:
		return io.EOF
	case ok && (ce.Code == websocket.StatusPolicyViolation || ce.Code == websocket.StatusMessageTooBig || ce.Code == websocket.StatusUnsupportedData):
		return errdefs.Wrap(err, Invalid, "the server closed the socket: %s", ce.Reason)
	case ok:
		return errdefs.Wrap(err, Unavailable, "the server closed the socket: %s", ce.Reason).WithNext("attach again at cursor %s", a.Cursor())
	}
	return errdefs.Wrap(err, Unavailable, "the socket broke: %v", err).WithNext("attach again at cursor %s", a.Cursor())
}

// end closes the socket and fails the write that waits.
func (a *Attachment) end(err error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended == nil {
		a.ended = err
		_ = a.conn.CloseNow()
	}
	if a.stdin != nil {
		a.stdin <- stdinAnswer{err: errdefs.New(Unavailable, "the socket ended before the input was answered").WithNext("attach again and write at the accepted offset")}
		a.stdin = nil
	}
	return a.ended
}

// Write writes input at an offset, like Process.Write, and waits for the answer.
func (a *Attachment) Write(ctx context.Context, offset int64, data []byte, eof bool) (StdinState, error) {
	a.write.Lock()
	defer a.write.Unlock()
	var st StdinState
	if len(data) > 0 {
		data = data[:min(len(data), api.MaxAttachMessage-9)]
		var err error
		st, err = a.ask(ctx, api.AttachMessage{Kind: api.AttachStdin, Position: offset, Data: data})
		if err != nil || !eof || st.Accepted < offset+int64(len(data)) {
			return st, err
		}
	}
	if !eof {
		return st, nil
	}
	return a.ask(ctx, api.AttachMessage{Kind: api.AttachEOF, Position: offset + int64(len(data))})
}

func (a *Attachment) ask(ctx context.Context, m api.AttachMessage) (StdinState, error) {
	answer := make(chan stdinAnswer, 1)
	a.mu.Lock()
	if a.ended != nil {
		a.mu.Unlock()
		return StdinState{}, errdefs.New(Unavailable, "the socket has ended")
	}
	a.stdin = answer
	a.mu.Unlock()
	if err := a.send(ctx, m); err != nil {
		return StdinState{}, err
	}
	select {
	case ans := <-answer:
		return ans.state, ans.err
	case <-ctx.Done():
		// The answer is still to come; one taken for that of a later write would
		// be a lie, so the socket ends here.
		_ = a.conn.CloseNow()
		return StdinState{}, errdefs.Wrap(context.Cause(ctx), Unavailable, "writing the input was given up")
	}
}

func (a *Attachment) send(ctx context.Context, m api.AttachMessage) error {
	if err := a.conn.Write(ctx, websocket.MessageBinary, api.AppendAttach(nil, m)); err != nil {
		return errdefs.Wrap(err, Unavailable, "the socket broke: %v", err)
	}
	return nil
}

// Stdin returns a writer of the input from an offset on, over this socket. Its
// writes are answered only while another goroutine calls Next.
func (a *Attachment) Stdin(ctx context.Context, offset int64) *Stdin {
	return &Stdin{write: a.Write, piece: a.p.piece(), ctx: ctx, offset: offset}
}

// Resize sets the size of the terminal. It does not wait for an answer.
func (a *Attachment) Resize(ctx context.Context, w Winsize) error {
	return a.send(ctx, api.AttachMessage{Kind: api.AttachResize, Size: w})
}

// Signal sends a polite signal. It does not wait for an answer.
func (a *Attachment) Signal(ctx context.Context, name string) error {
	return a.send(ctx, api.AttachMessage{Kind: api.AttachSignal, Signal: name})
}

// Ack acknowledges output. It does not wait for an answer.
func (a *Attachment) Ack(ctx context.Context, cursor string) error {
	n, err := a.p.position(cursor)
	if err != nil {
		return err
	}
	return a.send(ctx, api.AttachMessage{Kind: api.AttachAck, Position: n})
}

// Close ends the attachment, not the process.
func (a *Attachment) Close() error {
	_ = a.conn.Close(websocket.StatusNormalClosure, "")
	return nil
}
