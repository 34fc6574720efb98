package broker

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// Times of a target's connection.
const (
	ensureTime = time.Minute     // starting the host program and hearing who it is
	listTime   = time.Minute     // the list of all processes
	strayTime  = 2 * time.Minute // ending one stray
	firstRetry = 50 * time.Millisecond
	lastRetry  = 5 * time.Second
	strayLanes = 8 // strays ended at the same time
)

// target is one place where processes may run. Its goroutine (keep) owns the
// connection; everybody may read the link and the record.
type target struct {
	b       *Broker
	cfg     TargetConfig
	client  *host.Client // set before the first goroutine starts
	link    atomic.Pointer[link]
	rec     atomic.Pointer[store.Target]
	problem atomic.Pointer[string] // why there is no link
	tried   chan struct{}          // closed when the first attempt to reach it has ended, well or not
	tell    sync.Once              // closes tried
}

// link is a host program that answers.
type link struct {
	client *host.Client
	info   wire.HostInfo
}

func newTarget(b *Broker, cfg TargetConfig) *target {
	t := &target{b: b, cfg: cfg, tried: make(chan struct{})}
	t.fail("it was not reached yet")
	return t
}

// targetOf returns a target by name. One that is not configured any more is
// never reached.
func (b *Broker) targetOf(name string) *target {
	if t := b.targets[name]; t != nil {
		return t
	}
	t := newTarget(b, TargetConfig{Name: name})
	t.fail("it is not configured any more")
	t.rec.Store(&store.Target{Name: name})
	return t
}

