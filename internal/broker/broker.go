package broker

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/store"
)

// Broker owns runs, processes and fences. Its methods may be called from any
// goroutine; those that take a principal check what it may do, and a record
// outside its scope is not_found.
type Broker struct {
	cfg     Config
	log     *slog.Logger
	targets map[string]*target
	order   []string // of the configuration
	readers readers

	// Set by Start.
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	past past // of who does retain

	mu      sync.RWMutex // guards the rest
	running bool
	owners  map[string]*owner
	revive  map[string]int // handles whose owner failed, and how often
	routes  map[string][]gateway.Route
	ending  map[string]*finishing
}

// New checks the configuration and makes a broker that does nothing before Start.
func New(cfg Config) (*Broker, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	cfg.Limits = cfg.Limits.withDefaults()
	b := &Broker{
		cfg: cfg, log: cfg.Logger, targets: map[string]*target{},
		owners: map[string]*owner{}, revive: map[string]int{}, routes: map[string][]gateway.Route{}, ending: map[string]*finishing{},
	}
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	for _, t := range cfg.Targets {
		if t.MaxBoxes <= 0 {
			t.MaxBoxes = 64
		}
		b.targets[t.Name] = newTarget(b, t)
		b.order = append(b.order, t.Name)
	}
	return b, nil
}

// Start takes over the ledger: it raises the server's generation, gives every
// process that may be running an owner, and begins to reach the targets. It does
// not wait for them. ctx bounds Start alone. A broker starts once.
func (b *Broker) Start(ctx context.Context) error {
	generation, err := b.cfg.Store.NextGeneration(ctx)
	if err != nil {
		return err
	}
	for _, name := range b.order {
		t := b.targets[name]
		rec, err := b.cfg.Store.PutTarget(ctx, store.Target{
			Name: name, Kind: t.cfg.Driver.Kind(), Generation: 1, Enabled: true, MaxBoxes: t.cfg.MaxBoxes,
		})
		if err != nil {
			return err
		}
		t.begin(rec, generation)
	}
	found, err := b.unfinished(ctx)
	if err != nil {
		return err
	}
	b.mu.Lock()
	if b.running || b.ctx != nil {
		b.mu.Unlock()
		return errdefs.New(errdefs.Internal, "the broker was started twice")
	}
	b.ctx, b.cancel = context.WithCancel(context.WithoutCancel(ctx))
	b.running = true
	for i := range found {
		b.launch(found[i].Handle, &found[i], nil)
	}
	b.mu.Unlock()
	for _, name := range b.order {
		t := b.targets[name]
		b.wg.Go(func() { t.keep(b.ctx) })
	}
	b.wg.Go(func() { b.every(b.cfg.Limits.Sweep, b.sweep) })
	b.wg.Go(func() { b.every(b.cfg.Limits.RetentionEvery, b.retain) })
	b.wg.Go(func() { b.every(trimEvery, b.trim) })
	b.wg.Go(func() { b.every(reviveEvery, b.reviveFailed) })
	b.log.Info("the broker has started", "generation", generation, "processes", len(found))
	return nil
}

// Stop ends the broker and waits for its goroutines until ctx ends. Processes go
// on. Calls after it are unavailable. It may be called twice.
func (b *Broker) Stop(ctx context.Context) error {
	b.mu.Lock()
	b.running = false
	if b.cancel != nil {
		b.cancel()
	}
	b.mu.Unlock()
	done := make(chan struct{})
	go func() {
		b.wg.Wait()
		for _, t := range b.targets {
			t.close()
		}
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "the broker did not stop in time")
	}
}

// unfinished returns the records of all processes that may be running, the
// fenced ones included.
func (b *Broker) unfinished(ctx context.Context) ([]store.Process, error) {
	all := everything()
	var found []store.Process
	for page := (store.Page{Limit: 1000}); ; {
		some, err := b.cfg.Store.Processes(ctx, all, store.ProcessFilter{Live: true, Page: page})
		if err != nil {
			return nil, err
		}
		found = append(found, some...)
		if len(some) < page.Limit {
			break
		}
		page.After = some[len(some)-1].Handle
	}
	for page := (store.Page{Limit: 1000}); ; {
		fences, err := b.cfg.Store.Fences(ctx, all, true, page)
		if err != nil {
			return nil, err
		}
		for _, f := range fences {
			p, err := b.cfg.Store.Process(ctx, all, f.Handle)
			if errdefs.Is(err, errdefs.NotFound) {
				continue // a fence about nothing that is kept: only an operator lifts it
			}
			if err != nil {
				return nil, err
			}
			if p.State == api.StateFenced {
				found = append(found, p)
			}
		}
		if len(fences) < page.Limit {
			return found, nil
		}
		page.After = fences[len(fences)-1].ID
	}
}

