package runprocess

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// fake is a broker in memory. Each hook, if set, is asked first.
type fake struct {
	mu       sync.Mutex
	boxes    map[string]api.Box // by key
	runs     []api.RunRequest
	finished []string
	removed  []string
	reads    []Read
	running  int // calls with a run's token

	acquire, begin, finish func(ctx context.Context) error
	call                   func(ctx context.Context, what string) error
	unproven               bool
	log                    api.ReadResponse
}

func newFake() *fake { return &fake{boxes: map[string]api.Box{}} }

func (f *fake) AcquireBox(ctx context.Context, r api.BoxRequest) (api.Box, error) {
	if f.acquire != nil {
		if err := f.acquire(ctx); err != nil {
			return api.Box{}, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.boxes[r.Key]
	b.Reused = ok
	if !ok {
		b = api.Box{ID: "box-" + strconv.Itoa(len(f.boxes)+1), Key: r.Key, Target: "local"}
		f.boxes[r.Key] = b
	}
	return b, nil
}

func (f *fake) RemoveBox(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removed = append(f.removed, id)
	return nil
}

func (f *fake) BeginRun(ctx context.Context, r api.RunRequest) (api.Run, Processes, error) {
	if f.begin != nil {
		if err := f.begin(ctx); err != nil {
			return api.Run{}, nil, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runs = append(f.runs, r)
	return api.Run{ID: "run-" + strconv.Itoa(len(f.runs)), Box: r.Box}, &token{f}, nil
}

func (f *fake) FinishRun(ctx context.Context, id string, _ api.FinishRequest) (api.FinishResponse, error) {
	if f.finish != nil {
		if err := f.finish(ctx); err != nil {
			return api.FinishResponse{}, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running != 0 {
		return api.FinishResponse{}, errdefs.New(errdefs.Internal, "%d calls are under way", f.running)
	}
	f.finished = append(f.finished, id)
	return api.FinishResponse{Quiescent: !f.unproven}, nil
}

func (f *fake) counts() (begun, finished, removed int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.runs), len(f.finished), len(f.removed)
}

type token struct{ f *fake }

func (t *token) asked(ctx context.Context, what string) error {
	t.f.mu.Lock()
	t.f.running++
	hook := t.f.call
	t.f.mu.Unlock()
	defer func() { t.f.mu.Lock(); t.f.running--; t.f.mu.Unlock() }()
	if hook != nil {
		return hook(ctx, what)
	}
	return nil
}

func (t *token) Open(ctx context.Context, r api.OpenRequest) (api.Process, error) {
	return api.Process{Handle: "proc-" + r.RequestID, RequestID: r.RequestID, State: api.StateRunning}, t.asked(ctx, "open")
}

func (t *token) Write(ctx context.Context, _ string, offset int64, data []byte, eof bool) (api.StdinState, error) {
	return api.StdinState{Accepted: offset + int64(len(data)), EOF: eof}, t.asked(ctx, "write")
}

func (t *token) Read(ctx context.Context, _ string, r Read) (api.ReadResponse, error) {
	t.f.mu.Lock()
	t.f.reads = append(t.f.reads, r)
	out := t.f.log
	t.f.mu.Unlock()
	return out, t.asked(ctx, "read")
}

func (t *token) Get(ctx context.Context, n Name) (api.Process, error) {
	return api.Process{Handle: n.Handle, RequestID: n.RequestID}, t.asked(ctx, "get")
}

func (t *token) Close(ctx context.Context, n Name, _ api.CloseRequest) (api.CloseResponse, error) {
	return api.CloseResponse{Quiescent: true, Process: api.Process{Handle: n.Handle}}, t.asked(ctx, "close")
}

// binding is that of an installation.
func binding(installation string) pluginwire.Context {
	return pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1, InstallationUUID: installation, RuntimeRevision: 1,
		ArtifactDigest: strings.Repeat("a", 64)}
}

const plug = "stockade/runner"

// rig is a keeper that grants to plug.
func rig(t *testing.T, f *fake) *Keeper {
	t.Helper()
	k := New(Config{Broker: f, Plugins: []string{plug}})
	t.Cleanup(func() {
		if err := k.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return k
}

func runOf(installation, id string) Start {
	return Start{Plugin: plug, Binding: binding(installation), RunID: id, Conversation: []string{"talk"}}
}

type m = map[string]any

// ask asks as a worker of an installation does, over the connection "conn".
func ask(ctx context.Context, k *Keeper, installation, action string, payload m) (any, error) {
	raw, err := json.Marshal(payload)
	if err != nil {
		return nil, err
	}
	return k.Answer(ctx, "conn", plug, binding(installation), action, raw)
}

// refusal is what a worker reads of an error.
func refusal(t *testing.T, err error) (code errdefs.Code, retryable bool, text string) {
	t.Helper()
	peer, ok := errors.AsType[*rpc.PeerError](err)
	if !ok {
		t.Fatalf("no structured error: %v", err)
	}
	var got failure
	if json.Unmarshal(peer.Data, &got) != nil || got.Error.Details == nil || got.Error.Message == "" {
		t.Errorf("data: %s", peer.Data)
	}
	return got.Error.Code, got.Error.Retryable, peer.Message
}

var open = m{"run_id": "r", "request_id": "q", "argv": []string{"true"}}

func with(base m, more ...any) m {
	out := m{}
	for k, v := range base {
		out[k] = v
	}
	for i := 0; i < len(more); i += 2 {
		out[more[i].(string)] = more[i+1]
	}
	return out
}
