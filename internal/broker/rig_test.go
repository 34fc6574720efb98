package broker

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/sqlite"
)

func TestMain(m *testing.M) {
	os.Exit(hosttest.Main(func() int { return need.Run(m) }))
}

// rig is a whole server without its edges: a real ledger, a broker, and one
// target. The ledger's file outlives restarts of the server.
type rig struct {
	t      testing.TB
	ctx    context.Context
	path   string
	host   *fakeHost
	gate   *fakeGateway
	signer *secret.Signer
	limits Limits
	ledger *shaky
	b      *Broker
	admin  authz.Principal
	key    authz.Principal
	run    authz.Principal
	box    string
	log    *slog.Logger // nil discards
}

// inBubble runs a test with virtual time.
func inBubble(t *testing.T, limits Limits, f func(r *rig)) {
	t.Helper()
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		h := newFakeHost(t)
		r := &rig{t: t, ctx: t.Context(), path: filepath.Join(dir, "ledger.db"), host: h, gate: newFakeGateway(), signer: secret.NewSigner(), limits: limits}
		r.boot()
		r.scene()
		r.up()
		f(r)
	})
}

// boot starts a server over the ledger.
func (r *rig) boot() {
	r.t.Helper()
	st, err := sqlite.Open(r.ctx, sqlite.Config{Path: r.path})
	r.ok(err)
	r.ledger = &shaky{Store: st}
	r.b, err = New(Config{Store: r.ledger, Signer: r.signer, Gateway: r.gate, Limits: r.limits, Logger: r.log,
		Targets: []TargetConfig{{Name: "local", Driver: r.host}}})
	r.ok(err)
	r.ok(r.b.Start(r.ctx))
	b, ledger := r.b, st
	r.t.Cleanup(func() { _, _ = b.Stop(context.Background()), ledger.Close() }) // a failed test ends its bubble too
}

// stop ends the server; what it did not save is lost, as if it had been killed.
func (r *rig) stop() {
	r.t.Helper()
	r.ok(r.b.Stop(context.Background()))
	r.ok(r.ledger.Store.Close())
}

func (r *rig) restart() { r.t.Helper(); r.stop(); r.gate.restart(); r.boot() }

// scene makes a tenant with a box and a run.
func (r *rig) scene() {
	r.t.Helper()
	r.admin = authz.Principal{Kind: authz.Admin, Key: secret.ID(ident.Key)}
	r.key = authz.Principal{Kind: authz.Workspace, Workspace: "w", Key: secret.ID(ident.Key)}
	r.ok(r.ledger.CreateWorkspace(r.ctx, store.Workspace{Name: "w", Created: now()}, r.b.audit(r.admin, "", "workspace.create", "w", nil)))
	r.box = r.newBox("w")
	r.run = r.newRun(r.key, r.box)
}

func (r *rig) newBox(workspace string) string {
	r.t.Helper()
	id := secret.ID(ident.Box)
	_, _, err := r.ledger.CreateBox(r.ctx, store.Box{ID: id, Workspace: workspace, Target: "local", State: api.BoxReady,
		Limits: api.BoxLimits{CPUMillis: 1000, MemoryBytes: 1 << 30, Pids: 100}, IdleMillis: 1000, Created: now(), Used: now()}, store.Capacity{})
	r.ok(err)
	if b, err := r.ledger.Box(r.ctx, everything(), id); err != nil || b.State != api.BoxReady {
		r.ok(r.ledger.SetBoxState(r.ctx, id, api.BoxReady))
	}
	return id
}

func (r *rig) newRun(key authz.Principal, box string, models ...string) authz.Principal {
	r.t.Helper()
	created, err := r.b.CreateRun(r.ctx, key, api.RunRequest{Box: box, Models: models})
	r.ok(err)
	return authz.Principal{Kind: authz.Run, Workspace: key.Workspace, Run: created.Run.ID}
}

