package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/metrics"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/store"
)

// The test binary is also the host program of whole_test.go.
func TestMain(m *testing.M) {
	os.Exit(hosttest.Main(func() int { return need.Run(m) }))
}

const fakeHandle = "proc_aaaaaaaaaaaaaaaaaaaaaaaaaa"

// fakeBroker answers with the zero value of every operation and remembers what
// it was asked; err, if set, is every operation's error.
type fakeBroker struct {
	mu    sync.Mutex
	err   error
	calls []string
	stdin func(offset int64, data []byte, eof bool) (api.StdinState, error)
	read  func(q ReadQuery) (api.ReadResponse, error)
	open  func(ctx context.Context, r api.OpenRequest) (api.Process, error)
}

func (f *fakeBroker) note(ctx context.Context, call string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, call)
	return f.err
}

func (f *fakeBroker) noted() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string{}, f.calls...)
}

func (f *fakeBroker) Open(ctx context.Context, _ authz.Principal, r api.OpenRequest) (api.Process, error) {
	if f.open != nil {
		return f.open(ctx, r)
	}
	return api.Process{Handle: fakeHandle, RequestID: r.RequestID}, f.note(ctx, "open")
}
func (f *fakeBroker) Write(ctx context.Context, _ authz.Principal, _ string, offset int64, data []byte, eof bool) (api.StdinState, error) {
	err := f.note(ctx, "write")
	if f.stdin != nil {
		return f.stdin(offset, data, eof)
	}
	return api.StdinState{Accepted: offset + int64(len(data)), EOF: eof}, err
}
func (f *fakeBroker) Read(ctx context.Context, _ authz.Principal, _ string, q ReadQuery) (api.ReadResponse, error) {
	err := f.note(ctx, "read")
	if f.read != nil {
		return f.read(q)
	}
	return api.ReadResponse{}, err
}
func (f *fakeBroker) Stream(ctx context.Context, _ authz.Principal, _ string, _ StreamQuery) (*broker.LogStream, error) {
	return nil, errdefs.New(errdefs.Internal, "the fake streams through Config.Stream")
}
func (f *fakeBroker) Ack(ctx context.Context, _ authz.Principal, _, cursor string) error {
	return f.note(ctx, "ack "+cursor)
}
func (f *fakeBroker) Get(ctx context.Context, _ authz.Principal, handle string) (api.Process, error) {
	return api.Process{Handle: handle, Receipt: &api.Receipt{Handle: handle}}, f.note(ctx, "get "+handle)
}
func (f *fakeBroker) GetByRequest(ctx context.Context, _ authz.Principal, id string) (api.Process, error) {
	return api.Process{RequestID: id}, f.note(ctx, "get-by-request")
}
func (f *fakeBroker) List(ctx context.Context, _ authz.Principal, _ ListQuery) (api.List[api.Process], error) {
	return api.List[api.Process]{}, f.note(ctx, "list")
}
func (f *fakeBroker) Close(ctx context.Context, _ authz.Principal, _ string, _ api.CloseRequest) (api.CloseResponse, error) {
	return api.CloseResponse{}, f.note(ctx, "close")
}
func (f *fakeBroker) CloseByRequest(ctx context.Context, _ authz.Principal, _ api.CloseByRequest) (api.CloseResponse, error) {
	return api.CloseResponse{}, f.note(ctx, "close-by-request")
}
func (f *fakeBroker) Signal(ctx context.Context, _ authz.Principal, _, s string) error {
	return f.note(ctx, "signal "+s)
}
func (f *fakeBroker) Resize(ctx context.Context, _ authz.Principal, _ string, w api.Winsize) error {
	return f.note(ctx, "resize")
}
func (f *fakeBroker) CreateRun(ctx context.Context, _ authz.Principal, _ api.RunRequest) (api.RunCreated, error) {
	return api.RunCreated{}, f.note(ctx, "create-run")
}
func (f *fakeBroker) Run(ctx context.Context, _ authz.Principal, id string) (api.Run, error) {
	return api.Run{ID: id}, f.note(ctx, "run "+id)
}
func (f *fakeBroker) Runs(ctx context.Context, _ authz.Principal, _ store.Page) (api.List[api.Run], error) {
	return api.List[api.Run]{}, f.note(ctx, "runs")
}
func (f *fakeBroker) FinishRun(ctx context.Context, _ authz.Principal, _ string, _ api.FinishRequest) (api.FinishResponse, error) {
	return api.FinishResponse{}, f.note(ctx, "finish-run")
}
func (f *fakeBroker) Fences(ctx context.Context, _ authz.Principal, _ bool, _ store.Page) (api.List[api.Fence], error) {
	return api.List[api.Fence]{}, f.note(ctx, "fences")
}
func (f *fakeBroker) Fence(ctx context.Context, _ authz.Principal, _ string) (api.Fence, error) {
	return api.Fence{}, f.note(ctx, "fence")
}
func (f *fakeBroker) ClearFence(ctx context.Context, _ authz.Principal, _ string, _ api.ClearFenceRequest) (api.Fence, error) {
	return api.Fence{}, f.note(ctx, "clear-fence")
}
func (f *fakeBroker) Targets(ctx context.Context, _ authz.Principal) (api.List[api.Target], error) {
	return api.List[api.Target]{Items: []api.Target{{Name: "local", Up: true, Boxes: 3}}}, f.note(ctx, "targets")
}
func (f *fakeBroker) Target(ctx context.Context, _ authz.Principal, name string) (api.Target, error) {
	return api.Target{Name: name}, f.note(ctx, "target "+name)
}
func (f *fakeBroker) UpdateTarget(ctx context.Context, _ authz.Principal, name string, _ api.TargetUpdate) (api.Target, error) {
	return api.Target{Name: name}, f.note(ctx, "update-target")
}
func (f *fakeBroker) Audit(ctx context.Context, _ authz.Principal, _ string, _ store.Page) (api.List[api.AuditEvent], error) {
	return api.List[api.AuditEvent]{}, f.note(ctx, "audit")
}
func (f *fakeBroker) Stats() broker.Stats { return broker.Stats{Owners: 2} }