// Tried waits until every target has been reached or has failed to be reached
// once, so that a server which says it is ready can say what its targets are.
func (b *Broker) Tried(ctx context.Context) error {
	for _, t := range b.targets {
		select {
		case <-t.tried:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (t *target) begin(rec store.Target, generation int64) {
	t.rec.Store(&rec)
	t.client = host.NewClient(t.cfg.Driver.Dial, generation)
}

func (t *target) close() {
	if t.client != nil {
		t.client.CloseIdle()
	}
}

// here returns the link, or nil while the host program does not answer.
func (t *target) here() *link { return t.link.Load() }

// reach is here for callers who need it.
func (t *target) reach() (*link, error) {
	if l := t.here(); l != nil {
		return l, nil
	}
	return nil, errdefs.New(errdefs.Unavailable, "the host program of target %q does not answer: %s", t.cfg.Name, *t.problem.Load()).
		WithNext("try again; what runs there goes on meanwhile").With("target", t.cfg.Name)
}

func (t *target) generation() int64 { return t.rec.Load().Generation }

func (t *target) fail(why string) { t.problem.Store(&why) }

// keep holds the connection until ctx ends.
func (t *target) keep(ctx context.Context) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = firstRetry, lastRetry
	wait.Reset()
	for ctx.Err() == nil {
		err := t.session(ctx)
		t.tell.Do(func() { close(t.tried) })
		was := t.link.Swap(nil) != nil
		if was {
			wait.Reset()
		}
		t.client.CloseIdle()
		if ctx.Err() != nil {
			return
		}
		why, level := cut(err.Error()), slog.LevelWarn
		if !was && why == *t.problem.Load() { // said already
			level = slog.LevelDebug
		}
		t.fail(why)
		t.b.log.Log(ctx, level, "the host program of a target does not answer", "target", t.cfg.Name, "error", err)
		pause := time.NewTimer(wait.NextBackOff())
		select {
		case <-pause.C:
		case <-ctx.Done():
		}
		pause.Stop()
	}
}

// session reaches the host, compares, and watches until the connection breaks.
func (t *target) session(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	info, err := t.meet(ctx)
	if err != nil {
		return err
	}
	list, cancelList := context.WithTimeout(ctx, listTime)
	states, err := t.client.Procs(list)
	cancelList()
	if err != nil {
		return err
	}
	l := &link{client: t.client, info: info}
	t.link.Store(l)
	t.tell.Do(func() { close(t.tried) })
	t.b.log.Info("the host program of a target answers", "target", t.cfg.Name, "host", info.HostID, "processes", len(states))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() { t.renew(ctx, cancel) })
	t.compare(ctx, &wg, l, states)
	wg.Go(func() { t.b.reopenRoutes(ctx, t, l) })
	err = t.client.Watch(ctx, func(st wire.ProcState) { t.told(l, st) })
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// meet makes the host program reachable and checks who it is.
func (t *target) meet(ctx context.Context) (wire.HostInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, ensureTime)
	defer cancel()
	if err := t.cfg.Driver.Ensure(ctx); err != nil {
		return wire.HostInfo{}, err
	}
	info, err := t.client.Info(ctx)
	if err != nil {
		return info, err
	}
	if info.Protocol != wire.Protocol {
		return info, errdefs.New(errdefs.Unavailable, "the host program of target %q speaks version %d of the host API, this server speaks %d", t.cfg.Name, info.Protocol, wire.Protocol).
			WithNext("install the stockade-host that came with this server")
	}
	if !ident.Valid(ident.Host, info.HostID) || info.BootID == "" || len(info.BootID) > ident.MaxName {
		return info, errdefs.New(errdefs.Unavailable, "the host program of target %q does not say who it is", t.cfg.Name)
	}
	if err := t.client.SetLease(ctx, t.b.cfg.Limits.Lease); err != nil {
		return info, err
	}
	if rec := t.rec.Load(); rec.HostID != info.HostID || rec.BootID != info.BootID {
		if err := t.b.cfg.Store.SetTargetHost(ctx, t.cfg.Name, info.HostID, info.BootID); err != nil {
			return info, err
		}
		t.update(func(r *store.Target) { r.HostID, r.BootID = info.HostID, info.BootID })
	}
	return info, nil
}

// update changes the kept copy of the record.
func (t *target) update(f func(*store.Target)) {
	for {
		old := t.rec.Load()
		fresh := *old
		f(&fresh)
		if t.rec.CompareAndSwap(old, &fresh) {
			return
		}
	}
}

// renew renews the lease; a host that does not take it is not there.
func (t *target) renew(ctx context.Context, broken context.CancelCauseFunc) {
	tick := time.NewTicker(t.b.cfg.Limits.LeaseEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		if err := t.client.SetLease(ctx, t.b.cfg.Limits.Lease); err != nil && ctx.Err() == nil {
			broken(err)
			return
		}
	}
}

// compare gives every owner what the host has of its process. One that the list
// lacks asks for itself: the list may be older than its start.
func (t *target) compare(ctx context.Context, wg *sync.WaitGroup, l *link, states []wire.ProcState) {
	byID := make(map[string]wire.ProcState, len(states))
	for _, st := range states {
		byID[st.ID] = st
	}
	for _, o := range t.owners() {
		st, ok := byID[o.handle]
		delete(byID, o.handle)
		o.post(func(in *inbox) {
			in.again = true
			if !ok {
				in.ask = true
			}
		})
		if ok {
			t.told(l, st)
		}
	}
	var strays []string
	for id, st := range byID {
		if st.Phase != wire.PhaseEnded && ident.Valid(ident.Process, id) {
			strays = append(strays, id)
		}
	}
	if len(strays) > 0 {
		wg.Go(func() { t.endStrays(ctx, strays) })
	}
}

func (t *target) owners() []*owner {
	t.b.mu.RLock()
	defer t.b.mu.RUnlock()
	var mine []*owner
	for _, o := range t.b.owners {
		if o.home() == t.cfg.Name {
			mine = append(mine, o)
		}
	}
	return mine
}

// told hands a state to the process's owner. States of processes without one
// change nothing any more.
func (t *target) told(l *link, st wire.ProcState) {
	o := t.b.owner(st.ID)
	if o == nil {
		return
	}
	v := o.view.Load()
	if v == nil {
		o.post(func(in *inbox) { in.ask = true }) // its owner is still reading the ledger
		return
	}
	if v.rec.Target != t.cfg.Name {
		return
	}
	r, err := reportOf(v.rec, l.info.HostID, l.info.BootID, st)
	if err != nil {
		t.b.log.Warn("a state was not believed", "target", t.cfg.Name, "handle", st.ID, "error", err)
		return
	}
	o.report(r)
}

// endStrays ends what runs although the ledger says that it must not: the record
// is final. What the ledger does not know at all is left to the operator.
func (t *target) endStrays(ctx context.Context, handles []string) {
	slots := make(chan struct{}, strayLanes)
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, h := range handles {
		p, err := t.b.load(ctx, h)
		if errdefs.Is(err, errdefs.NotFound) {
			t.b.log.Error("a process runs that the ledger does not know", "target", t.cfg.Name, "handle", h)
			continue
		}
		if err != nil || p.Target != t.cfg.Name || !(p.State == api.StateClosed || p.State == api.StateNeverStarted) {
			continue
		}
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		wg.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, strayTime)
			defer cancel()
			t.b.log.Warn("a process runs although its record is closed; it is ended", "target", t.cfg.Name, "handle", h)
			if _, err := t.client.CloseProc(ctx, h, wire.Close{Reason: "its record is closed"}); err != nil {
				t.b.log.Warn("a stray process was not ended", "target", t.cfg.Name, "handle", h, "error", err)
			}
		})
	}
}

// dispatchOf is the event of telling a host.
func dispatchOf(l *link) process.Dispatch {
	return process.Dispatch{HostID: l.info.HostID, BootID: l.info.BootID}
}
