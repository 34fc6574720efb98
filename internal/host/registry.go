package host

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/boxhost"
	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// maxProcs bounds the processes one host keeps, ended ones that were not
// forgotten included.
const maxProcs = 16384

// adoptTime bounds how long a starting host waits for what its processes' shims
// say. 500 take about 100 ms.
const adoptTime = 3 * time.Second

// trash is the prefix of a process directory that is being deleted.
const trash = ".trash-"

// registry knows every process of the host.
type registry struct {
	dir     string // procs/
	exe     string
	boot    string
	runtime oci.Runtime
	rt      string // the runtime's --root
	lease   string
	cgroups string // where the hierarchies are mounted; "" is the default
	boxes   *boxhost.Manager
	hub     *hub
	log     *slog.Logger

	ctx context.Context // ends with the host; owners and polls live under it
	wg  sync.WaitGroup

	mu     sync.Mutex
	procs  map[string]*proc
	claims map[string]chan struct{} // ids being accepted; closed when decided
	live   map[string]int           // living processes per box, claims included
	closed bool
}

func (g *registry) find(id string) (*proc, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil
	}
	return nil, errdefs.New(errdefs.NotFound, "this host has no process %s", clipID(id))
}

func clipID(id string) string {
	if len(id) > 64 {
		id = id[:64] + "…"
	}
	return id
}

func (g *registry) ids() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	ids := make([]string, 0, len(g.procs))
	for id := range g.procs {
		ids = append(ids, id)
	}
	return ids
}

func (g *registry) all() []*proc {
	g.mu.Lock()
	defer g.mu.Unlock()
	ps := make([]*proc, 0, len(g.procs))
	for _, p := range g.procs {
		ps = append(ps, p)
	}
	return ps
}

// liveIn says how many processes live in a box.
func (g *registry) liveIn(box string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.live[box]
}

func (g *registry) left(box string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.live[box]--; g.live[box] <= 0 {
		delete(g.live, box)
	}
}

// close refuses new processes from now on. Without keep it refuses itself while
// a process lives.
func (g *registry) close(keep bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, k := range g.live {
		n += k
	}
	if n > 0 && !keep {
		return errdefs.New(errdefs.Conflict, "%d processes live on this host", n).
			WithNext("close them first, or stop the host program and keep them")
	}
	g.closed = true
	return nil
}

// start accepts a process, exactly once per id. For an id that was forbidden it
// returns the tombstone, whatever the spec.
func (g *registry) start(ctx context.Context, spec wire.ProcSpec) (*proc, error) {
	text, err := canonical(spec)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "the spec could not be encoded")
	}
	p, made, err := g.once(ctx, spec.ID, spec.Box, func(ctx context.Context) (*proc, error) {
		return g.accept(ctx, spec, text)
	})
	switch {
	case err != nil:
		return nil, err
	case made || p.tombstone:
		return p, nil
	}
	return p, sameSpec(p.text, text)
}

// forbid records that an id must never start, unless there is a process of that
// id already, which it returns.
func (g *registry) forbid(ctx context.Context, id, reason string) (*proc, error) {
	p, _, err := g.once(ctx, id, "", func(context.Context) (*proc, error) { return g.bury(id, reason) })
	return p, err
}

// once returns the process of an id, or makes it with create and gives it an owner.
// Concurrent calls for one id make it once; the second result says that this one did.
func (g *registry) once(ctx context.Context, id, box string, create func(context.Context) (*proc, error)) (*proc, bool, error) {
	for {
		p, wait, err := g.claim(id, box)
		if p != nil || err != nil {
			return p, false, err
		}
		if wait == nil {
			break
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, false, errdefs.Wrap(context.Cause(ctx), errdefs.Indeterminate, "the process %s is being accepted", id).WithNext("ask again")
		}
	}
	// From here on the outcome does not depend on the caller staying.
	p, err := create(context.WithoutCancel(ctx))
	g.mu.Lock()
	close(g.claims[id])
	delete(g.claims, id)
	if err == nil {
		g.procs[id] = p
		g.wg.Go(func() { p.own(g.ctx, !p.tombstone) })
	}
	g.mu.Unlock()
	if err != nil {
		g.left(box)
		return nil, false, err
	}
	g.hub.changed(id)
	return p, true, nil
}

