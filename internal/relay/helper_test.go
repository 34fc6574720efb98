package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relaywire"
)

func TestMain(m *testing.M) { need.Main(m) }

const token = "test-only-installation-token-8f69c142049db2bc"

// soon is how long a test waits for what must happen.
const soon = time.Minute

// newHub starts a hub on loopback; change may be nil.
func newHub(t testing.TB, change func(*HubConfig)) (*Hub, string) {
	t.Helper()
	cfg := HubConfig{Token: token, SpillDir: t.TempDir()}
	cfg.Limits.CancelTimeout = soon // a peer that answers must not be judged by the machine's speed
	if testing.Verbose() {
		cfg.Logger = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	}
	if change != nil {
		change(&cfg)
	}
	h, err := NewHub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, h) })
	url, err := h.Start(context.Background(), Endpoint{Token: cfg.Token})
	if err != nil {
		t.Fatal(err)
	}
	return h, url
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(string(bytes.TrimSpace(p)))
	return len(p), nil
}

func stop(t testing.TB, h *Hub) {
	t.Helper()
	if err := h.Stop(context.Background()); err != nil {
		t.Error(err)
	}
}

// clearFence clears the fence that stands for a daemon id, also where the evidence does not
// say it any more, or for a key.
func clearFence(h *Hub, id, operator, reason string) (Fence, error) {
	seen := Fence{DaemonID: id, Key: keyOf(id)}
	for _, f := range h.Fences() {
		if f.Key == id || f.Key == keyOf(id) {
			seen = f
		}
	}
	return h.ClearFence(context.Background(), seen, operator, reason)
}

// peer is a daemon under the test's control.
type peer struct {
	t    testing.TB
	ws   *websocket.Conn
	once sync.Once
}

// dial opens a WebSocket and says nothing.
func dial(t testing.TB, url string) *peer {
	t.Helper()
	tr := &http.Transport{DisableKeepAlives: true}
	ws, _, err := websocket.Dial(context.Background(), url, &websocket.DialOptions{HTTPClient: &http.Client{Transport: tr}})
	if err != nil {
		t.Fatal(err)
	}
	ws.SetReadLimit(-1)
	p := &peer{t: t, ws: ws}
	t.Cleanup(p.close)
	return p
}

func (p *peer) close() { p.once.Do(func() { p.ws.CloseNow() }) }

// connect is dial and a hello that must be accepted.
func connect(t testing.TB, url, id string) *peer {
	t.Helper()
	p := dial(t, url)
	p.send(relaywire.Frame{Type: relaywire.Hello, DaemonID: id, Protocol: relaywire.Protocol, Token: token})
	f := p.recv()
	if f.Type != relaywire.Ready || f.DaemonID != id || f.Protocol != relaywire.Protocol {
		t.Fatalf("got %+v instead of ready", f)
	}
	return p
}

func (p *peer) send(f relaywire.Frame) {
	p.t.Helper()
	p.raw(relaywire.Append(nil, &f))
}

func (p *peer) raw(b []byte) {
	p.t.Helper()
	if err := p.ws.Write(context.Background(), websocket.MessageText, b); err != nil {
		p.t.Fatalf("the hub does not take %.200q: %v", b, err)
	}
}

func (p *peer) next() (relaywire.Frame, error) {
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	_, data, err := p.ws.Read(ctx)
	if err != nil {
		return relaywire.Frame{}, err
	}
	return relaywire.Decode(data, 0)
}

func (p *peer) recv() relaywire.Frame {
	p.t.Helper()
	f, err := p.next()
	if err != nil {
		p.t.Fatal(err)
	}
	return f
}

// want receives frames until one of the type comes.
func (p *peer) want(typ relaywire.Type) relaywire.Frame {
	p.t.Helper()
	for {
		if f := p.recv(); f.Type == typ {
			return f
		}
	}
}

// closed waits for the end of the connection and returns its code and reason.
func (p *peer) closed() (int, string) {
	p.t.Helper()
	for {
		_, err := p.next()
		if err == nil {
			continue
		}
		if ce, ok := errors.AsType[websocket.CloseError](err); ok {
			return int(ce.Code), ce.Reason
		}
		if errors.Is(err, context.DeadlineExceeded) {
			p.t.Fatal("the hub did not close the connection")
		}
		return -1, ""
	}
}

// sync makes sure that the hub has handled everything sent before.
func (p *peer) sync() {
	p.t.Helper()
	p.send(relaywire.Frame{Type: relaywire.Ping})
	p.want(relaywire.Pong)
}

func (p *peer) event(job, event string) {
	p.t.Helper()
	p.send(relaywire.Frame{Type: relaywire.Event, JobID: job, Event: json.RawMessage(event)})
}

func (p *peer) finish(job string) {
	p.t.Helper()
	p.send(relaywire.Frame{Type: relaywire.Finished, JobID: job})
}

// run starts a job of a peer and checks what the peer got.
func run(t testing.TB, h *Hub, p *peer, req JobRequest) *Job {
	t.Helper()
	if req.Payload == nil {
		req.Payload = json.RawMessage(`{}`)
	}
	j, err := h.RunJob(context.Background(), req)
	if err != nil {
		t.Fatal(err)
	}
	if f := p.want(relaywire.Start); f.JobID != j.ID() || !bytes.Equal(f.Payload, req.Payload) {
		t.Fatalf("got %.200v instead of the start of %s", f, j.ID())
	}
	return j
}

// collect reads a job to its end, however long that takes as long as something comes.
func collect(t testing.TB, j *Job) ([]string, error) {
	t.Helper()
	var all []string
	for {
		ctx, cancel := context.WithTimeout(context.Background(), soon)
		e, err := j.Next(ctx)
		cancel()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if errors.Is(err, context.DeadlineExceeded) {
			t.Fatal("the job does not end")
		}
		if err != nil {
			return all, err
		}
		all = append(all, string(e))
	}
}

func wantCode(t testing.TB, err error, codes ...relaywire.Code) {
	t.Helper()
	if !slices.ContainsFunc(codes, func(c relaywire.Code) bool { return relaywire.Is(err, c) }) {
		t.Fatalf("got %v (%s), want one of %v", err, relaywire.CodeOf(err), codes)
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !ok(); {
		if time.Now().After(end) {
			t.Fatal("not in time: " + what)
		}
		time.Sleep(time.Millisecond)
	}
}

// toolFunc is Tools made of a function.
type toolFunc func(context.Context, json.RawMessage) (json.RawMessage, error)

func (f toolFunc) Call(ctx context.Context, p json.RawMessage) (json.RawMessage, error) {
	return f(ctx, p)
}
