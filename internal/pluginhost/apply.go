package pluginhost

import (
	"context"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Apply makes b the desired state of its installation and schedules what follows
// from it; it answers when that is scheduled, not when a worker is ready.
//
// archive is the package, or nil to use the one of b's digest that is already
// there. A package that does not have the digest changes nothing. From the
// moment b is current its predecessor can do nothing more; it is stopped before
// anything new starts. A failed installation may be applied again.
//
// When ctx ends before b is current, nothing changes. When it ends while dependencies
// are prepared, the installation is failed and may be applied again; stopping what was
// fenced is always finished.
func (m *Manager) Apply(ctx context.Context, b pluginwire.Context, archive []byte, req pluginwire.ApplyRequest) (pluginwire.StateResult, error) {
	defer m.saveUse(false)
	return m.applyNow(ctx, b, archive, req)
}

func (m *Manager) applyNow(ctx context.Context, b pluginwire.Context, archive []byte, req pluginwire.ApplyRequest) (pluginwire.StateResult, error) {
	unlock, err := m.turn(ctx, change{b, false})
	if err != nil {
		return pluginwire.StateResult{}, err
	}
	defer unlock()
	return m.apply(ctx, b, archive, req.Enabled, req.Mode)
}

// apply is Apply with the installation's lock held.
func (m *Manager) apply(ctx context.Context, b pluginwire.Context, archive []byte, enabled bool, mode pluginwire.Mode) (pluginwire.StateResult, error) {
	none := pluginwire.StateResult{}
	if err := m.Candidate(b); err != nil {
		return none, err
	}
	art, found, err := m.artifactOf(ctx, b.ArtifactDigest, archive)
	if err != nil {
		return none, err
	}
	var d dirs
	if found {
		if d, err = m.installationDirs(b.InstallationUUID); err != nil {
			return none, err
		}
	}
	m.mu.Lock()
	if err := m.askedLocked(ctx); err != nil {
		m.mu.Unlock()
		return none, err
	}
	prev, had, err := m.table.Activate(b)
	if err == nil {
		m.managed[b.InstallationUUID] = b
		m.notePinnedLocked()
	}
	m.mu.Unlock()
	if err != nil {
		return none, err
	}
	if had && prev != b {
		m.revoke(prev)
	}
	if !found {
		m.revoke(b)
		return pluginwire.StateResult{InstallationUUID: b.InstallationUUID, State: pluginwire.StateArtifactMissing}, nil
	}
	inst := m.record(b, art, d)
	if m.modeOf(inst) != mode {
		m.halt(inst, errdefs.New(errdefs.Unavailable, "the installation's execution mode changed"))
	}
	m.mu.Lock()
	inst.mode, inst.enabled = mode, enabled
	m.mu.Unlock()
	if !enabled {
		m.halt(inst, errdefs.New(errdefs.Unavailable, "the installation was disabled"))
		m.setState(inst, pluginwire.StateDisabled, "", "")
		return m.result(inst), nil
	}
	if err := m.prepare(ctx, inst); err == errSuperseded {
		m.halt(inst, err)
		m.setState(inst, pluginwire.StateFailed, pluginwire.ErrorDependencyPrepare, prepareText(err)) // should the newer one be refused
		return pluginwire.StateResult{InstallationUUID: b.InstallationUUID, State: pluginwire.StateSuperseded}, nil
	} else if err != nil && ctx.Err() != nil && m.hasTree(inst) {
		return none, context.Cause(ctx) // whoever asked has left: what runs goes on
	} else if err != nil {
		m.halt(inst, errdefs.New(errdefs.Unavailable, "the installation's dependencies could not be prepared"))
		m.setState(inst, pluginwire.StateFailed, pluginwire.ErrorDependencyPrepare, prepareText(err))
		return m.result(inst), nil
	}
	if !m.launch(inst) {
		return pluginwire.StateResult{InstallationUUID: b.InstallationUUID, State: pluginwire.StateSuperseded}, nil
	}
	return m.result(inst), nil
}

func (m *Manager) artifactOf(ctx context.Context, digest string, archive []byte) (artifact.Artifact, bool, error) {
	if archive == nil {
		return m.cfg.Artifacts.Lookup(digest)
	}
	a, err := m.cfg.Artifacts.Install(ctx, digest, archive)
	return a, err == nil, err
}

// record returns the record of b, a new one if there is none.
func (m *Manager) record(b pluginwire.Context, art artifact.Artifact, d dirs) *installation {
	m.mu.Lock()
	defer m.mu.Unlock()
	inst := m.installs[b]
	if inst == nil {
		inst = &installation{binding: b, dirs: d, logs: pluginlog.New(), since: time.Now(), state: pluginwire.StateDisabled, mode: pluginwire.ModeDedicated}
		m.installs[b] = inst
	}
	art.Manifest.Raw = nil // as large as the rest of the record, and not asked for again
	inst.artifact = art
	return inst
}

func (m *Manager) modeOf(inst *installation) pluginwire.Mode {
	m.mu.Lock()
	defer m.mu.Unlock()
	return inst.mode
}

// preparation is a preparing of dependencies that somebody newer may end.
type preparation struct {
	binding pluginwire.Context
	cancel  context.CancelCauseFunc
}

var errSuperseded error = errdefs.New(errdefs.Fenced, "the installation was superseded while its dependencies were prepared")

// change is an apply or a removal that waits for its turn.
type change struct {
	binding pluginwire.Context
	removal bool
}

// turn waits for an installation's lock. Whose turn it is may be preparing
// dependencies, or be about to, for up to the whole time an installer may take: if c
// will fence it, or is its removal, that is ended.
func (m *Manager) turn(ctx context.Context, c change) (unlock func(), err error) {
	uuid := c.binding.InstallationUUID
	m.mu.Lock()
	m.changes[uuid] = append(m.changes[uuid], &c)
	if p, ok := m.preparing[uuid]; ok && m.endsLocked(c, p.binding) {
		p.cancel(errSuperseded)
	}
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.changes[uuid] = slices.DeleteFunc(m.changes[uuid], func(o *change) bool { return o == &c }); len(m.changes[uuid]) == 0 {
			delete(m.changes, uuid)
		}
	}()
	return m.keys.Take(ctx, uuid)
}

