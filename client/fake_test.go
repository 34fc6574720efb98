package client_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/httpapi"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestMain(m *testing.M) { need.Main(m) }

// world is a broker in memory: processes whose output and input are byte slices.
// The methods not written here are not called by these tests.
type world struct {
	httpapi.Broker

	mu      sync.Mutex
	changed chan struct{} // closed at the next change
	procs   map[string]*proc
	opens   int
	signals int
	window  int  // how much input one write may have; 0: all
	hungry  bool // refuse input as exhausted, every other time
	turn    int
}

type proc struct {
	info   api.Process
	out    []byte // both streams
	kinds  []wire.Kind
	oldest int64
	ended  bool
	exit   *api.Exit
	stdin  []byte
	eof    bool
	acked  int64
}

func newWorld() *world { return &world{procs: map[string]*proc{}, changed: make(chan struct{})} }

func (w *world) change(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
	close(w.changed)
	w.changed = make(chan struct{})
}

// print adds output.
func (w *world) print(p *proc, kind wire.Kind, text string) {
	w.change(func() {
		p.out = append(p.out, text...)
		for range len(text) {
			p.kinds = append(p.kinds, kind)
		}
	})
}

func (w *world) exit(p *proc, code int) {
	w.change(func() { p.ended, p.exit = true, &api.Exit{Kind: api.ExitExited, Code: &code} })
}

func (w *world) find(handle string) (*proc, error) {
	p := w.procs[handle]
	if p == nil {
		return nil, errdefs.New(errdefs.NotFound, "there is no process %q here", handle)
	}
	return p, nil
}

func (p *proc) cursor(n int64) string {
	return p.info.Handle[len(p.info.Handle)-6:] + "." + strconv.FormatInt(n, 10)
}

func (p *proc) view() api.Process {
	v := p.info
	v.Stdin = api.StdinState{Accepted: int64(len(p.stdin)), EOF: p.eof}
	v.Log = api.LogState{Oldest: p.oldest, Next: int64(len(p.out)), EOF: p.ended}
	v.Exit, v.Cursor = p.exit, p.cursor(int64(len(p.out)))
	v.State = api.StateRunning
	if p.exit != nil {
		v.State = api.StateClosed
	}
	return v
}

// tenants knows two credentials.
type tenants struct{ httpapi.Tenants }

func (tenants) Authenticate(_ context.Context, key string) (authz.Principal, error) {
	switch key {
	case "run":
		return authz.Principal{Kind: authz.Run, Workspace: "acme", Run: "run_x"}, nil
	case "workspace":
		return authz.Principal{Kind: authz.Workspace, Key: "key_w", Workspace: "acme"}, nil
	}
	return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the credential is not known")
}

func (w *world) Stats() broker.Stats { return broker.Stats{} }

func (w *world) CreateRun(_ context.Context, _ authz.Principal, r api.RunRequest) (api.RunCreated, error) {
	return api.RunCreated{Run: api.Run{ID: "run_x", Box: r.Box}, Token: "run"}, nil
}

// boxes has one box.
type boxes struct{ httpapi.Boxes }

func (boxes) Acquire(_ context.Context, _ authz.Principal, r api.BoxRequest) (api.Box, error) {
	return api.Box{ID: "box_x", Key: r.Key, State: api.BoxReady}, nil
}

func (w *world) Open(_ context.Context, _ authz.Principal, r api.OpenRequest) (api.Process, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.procs {
		if p.info.RequestID == r.RequestID {
			if strings.Join(p.info.Argv, "\x00") != strings.Join(r.Argv, "\x00") {
				return api.Process{}, errdefs.New(errdefs.Conflict, "%s is taken", r.RequestID)
			}
			return p.view(), nil
		}
	}
	w.opens++
	p := &proc{info: api.Process{Handle: fmt.Sprintf("proc_%026d", w.opens), RequestID: r.RequestID, Argv: r.Argv, Limits: r.Limits}}
	w.procs[p.info.Handle] = p
	if r.Argv[0] == "echo" {
		p.out = []byte(strings.Join(r.Argv[1:], " ") + "\n")
		for range p.out {
			p.kinds = append(p.kinds, wire.KindStdout)
		}
		code := 0
		p.ended, p.exit = true, &api.Exit{Kind: api.ExitExited, Code: &code}
	}
	return p.view(), nil
}

