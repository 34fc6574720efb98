package relayclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// fakeHub hands each connection to the test.
type fakeHub struct {
	url   string
	conns chan *fakeConn
	stop  context.CancelFunc
}

// connect is connect, with a hub that goes away before the client: nobody reads
// there any more, so a client that said goodbye would wait for nothing.
func (h *fakeHub) connect(t *testing.T, id string, change func(*Config)) *running {
	t.Helper()
	r := connect(t, h.url, id, change)
	t.Cleanup(h.stop)
	return r
}

// fakeConn is the hub's end of one connection.
type fakeConn struct {
	t  *testing.T
	ws *websocket.Conn
}

func newFakeHub(t *testing.T) *fakeHub {
	t.Helper()
	ctx, stop := context.WithCancel(bg)
	h := &fakeHub{conns: make(chan *fakeConn, 16), stop: stop}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		ws.SetReadLimit(-1)
		h.conns <- &fakeConn{t, ws}
		<-ctx.Done()
		_ = ws.CloseNow()
	}))
	h.url = "ws" + strings.TrimPrefix(srv.URL, "http")
	t.Cleanup(func() {
		stop()
		srv.Close()
	})
	return h
}

// accept is the next connection, before its hello was read.
func (h *fakeHub) accept(t *testing.T) *fakeConn {
	t.Helper()
	select {
	case c := <-h.conns:
		return c
	case <-time.After(soon):
		t.Fatal("nobody connects")
		return nil
	}
}

// ready is the next connection with its hello answered.
func (h *fakeHub) ready(t *testing.T) *fakeConn {
	t.Helper()
	c := h.accept(t)
	f := c.next()
	if f.Type != relaywire.Hello {
		t.Fatalf("first comes %+v", f)
	}
	c.send(relaywire.Frame{Type: relaywire.Ready, DaemonID: f.DaemonID, Protocol: relaywire.Protocol})
	return c
}

func (c *fakeConn) send(f relaywire.Frame) {
	c.t.Helper()
	c.raw(relaywire.Append(nil, &f))
}

func (c *fakeConn) raw(b []byte) {
	c.t.Helper()
	if err := c.ws.Write(bg, websocket.MessageText, b); err != nil {
		c.t.Fatal(err)
	}
}

func (c *fakeConn) try() (relaywire.Frame, error) {
	ctx, cancel := context.WithTimeout(bg, soon)
	defer cancel()
	_, data, err := c.ws.Read(ctx)
	if err != nil {
		return relaywire.Frame{}, err
	}
	return relaywire.Decode(data, 0)
}

func (c *fakeConn) next() relaywire.Frame {
	c.t.Helper()
	f, err := c.try()
	if err != nil {
		c.t.Fatal(err)
	}
	return f
}

// closed reads until the client closes, and returns how.
func (c *fakeConn) closed() websocket.StatusCode {
	for {
		if _, err := c.try(); err != nil {
			return websocket.CloseStatus(err)
		}
	}
}

func start(id, payload string) relaywire.Frame {
	return relaywire.Frame{Type: relaywire.Start, JobID: id, Payload: json.RawMessage(payload)}
}

func cancel(id string) relaywire.Frame { return relaywire.Frame{Type: relaywire.Cancel, JobID: id} }

// obedient waits for its end.
func obedient(ctx context.Context, _ string, _ json.RawMessage, _ func(json.RawMessage) error, _ MCP) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func with(r runnerFunc, change ...func(*Config)) func(*Config) {
	return func(c *Config) {
		c.Runner = r
		for _, f := range change {
			f(c)
		}
	}
}

func TestHello(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	h.connect(t, "démon", with(obedient, func(c *Config) { c.Metadata = map[string]any{"version": "1"} }))
	f := h.accept(t).next()
	if f.Type != relaywire.Hello || f.DaemonID != "démon" || f.Protocol != "coding-relay-v1" || f.Token != token {
		t.Errorf("hello %+v", f)
	}
	var meta map[string]any
	if err := json.Unmarshal(f.Metadata, &meta); err != nil || meta["pid"] == nil || meta["cwd"] == "" || meta["platform"] != "linux" || meta["version"] != "1" {
		t.Errorf("metadata %s, %v", f.Metadata, err)
	}
}