// endsLocked reports whether a change leaves no use for b's dependencies; mu is held.
func (m *Manager) endsLocked(c change, b pluginwire.Context) bool {
	return m.usable() == nil && (c.binding == b) == c.removal && m.table.Candidate(c.binding) == nil
}

// prepare gets the installation's dependency tree, within the limiter.
func (m *Manager) prepare(ctx context.Context, inst *installation) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	uuid := inst.binding.InstallationUUID
	m.mu.Lock()
	m.preparing[uuid] = preparation{inst.binding, cancel}
	if slices.ContainsFunc(m.changes[uuid], func(c *change) bool { return m.endsLocked(*c, inst.binding) }) {
		cancel(errSuperseded) // it came before this began
	}
	m.mu.Unlock()
	tree, err := m.prepareNow(ctx, inst)
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.preparing, uuid)
	if err != nil && context.Cause(ctx) == errSuperseded {
		return errSuperseded
	}
	if err != nil && ctx.Err() != nil && inst.prepared {
		return err
	}
	inst.tree, inst.prepared = tree, err == nil
	return err
}

func (m *Manager) hasTree(inst *installation) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return inst.prepared
}

func (m *Manager) prepareNow(ctx context.Context, inst *installation) (deptree.Tree, error) {
	free, err := m.limiter.acquire(ctx)
	if err != nil {
		return deptree.Tree{}, err
	}
	defer free()
	return m.trees.Prepare(ctx, inst.artifact.Digest, inst.artifact.Code)
}

// prepareText is why preparing failed, in words a tenant may read.
func prepareText(err error) string {
	if errdefs.CodeOf(err) == errdefs.Internal {
		return "the plugin's dependencies could not be prepared"
	}
	return errText(err)
}

