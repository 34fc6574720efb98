package pluginhost

import (
	"context"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
)

// pool is the shared worker of one artifact digest. Fields below the line belong
// to Manager.mu.
//
// What its process writes to standard error belongs to no tenant in particular,
// so no tenant ever reads it: it is kept here, for the operator. A slot's log has
// the lines the runtime writes about that slot.
type pool struct {
	m        *Manager
	digest   string
	artifact artifact.Artifact
	tree     deptree.Tree
	dirs     dirs
	logs     *pluginlog.Buffer
	life     tokens // one: attaching
	// ---
	slots    map[pluginwire.Context]*slot
	link     *link // registered
	sup      *supervisor
	launch   uint64 // the only one that may register
	draining bool   // the last slot has left; the process is being stopped
}

// slot is one installation in a pool. Its fields belong to Manager.mu.
type slot struct {
	pool  *pool
	inst  *installation
	task  *attachTask // under way
	again bool        // asked for while one is under way: once more, then
	ready bool
}

// attachLocked puts an installation into the pool of its digest, or attaches its slot
// again; mu is held. What stands in the way makes the installation failed.
func (m *Manager) attachLocked(inst *installation) {
	fail := func(err error) {
		inst.state, inst.code, inst.message = pluginwire.StateFailed, pluginwire.ErrorWorkerLaunch, errText(err)
	}
	digest := inst.artifact.Digest
	p := m.pools[digest]
	if p != nil && inst.slot == nil && p.tree.Digest != inst.tree.Digest && len(p.slots) > 0 {
		fail(errdefs.New(errdefs.Conflict, "the dependency environment changed: the shared worker of this artifact runs with another one").
			WithNext("remove the artifact's other installations first, then apply this one again"))
		return
	}
	if p == nil {
		if limit := m.runtime.Policy.MaxWorkers; len(m.pools) >= limit {
			m.counter.refusedPools.Add(1)
			fail(errdefs.New(errdefs.Exhausted, "shared worker capacity reached: max_workers = %d", limit))
			return
		}
		p = &pool{m: m, digest: digest, artifact: inst.artifact, tree: inst.tree, dirs: m.poolDirs(digest), logs: pluginlog.New(),
			life: make(tokens, 1), slots: map[pluginwire.Context]*slot{}}
		m.pools[digest] = p
	}
	if len(p.slots) == 0 {
		p.tree = inst.tree
	}
	s := inst.slot
	if s == nil {
		s = &slot{pool: p, inst: inst}
		inst.slot = s
		p.slots[inst.binding] = s
	}
	if inst.plugin == nil {
		inst.state = pluginwire.StateStarting
	}
	switch {
	case p.draining: // stopPool starts it again when it is down
	case p.sup == nil:
		m.superviseLocked(p, func(sup *supervisor) { p.sup = sup })
	case p.link != nil:
		m.scheduleAttachLocked(p.link, s)
	}
}

// The pool as a unit.

func (p *pool) circuit() string  { return "shared:" + p.digest }
func (p *pool) ownProcess() bool { return false }

func (p *pool) wanted(s *supervisor) bool {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	return !p.m.closing && p.sup == s && !p.draining && len(p.slots) > 0 && p.m.pools[p.digest] == p
}

func (p *pool) retired(s *supervisor) {
	p.m.mu.Lock()
	defer p.m.mu.Unlock()
	if p.sup != s {
		return
	}
	p.sup = nil
	// A slot that came while this supervisor was leaving did not start another.
	if len(p.slots) > 0 && !p.draining && p.m.pools[p.digest] == p {
		p.m.superviseLocked(p, func(next *supervisor) { p.sup = next })
	}
}