// Whatever is wrong with the handshake: the connection goes, and it is tried again.
func TestHandshakeFailures(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(c *fakeConn){
		"silence":        func(*fakeConn) {}, // ready has a time-out
		"other protocol": func(c *fakeConn) { c.send(relaywire.Frame{Type: relaywire.Ready, Protocol: "coding-relay-v2"}) },
		"no protocol":    func(c *fakeConn) { c.raw([]byte(`{"type":"daemon.ready"}`)) },
		"other frame":    func(c *fakeConn) { c.send(start("j", "{}")) },
		"nonsense":       func(c *fakeConn) { c.raw([]byte(`{"type":`)) },
		"refused":        func(c *fakeConn) { _ = c.ws.Close(relaywire.CloseRefused, relaywire.ReasonToken) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newFakeHub(t)
			h.connect(t, "d", with(obedient, func(c *Config) { c.Limits.ReadyTimeout = 100 * time.Millisecond }))
			c := h.accept(t)
			c.next()
			answer(c)
			h.accept(t) // again
		})
	}
}

func TestOutcomes(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	h.connect(t, "d", with(func(ctx context.Context, id string, p json.RawMessage, emit func(json.RawMessage) error, _ MCP) error {
		if err := emit(json.RawMessage(` {"type":"x","id":"` + id + `"} `)); err != nil {
			return err
		}
		switch id {
		case "fails":
			return errors.New("it broke")
		case "waits":
			return obedient(ctx, id, p, emit, MCP{})
		case "bad events":
			for _, bad := range []string{"", "[]", "1", "{", `{"a":NaN}`} {
				if err := emit(json.RawMessage(bad)); !errdefs.Is(err, errdefs.Internal) {
					t.Errorf("%q: %v", bad, err)
				}
			}
		}
		return nil
	}))
	c := h.ready(t)
	for id, want := range map[string]string{
		"good":       `run.event {"type":"x","id":"good"} run.finished`,
		"bad events": `run.event {"type":"x","id":"bad events"} run.finished`,
		"fails":      `run.event {"type":"x","id":"fails"} run.event {"type":"run.failed","data":{"error":"it broke","code":"agent_runtime.daemon_unexpected","retryable":false}} run.finished`,
	} {
		c.send(start(id, "{}"))
		if got := c.until(id); got != want {
			t.Errorf("%s: %s", id, got)
		}
	}
	c.send(start("waits", "{}"))
	if f := c.next(); f.Type != relaywire.Event {
		t.Errorf("got %+v", f)
	}
	for range 3 { // repeating is harmless
		c.send(cancel("waits"))
	}
	if got := c.until("waits"); got != "run.finished" {
		t.Errorf("cancelled: %s", got)
	}
	c.send(cancel("waits"))
	c.send(cancel("never"))
	c.send(start("waits", "{}")) // over, so the id may come again
	c.send(cancel("waits"))
	if got := c.until("waits"); !strings.HasSuffix(got, "run.finished") {
		t.Errorf("again: %s", got)
	}
}

// An id is free as soon as the hub reads run.finished, however quick its next start
// is.
func TestIDIsFreeAtItsEnd(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	h.connect(t, "d", with(func(context.Context, string, json.RawMessage, func(json.RawMessage) error, MCP) error { return nil }))
	c := h.ready(t)
	for range 3000 {
		c.send(start("again", "{}"))
		c.until("again")
	}
}

// A job that comes while this program stops was never started here. The hub is told
// so: a connection that is lost with it would fence this machine for nothing.
func TestJobForAClientThatStops(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	runs, begun, proceed := make(chan struct{}), make(chan struct{}), make(chan struct{})
	r := h.connect(t, "d", with(func(ctx context.Context, id string, _ json.RawMessage, _ func(json.RawMessage) error, _ MCP) error {
		if id != "one" {
			t.Errorf("the job %s is run", id)
			return nil
		}
		close(runs)
		<-ctx.Done()
		close(begun)
		<-proceed
		return context.Cause(ctx)
	}))
	release := sync.OnceFunc(func() { close(proceed) })
	t.Cleanup(release)
	c := h.ready(t)
	c.send(start("one", "{}"))
	<-runs
	r.stop()
	<-begun
	for _, id := range []string{"two", "three"} {
		c.send(start(id, "{}"))
		if got := c.until(id); !strings.Contains(got, codeBusy) || !strings.Contains(got, `"retryable":true`) {
			t.Errorf("%s: %s", id, got)
		}
	}
	release()
	if got := c.until("one"); !strings.HasSuffix(got, "run.finished") {
		t.Error(got)
	}
	if code := c.closed(); code != websocket.StatusNormalClosure {
		t.Errorf("closed with %d", code)
	}
}

