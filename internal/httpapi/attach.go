package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

const (
	// pingEvery keeps proxies from closing a silent socket and finds dead peers.
	pingEvery = 30 * time.Second
	pingTime  = 30 * time.Second
	// goingAwayTime is how long a client may take to answer the close of a server
	// that shuts down. It comes out of the server's own time to drain.
	goingAwayTime = time.Second
	// maxMessage bounds a message of the server: one frame of the largest size.
	maxMessage = wire.HeaderSize + wire.MaxPayload
)

// Close codes of the socket beyond those of RFC 6455: 4000 + the HTTP status of
// the problem that ended the output.
const closeProblem = websocket.StatusCode(4000)

const attachDoc = `Carries output, input, resizing and signals on one WebSocket, sub-protocol ` + "`" + api.AttachProtocol + "`" + `, with the same offsets and cursors as the other operations, so that a client can switch at any time.

**From the server**, binary messages are frames exactly as in read-output, one or more whole ones per message, at most 1 MiB + 32 bytes; the last is a status frame. Text messages are JSON: ` + "`{\"type\":\"stdin\",\"stdin\":{\"accepted\":…,\"eof\":…,\"window_bytes\":…}}`" + ` answers input; ` + "`{\"type\":\"error\",\"for\":\"stdin\",\"problem\":{…}}`" + ` refuses something (for: stdin, eof, resize, ack, signal, output). Refused for want of room (` + "`exhausted`" + `): send again later.

**From the client**, binary messages of at most 1 MiB + 9 bytes: one byte of kind, then little-endian numbers. 1 stdin: offset (8), bytes. 2 end of input: offset (8). 3 resize: rows (2), columns (2). 4 acknowledge: position (8). 5 signal: its name.

**Close codes.** 1000 the log has ended · 1001 the server is shutting down: attach again at the last cursor · 1002, 1003, 1008 what the client sent is not of the sub-protocol · 1009 a message was too large · 4000 + an HTTP status: the output ended with that problem, sent before as an error message.

A client that reads slowly stalls its own socket only; one that reads nothing for five minutes is cut off. The server pings every 30 seconds. A browser page of another origin is refused.`

func (h *Handler) registerAttach(b *builder) {
	op, rt := b.operation(spec{id: "attach-process", method: http.MethodGet, path: "/v1/processes/{handle}/attach", action: authz.ProcessAttach, tag: "processes",
		summary: "Attach (WebSocket)", description: attachDoc,
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Exhausted, errdefs.Indeterminate}})
	op.Parameters = []*huma.Param{pathParam("handle", "The process's handle."),
		stringParam("cursor", "Where output begins; empty is the oldest byte that is kept.", false)}
	op.Responses["101"] = &huma.Response{Description: "The socket is open."}
	b.errorResponse(op, http.StatusUpgradeRequired, "`invalid`: not a WebSocket handshake of the sub-protocol")
	rt.sockets = true
	rawOp(b, op, rt, h.attach)
}

func (h *Handler) attach(w http.ResponseWriter, r *http.Request) error {
	q := query{r: r}
	cursor := q.text("cursor", maxCursor)
	if q.err != nil {
		return q.err
	}
	if err := checkHandshake(r); err != nil {
		return err
	}
	leave, ok := h.enter()
	if !ok {
		return errdefs.New(errdefs.Unavailable, "the server is shutting down").WithNext("try again")
	}
	defer leave()
	ctx, stop := h.untilClosing(r.Context())
	defer stop()
	// Before the handshake, so that a refusal is an ordinary problem.
	p, handle := principalOf(r.Context()), r.PathValue("handle")
	s, err := h.cfg.Stream(ctx, p, handle, StreamQuery{Cursor: cursor, Follow: true})
	if err != nil {
		return h.closingError(ctx, r, err)
	}
	defer s.Close()
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Time{})
	_ = c.SetWriteDeadline(time.Time{})
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		Subprotocols: []string{api.AttachProtocol}, CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		// checkHandshake let it pass, so the connection broke; Accept has answered.
		h.log.LogAttrs(ctx, slog.LevelDebug, "attach failed", attrRef(refOf(ctx)), attrError(err))
		return nil
	}
	conn.SetReadLimit(api.MaxAttachMessage)
	h.cfg.Metrics.Attached(1)
	defer h.cfg.Metrics.Attached(-1)
	a := &attached{h: h, conn: conn, p: p, handle: handle}
	a.serve(ctx, stop, s)
	return nil
}