// claim returns the process of this id, or a channel to wait for if it is just
// being accepted, or neither: then the caller has claimed the id.
func (g *registry) claim(id, box string) (*proc, <-chan struct{}, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil, nil
	}
	if c := g.claims[id]; c != nil {
		return nil, c, nil
	}
	if g.closed {
		return nil, nil, errdefs.New(errdefs.Unavailable, "the host program is about to stop").WithNext("try again when it is back")
	}
	if len(g.procs)+len(g.claims) >= maxProcs {
		return nil, nil, errdefs.New(errdefs.Exhausted, "this host keeps %d processes, the limit", maxProcs).
			WithNext("forget ended ones")
	}
	g.claims[id] = make(chan struct{})
	g.live[box]++
	return nil, nil, nil
}

// accept makes the process directory. Its last step writes spec.json: a
// directory without one was never accepted and nothing is ever started from it,
// so a refusal before that needs only to delete.
func (g *registry) accept(ctx context.Context, spec wire.ProcSpec, text []byte) (_ *proc, err error) {
	dir := filepath.Join(g.dir, spec.ID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, diskError(err, "make a process directory")
	}
	defer func() {
		if err != nil {
			if rerr := os.RemoveAll(dir); rerr != nil {
				g.log.Error("remove a refused process", "proc", spec.ID, "error", rerr)
			}
		}
	}()
	if err := g.prepare(ctx, spec, dir); err != nil {
		return nil, err
	}
	if err := durable.SyncDir(g.dir); err != nil {
		return nil, diskError(err, "make a process directory durable")
	}
	if err := writeSpec(dir, text); err != nil {
		// The rename may have happened although the directory could not be synced.
		os.Remove(filepath.Join(dir, specFile))
		return nil, err
	}
	p := g.newProc(spec, text, dir)
	p.st.Phase = wire.PhaseAccepted
	return p, nil
}

// bury makes the directory of a process that must never start: an exit record and
// no spec.
func (g *registry) bury(id, reason string) (*proc, error) {
	dir := filepath.Join(g.dir, id)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, diskError(err, "make a process directory")
	}
	p := g.newProc(wire.ProcSpec{ID: id}, nil, dir)
	p.tombstone = true
	now := time.Now().UTC()
	st := p.st
	st.Phase, st.Rev, st.Ended, st.Log.EOF = wire.PhaseEnded, 1, &now, true
	st.Exit = &api.Exit{Kind: api.ExitSpawnFailed, Detail: "it was closed before it was started; nothing ran"}
	st.Proof = &wire.Proof{Method: "never_started", BootID: g.boot, EmptyAt: now}
	err := shim.WriteExit(dir, st)
	if err == nil {
		if serr := durable.SyncDir(g.dir); serr != nil {
			err = diskError(serr, "make a process directory durable")
		}
	}
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	p.st = st
	g.log.Info("a process was forbidden to start", "proc", id, "reason", reason)
	return p, nil
}

// prepare writes what the shim needs. It may be repeated until the runtime was
// asked to start.
func (g *registry) prepare(ctx context.Context, spec wire.ProcSpec, dir string) error {
	bundle := filepath.Join(dir, bundleDir)
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return diskError(err, "make a bundle")
	}
	launch, err := g.boxes.Bundle(ctx, spec, bundle)
	if _, known := errors.AsType[*errdefs.Error](err); err != nil && !known {
		return diskError(err, "make a bundle") // what is left is the system's own word
	}
	if err != nil {
		return err
	}
	return writeKeep(dir, shim.Config{
		Spec: spec, Runtime: g.runtime.Path, Manner: g.runtime.Manner, RuntimeRoot: g.rt, Container: launch.Container,
		Bundle: bundle, Cgroup: launch.Cgroup, CgroupRoot: g.cgroups, LeaseFile: g.lease,
	})
}

func (g *registry) newProc(spec wire.ProcSpec, text []byte, dir string) *proc {
	return &proc{
		reg: g, id: spec.ID, box: spec.Box, dir: dir, spec: spec, text: text, client: shim.NewClient(dir),
		calls: make(chan struct{}, maxCalls), owned: make(chan struct{}), poke: make(chan struct{}, 1), changed: make(chan struct{}), counted: true,
		st: wire.ProcState{ID: spec.ID, Box: spec.Box, Phase: wire.PhaseStarting},
	}
}