// launch gives a process its owner; b.mu is held.
func (b *Broker) launch(handle string, known *store.Process, first []process.Effect) *owner {
	if o := b.owners[handle]; o != nil {
		return o
	}
	o := &owner{b: b, handle: handle, wake: make(chan struct{}, 1), done: make(chan struct{}), changed: make(chan struct{})}
	b.owners[handle] = o
	b.wg.Go(func() { o.own(b.ctx, known, first) })
	return o
}

// adopt returns the owner of a process, making one from the ledger if there is
// none. The record must be one that may change: neither closed nor never started.
func (b *Broker) adopt(handle string) (*owner, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running {
		return nil, stopping()
	}
	return b.launch(handle, nil, nil), nil
}

// created gives a process its owner right after it was recorded.
func (b *Broker) created(p store.Process, first []process.Effect) (*owner, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running {
		return nil, stopping()
	}
	return b.launch(p.Handle, &p, first), nil
}

func stopping() error {
	return errdefs.New(errdefs.Unavailable, "the server is starting or stopping").WithNext("try again in a moment")
}

// owner returns a process's owner, or nil.
func (b *Broker) owner(handle string) *owner {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.owners[handle]
}

// ownersOf lists the owners for which ok holds.
func (b *Broker) ownersOf(ok func(*view) bool) []*owner {
	b.mu.RLock()
	defer b.mu.RUnlock()
	var some []*owner
	for _, o := range b.owners {
		if v := o.view.Load(); v != nil && v.err == nil && ok(v) {
			some = append(some, o)
		}
	}
	return some
}

// load reads a record from the ledger.
func (b *Broker) load(ctx context.Context, handle string) (store.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, saveTime)
	defer cancel()
	return b.cfg.Store.Process(ctx, everything(), handle)
}

// ownerEnded takes an owner out; one that failed is tried again later.
func (b *Broker) ownerEnded(o *owner, failed error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owners[o.handle] == o {
		delete(b.owners, o.handle)
	}
	if failed != nil && !errdefs.Is(failed, errdefs.NotFound) && b.running {
		b.revive[o.handle]++
	} else {
		delete(b.revive, o.handle)
	}
}

// reviveEvery is the pause before a failed owner is begun anew.
const reviveEvery = time.Second

func (b *Broker) reviveFailed(context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.running {
		return
	}
	for handle := range b.revive {
		b.launch(handle, nil, nil)
	}
}

// every calls f at once and then with pauses, until the broker stops.
func (b *Broker) every(d time.Duration, f func(context.Context)) {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		f(b.ctx)
		select {
		case <-t.C:
		case <-b.ctx.Done():
			return
		}
	}
}

func (b *Broker) logChange(old store.Process, v *view) {
	if old.State == v.rec.State {
		return
	}
	level := slog.LevelDebug
	if v.rec.State == api.StateFenced {
		level = slog.LevelWarn
	}
	b.log.Log(b.ctx, level, "process", "handle", old.Handle, "workspace", old.Workspace, "run", old.Run,
		"target", old.Target, "from", old.State, "to", v.rec.State)
}

// Host returns the client of a target's host program, for boxes, files and
// images: not_found for an unknown target, unavailable, saying why, while it does
// not answer.
func (b *Broker) Host(name string) (*host.Client, error) {
	t := b.targets[name]
	if t == nil {
		return nil, errdefs.New(errdefs.NotFound, "there is no target %q", name)
	}
	if t.client == nil {
		return nil, stopping()
	}
	select {
	case <-t.tried:
		if _, err := t.reach(); err != nil {
			return nil, err
		}
	default: // it is just being reached for the first time; a call may well go through
	}
	return t.client, nil
}

// Stats is what the metrics show.
type Stats struct {
	Owners       int // processes that may be running, and fenced ones
	Unclassified int // of those, not heard of since this server started
	Streams      int // calls that read a log now
}

// Stats counts.
func (b *Broker) Stats() Stats {
	s := Stats{Streams: b.readers.count()}
	b.mu.RLock()
	defer b.mu.RUnlock()
	s.Owners = len(b.owners)
	for _, o := range b.owners {
		if v := o.view.Load(); v == nil || !v.heard {
			s.Unclassified++
		}
	}
	return s
}
