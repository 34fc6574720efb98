package pluginhost

import (
	"context"
	"os"
	"sync"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// linkKind is what stands at the other end of a worker's connection.
type linkKind int

const (
	kindDedicated linkKind = iota // one installation of the desired state
	kindPool                      // many installations of one artifact
	kindDebug                     // a plugin under development
	kindLegacy                    // a plugin of the legacy directory
)

// phase of a link: it goes only forward.
type phase int

const (
	phaseFresh       phase = iota // nothing but register_plugin is admitted
	phaseRegistering              // register_plugin runs; a dedicated worker is bound
	phaseRegistered
	phaseEnded
)

// link is one connection of a worker, from its start to its end. Fields below
// the line belong to Manager.mu; the others are fixed before the connection runs.
type link struct {
	m         *Manager
	kind      linkKind
	name      string
	launch    uint64 // of the capability it was started with
	inst      *installation
	pool      *pool
	old       *legacyUnit
	token     string             // debug key it was admitted with
	workspace pluginwire.Context // whose key that is
	files     *transfer.Store
	filesDir  string
	holder    *transfer.Holder
	conn      *rpc.Conn

	ready   chan struct{} // closed when registered and, unless a pool, initialised
	refused chan error    // why registration failed; one at most
	life    context.Context
	end     context.CancelCauseFunc
	tasks   sync.WaitGroup // attaches over this link
	// ---
	phase  phase
	bound  pluginwire.Context // zero in a pool
	id     string             // "author/name", once registered
	plugin *Plugin            // not in a pool
}

// newLink makes a link with an empty store for the files its worker pushes.
func (m *Manager) newLink(kind linkKind, name string, launch uint64, filesDir string) (*link, error) {
	// What an earlier worker pushed and nobody fetched has no reader any more.
	if err := os.RemoveAll(filesDir); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "old transfers cannot be removed").WithNext("check the runtime's data directory")
	}
	mode := pluginwire.ModeDedicated
	if kind == kindPool {
		mode = pluginwire.ModeShared
	}
	m.mu.Lock()
	limit := int64(m.policyLocked(mode).MaxFileSizeMB) << 20
	m.mu.Unlock()
	store, err := transfer.Open(transfer.Config{Dir: filesDir, MaxFileBytes: limit, Logger: m.log})
	if err != nil {
		return nil, err
	}
	life, end := context.WithCancelCause(context.Background())
	l := &link{m: m, kind: kind, name: name, launch: launch, files: store, filesDir: filesDir,
		ready: make(chan struct{}), refused: make(chan error, 1), life: life, end: end}
	l.holder = store.Holder(l.mayPush)
	return l, nil
}

// mayPush reports why files of a context have no place on this link any more; every
// message was admitted already.
func (l *link) mayPush(from pluginwire.Context) error {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	_, err := admit(l.claimLocked(pluginwire.ActionFileChunk, from))
	return err
}

func (l *link) config() rpc.Config {
	return rpc.Config{
		Name:   l.name,
		Handle: l.handle,
		Admit:  l.admit,
		Reserved: func(action string) bool {
			return action == pluginwire.ActionRegisterPlugin
		},
		Budget:    l.m.budget,
		PingEvery: l.m.cfg.PingEvery,
		Logger:    l.m.log,
	}
}

// release gives back what the link holds on disk; its connection has ended.
func (l *link) release() {
	l.unregister(nil)
	l.tasks.Wait()
	l.holder.Close()
	l.files.Close()
	if err := os.RemoveAll(l.filesDir); err != nil {
		l.m.log.Warn("transfers of a worker were left behind", "worker", l.name, "err", err)
	}
}

// refuse ends a link whose registration failed: nothing of it is admitted any more,
// its plugin is gone, and what started it then stops the worker.
func (l *link) refuse(err error) error {
	l.unregister(err)
	select {
	case l.refused <- err:
	default:
	}
	return err
}

// refusal is why registering was refused, if it was, else err: a worker that was
// refused ends by itself, and that it did is not the reason.
func (l *link) refusal(err error) error {
	select {
	case why := <-l.refused:
		return why
	default:
		return err
	}
}

// unregister takes the link's plugins out of every index and ends their calls;
// it reports whether the link was registered. It may be called again.
func (l *link) unregister(cause error) bool {
	if cause == nil {
		cause = errDisconnected(l.name)
	}
	m := l.m
	var gone []*Plugin
	m.mu.Lock()
	was := l.phase == phaseRegistered
	l.phase = phaseEnded
	if p := l.plugin; p != nil {
		gone = append(gone, p)
		l.plugin = nil
		if l.inst != nil && l.inst.plugin == p {
			l.inst.plugin = nil
		}
		m.dropOtherLocked(p)
	}
	if l.pool != nil && l.pool.link == l {
		l.pool.link = nil
		for _, s := range l.pool.slots {
			if s.inst.plugin != nil {
				gone = append(gone, s.inst.plugin)
				s.inst.plugin = nil
			}
			s.ready = false
		}
	}
	m.mu.Unlock()
	for _, p := range gone {
		p.end(errDisconnected(p.ID()))
	}
	l.end(cause)
	return was
}

// shutdownContext is the context shutdown is sent under: the bound one, none to
// a pool.
func (l *link) shutdownContext() pluginwire.Context {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	return l.bound
}