// until reads a job's frames up to run.finished.
func (c *fakeConn) until(id string) string {
	c.t.Helper()
	var all []string
	for {
		f := c.next()
		if f.JobID != id {
			c.t.Fatalf("a frame of another job: %+v", f)
		}
		s := string(f.Type)
		if f.Event != nil {
			s += " " + string(f.Event)
		}
		all = append(all, s)
		if f.Type == relaywire.Finished {
			return strings.Join(all, " ")
		}
	}
}

// A clean-up is not interrupted by cancels, however many, nor acknowledged before
// its end.
func TestRepeatedCancelDoesNotInterrupt(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	begun, proceed := make(chan struct{}), make(chan struct{})
	h.connect(t, "d", with(func(ctx context.Context, _ string, _ json.RawMessage, _ func(json.RawMessage) error, _ MCP) error {
		<-ctx.Done()
		close(begun)
		<-proceed
		return context.Cause(ctx)
	}))
	c := h.ready(t)
	c.send(start("j", "{}"))
	c.send(cancel("j"))
	<-begun
	for range 10 {
		c.send(cancel("j"))
	}
	c.send(relaywire.Frame{Type: "daemon.pong"})
	pinged := make(chan error, 1)
	read := make(chan relaywire.Frame, 1)
	go func() { // pongs come while it is read
		f, _ := c.try()
		read <- f
	}()
	go func() { pinged <- c.ws.Ping(bg) }()
	if err := <-pinged; err != nil { // so all the cancels were handled
		t.Fatal(err)
	}
	select {
	case f := <-read:
		t.Errorf("%+v before the end of the clean-up", f)
	default:
	}
	close(proceed)
	if f := <-read; f.Type != relaywire.Finished || f.JobID != "j" {
		t.Errorf("got %+v", f)
	}
}

// What makes no sense drops the connection; every job is ended, and it is connected
// again.
func TestFatalFrames(t *testing.T) {
	t.Parallel()
	for name, frame := range map[string]relaywire.Frame{
		"a job twice": start("j", "{}"),
		"an old hub":  {Type: relaywire.Cleanup, JobID: "j"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newFakeHub(t)
			ended := make(chan struct{})
			h.connect(t, "d", with(func(ctx context.Context, id string, p json.RawMessage, emit func(json.RawMessage) error, m MCP) error {
				defer close(ended)
				return obedient(ctx, id, p, emit, m)
			}))
			c := h.ready(t)
			c.send(start("j", "{}"))
			c.send(frame)
			c.closed()
			h.ready(t)
			select {
			case <-ended:
			default:
				t.Error("connected again with a job that runs")
			}
		})
	}
}

// What is odd and harmless is ignored.
func TestIgnoredFrames(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	h.connect(t, "d", with(func(context.Context, string, json.RawMessage, func(json.RawMessage) error, MCP) error { return nil }))
	c := h.ready(t)
	for _, raw := range []string{
		`{`, `[]`, `1`, ``, `{"type":"x"}`, `{"type":7}`, `{"type":"daemon.pong"}`, `{"type":"run.start"}`, `{"type":"run.start","job_id":"a"}`,
		`{"type":"run.start","job_id":"a","payload":[]}`, `{"type":"run.start","job_id":7,"payload":{}}`, `{"type":"run.start","job_id":"","payload":{}}`,
		`{"type":"run.cancel"}`, `{"type":"mcp.response","request_id":"x","payload":null}`, `{"type":"daemon.ready"}`, `{"type":"run.finished","job_id":"a"}`,
		"\xff\xfe", `{"type":"run.cancel","job_id":"\ud800"}`, `{"type":"run.start","job_id":"a","payload":NaN}`, strings.Repeat("[", 100_000),
	} {
		c.raw([]byte(raw))
	}
	if err := c.ws.Write(bg, websocket.MessageBinary, relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Start, JobID: "binary", Payload: json.RawMessage("{}")})); err != nil {
		t.Fatal(err)
	}
	if got := c.until("binary"); got != "run.finished" {
		t.Error(got)
	}
}

