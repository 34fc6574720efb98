package pluginhost

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/restart"
	"github.com/stockade-run/stockade/internal/restart/gate"
	"github.com/stockade-run/stockade/internal/rpc"
)

// unit is something a supervisor keeps running: a dedicated installation, a
// pool, a legacy plugin.
type unit interface {
	// circuit is the key of its circuit; "" is launched without the gate.
	circuit() string
	// wanted reports whether the unit is still to run under this supervisor. It is
	// asked before each attempt and after it, before a failure is counted.
	wanted(s *supervisor) bool
	// attempt runs one worker from its start to its end and returns why it ended.
	attempt(ctx context.Context, p permit) error
	// failed is told why an attempt failed while the unit is wanted.
	failed(err error)
	// retired is told that the supervisor has ended by itself.
	retired(s *supervisor)
	// ownProcess is false for pools; it only sorts numbers for health.
	ownProcess() bool
}

// supervisor is the handle of one supervisor goroutine.
type supervisor struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

// permit is the right to launch; its zero value, for units without a circuit,
// does nothing.
type permit struct {
	p      *gate.Permit
	g      *gate.Gate
	key    string
	closed *bool // the probe was stable: the permit has ended
}

func (p permit) ready() {
	if p.p != nil {
		p.p.Ready()
	}
}

func (p permit) probe() bool { return p.p != nil && p.p.Probe() }

func (p permit) stable() {
	if p.p != nil {
		p.p.Stable()
		*p.closed = true
	}
}

func (p permit) fail() {
	switch {
	case p.p == nil:
	case *p.closed:
		p.g.Failed(p.key)
	default:
		p.p.Fail()
	}
}

func (p permit) abandon() {
	if p.p != nil {
		p.p.Abandon()
	}
}

// superviseLocked starts a supervisor; mu is held. nil means that the runtime is
// shutting down.
func (m *Manager) superviseLocked(u unit, own func(*supervisor)) {
	if m.closing {
		return
	}
	ctx, cancel := context.WithCancelCause(m.life)
	s := &supervisor{cancel: cancel, done: make(chan struct{})}
	own(s)
	// Its place in the queue is that of this call, not of when the goroutine gets to it.
	var turn *gate.Turn
	if key := u.circuit(); key != "" {
		turn = m.gate.Ask(key)
	}
	m.running.Go(func() {
		defer close(s.done)
		defer cancel(nil)
		m.supervise(ctx, s, u, turn)
		u.retired(s)
	})
}

// supervise launches u again and again until ctx ends or it is no longer wanted. turn
// is its place for the first launch, nil for a unit without a circuit.
func (m *Manager) supervise(ctx context.Context, s *supervisor, u unit, turn *gate.Turn) {
	var backoff restart.Backoff
	for {
		if !u.wanted(s) {
			s.cancel(nil)
			if turn != nil {
				_, _ = turn.Wait(ctx) // gives the place back
			}
			return
		}
		var p permit
		started := time.Now()
		var err error
		if key := u.circuit(); key != "" {
			p = permit{g: m.gate, key: key, closed: new(bool)}
			if turn == nil {
				turn = m.gate.Ask(key)
			}
			p.p, err = turn.Wait(ctx)
			turn = nil
		}
		if err == nil {
			started = time.Now()
			if u.wanted(s) {
				err = u.attempt(ctx, p)
			}
			if ctx.Err() != nil || !u.wanted(s) {
				p.abandon()
				return
			}
			p.fail()
		} else if ctx.Err() != nil {
			return
		}
		u.failed(err)
		var wait time.Duration
		wait, backoff = backoff.Next(time.Since(started), rand.Float64())
		leave := m.counter.backoff(u.ownProcess(), wait)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		leave()
		if ctx.Err() != nil {
			return
		}
	}
}

// stop ends a supervisor and waits for it: its worker is stopped in order and
// gone, or JoinWithin has passed, which is logged and leaves it behind.
func (m *Manager) stop(s *supervisor, cause error) {
	if s == nil {
		return
	}
	s.cancel(cause)
	timer := time.NewTimer(JoinWithin)
	defer timer.Stop()
	select {
	case <-s.done:
	case <-timer.C:
		m.log.Error("a plugin worker's supervisor did not end in time and is left behind", "within", JoinWithin)
	}
}

func policyOf(p pluginwire.WorkerPolicy) restart.Policy {
	seconds := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	return restart.Policy{
		Concurrent: p.MaxConcurrentRestarts, Threshold: p.RestartFailureThreshold,
		Window: seconds(p.RestartFailureWindow), Open: seconds(p.RestartCircuitOpen),
		MaxCircuits: p.MaxPendingRegistrations,
	}
}

// dedicated is an installation with a process of its own.
type dedicated struct {
	m    *Manager
	inst *installation
}

func (d dedicated) circuit() string  { return d.inst.binding.InstallationUUID }
func (d dedicated) ownProcess() bool { return true }

func (d dedicated) wanted(s *supervisor) bool {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	i := d.inst
	return !d.m.closing && i.sup == s && i.enabled && d.m.installs[i.binding] == i && d.m.currentLocked(i.binding)
}

func (d dedicated) retired(s *supervisor) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if d.inst.sup != s {
		return // left behind: the directories may be another worker's
	}
	d.m.mu.Unlock()
	if err := d.inst.dirs.dropTransfers(); err != nil {
		d.m.log.Warn("files that a worker was sent stay", "installation", d.inst.binding.InstallationUUID, "err", err)
	}
	d.m.mu.Lock()
	if d.inst.sup == s {
		d.inst.sup = nil
	}
}

func (d dedicated) failed(err error) {
	d.m.mu.Lock()
	i := d.inst
	i.state, i.code, i.message = pluginwire.StateFailed, pluginwire.ErrorWorkerLaunch, errText(err)
	d.m.mu.Unlock()
	i.logs.Add(time.Now(), "ERROR", errText(err))
	d.m.log.Warn("a plugin worker failed", "installation", i.binding.InstallationUUID, "err", err)
}

// attempt launches the installation's worker once.
func (d dedicated) attempt(ctx context.Context, p permit) error {
	m, i := d.m, d.inst
	m.mu.Lock()
	if !i.prepared {
		m.mu.Unlock()
		return errdefs.New(errdefs.Internal, "the installation has no dependency tree")
	}
	if i.state != pluginwire.StateRunning {
		i.state, i.code, i.message = pluginwire.StateStarting, "", ""
	}
	launch := m.nextLaunch()
	art, tree, policy := i.artifact, i.tree, m.policyLocked(pluginwire.ModeDedicated)
	m.mu.Unlock()

	if err := i.dirs.dropTransfers(); err != nil {
		return err
	}
	l, err := m.newLink(kindDedicated, i.binding.InstallationUUID, launch, i.dirs.files)
	if err != nil {
		return err
	}
	l.inst = i
	return m.run(ctx, p, l, plan{
		spec:   specOf(i.binding.InstallationUUID, art.Code, tree.SitePackages, i.dirs, policy),
		grant:  grantOf(art, i.binding, "", launch),
		stderr: i.logs,
		within: ReadyWithin,
		late:   "did not become ready",
		ready: func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			if i.enabled && i.plugin != nil {
				i.state, i.code, i.message = pluginwire.StateRunning, "", ""
			}
		},
	})
}

// errText is what a tenant may read of an error: our own message, a peer's, and
// one general sentence for any other.
func errText(err error) string {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e.Message
	}
	if e, ok := errors.AsType[*rpc.PeerError](err); ok {
		return pluginwire.CutText(e.Message)
	}
	return "the plugin worker ended unexpectedly"
}