// fakeBoxes keeps what was uploaded.
type fakeBoxes struct {
	fb      *fakeBroker
	mu      sync.Mutex
	upload  []byte
	getData []byte
	getErr  error // after getData
}

func (f *fakeBoxes) Acquire(ctx context.Context, _ authz.Principal, r api.BoxRequest) (api.Box, error) {
	return api.Box{Key: r.Key}, f.fb.note(ctx, "acquire")
}
func (f *fakeBoxes) Get(ctx context.Context, _ authz.Principal, id string) (api.Box, error) {
	return api.Box{ID: id}, f.fb.note(ctx, "box "+id)
}
func (f *fakeBoxes) List(ctx context.Context, _ authz.Principal, _ store.Page) (api.List[api.Box], error) {
	return api.List[api.Box]{}, f.fb.note(ctx, "boxes")
}
func (f *fakeBoxes) Remove(ctx context.Context, _ authz.Principal, _ string) error {
	return f.fb.note(ctx, "remove-box")
}
func (f *fakeBoxes) PutFiles(ctx context.Context, _ authz.Principal, _, path string, tar io.Reader) error {
	if err := f.fb.note(ctx, "put-files "+path); err != nil {
		return err
	}
	b, err := io.ReadAll(tar)
	f.mu.Lock()
	f.upload = b
	f.mu.Unlock()
	return err
}
func (f *fakeBoxes) GetFiles(ctx context.Context, _ authz.Principal, _, path string, w io.Writer) error {
	if err := f.fb.note(ctx, "get-files "+path); err != nil {
		return err
	}
	if _, err := w.Write(f.getData); err != nil {
		return err
	}
	return f.getErr
}
func (f *fakeBoxes) LoadImage(ctx context.Context, _ authz.Principal, target, name string, tar io.Reader) ([]api.Image, error) {
	_, _ = io.Copy(io.Discard, tar)
	return nil, f.fb.note(ctx, "load-image "+target+" "+name)
}
func (f *fakeBoxes) Images(ctx context.Context, _ authz.Principal, _ string) (api.List[api.Image], error) {
	return api.List[api.Image]{}, f.fb.note(ctx, "images")
}
func (f *fakeBoxes) RemoveImage(ctx context.Context, _ authz.Principal, _, ref string) error {
	return f.fb.note(ctx, "remove-image "+ref)
}

// fakeTenants knows one credential per kind: its name.
type fakeTenants struct {
	fb      *fakeBroker
	revoked atomic.Bool // the workspace's key is no more
}

func (f *fakeTenants) Authenticate(_ context.Context, credential string) (authz.Principal, error) {
	if credential == "workspace" && f.revoked.Load() {
		return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the key was revoked")
	}
	switch credential {
	case "admin":
		return authz.Principal{Kind: authz.Admin, Key: "key_admin"}, nil
	case "workspace":
		return authz.Principal{Kind: authz.Workspace, Key: "key_ws", Workspace: "acme"}, nil
	case "run":
		return authz.Principal{Kind: authz.Run, Workspace: "acme", Run: "run_x"}, nil
	case "broken":
		return authz.Principal{}, errdefs.New(errdefs.Unavailable, "the ledger does not answer")
	}
	return authz.Principal{}, errdefs.New(errdefs.Unauthenticated, "the credential is not known")
}
func (f *fakeTenants) CreateWorkspace(ctx context.Context, _ authz.Principal, r api.WorkspaceRequest) (api.Workspace, error) {
	return api.Workspace{Name: r.Name}, f.fb.note(ctx, "create-workspace")
}
func (f *fakeTenants) Workspaces(ctx context.Context, _ authz.Principal, _ int, _ string) (api.List[api.Workspace], error) {
	return api.List[api.Workspace]{}, f.fb.note(ctx, "workspaces")
}
func (f *fakeTenants) CreateKey(ctx context.Context, _ authz.Principal, _ string, _ api.KeyRequest) (api.KeyCreated, error) {
	return api.KeyCreated{}, f.fb.note(ctx, "create-key")
}
func (f *fakeTenants) Keys(ctx context.Context, _ authz.Principal, _ string, _ int, _ string) (api.List[api.Key], error) {
	return api.List[api.Key]{}, f.fb.note(ctx, "keys")
}
func (f *fakeTenants) RevokeKey(ctx context.Context, _ authz.Principal, id string) (api.Key, error) {
	return api.Key{ID: id}, f.fb.note(ctx, "revoke-key")
}

