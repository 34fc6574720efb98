package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

func TestCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := scripted(t, Config{})
		type answer struct {
			data json.RawMessage
			err  error
		}
		call := func(data any, o CallOptions) chan answer {
			ch := make(chan answer, 1)
			go func() {
				data, err := s.conn.Call(t.Context(), "act", data, o)
				ch <- answer{data, err}
			}()
			synctest.Wait()
			return ch
		}
		on, err := pluginwire.DecodeContext([]byte(ctxA))
		if err != nil {
			t.Fatal(err)
		}
		// Success, with the context, and by a message that is only nearly like ours.
		got := call(map[string]int{"a": 1}, CallOptions{Context: on})
		s.want(`{"seq_id":101,"action":"act","data":{"a":1},"context":` + ctxA + `}`)
		s.send(`{"data": {"b": NaN}, "code": 0, "message": "ok", "seq_id": "101", "more": 1}`)
		if a := <-got; a.err != nil || string(a.data) != `{"b": NaN}` {
			t.Errorf("%s, %v", a.data, a.err)
		}
		// Failure, with structured data.
		got = call(nil, CallOptions{})
		s.want(`{"seq_id":102,"action":"act","data":{}}`)
		s.send(`{"seq_id":102,"code":7,"message":"ValueError: x","data":{"error":{}}}`)
		var p *PeerError
		if a := <-got; !errors.As(a.err, &p) || p.Message != "ValueError: x" || string(p.Data) != `{"error":{}}` || p.Action != "act" {
			t.Errorf("%v", a.err)
		}
		// Foreign, late, malformed and double responses reach nobody.
		got = call(nil, CallOptions{})
		s.want(`{"seq_id":103,"action":"act","data":{}}`)
		s.send(ok("102", "{}"), ok("999", "{}"), ok("null", "{}"), `{"seq_id":103,"code":0,"data":{}}`,
			`{"seq_id":103,"code":0,"message":"m","data":[]}`, ok("103", `{"n":1}`), ok("103", `{"n":2}`))
		if a := <-got; string(a.data) != `{"n":1}` {
			t.Errorf("%s, %v", a.data, a.err)
		}
		synctest.Wait()
		if n := s.conn.Counters(); n.Late != 3 || n.Ignored != 3 || n.Waiting != 0 {
			t.Errorf("counters %+v", n)
		}
		// Time.
		begin := time.Now()
		a := <-call(nil, CallOptions{})
		if !errors.Is(a.err, ErrTimeout) || errdefs.CodeOf(a.err) != errdefs.Unavailable || time.Since(begin) != 15*time.Second ||
			!strings.HasPrefix(pluginwire.FromError(a.err), "ActionCallTimeoutError: action call timed out") {
			t.Errorf("after %s: %v", time.Since(begin), a.err)
		}
		begin = time.Now()
		a = <-call(nil, CallOptions{Timeout: time.Minute, CancelPeer: true})
		if !errors.Is(a.err, ErrTimeout) || time.Since(begin) != time.Minute {
			t.Errorf("after %s: %v", time.Since(begin), a.err)
		}
		s.want(`{"seq_id":104,"action":"act","data":{}}`, `{"seq_id":105,"action":"act","data":{}}`,
			`{"seq_id":106,"action":"__cancel_action","data":{"seq_id":105}}`)
		s.send(bad("106", "ValueError: Action __cancel_action not found"), ok("105", "{}"))
		// None at all, ended by the connection.
		got = call(nil, CallOptions{Timeout: -1})
		s.want(`{"seq_id":107,"action":"act","data":{}}`)
		time.Sleep(100 * time.Hour)
		why := errors.New("superseded")
		s.conn.Close(why)
		if a := <-got; !errors.Is(a.err, ErrClosed) || !errors.Is(a.err, why) || pluginwire.FromError(a.err) != "ConnectionClosedError: the connection is closed: superseded" {
			t.Errorf("%v", a.err)
		}
		if _, err := s.conn.Call(t.Context(), "act", nil, CallOptions{}); !errors.Is(err, ErrClosed) {
			t.Errorf("after the end: %v", err)
		}
		s.end()
	})
}

