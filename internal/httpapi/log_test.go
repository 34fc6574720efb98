package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

func jsonValid(b []byte) bool { return json.Valid(b) }

// frame makes one frame.
func frame(kind wire.Kind, cursor int64, payload string) []byte {
	b := wire.AppendHeader(nil, wire.Header{Kind: kind, Length: len(payload), Cursor: cursor, Offset: cursor, Sum: wire.Sum([]byte(payload))})
	return append(b, payload...)
}

// frames splits bytes into payloads by kind, failing on anything damaged.
func frames(t *testing.T, b []byte) (out string, status *api.StreamStatus) {
	t.Helper()
	for len(b) > 0 {
		h, err := wire.ParseHeader(b)
		if err != nil || len(b) < wire.HeaderSize+h.Length {
			t.Fatalf("not whole frames: %v", err)
		}
		payload := b[wire.HeaderSize : wire.HeaderSize+h.Length]
		if wire.Sum(payload) != h.Sum {
			t.Fatal("a payload is damaged")
		}
		if h.Kind == wire.KindStatus {
			status = &api.StreamStatus{}
			if err := json.Unmarshal(payload, status); err != nil {
				t.Fatal(err)
			}
		} else {
			out += string(payload)
		}
		b = b[wire.HeaderSize+h.Length:]
	}
	return out, status
}

const logPath = "/v1/processes/" + fakeHandle + "/log"

func TestFramesPassAsTheyAre(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var asked StreamQuery
	batches := [][]byte{frame(wire.KindStdout, 0, "one"), append(frame(wire.KindStderr, 3, "two"), frame(wire.KindStatus, 0, `{"eof":true}`)...)}
	r.stream = func(ctx context.Context, q StreamQuery) (LogStream, error) {
		asked = q
		return r.newStream(ctx, bytesClone(batches), io.EOF), nil
	}
	resp, b := r.do("GET", logPath+"?cursor=aaaaaa.0&follow=true&wait_ms=7&ack=true", "run", nil, "Accept: application/json;q=0, "+wire.FramesType)
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != wire.FramesType || !bytes.Equal(b, bytes.Join(batches, nil)) {
		t.Errorf("%d %s %q", resp.StatusCode, resp.Header, b)
	}
	if asked != (StreamQuery{Cursor: "aaaaaa.0", Follow: true, Wait: 7 * time.Millisecond, Ack: true}) {
		t.Errorf("the broker was asked %+v", asked)
	}
	resp, b = r.do("GET", logPath+"?max_bytes=1", "run", nil, "Accept: "+wire.FramesType)
	r.problem(resp, b, 400, errdefs.Invalid)
	// An operator may look, but not acknowledge in the tenant's name.
	resp, b = r.do("GET", logPath+"?ack=true", "admin", nil)
	r.problem(resp, b, 403, errdefs.Denied)
}

func bytesClone(b [][]byte) [][]byte { return append([][]byte{}, b...) }

func TestAStreamThatFailsSaysSo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	fail := errdefs.New(errdefs.Unavailable, "the host is gone")
	r.stream = func(ctx context.Context, _ StreamQuery) (LogStream, error) {
		return r.newStream(ctx, [][]byte{frame(wire.KindStdout, 0, "one")}, fail), nil
	}
	_, b := r.do("GET", logPath, "run", nil, "Accept: "+wire.FramesType)
	out, st := frames(t, b)
	if out != "one" || st == nil || st.Error == nil || st.Error.Code != errdefs.Unavailable || st.EOF {
		t.Errorf("%q, %+v", out, st)
	}
	r.stream = func(ctx context.Context, _ StreamQuery) (LogStream, error) { return r.newStream(ctx, nil, fail), nil }
	resp, b := r.do("GET", logPath, "run", nil, "Accept: "+wire.FramesType)
	r.problem(resp, b, 503, errdefs.Unavailable)
	r.stream = func(context.Context, StreamQuery) (LogStream, error) {
		return nil, errdefs.New(errdefs.Invalid, "not a cursor of this process")
	}
	resp, b = r.do("GET", logPath, "run", nil, "Accept: "+wire.FramesType)
	r.problem(resp, b, 400, errdefs.Invalid)
}

