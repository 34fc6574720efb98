package metrics

import (
	"context"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/store"
)

// Ledger returns s with its commits counted and timed, and with what they say of
// processes and fences: the gauges by state follow what was made durable, not
// what was meant. A nil *Metrics returns s itself.
func (m *Metrics) Ledger(s store.Store) store.Store {
	if m == nil {
		return s
	}
	return &ledger{Store: s, m: m, live: map[string]api.ProcessState{}}
}

// ledger passes everything on. Methods that only read are the inner store's own.
type ledger struct {
	store.Store
	m *Metrics

	mu   sync.Mutex
	own  bool                        // something was committed: from now on commits say everything
	live map[string]api.ProcessState // by handle; as many as there are live and fenced processes
}

// timed runs one commit.
func (l *ledger) timed(commit func() error) error {
	start := time.Now()
	err := commit()
	l.m.Committed(err, time.Since(start))
	return err
}

// seen notes the state of a process that was committed. Those that are over are
// not kept.
func (l *ledger) seen(p store.Process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.own = true
	l.note(p)
}

// found notes what a server that starts finds in the ledger. Once it has committed
// anything, what is read may be older than what is known, and is not listened to.
func (l *ledger) found(ps ...store.Process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.own {
		return
	}
	for _, p := range ps {
		l.note(p)
	}
}

func (l *ledger) note(p store.Process) {
	to := p.State
	if to == api.StateClosed || to == api.StateNeverStarted {
		to = ""
	}
	l.m.Moved(l.live[p.Handle], to)
	if to == "" {
		delete(l.live, p.Handle)
	} else {
		l.live[p.Handle] = to
	}
}

func (l *ledger) CreateProcess(ctx context.Context, p store.Process, c store.Capacity, a store.AuditEvent) (proc store.Process, created bool, err error) {
	err = l.timed(func() (err error) { proc, created, err = l.Store.CreateProcess(ctx, p, c, a); return err })
	if err == nil && created {
		l.seen(proc)
	}
	return proc, created, err
}

func (l *ledger) SaveProcess(ctx context.Context, p store.Process, c store.Change) (version int64, err error) {
	err = l.timed(func() (err error) { version, err = l.Store.SaveProcess(ctx, p, c); return err })
	if err != nil {
		return version, err
	}
	l.seen(p)
	if c.Fence != nil {
		l.m.FenceRaised()
	}
	if c.ClearFence != nil {
		l.m.FenceCleared()
	}
	return version, nil
}

// Processes and Process are how a server that starts learns which processes may be
// running, and which are fenced.
func (l *ledger) Processes(ctx context.Context, s store.Scope, f store.ProcessFilter) ([]store.Process, error) {
	all, err := l.Store.Processes(ctx, s, f)
	if err == nil && s.All && f.Live {
		l.found(all...)
	}
	return all, err
}

func (l *ledger) Process(ctx context.Context, s store.Scope, handle string) (store.Process, error) {
	p, err := l.Store.Process(ctx, s, handle)
	if err == nil && s.All {
		l.found(p)
	}
	return p, err
}

func (l *ledger) CreateRun(ctx context.Context, r store.Run, c store.Capacity) error {
	return l.timed(func() error { return l.Store.CreateRun(ctx, r, c) })
}

func (l *ledger) SetRunState(ctx context.Context, id string, state api.RunState, at time.Time) (run store.Run, err error) {
	err = l.timed(func() (err error) { run, err = l.Store.SetRunState(ctx, id, state, at); return err })
	return run, err
}

func (l *ledger) CreateBox(ctx context.Context, b store.Box, c store.Capacity) (box store.Box, created bool, err error) {
	err = l.timed(func() (err error) { box, created, err = l.Store.CreateBox(ctx, b, c); return err })
	return box, created, err
}

func (l *ledger) SetBoxState(ctx context.Context, id string, state api.BoxState) error {
	return l.timed(func() error { return l.Store.SetBoxState(ctx, id, state) })
}

func (l *ledger) DeleteBox(ctx context.Context, id string) error {
	return l.timed(func() error { return l.Store.DeleteBox(ctx, id) })
}

func (l *ledger) AppendAudit(ctx context.Context, a store.AuditEvent) error {
	return l.timed(func() error { return l.Store.AppendAudit(ctx, a) })
}