// enter counts a socket that Shutdown waits for.
func (h *Handler) enter() (leave func(), ok bool) {
	h.socketsMu.Lock()
	defer h.socketsMu.Unlock()
	if h.closing.Err() != nil {
		return nil, false
	}
	h.sockets.Add(1)
	return h.sockets.Done, true
}

// checkHandshake refuses, as problems, what websocket.Accept would refuse in
// plain text, and a page of another origin.
func checkHandshake(r *http.Request) error {
	if origin := r.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || !strings.EqualFold(u.Host, r.Host) {
			return errdefs.New(errdefs.Denied, "a page of another origin may not attach")
		}
	}
	upgrade := func(text string) error {
		f := status(http.StatusUpgradeRequired, "this is not a WebSocket handshake: %s", text)
		f.header.Set("Upgrade", "websocket")
		f.header.Set("Connection", "Upgrade")
		f.header.Set("Sec-WebSocket-Version", "13")
		f.header.Set("Sec-WebSocket-Protocol", api.AttachProtocol)
		return f
	}
	switch {
	case !hasToken(r.Header, "Connection", "upgrade") || !hasToken(r.Header, "Upgrade", "websocket"):
		return upgrade("the headers Connection: Upgrade and Upgrade: websocket are missing")
	case r.ProtoMajor != 1 || !r.ProtoAtLeast(1, 1):
		return upgrade("it needs HTTP/1.1")
	case r.Header.Get("Sec-WebSocket-Version") != "13":
		return upgrade("only version 13 is known")
	case len(r.Header.Values("Sec-WebSocket-Key")) != 1 || !validKey(r.Header.Get("Sec-WebSocket-Key")):
		return upgrade("Sec-WebSocket-Key is not 16 bytes in base 64, once")
	case !hasToken(r.Header, "Sec-WebSocket-Protocol", api.AttachProtocol):
		return upgrade("the sub-protocol " + api.AttachProtocol + " is not offered")
	}
	return nil
}

func hasToken(head http.Header, name, token string) bool {
	for _, v := range head.Values(name) {
		for part := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

// attached is one open socket. Two goroutines write to conn, which allows it:
// output (frames, pings) and input (replies).
type attached struct {
	h      *Handler
	conn   *websocket.Conn
	p      authz.Principal
	handle string

	busy    atomic.Int32 // writes that wait for the client
	closing sync.Once
}

// serve runs until the log or the client ends. ctx is what the stream was opened
// with and ends with the server; stop ends it.
func (a *attached) serve(ctx context.Context, stop func(), s LogStream) {
	// Cancelling what conn reads with would drop the connection without a close
	// code, so it has a context of its own, ended last.
	connCtx, drop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() {
		defer stop() // wakes the pinger
		a.output(connCtx, ctx, s)
	})
	wg.Go(func() { a.ping(ctx, connCtx) })
	a.input(connCtx)
	// The client is gone, or output has closed the socket.
	stop()
	drop()
	_ = a.conn.CloseNow()
	wg.Wait()
}

func (a *attached) closeWith(code websocket.StatusCode, reason string) {
	a.closing.Do(func() {
		if code == websocket.StatusGoingAway {
			// A client that is not reading now would hold up the shutdown; it finds the
			// broken connection later and attaches again, losing nothing.
			defer time.AfterFunc(goingAwayTime, func() { _ = a.conn.CloseNow() }).Stop()
		}
		_ = a.conn.Close(code, reason)
	})
}

// output sends frames, then closes the socket, which ends input.
func (a *attached) output(conn, ctx context.Context, s LogStream) {
	for {
		batch, err := s.Next()
		for rest := batch; len(rest) > 0; {
			n := messageLen(rest)
			if !a.write(conn, websocket.MessageBinary, rest[:n]) {
				return
			}
			rest = rest[n:]
		}
		a.h.cfg.Metrics.BytesOut(int64(len(batch)))
		switch {
		case errors.Is(err, io.EOF):
			a.closeWith(websocket.StatusNormalClosure, "the log has ended")
			return
		case err != nil && a.h.closing.Err() != nil:
			a.closeWith(websocket.StatusGoingAway, "the server is shutting down")
			return
		case err != nil && ctx.Err() != nil && refusalOf(ctx) == nil:
			return // the client is gone
		case err != nil:
			f := a.h.fail(ctx, err)
			a.reply(conn, api.AttachReply{Type: "error", For: "output", Problem: &f.Problem})
			a.closeWith(closeProblem+websocket.StatusCode(f.Status), string(f.Code))
			return
		}
	}
}

// messageLen returns how much of a batch of whole frames goes into one message.
func messageLen(batch []byte) int {
	n := 0
	for n+wire.HeaderSize <= len(batch) {
		head, err := wire.ParseHeader(batch[n:])
		if err != nil {
			break // not frames: the broker has checked them; the client sees the damage
		}
		next := n + wire.HeaderSize + head.Length
		if next > len(batch) || next > maxMessage {
			break
		}
		n = next
	}
	if n == 0 {
		return min(len(batch), maxMessage)
	}
	return n
}

func (a *attached) write(ctx context.Context, t websocket.MessageType, b []byte) bool {
	a.busy.Add(1)
	defer a.busy.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, stallTime)
	defer cancel()
	return a.conn.Write(ctx, t, b) == nil
}

