// Package gate makes callers wait for the rules of package restart: a supervisor
// acquires a permit, launches its worker, and says how that went.
package gate

import (
	"context"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/restart"
)

// Gate admits launches. It is safe for concurrent use. It starts no goroutine;
// one timer runs while a launch waits for a circuit.
type Gate struct {
	mu      sync.Mutex
	rules   *restart.Coordinator
	waiters map[uint64]chan restart.Launch // each has room for one
	timer   *time.Timer                    // nil while nothing waits for time
}

// New returns a gate with a policy, which must be valid.
func New(p restart.Policy) *Gate {
	return &Gate{rules: restart.NewCoordinator(p), waiters: map[uint64]chan restart.Launch{}}
}

// Configure says again what [New] was told, as a host does when it connects
// again. Another policy is a Conflict: it cannot be changed.
func (g *Gate) Configure(p restart.Policy) error {
	if p != g.rules.Policy() {
		return errdefs.New(errdefs.Conflict, "the restart policy is set and cannot be changed").WithNext("restart the runtime to change it")
	}
	return nil
}

// Acquire is Ask and Wait.
func (g *Gate) Acquire(ctx context.Context, key string) (*Permit, error) {
	return g.Ask(key).Wait(ctx)
}

// Turn is a place among those who wait for a launch. It must be waited for.
type Turn struct {
	g  *Gate
	id uint64
	ch chan restart.Launch
}

// Ask asks for a launch of the key, without waiting. Launches are admitted in the
// order of asking, but for those whose key has an open circuit: these wait without a
// slot.
func (g *Gate) Ask(key string) *Turn {
	t := &Turn{g: g, ch: make(chan restart.Launch, 1)}
	g.change(func() {
		t.id = g.rules.Ask(key)
		g.waiters[t.id] = t.ch
	})
	return t
}

// Wait, to be called once, waits until the launch may begin. The permit must be ended
// by Fail, Abandon or Stable. The error is the context's; then nothing is held.
func (t *Turn) Wait(ctx context.Context) (*Permit, error) {
	g := t.g
	if ctx.Err() == nil {
		select {
		case l := <-t.ch:
			return &Permit{gate: g, launch: l}, nil
		case <-ctx.Done():
		}
	}
	g.change(func() {
		delete(g.waiters, t.id)
		if !g.rules.Cancel(t.id) { // it was admitted meanwhile
			g.rules.Abandon(<-t.ch)
		}
	})
	return nil, context.Cause(ctx)
}

// change does something to the rules and hands out what it admits.
func (g *Gate) change(do func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	do()
	g.admit()
}

// admit hands out what may begin, and sets the timer for what only waits for time.
// g.mu is held.
func (g *Gate) admit() {
	now := time.Now()
	for _, l := range g.rules.Admit(now) {
		g.waiters[l.ID] <- l // has room
		delete(g.waiters, l.ID)
	}
	at, ok := g.rules.Wake()
	switch {
	case !ok && g.timer != nil:
		g.timer.Stop()
		g.timer = nil
	case ok && g.timer != nil:
		g.timer.Reset(at.Sub(now))
	case ok:
		g.timer = time.AfterFunc(at.Sub(now), func() { g.change(func() {}) })
	}
}

// Snapshot returns the gate in numbers. That of a nil gate says that nothing is
// configured.
func (g *Gate) Snapshot() restart.Snapshot {
	if g == nil {
		return restart.Snapshot{}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.rules.Snapshot(time.Now())
}

// Permit is the leave to launch once. Its methods never wait and may be called by
// any goroutine; after it ended they do nothing.
type Permit struct {
	gate   *Gate
	launch restart.Launch
	ready  bool // guarded by gate.mu, like ended
	ended  bool
}

// Probe reports whether this is the one launch of a half-open circuit, which
// must run for [restart.Stable] before Stable is said.
func (p *Permit) Probe() bool { return p.launch.Probe }

// Ready says that the worker runs: the next launch may begin.
func (p *Permit) Ready() {
	p.gate.change(func() {
		if !p.ready && !p.ended {
			p.ready = p.gate.rules.Ready(p.launch)
		}
	})
}

// Fail ends the permit: the worker did not become ready, or exited.
func (p *Permit) Fail() { p.end(func(c *restart.Coordinator) { c.Fail(p.launch, time.Now()) }) }

// Abandon ends the permit without a count: the worker is not wanted any more.
func (p *Permit) Abandon() { p.end(func(c *restart.Coordinator) { c.Abandon(p.launch) }) }

// Stable ends the permit: the worker ran for [restart.Stable]. A later exit of it
// belongs to no permit; say it with [Gate.Failed].
func (p *Permit) Stable() { p.end(func(c *restart.Coordinator) { c.Stable(p.launch) }) }

func (p *Permit) end(how func(*restart.Coordinator)) {
	p.gate.change(func() {
		if !p.ended {
			p.ended = true
			how(p.gate.rules)
		}
	})
}

// Failed counts the failure of a worker whose permit had ended as stable.
func (g *Gate) Failed(key string) {
	g.change(func() { g.rules.Fail(restart.Launch{Key: key}, time.Now()) })
}