// TestAnswerInHand: a call whose answer is being told cannot be given up at that moment
// and be lent to the next, which would get the answer of the first.
func TestAnswerInHand(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := New(Stdio(nil, nil, nil), Config{})
		k := &call{action: "a", answer: make(chan result)} // nobody takes it yet
		id, err := c.expect(k)
		if err != nil {
			t.Fatal(err)
		}
		go c.route(&pluginwire.Response{ID: id}, false)
		synctest.Wait()
		if c.forget(id) {
			t.Error("the call was given up while its answer was on its way to it")
		}
		<-k.answer
	})
}

func TestCallRefusedHere(t *testing.T) {
	t.Parallel()
	s := scripted(t, Config{})
	defer s.end()
	if _, err := s.conn.Call(t.Context(), "act", object(pluginwire.MaxMessage), CallOptions{}); !errors.Is(err, pluginwire.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	for _, data := range []any{json.RawMessage("[]"), 7, "x", make(chan int)} {
		if _, err := s.conn.Call(t.Context(), "act", data, CallOptions{}); err == nil {
			t.Errorf("%v was sent", data)
		}
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	cancel(why)
	if _, err := s.conn.Call(ctx, "act", nil, CallOptions{}); err != why {
		t.Errorf("a call whose context had ended: %v", err)
	}
	if n := s.conn.Counters(); n.Waiting != 0 {
		t.Errorf("counters %+v", n)
	}
}

// The peer's unanswered action is no obstacle to calls back, however deep.
func TestNested(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		handle := func(ctx context.Context, in *Inbound) (any, error) {
			n, err := pluginwire.IntField(in.Data, "n")
			if err != nil || n == 0 {
				return in.Data, err
			}
			return in.Conn.Call(ctx, "down", map[string]int64{"n": n - 1}, CallOptions{})
		}
		l, _, stop := both(t, Config{Handle: handle}, Config{Handle: handle})
		if got, err := l.Call(t.Context(), "down", map[string]int{"n": 200}, CallOptions{}); err != nil || string(got) != `{"n":0}` {
			t.Errorf("%s, %v", got, err)
		}
		// Deeper than both lanes of 128: the busy answer comes back up.
		_, err := l.Call(t.Context(), "down", map[string]int{"n": 300}, CallOptions{})
		if err == nil || !strings.Contains(err.Error(), "connection is busy (max 128 concurrent actions)") {
			t.Errorf("%v", err)
		}
		stop()
	})
}

// counter streams n frames of some bytes.
func counter(sent chan<- int) Handler {
	return func(ctx context.Context, in *Inbound) (any, error) {
		n, _ := pluginwire.IntField(in.Data, "n")
		size, _ := pluginwire.IntField(in.Data, "size")
		in.BeginStream()
		for i := range n {
			if err := in.Send(ctx, json.RawMessage(fmt.Sprintf(`{"i":%d,"x":"%s"}`, i, strings.Repeat("x", int(size))))); err != nil {
				return nil, err
			}
			if sent != nil {
				sent <- int(i)
			}
		}
		if in.Action == "fails" {
			return nil, errdefs.New(errdefs.Invalid, "enough")
		}
		if in.Action == "yields" { // an error, and an end frame after it: a peer may
			return nil, in.Conn.reply(ctx, &pluginwire.Response{Seq: in.seq, Code: 1, Message: "ValueError: enough"}, nil)
		}
		return nil, nil
	}
}

func drain(ctx context.Context, s *Stream) (n int, err error) {
	for {
		data, err := s.Next(ctx)
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		if i, err := pluginwire.IntField(data, "i"); err != nil || int(i) != n {
			return n, fmt.Errorf("frame %d is %.40s", n, data)
		}
		n++
	}
}