// Paired with test_coding_relay_v1.py, client_cleanup_failure_refuses_reconnect: how
// it looks on the wire.
func TestUnconfirmedClosesWith1011(t *testing.T) {
	t.Parallel()
	for i := range 10 { // an acknowledgement would race with the close
		t.Run(strconv.Itoa(i), unconfirmedCloses)
	}
}

func unconfirmedCloses(t *testing.T) {
	h := newFakeHub(t)
	c := h.connect(t, "d", with(func(context.Context, string, json.RawMessage, func(json.RawMessage) error, MCP) error {
		return fmt.Errorf("wrapped: %w", &UnconfirmedError{Why: "x"})
	}))
	conn := h.ready(t)
	conn.send(start("j", "{}"))
	f, err := conn.try()
	if err == nil {
		t.Errorf("it says %+v", f)
	}
	if got := websocket.CloseStatus(err); got != relaywire.CloseHalted {
		t.Errorf("closed with %d, %v", got, err)
	}
	if err := c.wait(t); !errdefs.Is(err, errdefs.Indeterminate) {
		t.Error(err)
	}
	select {
	case <-h.conns:
		t.Error("it connects again")
	default:
	}
}

// A hub that does not read stops who has something to say, and nobody else; an
// acknowledgement goes before what waits.
func TestStalledHub(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	event := json.RawMessage(`{"x":"` + strings.Repeat("y", 64<<10) + `"}`)
	var mu sync.Mutex
	sent := map[string]int{}
	h.connect(t, "d", with(func(ctx context.Context, id string, p json.RawMessage, emit func(json.RawMessage) error, m MCP) error {
		if id == "quiet" {
			return obedient(ctx, id, p, emit, m)
		}
		for {
			if err := emit(event); err != nil {
				return err
			}
			mu.Lock()
			sent[id]++
			mu.Unlock()
		}
	}, func(c *Config) { c.Limits.QueueBytes = 256 << 10 }))
	c := h.ready(t)
	for _, id := range []string{"flood1", "flood2", "quiet"} {
		c.send(start(id, "{}"))
	}
	// Nothing is read here: soon nothing more is taken there.
	last := -1
	wait(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		n := sent["flood1"] + sent["flood2"]
		still := n == last && n > 0
		last = n
		time.Sleep(100 * time.Millisecond)
		return still
	})
	mu.Lock()
	n := sent["flood1"] + sent["flood2"]
	mu.Unlock()
	if n > 400 {
		t.Errorf("%d events of 64 KiB were taken by a hub that reads none", n)
	}
	c.send(cancel("quiet"))
	c.send(cancel("flood1"))
	// What was on its way comes, then the acknowledgements, among the other's flood.
	seen := map[string]int{}
	finished := map[string]int{}
	for total := 0; len(finished) < 2; total++ {
		f := c.next()
		if f.Type == relaywire.Finished {
			finished[f.JobID] = total
		} else if seen[f.JobID]++; finished[f.JobID] > 0 {
			t.Errorf("an event of %s after its end", f.JobID)
		}
		if total > 2000 {
			t.Fatalf("no acknowledgement among %v", seen)
		}
	}
	c.send(cancel("flood2"))
	for {
		if f := c.next(); f.Type == relaywire.Finished {
			break
		}
	}
}

// What a cancelled job had to say is not sent any more, so that its acknowledgement
// comes at once.
func TestCancelDropsWhatWaits(t *testing.T) {
	t.Parallel()
	const total = 600 // of 64 KiB: far more than a connection holds on its way
	h := newFakeHub(t)
	queued := make(chan struct{})
	event := json.RawMessage(`{"x":"` + strings.Repeat("y", 64<<10) + `"}`)
	h.connect(t, "d", with(func(ctx context.Context, id string, p json.RawMessage, emit func(json.RawMessage) error, m MCP) error {
		for range total {
			if err := emit(event); err != nil {
				return err
			}
		}
		close(queued)
		return obedient(ctx, id, p, emit, m)
	}, func(c *Config) { c.Limits.QueueBytes = 1 << 30 }))
	c := h.ready(t)
	c.send(start("j", "{}"))
	<-queued
	c.send(cancel("j"))
	n := 0
	for c.next().Type != relaywire.Finished {
		if n++; n == 1 {
			// Only once something is read does the writer go on; by then the cancel is
			// handled, because the client's reader waits for nobody.
			go func() { _ = c.ws.Ping(bg) }()
		}
	}
	if n >= total {
		t.Errorf("all %d events came before the end", n)
	}
}