// up waits until the host is known.
func (r *rig) up() {
	r.t.Helper()
	r.eventually("the host is up", func() bool { return r.b.targets["local"].here() != nil })
}

func (r *rig) ok(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) code(err error, want errdefs.Code) {
	r.t.Helper()
	if errdefs.CodeOf(err) != want {
		r.t.Fatalf("got %q (%v), want %q", errdefs.CodeOf(err), err, want)
	}
}

// eventually waits for a condition in virtual time.
func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	for range 600 {
		synctest.Wait()
		if ok() {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	r.t.Fatalf("not within a minute: %s", what)
}

func request(id string, argv ...string) api.OpenRequest {
	return api.OpenRequest{RequestID: id, Argv: argv, Stdin: true}
}

func (r *rig) open(id string) api.Process {
	r.t.Helper()
	p, err := r.b.Open(r.ctx, r.run, request(id, "sleep", "1"))
	r.ok(err)
	return p
}

func (r *rig) get(handle string) api.Process {
	r.t.Helper()
	p, err := r.b.Get(r.ctx, r.key, handle)
	r.ok(err)
	return p
}

func (r *rig) becomes(handle string, want api.ProcessState) api.Process {
	r.t.Helper()
	var p api.Process
	r.eventually(handle+" is "+string(want), func() bool {
		var err error
		p, err = r.b.Get(r.ctx, r.key, handle)
		return err == nil && p.State == want
	})
	return p
}

// shaky is a ledger that fails on cue.
type shaky struct {
	*sqlite.Store
	mu    sync.Mutex
	saves int
	// fail is asked before each save, with the number of the save.
	fail func(n int, p store.Process) error
	// after makes the save happen and its answer fail.
	after bool
}

func (s *shaky) SaveProcess(ctx context.Context, p store.Process, c store.Change) (int64, error) {
	s.mu.Lock()
	s.saves++
	var err error
	if s.fail != nil {
		err = s.fail(s.saves, p)
	}
	after := s.after
	s.mu.Unlock()
	if err != nil && !after {
		return 0, err
	}
	v, serr := s.Store.SaveProcess(ctx, p, c)
	if err != nil {
		return 0, err
	}
	return v, serr
}

func (s *shaky) set(f func(n int, p store.Process) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail = f
}

// fakeGateway remembers what it opened.
type fakeGateway struct {
	mu     sync.Mutex
	open   map[string]gateway.Grant
	opened int
	closed []string
	fail   error
	shift  int // added to every port
}

func newFakeGateway() *fakeGateway { return &fakeGateway{open: map[string]gateway.Grant{}} }

func (g *fakeGateway) restart() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.open)
}

func (g *fakeGateway) Check(names []string) error {
	for _, n := range names {
		if n != "openai" {
			return errdefs.New(errdefs.NotFound, "no provider %s", n)
		}
	}
	return nil
}

func (g *fakeGateway) Open(_ context.Context, grant gateway.Grant) ([]gateway.Route, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fail != nil {
		return nil, g.fail
	}
	g.opened++
	g.open[grant.Run] = grant
	var routes []gateway.Route
	for _, p := range grant.Providers {
		routes = append(routes, gateway.Route{Provider: p, Port: grant.Ports[p] + g.shift, BaseURL: "http://127.0.0.1/" + p,
			Env: map[string]string{"OPENAI_BASE_URL": "http://127.0.0.1/" + p, "OPENAI_API_KEY": "placeholder"}})
	}
	return routes, nil
}

func (g *fakeGateway) CloseRun(_ context.Context, run string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fail != nil {
		return g.fail
	}
	delete(g.open, run)
	g.closed = append(g.closed, run)
	return nil
}

func (g *fakeGateway) Env(routes []gateway.Route) map[string]string {
	env := map[string]string{}
	for _, r := range routes {
		for k, v := range r.Env {
			env[k] = v
		}
	}
	return env
}

func (g *fakeGateway) isOpen(run string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	_, ok := g.open[run]
	return ok
}