func TestStream(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		sent := make(chan int, 10000)
		l, r, stop := both(t, Config{}, Config{Handle: counter(sent)})
		for _, n := range []int{0, 1, 3, 4, 8, 9, 1000} {
			s, err := l.Stream(t.Context(), "act", map[string]int{"n": n}, CallOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got, err := drain(t.Context(), s); got != n || err != nil {
				t.Errorf("%d frames of %d: %v", got, n, err)
			}
			s.Close()
			if _, err := s.Next(t.Context()); err != io.EOF {
				t.Errorf("after the end: %v", err)
			}
		}
		// A slow reader holds the sender to the window.
		for len(sent) > 0 {
			<-sent
		}
		s, err := l.Stream(t.Context(), "act", map[string]int{"n": 100}, CallOptions{})
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for read, want := range []int{8, 8, 8, 8, 8, 12, 12} { // frames sent after so many were read
			if len(sent) != want {
				t.Errorf("%d frames were sent after %d were read, want %d", len(sent), read, want)
			}
			if _, err := s.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		// Its own pace is not the idle time: the end of that is for frames that do not come.
		time.Sleep(10 * time.Minute)
		if _, err := s.Next(t.Context()); err != nil {
			t.Error(err)
		}
		s.Close()
		synctest.Wait()
		if n := r.Counters(); n.InFlight != 0 || n.Cancelled != 1 {
			t.Errorf("a closed stream goes on: %+v", n)
		}
		for _, action := range []string{"fails", "yields"} {
			s, err := l.Stream(t.Context(), action, map[string]int{"n": 2}, CallOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if n, err := drain(t.Context(), s); n != 2 || err == nil || err.Error() != "ValueError: enough" {
				t.Errorf("%s: %d frames, %v", action, n, err)
			}
		}
		// A frame that is too large is refused by the sender.
		if s, err = l.Stream(t.Context(), "act", map[string]int{"n": 1, "size": pluginwire.MaxStreamFrame}, CallOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := drain(t.Context(), s); err == nil || !strings.Contains(err.Error(), "the limit is 1048576") {
			t.Errorf("a large frame: %v", err)
		}
		// A caller that offers flow control to a unary action gets one frame and an end.
		r.cfg.Handle = func(context.Context, *Inbound) (any, error) { return json.RawMessage(`{"i":0}`), nil }
		if s, err = l.Stream(t.Context(), "act", nil, CallOptions{}); err != nil {
			t.Fatal(err)
		}
		if n, err := drain(t.Context(), s); n != 1 || err != nil {
			t.Errorf("%d frames, %v", n, err)
		}
		stop()
		if _, err = l.Stream(context.Background(), "act", nil, CallOptions{}); !errors.Is(err, ErrClosed) {
			t.Errorf("after the end: %v", err)
		}
	})
}

// The stream of a peer that knows no flow control, and what a bad one may do.
func TestStreamByHand(t *testing.T) {
	t.Parallel()
	frame := func(seq string, index int, data string) string {
		m := `{"seq_id":` + seq + `,"code":0,"message":"success","data":` + data + `,"chunk_status":"continue"`
		if index > 0 {
			m += fmt.Sprintf(`,"stream_index":%d`, index)
		}
		return m + "}"
	}
	type rig struct {
		*script
		st *Stream
	}
	open := func(t *testing.T) rig {
		s := scripted(t, Config{})
		on, _ := pluginwire.DecodeContext([]byte(ctxA))
		st, err := s.conn.Stream(t.Context(), "act", nil, CallOptions{Context: on, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		s.want(`{"seq_id":101,"action":"act","data":{},"context":` + ctxA + `,"stream_flow_control":1}`)
		return rig{s, st}
	}
	cancelled := `{"seq_id":102,"action":"__cancel_action","data":{"seq_id":101},"context":` + ctxA + `}`
	for _, c := range []struct {
		name string
		run  func(t *testing.T, r rig)
	}{
		{"legacy", func(t *testing.T, r rig) {
			for i := range 20 {
				r.send(frame("101", 0, fmt.Sprintf(`{"i":%d}`, i)))
			}
			r.send(end("101"), end("101"))
			if n, err := drain(t.Context(), r.st); n != 20 || err != nil {
				t.Errorf("%d, %v", n, err)
			}
			r.silent() // no acknowledgements
		}},
		{"acknowledged", func(t *testing.T, r rig) {
			for i := range 8 {
				r.send(frame("101", i+1, fmt.Sprintf(`{"i":%d}`, i)))
			}
			for range 4 {
				if _, err := r.st.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
			r.silent() // the fourth is not processed yet
			if _, err := r.st.Next(t.Context()); err != nil {
				t.Fatal(err)
			}
			r.want(`{"seq_id":102,"action":"__stream_ack","data":{"seq_id":101,"index":4},"context":` + ctxA + `}`)
			r.send(ok("102", `{"accepted":false}`), end("101"))
			for i := range 3 {
				if data, err := r.st.Next(t.Context()); err != nil || string(data) != fmt.Sprintf(`{"i":%d}`, i+5) {
					t.Errorf("%s, %v", data, err)
				}
			}
			if _, err := r.st.Next(t.Context()); err != io.EOF {
				t.Error(err)
			}
		}},
		{"out of order", func(t *testing.T, r rig) {
			r.send(frame("101", 1, `{"i":0}`), frame("101", 3, `{"i":1}`))
			synctest.Wait()
			if _, err := r.st.Next(t.Context()); !errors.Is(err, ErrStream) || !strings.Contains(err.Error(), "out of order") {
				t.Error(err)
			}
			r.want(cancelled)
			r.send(frame("101", 4, `{}`))
		}},
		{"index lost", func(t *testing.T, r rig) {
			r.send(frame("101", 1, `{"i":0}`), frame("101", 0, `{"i":1}`))
			synctest.Wait()
			if _, err := r.st.Next(t.Context()); !errors.Is(err, ErrStream) {
				t.Error(err)
			}
			r.want(cancelled)
		}},
		{"too many frames", func(t *testing.T, r rig) {
			for i := range pluginwire.StreamBufferFrames + 1 {
				r.send(frame("101", i+1, `{}`))
			}
			synctest.Wait()
			if _, err := r.st.Next(t.Context()); !errors.Is(err, ErrStream) || !strings.Contains(err.Error(), "128 unread frames") {
				t.Error(err)
			}
			r.want(cancelled)
		}},
		{"legacy burst", func(t *testing.T, r rig) {
			// A peer without flow control may write more frames than that at once.
			for i := range 1000 {
				r.send(frame("101", 0, fmt.Sprintf(`{"i":%d}`, i)))
			}
			r.send(end("101"))
			if n, err := drain(t.Context(), r.st); n != 1000 || err != nil {
				t.Errorf("%d, %v", n, err)
			}
		}},
		{"legacy flood", func(t *testing.T, r rig) {
			for range pluginwire.StreamBufferBytes/(1000+frameOverhead) + 1 {
				r.send(frame("101", 0, string(object(1000))))
			}
			synctest.Wait()
			if _, err := r.st.Next(t.Context()); !errors.Is(err, ErrStream) || !strings.Contains(err.Error(), "unread bytes") {
				t.Error(err)
			}
			r.want(cancelled)
		}},
		{"too many bytes", func(t *testing.T, r rig) {
			for i := range 9 {
				r.send(frame("101", i+1, string(object(1<<20-200))))
			}
			r.send(frame("101", 10, string(object(1<<20-200))))
			synctest.Wait()
			if _, err := r.st.Next(t.Context()); !errors.Is(err, ErrStream) || !strings.Contains(err.Error(), "unread bytes") {
				t.Error(err)
			}
			r.want(cancelled)
		}},
		{"error first", func(t *testing.T, r rig) {
			r.send(frame("101", 1, `{"i":0}`), bad("101", "KeyError: 'x'"), end("101"))
			if n, err := drain(t.Context(), r.st); n != 1 || err == nil || err.Error() != "KeyError: 'x'" {
				t.Errorf("%d, %v", n, err)
			}
		}},
		{"idle", func(t *testing.T, r rig) {
			r.send(frame("101", 1, `{"i":0}`))
			begin := time.Now()
			time.Sleep(8 * time.Second)
			if n, err := drain(t.Context(), r.st); n != 1 || !errors.Is(err, ErrTimeout) || time.Since(begin) != 18*time.Second {
				t.Errorf("after %s: %d, %v", time.Since(begin), n, err)
			}
			r.want(cancelled)
			r.send(end("101"))
		}},
		{"reader gives up", func(t *testing.T, r rig) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := r.st.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			r.send(frame("101", 1, `{"i":0}`), end("101"))
			if n, err := drain(t.Context(), r.st); n != 1 || err != nil {
				t.Errorf("%d, %v", n, err)
			}
		}},
		{"closed connection", func(t *testing.T, r rig) {
			r.send(frame("101", 1, `{"i":0}`))
			synctest.Wait()
			r.conn.Close(nil)
			if n, err := drain(t.Context(), r.st); n != 1 || !errors.Is(err, ErrClosed) {
				t.Errorf("%d, %v", n, err)
			}
			r.st.Close()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := open(t)
				c.run(t, r)
				synctest.Wait()
				if n := r.conn.Counters(); n.Waiting != 0 {
					t.Errorf("counters %+v", n)
				}
				r.end()
			})
		})
	}
}

// The acknowledgements that we take: only for a stream, of the right context, in range.
func TestAcks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		sent := make(chan int, 100)
		s := scripted(t, Config{Handle: counter(sent)})
		frames := 0
		ack := func(seq int, data, on, want string) {
			t.Helper()
			s.send(asked(seq, "__stream_ack", data, on))
			for { // frames that the acknowledgement lets go may come before its answer
				m := <-s.seen
				if strings.Contains(m, "stream_index") {
					frames++
					continue
				}
				if !strings.Contains(m, want) {
					t.Errorf("ack %s: %s", data, m)
				}
				break
			}
			synctest.Wait()
		}
		s.send(`{"seq_id":1,"action":"act","data":{"n":100},"context":` + ctxA + `,"stream_flow_control":1}`)
		for range 8 {
			<-s.seen
		}
		synctest.Wait()
		ack(10, `{"seq_id":1,"index":4}`, ctxB, `"accepted":false`)
		ack(11, `{"seq_id":1,"index":4}`, "", `"accepted":false`)
		ack(12, `{"seq_id":2,"index":4}`, ctxA, `"accepted":false`)
		ack(13, `{"seq_id":1,"index":9}`, ctxA, `ValueError: index 9 is not between 0 and 8`)
		ack(14, `{"seq_id":1,"index":-1}`, ctxA, `ValueError: `)
		ack(15, `{"seq_id":1}`, ctxA, `KeyError: 'index'`)
		ack(16, `{"seq_id":1,"index":true}`, ctxA, `ValueError: `)
		if len(sent) != 8 {
			t.Errorf("%d frames were sent", len(sent))
		}
		ack(17, `{"seq_id":1,"index":3}`, ctxA, `"accepted":true`)
		if len(sent) != 11 {
			t.Errorf("%d frames were sent", len(sent))
		}
		for ; frames < 3; frames++ {
			<-s.seen
		}
		ack(18, `{"seq_id":1,"index":2}`, ctxA, `ValueError: `)
		// A caller that never acknowledges again does not hold the action for ever.
		time.Sleep(AckPatience + time.Second)
		if m := <-s.seen; !strings.Contains(m, "has not acknowledged") {
			t.Error(m)
		}
		s.end()
	})
}