func (a *attached) reply(ctx context.Context, v api.AttachReply) bool {
	b, err := json.Marshal(v)
	return err == nil && a.write(ctx, websocket.MessageText, b)
}

// ping finds a peer that is gone. One that only does not read is left alone: its
// pongs may be stuck behind what it does not take.
func (a *attached) ping(ctx, conn context.Context) {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if a.busy.Load() > 0 {
			continue
		}
		pctx, cancel := context.WithTimeout(conn, pingTime)
		err := a.conn.Ping(pctx)
		cancel()
		if err != nil && a.busy.Load() == 0 {
			_ = a.conn.CloseNow()
			return
		}
	}
}

// input obeys the client's messages until the socket ends.
func (a *attached) input(ctx context.Context) {
	for {
		t, b, err := a.conn.Read(ctx)
		if err != nil {
			return // closed, by either side; the library answers messages that are too large
		}
		if t != websocket.MessageBinary {
			a.closeWith(websocket.StatusUnsupportedData, "messages of a client are binary")
			return
		}
		m, err := api.ParseAttach(b)
		if err != nil {
			a.closeWith(websocket.StatusPolicyViolation, reason(err))
			return
		}
		if holds(ctx) != nil {
			continue // not obeyed; the output, which that has ended, says why
		}
		if !a.obey(ctx, m) {
			return
		}
	}
}

// obey carries out one message and answers it; false if the client is gone.
func (a *attached) obey(ctx context.Context, m api.AttachMessage) bool {
	b := a.h.cfg.Broker
	var what string
	var err error
	switch m.Kind {
	case api.AttachStdin, api.AttachEOF:
		what = "stdin"
		if m.Kind == api.AttachEOF {
			what = "eof"
		}
		var st api.StdinState
		st, err = b.Write(ctx, a.p, a.handle, m.Position, m.Data, m.Kind == api.AttachEOF)
		if err == nil {
			a.h.cfg.Metrics.BytesIn(max(0, min(st.Accepted-m.Position, int64(len(m.Data)))))
			return a.reply(ctx, api.AttachReply{Type: "stdin", Stdin: &st})
		}
		err = withWindow(err)
	case api.AttachResize:
		what, err = "resize", b.Resize(ctx, a.p, a.handle, m.Size)
	case api.AttachAck:
		what, err = "ack", b.Ack(ctx, a.p, a.handle, cursorOf(a.handle, m.Position))
	case api.AttachSignal:
		what, err = "signal", b.Signal(ctx, a.p, a.handle, m.Signal)
	}
	if err == nil {
		return true
	}
	f := a.h.fail(ctx, err)
	return a.reply(ctx, api.AttachReply{Type: "error", For: what, Problem: &f.Problem})
}

// cursorOf writes a position as a cursor of the process.
func cursorOf(handle string, position int64) string {
	return handle[max(0, len(handle)-6):] + "." + strconv.FormatInt(position, 10)
}

// reason fits an error into a close frame, which holds 123 bytes of reason (RFC
// 6455 section 5.5).
func reason(err error) string { return printable(err.Error(), 100) }
