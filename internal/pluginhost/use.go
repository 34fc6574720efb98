package pluginhost

import (
	"slices"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
)

// useRecord is the record on disk of what installations use, so that packages and
// trees can be collected while no runtime runs.
type useRecord struct {
	mu    sync.Mutex
	saved artifact.Use
	began bool // saved is what is on disk
	whole bool // a reconcile has told the whole desired state
}

// saveUse writes what is in use now, if it has changed. Until LangBot has told the
// whole desired state once (whole), what an earlier runtime has used is kept.
// Plugins of the legacy directory use neither packages nor trees of the stores.
func (m *Manager) saveUse(whole bool) {
	u := &m.use
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.began {
		before, _, err := artifact.LoadUse(m.root)
		if err != nil {
			m.log.Warn("the record of use is made anew", "err", err)
		}
		u.saved, u.began = before, true
	}
	now := m.using()
	if u.whole = u.whole || whole; !u.whole {
		now.Artifacts = union(now.Artifacts, u.saved.Artifacts)
		now.Trees = union(now.Trees, u.saved.Trees)
	}
	if !u.saved.At.IsZero() && slices.Equal(now.Artifacts, u.saved.Artifacts) && slices.Equal(now.Trees, u.saved.Trees) {
		return
	}
	now.At = time.Now()
	if err := artifact.SaveUse(m.root, now); err != nil {
		m.log.Warn("what installations use cannot be recorded: artifact gc will not know it", "err", err)
		return
	}
	u.saved = now
}

// using is what installations use, sorted. A pool that only drains is none of them:
// the record is for when no runtime runs.
func (m *Manager) using() artifact.Use {
	m.mu.Lock()
	defer m.mu.Unlock()
	var artifacts, trees []string
	for b, inst := range m.installs {
		artifacts = append(artifacts, b.ArtifactDigest)
		if inst.prepared {
			trees = append(trees, inst.tree.Digest)
		}
	}
	return artifact.Use{Artifacts: union(artifacts), Trees: union(trees)}
}

// union is the sorted set of all.
func union(lists ...[]string) []string {
	out := slices.Concat(lists...)
	slices.Sort(out)
	return slices.Compact(out)
}