// post calls a job's tools as its agent would.
func post(t *testing.T, m MCP, path, token, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequest("POST", strings.TrimSuffix(m.URL, "/mcp")+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error()
	}
	return res.StatusCode, string(bytes.TrimSpace(b))
}

// A body that is announced and never sent keeps no connection, and no slot of the job.
func TestProxyABodyThatNeverComes(t *testing.T) {
	t.Parallel()
	p, err := newProxy(&session{client: &client{limits: relaywire.Limits{}.WithDefaults(), log: slog.New(slog.DiscardHandler)}}, "j")
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	p.body = 20 * time.Millisecond
	at := strings.TrimSuffix(strings.TrimPrefix(p.url, "http://"), "/mcp")
	for _, x := range [][2]string{
		{"POST /mcp HTTP/1.1\r\nContent-Length: 10", "401"}, {"GET /healthz HTTP/1.1\r\nContent-Length: 10", "200"}, {"POST /no HTTP/1.1\r\nTransfer-Encoding: chunked", "404"},
		{"POST /mcp HTTP/1.1\r\nAuthorization: Bearer " + p.token + "\r\nContent-Length: 10", "413"},
	} {
		conn, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second)) // instead of hanging
		fmt.Fprintf(conn, "%s\r\nHost: x\r\n\r\n", x[0])
		if b, err := io.ReadAll(conn); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 "+x[1]) {
			t.Errorf("%q: %q %v", x[0], b, err)
		}
	}
	if len(p.slots) > 0 || p.srv.IdleTimeout <= 0 {
		t.Errorf("%d slots are taken, idle connections end after %v", len(p.slots), p.srv.IdleTimeout)
	}
}

