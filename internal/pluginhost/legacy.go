package pluginhost

import (
	"context"
	"path/filepath"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
	"github.com/stockade-run/stockade/internal/worker"
)

// Legacy is a plugin of the legacy directory, as its owner wants it run.
type Legacy struct {
	Author, Name string
	Dir          string // its directory
	SitePackages string // of its own environment; may be empty
	Problem      string // what its log shall say first, such as why a dependency is missing
}

// legacyUnit is a legacy plugin that runs; sup belongs to Manager.mu.
type legacyUnit struct {
	m    *Manager
	spec Legacy
	logs *pluginlog.Buffer
	sup  *supervisor
	last string // why the last attempt failed
}

func (s Legacy) id() string { return s.Author + "/" + s.Name }

// StartLegacy starts a supervisor for a legacy plugin. It is a conflict when the
// plugin is already supervised, and refused in the profile shared.
func (m *Manager) StartLegacy(spec Legacy) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usable(); err != nil {
		return err
	}
	if shared(m.runtime) {
		return errdefs.New(errdefs.Denied, "the profile shared runs no legacy plugins")
	}
	if m.legacy[spec.id()] != nil {
		return errdefs.New(errdefs.Conflict, "plugin %s is already running", spec.id())
	}
	u := &legacyUnit{m: m, spec: spec, logs: pluginlog.New()}
	if spec.Problem != "" {
		u.logs.Add(time.Now(), "ERROR", spec.Problem)
	}
	m.legacy[spec.id()] = u
	m.superviseLocked(u, func(s *supervisor) { u.sup = s })
	return nil
}

// StopLegacy stops a legacy plugin and waits until it is gone; one that does not
// run is no error.
func (m *Manager) StopLegacy(author, name string) {
	id := Legacy{Author: author, Name: name}.id()
	m.mu.Lock()
	u := m.legacy[id]
	var sup *supervisor
	if u != nil {
		sup = u.sup
	}
	delete(m.legacy, id)
	m.mu.Unlock()
	if sup != nil {
		m.stop(sup, errdefs.New(errdefs.Unavailable, "plugin %s was stopped", id))
	}
}

// LegacyReady reports whether a legacy plugin is registered and initialised, and
// why its last attempt failed.
func (m *Manager) LegacyReady(author, name string) (ready bool, lastFailure string) {
	id := Legacy{Author: author, Name: name}.id()
	m.mu.Lock()
	u := m.legacy[id]
	if u != nil {
		lastFailure = u.last
	}
	var p *Plugin
	for _, o := range m.others {
		if o.ID() == id && o.link.kind == kindLegacy {
			p = o
		}
	}
	m.mu.Unlock()
	return p != nil && p.Container().Status == StatusInitialized, lastFailure
}

// Pinned waits until the runtime serves a Workspace, which LangBot's first
// request under one fixes (oss_dev), and returns it.
func (m *Manager) Pinned(ctx context.Context) (pluginwire.Context, error) {
	select {
	case <-m.pinned:
	case <-ctx.Done():
		return pluginwire.Context{}, context.Cause(ctx)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	ws, _ := m.table.Pinned()
	return ws, nil
}

// notePinnedLocked opens Pinned once the table has a Workspace; mu is held.
func (m *Manager) notePinnedLocked() {
	if _, ok := m.table.Pinned(); !ok {
		return
	}
	select {
	case <-m.pinned:
	default:
		close(m.pinned)
	}
}

// The legacy plugin as a unit: without a circuit, as in the published runtime.

func (u *legacyUnit) circuit() string  { return "" }
func (u *legacyUnit) ownProcess() bool { return true }

func (u *legacyUnit) wanted(s *supervisor) bool {
	u.m.mu.Lock()
	defer u.m.mu.Unlock()
	return !u.m.closing && u.m.legacy[u.spec.id()] == u && u.sup == s
}

func (u *legacyUnit) retired(s *supervisor) {}

func (u *legacyUnit) failed(err error) {
	u.m.mu.Lock()
	u.last = errText(err)
	u.m.mu.Unlock()
	u.logs.Add(time.Now(), "ERROR", errText(err))
	u.m.log.Warn("a legacy plugin failed", "plugin", u.spec.id(), "err", err)
}

func (u *legacyUnit) attempt(ctx context.Context, p permit) error {
	m := u.m
	m.mu.Lock()
	launch := m.nextLaunch()
	policy := m.runtime.Policy
	m.mu.Unlock()
	name := u.spec.Author + "__" + u.spec.Name
	l, err := m.newLink(kindLegacy, name, launch, filepath.Join(m.root, legacyTransfersDir, name))
	if err != nil {
		return err
	}
	l.old = u
	return m.run(ctx, p, l, plan{
		spec:   worker.Spec{Name: name, Code: u.spec.Dir, SitePackages: u.spec.SitePackages, Policy: policy, Legacy: true},
		grant:  registration.Grant{Author: u.spec.Author, Name: u.spec.Name, Launch: launch},
		stderr: u.logs,
		within: ReadyWithin,
		late:   "did not become ready",
		ready:  func() {},
	})
}

// registerLegacy waits for the Workspace, then registers under the installation
// that LangBot's settings name.
func (l *link) registerLegacy(ctx context.Context, c Container) error {
	ws, err := l.m.Pinned(ctx)
	if err != nil {
		return err
	}
	l.m.mu.Lock()
	l.bound, l.id = ws, c.ID()
	l.m.mu.Unlock()
	return l.settle(ctx, ws, c, l.old.logs, false)
}