// fakeStream gives batches, then an error; while it has none it waits for ctx.
type fakeStream struct {
	ctx     context.Context
	batches [][]byte
	err     error
	closed  chan struct{}
	once    sync.Once
}

func (s *fakeStream) Next() ([]byte, error) {
	if len(s.batches) > 0 {
		b := s.batches[0]
		s.batches = s.batches[1:]
		return b, nil
	}
	if s.err != nil {
		return nil, s.err
	}
	<-s.ctx.Done()
	return nil, errdefs.Wrap(s.ctx.Err(), errdefs.Unavailable, "given up")
}

func (s *fakeStream) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// rig is an API over fakes on a loopback listener.
type rig struct {
	t      *testing.T
	h      *Handler
	broker *fakeBroker
	boxes  *fakeBoxes
	relay  *fakeRelay
	keys   *fakeTenants
	logs   *syncBuffer
	server *httptest.Server

	mu      sync.Mutex
	stream  func(ctx context.Context, q StreamQuery) (LogStream, error)
	streams []*fakeStream
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, broker: &fakeBroker{}, logs: &syncBuffer{}}
	r.relay, r.keys = &fakeRelay{fb: r.broker}, &fakeTenants{fb: r.broker}
	r.boxes = &fakeBoxes{fb: r.broker, getData: []byte("tar")}
	var err error
	r.h, err = New(Config{Broker: r.broker, Boxes: r.boxes, Tenants: r.keys, Relay: r.relay, Metrics: metrics.New("test"),
		Version: "test", Logger: slog.New(slog.NewTextHandler(r.logs, nil)),
		Stream: func(ctx context.Context, _ authz.Principal, _ string, q StreamQuery) (LogStream, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.stream != nil {
				return r.stream(ctx, q)
			}
			return r.newStream(ctx, nil, io.EOF), r.broker.note(ctx, "stream")
		}})
	if err != nil {
		t.Fatal(err)
	}
	r.server = httptest.NewServer(r.h)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := r.h.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		r.server.Close()
		r.server.Client().CloseIdleConnections()
		for _, s := range r.streams {
			select {
			case <-s.closed:
			default:
				t.Error("a log stream was not closed")
			}
		}
	})
	return r
}

// newStream makes a stream whose closing is checked. The caller holds mu.
func (r *rig) newStream(ctx context.Context, batches [][]byte, err error) *fakeStream {
	s := &fakeStream{ctx: ctx, batches: batches, err: err, closed: make(chan struct{})}
	r.streams = append(r.streams, s)
	return s
}

// do sends a request whose header fields are "Name: value" strings, and reads
// the whole answer.
func (r *rig) do(method, path, key string, body io.Reader, head ...string) (*http.Response, []byte) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, r.server.URL+path, body)
	if err != nil {
		r.t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	for _, h := range head {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Add(name, value)
	}
	resp, err := r.server.Client().Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp, b
}

// problem checks that an answer is exactly a problem with the status and code.
func (r *rig) problem(resp *http.Response, body []byte, status int, code errdefs.Code) api.Problem {
	r.t.Helper()
	where := resp.Request.Method + " " + resp.Request.URL.String()
	if resp.StatusCode != status {
		r.t.Errorf("%s: status %d, want %d; %s", where, resp.StatusCode, status, body)
	}
	if ct := resp.Header.Get("Content-Type"); ct != api.ProblemType {
		r.t.Errorf("%s: content type %q, want %q", where, ct, api.ProblemType)
	}
	var p api.Problem
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		r.t.Errorf("%s: not a problem: %v; %s", where, err, body)
	}
	if p.Code != code || p.Status != resp.StatusCode || p.Detail == "" || p.Title == "" || p.Type != "urn:stockade:error:"+string(code) {
		r.t.Errorf("%s: problem %+v, want code %s and status %d", where, p, code, resp.StatusCode)
	}
	return p
}
