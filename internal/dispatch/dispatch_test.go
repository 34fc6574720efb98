package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/relaywire"
	"github.com/stockade-run/stockade/internal/store"
)

func TestMain(m *testing.M) { need.Main(m) }

var (
	admin = authz.Principal{Kind: authz.Admin, Key: "key_admin"}
	owner = authz.Principal{Kind: authz.Workspace, Key: "key_w", Workspace: "acme"}
	other = authz.Principal{Kind: authz.Workspace, Key: "key_o", Workspace: "other"}
	run   = authz.Principal{Kind: authz.Run, Workspace: "acme", Run: "run_x"}
)

// ledger keeps acts in memory, or fails.
type ledger struct {
	mu   sync.Mutex
	acts []store.AuditEvent
	err  error
}

func (l *ledger) AppendAudit(_ context.Context, a store.AuditEvent) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.acts = append(l.acts, a)
	}
	return l.err
}

type rig struct {
	t      *testing.T
	hub    *relay.Hub
	s      *Service
	ledger *ledger
	url    string
}

// newRig makes a hub that waits patience for an acknowledgement: long where a daemon
// gives one, short where none comes.
func newRig(t *testing.T, dir string, patience time.Duration) *rig {
	t.Helper()
	hub, err := relay.NewHub(relay.HubConfig{Token: "t", StateDir: dir, Limits: relaywire.Limits{CancelTimeout: patience}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(hub)
	r := &rig{t: t, hub: hub, ledger: &ledger{}, url: "ws" + strings.TrimPrefix(server.URL, "http")}
	r.s = New(Config{Hub: hub, Workspace: "acme", MaxPayload: 16 << 20, Ledger: r.ledger})
	t.Cleanup(func() {
		if err := hub.Stop(context.Background()); err != nil {
			t.Error(err)
		}
		r.s.Close()
		server.Close()
	})
	return r
}

// daemon connects and hands each frame to do, which may answer.
func (r *rig) daemon(id string, do func(f relaywire.Frame, say func(relaywire.Frame))) {
	r.t.Helper()
	ws, _, err := websocket.Dial(r.t.Context(), r.url, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	say := func(f relaywire.Frame) {
		_ = ws.Write(context.Background(), websocket.MessageText, relaywire.Append(nil, &f)) // a lost connection is the reader's to see
	}
	say(relaywire.Frame{Type: relaywire.Hello, DaemonID: id, Protocol: relaywire.Protocol, Token: "t"})
	if _, b, err := ws.Read(r.t.Context()); err != nil || !strings.Contains(string(b), "ready") {
		r.t.Fatalf("%s %v", b, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			_, b, err := ws.Read(context.Background())
			if err != nil {
				return
			}
			if f, err := relaywire.Decode(b, 0); err == nil {
				do(f, say)
			}
		}
	}()
	r.t.Cleanup(func() { ws.CloseNow(); <-done })
}

// polite says one event and finishes when it is cancelled.
func polite(f relaywire.Frame, say func(relaywire.Frame)) {
	switch f.Type {
	case relaywire.Start:
		say(relaywire.Frame{Type: relaywire.Event, JobID: f.JobID, Event: json.RawMessage(`{"n":1}`)})
	case relaywire.Cancel:
		say(relaywire.Frame{Type: relaywire.Finished, JobID: f.JobID})
	}
}

// rude never answers a cancel.
func rude(f relaywire.Frame, say func(relaywire.Frame)) {
	if f.Type == relaywire.Start {
		polite(f, say)
	}
}

func req(daemon string) api.RelayJobRequest {
	return api.RelayJobRequest{DaemonID: daemon, Payload: json.RawMessage(`{"prompt":"hi"}`), WaitMillis: 5000}
}

// TestOnlyTheRelaysWorkspaceSeesIt walks every operation with every credential:
// for another workspace it is as if there were no relay.
func TestOnlyTheRelaysWorkspaceSeesIt(t *testing.T) {
	t.Parallel()
	r := newRig(t, "", time.Minute)
	ctx := t.Context()
	ops := map[authz.Action]func(authz.Principal) error{
		authz.RelayJobRun: func(p authz.Principal) error {
			_, err := r.s.Run(ctx, p, api.RelayJobRequest{DaemonID: "x"})
			return err
		},
		authz.RelayJobRead:    func(p authz.Principal) error { _, err := r.s.Jobs(ctx, p); return err },
		authz.RelayJobCancel:  func(p authz.Principal) error { _, err := r.s.Cancel(ctx, p, "x"); return err },
		authz.RelayDaemonRead: func(p authz.Principal) error { _, err := r.s.Daemons(ctx, p); return err },
		authz.RelayFenceRead: func(p authz.Principal) error {
			_, err1 := r.s.Fences(ctx, p)
			_, err2 := r.s.Fence(ctx, p, "x")
			return errors.Join(err1, err2)
		},
		authz.RelayFenceClear: func(p authz.Principal) error {
			_, err := r.s.ClearFence(ctx, p, "x", api.ClearRelayFenceRequest{Reason: "looked at it"})
			return err
		},
	}
	for action, do := range ops {
		for _, p := range []authz.Principal{admin, owner, other, run, {}} {
			err := do(p)
			switch {
			case p.Kind == "":
				if !errdefs.Is(err, errdefs.Unauthenticated) {
					t.Errorf("%s by nobody: %v", action, err)
				}
			case !authz.Allowed(p.Kind, action):
				if !errdefs.Is(err, errdefs.Denied) {
					t.Errorf("%s by %s: %v", action, p, err)
				}
			case p == other:
				if err == nil || err.Error() != ErrNone().Error() || !errdefs.Is(err, errdefs.NotFound) {
					t.Errorf("%s by another workspace: %v", action, err)
				}
			case errdefs.Is(err, errdefs.Denied), errdefs.Is(err, errdefs.Unauthenticated):
				t.Errorf("%s by %s: %v", action, p, err)
			}
		}
	}
	if len(r.ledger.acts) > 0 {
		t.Errorf("what was refused was recorded: %v", r.ledger.acts)
	}
}

func TestAJobRunsAndIsCancelledByItsID(t *testing.T) {
	t.Parallel()
	r := newRig(t, "", time.Minute)
	r.daemon("laptop", polite)
	job, err := r.s.Run(t.Context(), owner, req("laptop"))
	if err != nil {
		t.Fatal(err)
	}
	if job.Info().DaemonID != "laptop" || len(job.Info().ID) != 22 {
		t.Errorf("%+v", job.Info())
	}
	if events, err := job.NextBatch(t.Context()); err != nil || len(events) != 1 || string(events[0]) != `{"n":1}` {
		t.Errorf("%s %v", events, err)
	}
	if l, err := r.s.Jobs(t.Context(), admin); err != nil || len(l.Items) != 1 || l.Items[0].State != "running" || l.Items[0].Events != 1 {
		t.Errorf("%+v %v", l, err)
	}
	if l, err := r.s.Daemons(t.Context(), owner); err != nil || len(l.Items) != 1 || len(l.Items[0].Jobs) != 1 {
		t.Errorf("%+v %v", l, err)
	}
	// A wait that ends is no end of the job.
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := job.NextBatch(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	o, err := r.s.Cancel(t.Context(), admin, job.Info().ID)
	if err != nil || !o.Acknowledged || o.Code != "relay.daemon_cancelled" || !strings.Contains(o.Cause, "key_admin") {
		t.Errorf("%+v %v", o, err)
	}
	if _, err := job.NextBatch(t.Context()); err != io.EOF {
		t.Errorf("%v", err)
	}
	again, err := job.Leave(t.Context(), "over")
	if err != nil || again.Cause != o.Cause {
		t.Errorf("%+v %v", again, err)
	}
	if _, err := r.s.Cancel(t.Context(), owner, job.Info().ID); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("%v", err)
	}
}

// TestWhoIsGoneStartsNothing: a request that was given up while it waited for the
// daemon never becomes a job.
func TestWhoIsGoneStartsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, "", time.Minute)
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { _, err := r.s.Run(ctx, owner, req("late")); result <- err }()
	cancel()
	if err := <-result; err == nil {
		t.Error("a job began")
	}
	if l, _ := r.s.Jobs(t.Context(), owner); len(l.Items) != 0 {
		t.Errorf("%+v", l)
	}
}

func TestBadRequests(t *testing.T) {
	t.Parallel()
	r := newRig(t, "", time.Minute)
	r.daemon("laptop", polite)
	for name, change := range map[string]func(*api.RelayJobRequest){
		"a tool set":        func(q *api.RelayJobRequest) { q.Tools = []string{"files"} },
		"negative time-out": func(q *api.RelayJobRequest) { q.TimeoutMillis = -1 },
		"tiny time-out":     func(q *api.RelayJobRequest) { q.TimeoutMillis = 9 },
		"huge time-out":     func(q *api.RelayJobRequest) { q.TimeoutMillis = 1 << 50 },
		"negative wait":     func(q *api.RelayJobRequest) { q.WaitMillis = -1 },
		"huge wait":         func(q *api.RelayJobRequest) { q.WaitMillis = 1 << 50 },
		"empty daemon":      func(q *api.RelayJobRequest) { q.DaemonID = " " },
		"long daemon":       func(q *api.RelayJobRequest) { q.DaemonID = strings.Repeat("é", 129) },
		"payload a list":    func(q *api.RelayJobRequest) { q.Payload = json.RawMessage(`[1]`) },
		"payload too deep": func(q *api.RelayJobRequest) {
			q.Payload = json.RawMessage(`{"a":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + `}`)
		},
	} {
		q := req("laptop")
		change(&q)
		if _, err := r.s.Run(t.Context(), owner, q); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	q := req("laptop")
	q.Payload = json.RawMessage(`{"a":"` + strings.Repeat("x", 16<<20) + `"}`)
	if _, err := r.s.Run(t.Context(), owner, q); !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "16777216") {
		t.Errorf("%v", err)
	}
	if l, _ := r.s.Fences(t.Context(), admin); len(l.Items) != 0 {
		t.Errorf("a refusal fenced: %+v", l)
	}
}

// TestAFenceIsClearedByAnAuditedAct: only with a reason, only by the operator, and
// not at all if the act cannot be recorded.
func TestAFenceIsClearedByAnAuditedAct(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newRig(t, dir, 100*time.Millisecond)
	r.daemon("rude", rude)
	job, err := r.s.Run(t.Context(), owner, req("rude"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := job.NextBatch(t.Context()); err != nil {
		t.Fatal(err)
	}
	o, err := job.Leave(t.Context(), "enough")
	if err != nil || o.Acknowledged || o.Fence == nil || o.Fence.DaemonID != "rude" || o.Fence.Jobs[0] != job.Info().ID {
		t.Fatalf("%+v %v", o, err)
	}
	if _, err := r.s.Run(t.Context(), owner, req("rude")); !errdefs.Is(err, errdefs.Fenced) {
		t.Errorf("%v", err)
	}
	for _, reason := range []string{"", "short", "         ", strings.Repeat("x", 1025)} {
		if _, err := r.s.ClearFence(t.Context(), admin, "rude", api.ClearRelayFenceRequest{Reason: reason}); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v", reason, err)
		}
	}
	clear := api.ClearRelayFenceRequest{Fence: o.Fence.ID, Reason: "the machine was restarted"}
	r.ledger.err = errdefs.New(errdefs.Unavailable, "the disk is full")
	if _, err := r.s.ClearFence(t.Context(), admin, "rude", clear); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("%v", err)
	}
	other := clear
	other.Fence = "0123456789abcdef"
	if _, err := r.s.ClearFence(t.Context(), admin, "rude", other); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a fence that nobody looked at: %v", err)
	}
	if f, err := r.s.Fence(t.Context(), admin, o.Fence.Key); err != nil || f.DaemonID != "rude" {
		t.Errorf("the fence is gone without a record: %+v %v", f, err)
	}
	r.ledger.err = nil
	// However many say so at once: one states it, and lifts what was stated.
	var lifted atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			f, err := r.s.ClearFence(t.Context(), admin, o.Fence.Key, clear)
			switch {
			case err == nil && f.Key == o.Fence.Key:
				lifted.Add(1)
			case !errdefs.Is(err, errdefs.NotFound):
				t.Errorf("%+v %v", f, err)
			}
		})
	}
	wg.Wait()
	if n := lifted.Load(); n != 1 {
		t.Fatalf("lifted %d times", n)
	}
	a := r.ledger.acts
	if len(a) != 1 || a[0].Actor != "key_admin" || a[0].Action != "relay.fence.clear" || a[0].Detail["daemon"] != "rude" || a[0].Detail["reason"] != clear.Reason {
		t.Errorf("%+v", a)
	}
	if _, err := r.s.ClearFence(t.Context(), admin, "rude", clear); !errdefs.Is(err, errdefs.NotFound) || len(r.ledger.acts) != 1 {
		t.Errorf("%v, %d acts", err, len(r.ledger.acts))
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.pending")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "audit.jsonl")); err != nil || strings.Count(string(b), "key_admin") != 1 {
		t.Errorf("the hub's own record does not name the operator once: %s %v", b, err)
	}
}

func TestAJobWithoutAGrantFindsNoTools(t *testing.T) {
	t.Parallel()
	r := newRig(t, "", time.Minute)
	answers := make(chan string, 1)
	r.daemon("laptop", func(f relaywire.Frame, say func(relaywire.Frame)) {
		switch f.Type {
		case relaywire.Start:
			say(relaywire.Frame{Type: relaywire.MCPRequest, JobID: f.JobID, RequestID: "1", Payload: json.RawMessage(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`)})
		case relaywire.MCPResponse:
			answers <- string(f.Payload)
			say(relaywire.Frame{Type: relaywire.Finished, JobID: f.JobID})
		}
	})
	job, err := r.s.Run(t.Context(), owner, req("laptop"))
	if err != nil {
		t.Fatal(err)
	}
	if got := <-answers; got != `{"id":1,"jsonrpc":"2.0","result":{"tools":[]}}` {
		t.Errorf("%s", got)
	}
	if o, err := job.Leave(t.Context(), "over"); err != nil || !o.Acknowledged {
		t.Errorf("%+v %v", o, err)
	}
}
