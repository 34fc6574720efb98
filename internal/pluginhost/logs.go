package pluginhost

import (
	"time"

	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Logs returns the newest limit lines, oldest first, of a plugin that a context
// may see, of at least a level ("" is every line). An installation's log outlives
// its workers; a plugin that is not there has none.
func (m *Manager) Logs(c pluginwire.Context, author, name string, limit int, level string) []pluginlog.Line {
	if b := m.logsOf(c, author, name); b != nil {
		return b.Tail(limit, level)
	}
	return []pluginlog.Line{}
}

func (m *Manager) logsOf(c pluginwire.Context, author, name string) *pluginlog.Buffer {
	m.mu.Lock()
	if inst := m.installs[c]; inst != nil {
		defer m.mu.Unlock()
		if inst.artifact.Manifest.Author == author && inst.artifact.Manifest.Name == name {
			return inst.logs
		}
		return nil
	}
	legacy := m.legacy[author+"/"+name]
	hidden := !m.set || shared(m.runtime)
	m.mu.Unlock()
	if p, ok := m.Find(c, author, name); ok {
		return p.logs
	}
	if legacy != nil && !hidden && !m.hides(c, author, name) {
		if pin, ok := m.pin(); ok && (c.IsZero() || pin.SameWorkspace(c)) {
			return legacy.logs
		}
	}
	return nil
}

// hides reports whether an installation of the context's Workspace has this
// identity.
func (m *Manager) hides(c pluginwire.Context, author, name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for b, inst := range m.installs {
		if b.SameWorkspace(c) && inst.artifact.Manifest.Author == author && inst.artifact.Manifest.Name == name {
			return true
		}
	}
	return false
}

func (m *Manager) pin() (pluginwire.Context, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.table.Pinned()
}

// Note adds a line to the log of a plugin that a context may see, unless its
// worker's own standard error is being read, which says it already. It reports
// whether there is such a plugin.
func (m *Manager) Note(c pluginwire.Context, author, name string, now time.Time, level, line string) bool {
	b := m.logsOf(c, author, name)
	if b == nil {
		return false
	}
	if !b.Reading() {
		b.Add(now, level, line)
	}
	return true
}