// launch schedules the installation's worker or slot, if its record is still the
// one of the current binding. Scheduling what is already there changes nothing,
// but a slot is attached again, with fresh settings.
func (m *Manager) launch(inst *installation) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing || m.installs[inst.binding] != inst || !m.currentLocked(inst.binding) {
		return false
	}
	inst.code, inst.message = "", ""
	if inst.mode == pluginwire.ModeShared {
		m.attachLocked(inst)
		return true
	}
	if inst.plugin == nil || inst.state != pluginwire.StateRunning {
		inst.state = pluginwire.StateStarting
	}
	if inst.sup == nil {
		m.superviseLocked(dedicated{m, inst}, func(s *supervisor) { inst.sup = s })
	}
	return true
}

// Remove ends an installation whose current binding is exactly b. Once begun it
// is finished even when ctx ends; then the context's error is returned after it.
func (m *Manager) Remove(ctx context.Context, b pluginwire.Context) (pluginwire.StateResult, error) {
	unlock, err := m.turn(ctx, change{b, true})
	if err != nil {
		return pluginwire.StateResult{}, err
	}
	defer unlock()
	if err := m.deactivate(ctx, b); err != nil {
		return pluginwire.StateResult{}, err
	}
	m.revoke(b)
	m.saveUse(false)
	return pluginwire.StateResult{InstallationUUID: b.InstallationUUID, State: pluginwire.StateRemoved}, context.Cause(ctx)
}

// askedLocked reports why desired state may not be changed for whoever asked; mu is
// held. LangBot that has come back over a newer connection says all that shall run: what
// the older one still had under way must not change it afterwards.
func (m *Manager) askedLocked(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return m.usable()
}

func (m *Manager) deactivate(ctx context.Context, b pluginwire.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.askedLocked(ctx); err != nil {
		return err
	}
	if err := m.table.Deactivate(b); err != nil {
		return err
	}
	if m.managed[b.InstallationUUID] == b {
		delete(m.managed, b.InstallationUUID)
	}
	return nil
}

// revoke ends everything of a binding that is no longer wanted: its pending
// capability, its worker or slot, its record. The installation's lock is held. It
// cannot be interrupted and, unlike the published Python runtime, does not wait
// for somebody else's dependencies: what is fenced goes at once.
func (m *Manager) revoke(b pluginwire.Context) {
	m.pending.RevokeBinding(b)
	m.mu.Lock()
	inst := m.installs[b]
	m.mu.Unlock()
	if inst == nil {
		return
	}
	m.halt(inst, errdefs.New(errdefs.Denied, "the plugin's installation binding was revoked"))
	m.mu.Lock()
	if m.installs[b] == inst {
		delete(m.installs, b)
	}
	m.mu.Unlock()
}

// halt stops the installation's worker or detaches its slot, and waits for it.
func (m *Manager) halt(inst *installation, cause error) {
	m.mu.Lock()
	sup, slot, p := inst.sup, inst.slot, inst.plugin
	m.mu.Unlock()
	if sup == nil && slot == nil && p == nil {
		return
	}
	if p != nil {
		p.end(cause)
	}
	m.detach(inst, cause)
	m.stop(sup, cause)
	m.mu.Lock()
	if inst.sup == sup {
		inst.sup = nil
	}
	m.mu.Unlock()
}

func (m *Manager) setState(inst *installation, state, code, message string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	inst.state, inst.code, inst.message = state, code, message
}

// result is what LangBot is told of an installation.
func (m *Manager) result(inst *installation) pluginwire.StateResult {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := pluginwire.StateResult{
		InstallationUUID: inst.binding.InstallationUUID, State: inst.state, ArtifactPath: inst.artifact.Code,
		ErrorCode: inst.code, Message: inst.message,
	}
	if inst.prepared {
		r.DependencyEnvironmentDigest = inst.tree.Digest
	}
	return r
}