// failed tells every slot; they are attached again when the process is back.
func (p *pool) failed(err error) {
	m := p.m
	m.counter.poolFailures.Add(1)
	var logs []*pluginlog.Buffer
	m.mu.Lock()
	for _, s := range p.slots {
		s.inst.state, s.inst.code, s.inst.message = pluginwire.StateFailed, pluginwire.ErrorWorkerLaunch, errText(err)
		logs = append(logs, s.inst.logs)
	}
	m.mu.Unlock()
	now := time.Now()
	for _, b := range logs {
		b.Add(now, "ERROR", errText(err))
	}
	tail := p.logs.Tail(5, "")
	m.log.Warn("a shared plugin worker failed", "artifact", p.digest, "err", err, "stderr", tail)
}

// attempt launches the pool's process once.
func (p *pool) attempt(ctx context.Context, permit permit) error {
	m := p.m
	m.mu.Lock()
	var first *slot
	for _, s := range p.slots {
		if m.currentLocked(s.inst.binding) && (first == nil || s.inst.since.Before(first.inst.since)) {
			first = s
		}
	}
	if first == nil {
		m.mu.Unlock()
		return errdefs.New(errdefs.Denied, "every installation of this shared worker was revoked")
	}
	for _, s := range p.slots {
		s.inst.state, s.inst.code, s.inst.message = pluginwire.StateStarting, "", ""
	}
	p.launch = m.nextLaunch()
	launch, tree, policy, representative := p.launch, p.tree, m.policyLocked(pluginwire.ModeShared), first.inst.binding
	m.mu.Unlock()
	if err := m.freshPool(p.digest); err != nil {
		return err
	}
	l, err := m.newLink(kindPool, "shared-"+p.digest[:12], launch, p.dirs.files)
	if err != nil {
		return err
	}
	l.pool = p
	spec := specOf(l.name, p.artifact.Code, tree.SitePackages, p.dirs, policy)
	spec.Private, spec.Scratch = nil, p.dirs.tmp
	return m.run(ctx, permit, l, plan{
		spec:   spec,
		grant:  grantOf(p.artifact, representative, p.digest, launch),
		stderr: p.logs,
		within: RegisterWithin,
		late:   "did not register",
		ready:  func() {},
	})
}

// registerPool binds a link to its pool and schedules every slot. It asks nobody
// and does not wait for an attach under way: the worker gets its
// answer at once, and no initialize_plugin.
func (m *Manager) registerPool(l *link, grant registration.Grant, c Container) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := l.pool
	if p == nil || m.pools[grant.Pool] != p || p.launch != grant.Launch || p.draining || l.phase != phaseRegistering || m.closing {
		return errdefs.New(errdefs.Denied, "the registration's generation changed: the shared worker is being replaced")
	}
	l.phase, l.id = phaseRegistered, c.ID()
	p.link = l
	m.counter.poolRegistrations.Add(1)
	for _, s := range slices.SortedFunc(maps.Values(p.slots), func(a, b *slot) int { return a.inst.since.Compare(b.inst.since) }) {
		m.scheduleAttachLocked(l, s)
	}
	close(l.ready)
	return nil
}

// stopPool stops the process of a pool whose last slot has left, and reports
// false when a slot has come meanwhile. One that comes while it stops starts the
// same pool again; otherwise the pool is forgotten, with what was pushed to it.
func (m *Manager) stopPool(p *pool, cause error) bool {
	m.mu.Lock()
	if len(p.slots) > 0 {
		m.mu.Unlock()
		return false
	}
	sup := p.sup
	if p.draining { // somebody stops it already
		m.mu.Unlock()
		m.stop(sup, cause)
		return true
	}
	p.draining = true
	m.mu.Unlock()
	m.counter.poolStops.Add(1)
	m.pending.RevokePool(p.digest)
	m.stop(sup, cause)
	// While it drains no other process of it is started.
	if err := os.RemoveAll(m.poolBase(p.digest)); err != nil {
		m.log.Warn("the scratch directories of a shared worker that has ended stay", "artifact", p.digest, "err", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p.draining = false
	if p.sup == sup {
		p.sup = nil
	}
	if len(p.slots) > 0 {
		m.superviseLocked(p, func(s *supervisor) { p.sup = s })
		return true
	}
	if m.pools[p.digest] == p {
		delete(m.pools, p.digest)
	}
	return true
}