func (w *world) Get(_ context.Context, _ authz.Principal, handle string) (api.Process, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p, err := w.find(handle)
	if err != nil {
		return api.Process{}, err
	}
	return p.view(), nil
}

func (w *world) Signal(context.Context, authz.Principal, string, string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.signals++
	return nil
}

func (w *world) Resize(context.Context, authz.Principal, string, api.Winsize) error { return nil }

func (w *world) Close(_ context.Context, _ authz.Principal, handle string, _ api.CloseRequest) (api.CloseResponse, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p, err := w.find(handle)
	if err != nil {
		return api.CloseResponse{}, err
	}
	return api.CloseResponse{Quiescent: true, Receipt: &api.Receipt{Handle: handle}, Process: p.view()}, nil
}

func (w *world) Write(_ context.Context, _ authz.Principal, handle string, offset int64, data []byte, eof bool) (st api.StdinState, err error) {
	w.change(func() {
		var p *proc
		if p, err = w.find(handle); err != nil {
			return
		}
		have := int64(len(p.stdin))
		if w.turn++; w.hungry && w.turn%2 == 0 {
			err = errdefs.New(errdefs.Exhausted, "the child does not read").With("window_bytes", "0")
			return
		}
		if offset > have {
			err = errdefs.New(errdefs.Conflict, "the next offset is %d", have)
			return
		}
		fresh := data[min(int64(len(data)), have-offset):]
		whole := true
		if w.window > 0 && len(fresh) > w.window {
			fresh, whole = fresh[:w.window], false
		}
		if p.eof && len(fresh) > 0 {
			err = errdefs.New(errdefs.Conflict, "the input has ended")
			return
		}
		p.stdin = append(p.stdin, fresh...)
		p.eof = p.eof || eof && whole
		st = api.StdinState{Accepted: int64(len(p.stdin)), EOF: p.eof}
	})
	return st, err
}

func (w *world) Ack(_ context.Context, _ authz.Principal, handle, cursor string) error {
	var err error
	w.change(func() {
		var p *proc
		if p, err = w.find(handle); err != nil {
			return
		}
		_, digits, _ := strings.Cut(cursor, ".")
		n, _ := strconv.ParseInt(digits, 10, 64)
		p.acked = max(p.acked, n)
	})
	return err
}

func (w *world) Read(ctx context.Context, p authz.Principal, handle string, q httpapi.ReadQuery) (api.ReadResponse, error) {
	s, err := w.stream(ctx, p, handle, httpapi.StreamQuery{Cursor: q.Cursor})
	if err != nil {
		return api.ReadResponse{}, err
	}
	b, _ := s.Next()
	h, _ := wire.ParseHeader(b)
	var r api.ReadResponse
	if h.Kind == wire.KindStatus {
		_ = json.Unmarshal(b[wire.HeaderSize:], &r)
	}
	return r, nil
}

// stream is httpapi.Config.Stream.
func (w *world) stream(ctx context.Context, _ authz.Principal, handle string, q httpapi.StreamQuery) (httpapi.LogStream, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p, err := w.find(handle)
	if err != nil {
		return nil, err
	}
	s := &logStream{w: w, p: p, ctx: ctx, follow: q.Follow, at: p.oldest}
	if q.Cursor != "" {
		tail, digits, _ := strings.Cut(q.Cursor, ".")
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || tail != handle[len(handle)-6:] || n > int64(len(p.out)) {
			return nil, errdefs.New(errdefs.Invalid, "%q is not a cursor", q.Cursor)
		}
		s.at = n
	}
	return s, nil
}

type logStream struct {
	w      *world
	p      *proc
	ctx    context.Context
	follow bool
	at     int64
	done   bool
}