// echoes checks that payloads of every size come back as they were sent.
func echoes(t *testing.T, c *Conn) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.OneOf(rapid.IntRange(0, 2000), rapid.IntRange(15<<10, 18<<10), rapid.IntRange(60<<10, 70<<10), rapid.IntRange(0, 600<<10)).Draw(t, "size")
		unit := rapid.SampledFrom([]string{"x", `\"`, `\\`, "é", "🐮", `\n`, `\ud800`, "} {"}).Draw(t, "unit")
		gap := rapid.SampledFrom([]string{"", " ", "\n", "\r\n", "\t"}).Draw(t, "gap")
		data := `{"text":` + gap + `"` + strings.Repeat(unit, size/len(unit)) + `"` + gap + `}`
		got, err := c.Call(context.Background(), "echo", json.RawMessage(data), CallOptions{})
		if err != nil {
			t.Fatal(err)
		}
		plain := func(b []byte) string { // line ends between tokens may become spaces
			return strings.NewReplacer("\n", " ", "\r", " ").Replace(string(bytes.TrimSpace(b)))
		}
		if plain(got) != plain([]byte(data)) {
			t.Fatalf("sent %.60q, got %.60q", data, got)
		}
	})
}

func TestEchoStdio(t *testing.T) {
	t.Parallel()
	l, _, stop := both(t, Config{}, Config{Handle: echo})
	defer stop()
	echoes(t, l)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			for range 50 {
				if _, err := l.Call(context.Background(), "echo", object(100), CallOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
}

// sockets joins two Conns by a WebSocket.
func sockets(t testing.TB, right Config) (l *Conn, stop func()) {
	accepted := make(chan *websocket.Conn, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		accepted <- c
	}))
	c, _, err := websocket.Dial(context.Background(), srv.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, _, end := join(t, WebSocket(c), WebSocket(<-accepted), Config{}, right)
	return l, func() { end(); srv.Close() }
}

func TestEchoWebSocket(t *testing.T) {
	t.Parallel()
	l, stop := sockets(t, Config{Handle: echo})
	defer stop()
	echoes(t, l)
	if got, err := l.Call(context.Background(), "echo", object(pluginwire.MaxMessage-200), CallOptions{Timeout: time.Minute}); err != nil || len(got) != pluginwire.MaxMessage-200 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestLargestOverStdio(t *testing.T) {
	t.Parallel()
	l, _, stop := both(t, Config{}, Config{Handle: echo})
	defer stop()
	if got, err := l.Call(context.Background(), "echo", object(pluginwire.MaxMessage-200), CallOptions{Timeout: time.Minute}); err != nil || len(got) != pluginwire.MaxMessage-200 {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// Lines that a peer must not send, and those it may.
func TestStdioReader(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, in string
		want     int // messages
		err      error
	}{
		{"noise", "hello\n\n" + strings.Repeat("x", 40<<20) + "\n{\"a\":1}\n", 1, io.EOF},
		{"no line end", `{"a":1}`, 1, io.EOF},
		{"half a line", `{"a":`, 0, io.EOF},
		{"a line that never ends", "{" + strings.Repeat("x", 40<<20), 0, pluginwire.ErrTooLarge},
		{"a large plain line", `{"a":"` + strings.Repeat("x", 10<<20) + "\"}\n", 1, io.EOF},
		{"too large a plain line", `{"a":"` + strings.Repeat("x", 16<<20) + "\"}\n", 0, pluginwire.ErrTooLarge},
		{"a promise that is too large", `{"type":"chunk_start","total_size":16777217}` + "\n", 0, pluginwire.ErrTooLarge},
		{"a wrong offset", `{"type":"chunk_start","total_size":2}` + "\n" + `{"type":"chunk_data","data":"{","offset":1}` + "\n", 0, pluginwire.ErrChunk},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			tr := Stdio(strings.NewReader(c.in), io.Discard, nil)
			n := 0
			var err error
			for err == nil {
				var msg []byte
				if msg, err = tr.Read(); err == nil && len(msg) > 0 && msg[len(msg)-1] == '}' {
					n++
				}
			}
			if n != c.want || !errors.Is(err, c.err) {
				t.Errorf("%d messages, %v", n, err)
			}
			if s := tr.(*stdio); c.name == "noise" && len(s.buf) > largeBuffer {
				t.Errorf("noise made the buffer %d bytes", len(s.buf))
			}
		})
	}
}

// A payload that holds line ends must not write messages of its own.
func TestNoMessageInsideAPayload(t *testing.T) {
	t.Parallel()
	s := scripted(t, Config{})
	defer s.end()
	for _, pad := range []int{0, 40 << 10} {
		inner := asked(1, "register_plugin", `{}`, "")
		data := `{"pad":"` + strings.Repeat("x", pad) + `","a":` + "\n" + inner + "\r\n" + `}`
		go func() {
			_, _ = s.conn.Call(context.Background(), "act", json.RawMessage(data), CallOptions{Timeout: time.Millisecond})
		}()
		var m pluginwire.Message
		if err := m.Decode([]byte(<-s.seen)); err != nil || m.Request.Action != "act" {
			t.Errorf("%+v, %v", m, err)
		}
		synctestFree(s)
	}
}

func synctestFree(s *script) {
	for s.conn.Counters().Waiting > 0 {
		time.Sleep(time.Millisecond)
	}
}