func TestProxy(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	mcps := make(chan MCP, 1)
	h.connect(t, "d", with(func(ctx context.Context, id string, p json.RawMessage, emit func(json.RawMessage) error, m MCP) error {
		mcps <- m
		return obedient(ctx, id, p, emit, m)
	}, func(c *Config) { c.Limits.MessageBytes = 1 << 20 }))
	c := h.ready(t)
	c.send(start("j", "{}"))
	m := <-mcps

	// The hub answers in the other order, and not everything.
	ids := make(chan relaywire.Frame, 16)
	reading := make(chan struct{})
	go func() {
		defer close(reading)
		for {
			f, err := c.try()
			if err != nil || f.Type == relaywire.Finished {
				return
			}
			ids <- f
		}
	}()
	t.Run("refused", func(t *testing.T) {
		for _, x := range []struct {
			path, token, body string
			code              int
		}{
			{"/mcp", "", "{}", 401}, {"/mcp", "wrong", "{}", 401}, {"/mcp/http", "", "{}", 401}, {"/other", m.Token, "{}", 404},
			{"/mcp", m.Token, "nonsense", 400}, {"/mcp", m.Token, "1", 400}, {"/mcp", m.Token, `{"a":NaN}`, 400},
			{"/mcp", m.Token, `{"x":"` + strings.Repeat("y", 2<<20) + `"}`, 413},
		} {
			if code, body := post(t, m, x.path, x.token, x.body); code != x.code {
				t.Errorf("%s %.20s: %d %s, want %d", x.path, x.body, code, body, x.code)
			}
		}
		res, err := http.Get(strings.TrimSuffix(m.URL, "/mcp") + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		http.DefaultClient.CloseIdleConnections()
		if res.StatusCode != 200 || string(b) != `{"ok":true}` {
			t.Errorf("healthz: %d %s", res.StatusCode, b)
		}
	})
	t.Run("beside each other", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call"}`, i)
				code, got := post(t, m, []string{"/mcp", "/mcp/http"}[i%2], m.Token, body)
				if want := fmt.Sprintf(`{"echo":%s}`, body); code != 200 || got != want {
					t.Errorf("call %d: %d %s", i, code, got)
				}
			})
		}
		var frames []relaywire.Frame
		for range 4 {
			frames = append(frames, <-ids)
		}
		for i := range frames {
			f := frames[len(frames)-1-i]
			if f.Type != relaywire.MCPRequest || f.JobID != "j" || len(f.RequestID) != 16 {
				t.Errorf("request %+v", f)
			}
			for _, id := range []string{"unknown", f.RequestID, f.RequestID} {
				c.send(relaywire.Frame{Type: relaywire.MCPResponse, RequestID: id, JobID: "j", Payload: json.RawMessage(`{"echo":` + string(f.Payload) + `}`)})
			}
		}
		wg.Wait()
	})
	t.Run("notification", func(t *testing.T) {
		go func() {
			f := <-ids
			c.send(relaywire.Frame{Type: relaywire.MCPResponse, RequestID: f.RequestID, JobID: "j"})
		}()
		if code, body := post(t, m, "/mcp", m.Token, `{"jsonrpc":"2.0","method":"notifications/initialized"}`); code != 202 || body != "" {
			t.Errorf("%d %q", code, body)
		}
	})
	t.Run("no answer", func(t *testing.T) {
		m.SetCallTimeout(50 * time.Millisecond)
		code, body := post(t, m, "/mcp", m.Token, `{"jsonrpc":"2.0","id":"a1","method":"x"}`)
		if code != 200 || !strings.Contains(body, `"id":"a1"`) || !strings.Contains(body, "-32000") || !strings.Contains(body, "in time") {
			t.Errorf("%d %s", code, body)
		}
		code, body = post(t, m, "/mcp", m.Token, `[{"jsonrpc":"2.0","id":1,"method":"x"},{"jsonrpc":"2.0","method":"y"},{"jsonrpc":"2.0","id":2,"method":"z"}]`)
		if code != 200 || !strings.Contains(body, `"id":1`) || !strings.Contains(body, `"id":2`) || strings.Count(body, "-32000") != 2 {
			t.Errorf("%d %s", code, body)
		}
		<-ids
		<-ids
		m.SetCallTimeout(time.Hour)
	})
	t.Run("the end", func(t *testing.T) {
		result := make(chan string, 1)
		go func() {
			_, body := post(t, m, "/mcp", m.Token, `{"jsonrpc":"2.0","id":1,"method":"x"}`)
			result <- body
		}()
		<-ids
		c.send(cancel("j"))
		<-reading // run.finished
		<-result  // ended, whatever it got
		if code, body := post(t, m, "/mcp", m.Token, "{}"); code != 0 || !strings.Contains(body, "refused") {
			t.Errorf("after the end: %d %s", code, body)
		}
	})
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	good := Config{URL: "ws://127.0.0.1:1", DaemonID: "d", Runner: runnerFunc(obedient)}
	for name, change := range map[string]func(*Config){
		"no url": func(c *Config) { c.URL = "" }, "http": func(c *Config) { c.URL = "http://x" }, "password": func(c *Config) { c.URL = "ws://u:p@x" },
		"no id": func(c *Config) { c.DaemonID = "" }, "long id": func(c *Config) { c.DaemonID = strings.Repeat("é", 129) },
		"limits": func(c *Config) { c.Limits.MessageBytes = -1 }, "metadata": func(c *Config) { c.Metadata = map[string]any{"x": make(chan int)} },
		"command":   func(c *Config) { c.Runner, c.AllowCommand = nil, []string{"./x"} },
		"directory": func(c *Config) { c.Runner, c.AllowWorkspace = nil, []string{"/no/such/directory"} },
	} {
		cfg := good
		change(&cfg)
		if err := Run(bg, cfg); !errdefs.Is(err, errdefs.Invalid) && !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// More jobs than allowed are refused, each by itself.
func TestTooManyJobs(t *testing.T) {
	t.Parallel()
	h := newFakeHub(t)
	h.connect(t, "d", with(obedient, func(c *Config) { c.Limits.Jobs = 2 }))
	c := h.ready(t)
	for _, id := range []string{"a", "b", "c"} {
		c.send(start(id, "{}"))
	}
	if got := c.until("c"); !strings.Contains(got, "agent_runtime.daemon_busy") {
		t.Error(got)
	}
}