func TestShutdownEndsFollowersAndSockets(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream = func(ctx context.Context, _ StreamQuery) (LogStream, error) {
		return r.newStream(ctx, [][]byte{frame(wire.KindStdout, 0, "one")}, nil), nil // then waits
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", r.server.URL+logPath+"?follow=true", nil)
	req.Header.Set("Authorization", "Bearer run")
	req.Header.Set("Accept", wire.FramesType)
	resp, err := r.server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := make([]byte, wire.HeaderSize+3)
	if _, err := io.ReadFull(resp.Body, first); err != nil {
		t.Fatal(err)
	}
	c := r.dial("")
	if _, b, err := c.Read(t.Context()); err != nil || !bytes.Equal(b, first) {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- r.h.Shutdown(t.Context()) }()
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if _, st := frames(t, rest); st == nil || st.Error == nil || st.Error.Code != errdefs.Unavailable {
		t.Errorf("the follower got %+v", st)
	}
	if _, _, err := c.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusGoingAway {
		t.Errorf("the socket ended with %v", err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	_, b := r.do("GET", "/v1/processes/"+fakeHandle+"/attach", "run", nil, handshake()...)
	var p api.Problem
	if json.Unmarshal(b, &p) != nil || p.Code != errdefs.Unavailable {
		t.Errorf("after the shutdown attach answers %s", b)
	}
}

func handshake() []string {
	return []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
		"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Protocol: " + api.AttachProtocol}
}

// dial attaches.
func (r *rig) dial(query string) *websocket.Conn {
	r.t.Helper()
	return r.dialAs("run", query)
}

func (r *rig) dialAs(key, query string) *websocket.Conn {
	r.t.Helper()
	c, _, err := websocket.Dial(r.t.Context(), r.server.URL+"/v1/processes/"+fakeHandle+"/attach"+query, &websocket.DialOptions{
		HTTPClient: r.server.Client(), Subprotocols: []string{api.AttachProtocol}, HTTPHeader: http.Header{"Authorization": {"Bearer " + key}}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.CloseNow() })
	c.SetReadLimit(maxMessage)
	return c
}

func TestAttachRefusals(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	path := "/v1/processes/" + fakeHandle + "/attach"
	without := func(name string) []string {
		var head []string
		for _, h := range handshake() {
			if !strings.HasPrefix(h, name+":") {
				head = append(head, h)
			}
		}
		return head
	}
	for _, name := range []string{"Connection", "Upgrade", "Sec-WebSocket-Version", "Sec-WebSocket-Key", "Sec-WebSocket-Protocol"} {
		resp, b := r.do("GET", path, "run", nil, without(name)...)
		r.problem(resp, b, 426, errdefs.Invalid)
	}
	for _, origin := range []string{"https://evil.example", "null", "http://127.0.0.1:1"} {
		resp, b := r.do("GET", path, "run", nil, append(handshake(), "Origin: "+origin)...)
		r.problem(resp, b, 403, errdefs.Denied)
	}
	resp, b := r.do("GET", path, "run", nil, append(handshake(), "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")...)
	r.problem(resp, b, 426, errdefs.Invalid)
	resp, b = r.do("GET", path, "", nil, handshake()...)
	r.problem(resp, b, 401, errdefs.Unauthenticated)
	resp, b = r.do("GET", path, "admin", nil, handshake()...)
	r.problem(resp, b, 403, errdefs.Denied)
	r.stream = func(context.Context, StreamQuery) (LogStream, error) {
		return nil, errdefs.New(errdefs.NotFound, "no such process")
	}
	resp, b = r.do("GET", path, "run", nil, handshake()...)
	r.problem(resp, b, 404, errdefs.NotFound)
}

func TestAttachCarriesEverything(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var asked StreamQuery
	big := strings.Repeat("x", wire.MaxPayload)
	r.stream = func(ctx context.Context, q StreamQuery) (LogStream, error) {
		asked = q
		batch := append(frame(wire.KindStdout, 0, "ab"), frame(wire.KindStderr, 2, big)...)
		return r.newStream(ctx, [][]byte{append(batch, frame(wire.KindStdout, 2+wire.MaxPayload, "z")...)}, nil), nil
	}
	c := r.dial("?cursor=aaaaaa.0")
	var out string
	for len(out) < len(big)+3 {
		typ, b, err := c.Read(t.Context())
		if err != nil || typ != websocket.MessageBinary {
			t.Fatalf("%v %v", typ, err)
		}
		text, _ := frames(t, b) // whole frames in each message
		out += text
	}
	if out != "ab"+big+"z" || !asked.Follow || asked.Cursor != "aaaaaa.0" {
		t.Errorf("%d bytes came; asked %+v", len(out), asked)
	}
	send := func(m api.AttachMessage) {
		t.Helper()
		if err := c.Write(t.Context(), websocket.MessageBinary, api.AppendAttach(nil, m)); err != nil {
			t.Fatal(err)
		}
	}
	reply := func() (v api.AttachReply) {
		t.Helper()
		typ, b, err := c.Read(t.Context())
		if err != nil || typ != websocket.MessageText || json.Unmarshal(b, &v) != nil {
			t.Fatalf("%v %s %v", typ, b, err)
		}
		return v
	}
	send(api.AttachMessage{Kind: api.AttachStdin, Position: 4, Data: []byte("xyz")})
	if v := reply(); v.Type != "stdin" || v.Stdin == nil || v.Stdin.Accepted != 7 {
		t.Errorf("%+v", v)
	}
	send(api.AttachMessage{Kind: api.AttachEOF, Position: 7})
	if v := reply(); v.Stdin == nil || !v.Stdin.EOF {
		t.Errorf("%+v", v)
	}
	send(api.AttachMessage{Kind: api.AttachResize, Size: api.Winsize{Rows: 2, Cols: 3}})
	send(api.AttachMessage{Kind: api.AttachSignal, Signal: "SIGINT"})
	send(api.AttachMessage{Kind: api.AttachAck, Position: 9})
	r.broker.mu.Lock()
	r.broker.stdin = func(int64, []byte, bool) (api.StdinState, error) {
		return api.StdinState{}, errdefs.New(errdefs.Exhausted, "the child does not read").With("window_bytes", "0")
	}
	r.broker.mu.Unlock()
	send(api.AttachMessage{Kind: api.AttachStdin, Position: 7, Data: []byte("more")})
	if v := reply(); v.Type != "error" || v.For != "stdin" || v.Problem.Code != errdefs.Exhausted || v.Problem.Facts["window_bytes"] != "0" {
		t.Errorf("%+v", v)
	}
	want := []string{"write", "write", "resize", "signal SIGINT", "ack aaaaaa.9", "write"}
	if got := r.broker.noted(); strings.Join(got, ",") != strings.Join(want, ",") {
		t.Errorf("the broker was asked %v, want %v", got, want)
	}
}

func TestAttachEndsWithAReason(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		send func(*websocket.Conn) error
		code websocket.StatusCode
	}{
		"end":       {err: io.EOF, code: websocket.StatusNormalClosure},
		"not found": {err: errdefs.New(errdefs.NotFound, "the log is gone"), code: 4404},
		"fault":     {err: errors.New("boom"), code: 4500},
		"text": {code: websocket.StatusUnsupportedData, send: func(c *websocket.Conn) error {
			return c.Write(t.Context(), websocket.MessageText, []byte("{}"))
		}},
		"not a message": {code: websocket.StatusPolicyViolation, send: func(c *websocket.Conn) error {
			return c.Write(t.Context(), websocket.MessageBinary, []byte{77})
		}},
		"too large": {code: websocket.StatusMessageTooBig, send: func(c *websocket.Conn) error {
			return c.Write(t.Context(), websocket.MessageBinary, make([]byte, api.MaxAttachMessage+1))
		}},
	} {
		r := newRig(t)
		r.stream = func(ctx context.Context, _ StreamQuery) (LogStream, error) {
			return r.newStream(ctx, [][]byte{frame(wire.KindStdout, 0, "out")}, c.err), nil
		}
		conn := r.dial("")
		if _, b, err := conn.Read(t.Context()); err != nil || !strings.HasSuffix(string(b), "out") {
			t.Fatalf("%s: %v", name, err)
		}
		if c.send != nil {
			_ = c.send(conn) // the server may close before all of it is sent
		}
		for {
			typ, b, err := conn.Read(t.Context())
			if err == nil && typ == websocket.MessageText {
				var v api.AttachReply
				if json.Unmarshal(b, &v) != nil || v.For != "output" || v.Problem == nil {
					t.Errorf("%s: %s", name, b)
				}
				continue
			}
			if websocket.CloseStatus(err) != c.code {
				t.Errorf("%s: ended with %v, want %d", name, err, c.code)
			}
			break
		}
	}
}

func TestAClientThatDoesNotReadStallsOnlyItself(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var batches [][]byte
	for i := range 64 { // more than all buffers on the way hold
		batches = append(batches, frame(wire.KindStdout, int64(i)<<20, strings.Repeat("x", 1<<20)))
	}
	r.stream = func(ctx context.Context, q StreamQuery) (LogStream, error) {
		return r.newStream(ctx, bytesClone(batches), io.EOF), nil
	}
	slow := r.dial("")
	fast := r.dial("")
	for range batches {
		if _, _, err := fast.Read(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := fast.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("the fast one ended with %v", err)
	}
	// The slow one still gets all of it when it comes to read.
	for range batches {
		if _, _, err := slow.Read(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// One that goes away without reading leaves nothing behind: the rig's end checks it.
	_ = r.dial("").CloseNow()
}

func TestAPanicInAStreamCutsIt(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.stream = func(ctx context.Context, _ StreamQuery) (LogStream, error) {
		return &panicStream{fakeStream: r.newStream(ctx, [][]byte{frame(wire.KindStdout, 0, "one")}, nil)}, nil
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", r.server.URL+logPath, nil)
	req.Header.Set("Authorization", "Bearer run")
	req.Header.Set("Accept", wire.FramesType)
	resp, err := r.server.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("an answer that broke off reads as whole")
	}
	if log := r.logs.String(); !strings.Contains(log, "request panicked") || !strings.Contains(log, "read-output") {
		t.Errorf("the log says %q", log)
	}
}

type panicStream struct{ *fakeStream }

func (s *panicStream) Next() ([]byte, error) {
	if len(s.batches) == 0 {
		panic("at a bad moment")
	}
	return s.fakeStream.Next()
}

// deadlines is a connection that notes the deadlines it gets.
type deadlines struct {
	*httptest.ResponseRecorder
	read, write []time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error  { d.read = append(d.read, t); return nil }
func (d *deadlines) SetWriteDeadline(t time.Time) error { d.write = append(d.write, t); return nil }

// A deadline that is still set while an operation runs would end its context.
func TestTheDeadlineOfTheBodyIsLiftedBeforeTheOperation(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
	r.broker.open = func(context.Context, api.OpenRequest) (api.Process, error) {
		if len(d.read) < 2 || d.read[0].IsZero() || !d.read[len(d.read)-1].IsZero() {
			t.Errorf("while the operation runs the deadlines were %v", d.read)
		}
		return api.Process{}, nil
	}
	req := httptest.NewRequest("POST", "/v1/processes", strings.NewReader(`{"request_id":"r","argv":["x"]}`))
	req.Header.Set("Authorization", "Bearer run")
	r.h.ServeHTTP(d, req)
	if d.Code != 200 {
		t.Errorf("%d %s", d.Code, d.Body)
	}
	// The deadline of writing of the request before is lifted, and one is set for
	// this answer.
	if len(d.write) != 2 || !d.write[0].IsZero() || d.write[1].IsZero() {
		t.Errorf("the deadlines of writing were %v", d.write)
	}
}