func pack(kind wire.Kind, cursor, offset int64, payload []byte) []byte {
	b := wire.AppendHeader(nil, wire.Header{Kind: kind, Length: len(payload), Cursor: cursor, Offset: offset, Sum: wire.Sum(payload)})
	return append(b, payload...)
}

func (s *logStream) Next() ([]byte, error) {
	for {
		s.w.mu.Lock()
		b, err := s.next()
		wait := s.w.changed
		s.w.mu.Unlock()
		if b != nil || err != nil {
			return b, err
		}
		select {
		case <-wait:
		case <-s.ctx.Done():
			return nil, s.ctx.Err()
		}
	}
}

func (s *logStream) next() ([]byte, error) {
	p, end := s.p, int64(len(s.p.out))
	switch {
	case s.done:
		return nil, io.EOF
	case s.at < p.oldest:
		b, _ := json.Marshal(wire.GapFrame{From: s.at, To: p.oldest})
		from := s.at
		s.at = p.oldest
		return pack(wire.KindGap, from, 0, b), nil
	case s.at < end:
		n := s.at
		for n < end && n-s.at < 1000 && p.kinds[n] == p.kinds[s.at] {
			n++
		}
		offset := int64(0)
		for _, k := range p.kinds[:s.at] {
			if k == p.kinds[s.at] {
				offset++
			}
		}
		b := pack(p.kinds[s.at], s.at, offset, p.out[s.at:n])
		s.at = n
		return b, nil
	case p.ended || !s.follow:
		s.done = true
		b, _ := json.Marshal(api.ReadResponse{Next: p.cursor(s.at), Oldest: p.cursor(p.oldest), EOF: p.ended, Exit: p.exit})
		return pack(wire.KindStatus, s.at, 0, b), nil
	}
	return nil, nil
}

func (s *logStream) Close() error { return nil }

// site serves a world at one address, and can go away and come back.
type site struct {
	t    testing.TB
	w    *world
	addr string
	srv  *httptest.Server
	h    *httpapi.Handler
}

func newSite(t testing.TB, w *world) *site {
	s := &site{t: t, w: w, addr: need.Loopback() + ":0"}
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *site) start() {
	h, err := httpapi.New(httpapi.Config{Broker: s.w, Boxes: boxes{}, Tenants: tenants{}, Stream: s.w.stream})
	if err != nil {
		s.t.Fatal(err)
	}
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.addr = l.Addr().String()
	s.h = h
	s.srv = &httptest.Server{Listener: l, Config: &http.Server{Handler: h}}
	s.srv.Start()
}

// stop is the death of the server: connections break wherever they are.
func (s *site) stop() {
	if s.srv == nil {
		return
	}
	s.srv.CloseClientConnections()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = s.h.Shutdown(ctx)
	s.srv.Close()
	s.srv = nil
}

func (s *site) client(t testing.TB, hc *http.Client) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{URL: "http://" + s.addr, Key: "run", HTTP: hc})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

// lossy breaks calls: answers are lost after the server gave them, bodies are cut
// off. Which ones is decided by a count, so that a failure repeats.
type lossy struct {
	base  *http.Transport
	every int // an answer in so many is lost
	cut   int // bodies are cut after so many bytes, growing

	mu sync.Mutex
	n  int
}

func newLossy(t testing.TB, every, cut int) *http.Client {
	l := &lossy{base: &http.Transport{}, every: every, cut: cut}
	t.Cleanup(l.base.CloseIdleConnections)
	return &http.Client{Transport: l}
}

func (l *lossy) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := l.base.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.n++
	n := l.n
	l.mu.Unlock()
	if l.every > 0 && n%l.every == 0 {
		resp.Body.Close()
		return nil, io.ErrUnexpectedEOF
	}
	if l.cut > 0 && strings.HasSuffix(r.URL.Path, "/log") {
		resp.Body = &cutBody{ReadCloser: resp.Body, left: l.cut * (1 + n%7)}
	}
	return resp, nil
}

type cutBody struct {
	io.ReadCloser
	left int
}

func (c *cutBody) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := c.ReadCloser.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}
