package storetest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// world is a ledger and what fills it.
type world struct {
	testing.TB
	s    store.Store
	cfg  Config
	ctx  context.Context
	next *atomic.Int64 // for ids
}

// epoch is the time everything in a test is created at; finer than what is kept.
var epoch = time.Date(2026, 3, 4, 5, 6, 7, 123456789, time.FixedZone("east", 3600))

func newWorld(t testing.TB, cfg Config) *world {
	w := &world{TB: t, cfg: cfg, s: cfg.Open(t), ctx: t.Context(), next: new(atomic.Int64)}
	t.Cleanup(func() {
		if err := w.s.Close(); err != nil {
			t.Errorf("closing: %v", err)
		}
	})
	return w
}

var all = store.Scope{All: true}

func (w *world) id(kind string) string { return fmt.Sprintf("%s_%d", kind, w.next.Add(1)) }

func (w *world) event() store.AuditEvent {
	return store.AuditEvent{ID: w.id("aud"), At: epoch, Actor: "key_test", Action: "test"}
}

func (w *world) workspace(name string) string {
	w.Helper()
	w.ok(w.s.CreateWorkspace(w.ctx, store.Workspace{Name: name, Created: epoch}, w.event()))
	return name
}

func (w *world) target(name string) string {
	w.Helper()
	_, err := w.s.PutTarget(w.ctx, store.Target{Name: name, Kind: "box", Enabled: true, MaxBoxes: 10})
	w.ok(err)
	return name
}

func (w *world) newBox(workspace, target string) store.Box {
	return store.Box{ID: w.id("box"), Workspace: workspace, Target: target, State: api.BoxReady, IdleMillis: 1000, Created: epoch, Used: epoch,
		Limits: api.BoxLimits{CPUMillis: 1000, Pids: 7}, Mounts: []api.Mount{{Source: "/a", Dest: "/b", Writable: true}}}
}

func (w *world) box(workspace, target string) store.Box {
	w.Helper()
	b, created, err := w.s.CreateBox(w.ctx, w.newBox(workspace, target), store.Capacity{})
	w.ok(err)
	w.is(created, true)
	return b
}

func (w *world) newRun(b store.Box) store.Run {
	return store.Run{ID: w.id("run"), Workspace: b.Workspace, Box: b.ID, Target: b.Target, State: api.RunActive, TokenHash: [32]byte{1},
		Created: epoch, Expires: epoch.Add(time.Hour)}
}

func (w *world) run(b store.Box) store.Run {
	w.Helper()
	r := w.newRun(b)
	w.ok(w.s.CreateRun(w.ctx, r, store.Capacity{}))
	return r
}

func (w *world) newProcess(r store.Run) store.Process {
	return store.Process{Handle: w.id("proc"), RequestID: w.id("req"), Digest: [32]byte{9}, Workspace: r.Workspace, Run: r.ID, Target: r.Target,
		Box: r.Box, Generation: 1, State: api.StateRequested, Cleanup: api.CleanupPending, Spec: []byte(`{"id":"x"}`), Created: epoch}
}

func (w *world) process(r store.Run) store.Process {
	w.Helper()
	return w.open(w.newProcess(r))
}

func (w *world) open(p store.Process) store.Process {
	w.Helper()
	got, created, err := w.s.CreateProcess(w.ctx, p, store.Capacity{}, w.event())
	w.ok(err)
	w.is(created, true)
	return got
}

// save saves p and returns it with its new version.
func (w *world) save(p store.Process, c store.Change) store.Process {
	w.Helper()
	v, err := w.s.SaveProcess(w.ctx, p, c)
	w.ok(err)
	w.is(v, p.Version+1)
	p.Version = v
	return p
}

// end brings p to its proven end.
func (w *world) end(p store.Process, at time.Time) store.Process {
	w.Helper()
	p.State, p.Cleanup, p.Closed = api.StateClosed, api.CleanupQuiescent, &at
	return w.save(p, store.Change{})
}

func (w *world) newFence(p store.Process, box string) *store.Fence {
	return &store.Fence{ID: w.id("fence"), Workspace: p.Workspace, Target: p.Target, Box: box, Handle: p.Handle, Reason: "test",
		Evidence: map[string]string{"host": "h"}, Created: epoch}
}

func (w *world) newReceipt(p store.Process) *store.Receipt {
	id := w.id("rcpt")
	return &store.Receipt{ID: id, Handle: p.Handle, Created: epoch, Body: api.Receipt{ID: id, Handle: p.Handle, Method: "cgroup",
		EmptyAt: epoch.UTC(), Payload: []byte("p"), PublicKey: []byte("k"), Signature: []byte("s")}}
}

// scene is one tenant with one of everything.
type scene struct {
	workspace string
	box       store.Box
	run       store.Run
}

func (w *world) scene(workspace, target string) scene {
	w.Helper()
	b := w.box(w.workspace(workspace), target)
	return scene{workspace, b, w.run(b)}
}

func (w *world) ok(err error) {
	w.Helper()
	if err != nil {
		w.Fatalf("unexpected error: %v (cause: %v)", err, errors.Unwrap(err))
	}
}

// code requires an error of a code, and that it is an *errdefs.Error itself.
func (w *world) code(err error, want errdefs.Code) *errdefs.Error {
	w.Helper()
	e, ok := err.(*errdefs.Error)
	if !ok || e.Code != want {
		w.Fatalf("got %T %v, want the code %s", err, err, want)
	}
	if e.Message == "" {
		w.Fatalf("the %s error has no message", want)
	}
	return e
}

func (w *world) is(got, want any) {
	w.Helper()
	if !reflect.DeepEqual(got, want) {
		w.Fatalf("got  %+v\nwant %+v", got, want)
	}
}

// ids lists the ids of records.
func ids[T any](records []T, id func(T) string) []string {
	out := make([]string, 0, len(records))
	for _, r := range records {
		out = append(out, id(r))
	}
	return out
}