// adopt finds the processes of an earlier host program. Each gets an owner,
// which looks at what is there and goes on from it.
func (g *registry) adopt() error {
	entries, err := os.ReadDir(g.dir)
	if err != nil {
		return diskError(err, "read the process directories")
	}
	for _, e := range entries {
		dir := filepath.Join(g.dir, e.Name())
		if strings.HasPrefix(e.Name(), trash) {
			if err := os.RemoveAll(dir); err != nil {
				g.log.Error("remove a forgotten process", "dir", dir, "error", err)
			}
			continue
		}
		if !e.IsDir() || !ident.Valid(ident.Process, e.Name()) {
			g.log.Warn("something else among the process directories", "name", e.Name())
			continue
		}
		spec, text, err := readSpec(dir)
		if notExist(err) && !anyTrace(dir) {
			// The host died while it accepted this one; nothing was answered or started.
			if err := os.RemoveAll(dir); err != nil {
				return diskError(err, "remove a process that was not accepted")
			}
			continue
		}
		buried := notExist(err)
		if err != nil {
			spec, text = wire.ProcSpec{ID: e.Name()}, nil
		}
		if err != nil && !buried {
			g.log.Error("a process's spec cannot be read", "proc", e.Name(), "error", err)
			if keep, kerr := readKeep(dir); kerr == nil && keep.Spec.ID == e.Name() {
				spec = keep.Spec // the shim's copy: enough to stop it, not to start it
			}
		}
		p := g.newProc(spec, text, dir)
		p.tombstone = buried
		g.procs[p.id] = p
		g.live[p.box]++
	}
	return nil
}

// goOn gives every adopted process its owner, and waits a bounded time until
// each has found where its process stands, so that the first answer of a new host
// program is not behind the last one of the old.
func (g *registry) goOn(ctx context.Context) {
	ps := g.all()
	for _, p := range ps {
		g.wg.Go(func() { p.own(g.ctx, false) })
	}
	ctx, cancel := context.WithTimeout(ctx, adoptTime)
	defer cancel()
	for _, p := range ps {
		if p.await(ctx, func() bool { return p.known }) != nil {
			g.log.Warn("some processes are still being looked at", "first", p.id)
			return
		}
	}
}

// anyTrace reports whether a shim ever worked in a directory.
func anyTrace(dir string) bool {
	for _, name := range []string{shimFile, exitFile} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !notExist(err) {
			return true
		}
	}
	tried, err := shim.Tried(dir)
	return tried || err != nil
}

// forget removes an ended process. release must have returned nil for it.
func (g *registry) forget(id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.procs[id]
	if p == nil {
		return nil
	}
	if st := p.state(); st.Phase != wire.PhaseEnded || st.Proof == nil {
		return errdefs.New(errdefs.Conflict, "the process lives")
	}
	gone := filepath.Join(g.dir, trash+id)
	if err := os.Rename(p.dir, gone); err != nil {
		return diskError(err, "remove a process")
	}
	delete(g.procs, id)
	g.wg.Go(func() {
		p.client.CloseIdle()
		if err := os.RemoveAll(gone); err != nil {
			g.log.Error("remove a forgotten process", "proc", id, "error", err)
		}
	})
	return nil
}

// release returns nil when nothing needs a process's directory any more: it has
// ended with proof, and its owner has seen the shim off.
func (p *proc) release(ctx context.Context) error {
	st := p.state()
	switch {
	case st.Phase != wire.PhaseEnded:
		return errdefs.New(errdefs.Conflict, "the process lives").WithNext("close it first")
	case st.Proof == nil:
		return errdefs.New(errdefs.Conflict, "the process ended without proof that its tree is gone: %s", st.Unproven).
			WithNext("close it again, or reboot the machine; then it can be forgotten")
	}
	select {
	case <-p.owned:
		return nil
	case <-ctx.Done():
		return errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the process %s is still being put away", p.id).WithNext("try again")
	}
}
