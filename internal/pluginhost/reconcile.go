package pluginhost

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Reconcile makes the list the whole desired state: what is not in it, or in it
// under another binding, is removed first; then every entry is applied, from
// packages that are already here. One stale entry refuses all of it before
// anything changes. One at a time; an entry that cannot run is reported and does
// not fail the others. Installations that were used last are launched first, also
// those that an earlier runtime in this directory ran; whose dependencies are still to
// be installed come last, so that a package index that hangs holds nobody else up.
func (m *Manager) Reconcile(ctx context.Context, want []pluginwire.DesiredState) (pluginwire.ReconcileResult, error) {
	none := pluginwire.ReconcileResult{}
	unlock, err := m.recon.acquire(ctx)
	if err != nil {
		return none, err
	}
	defer unlock()
	next := map[string]pluginwire.Context{}
	bindings := make([]pluginwire.Context, 0, len(want))
	for _, w := range want {
		next[w.Binding.InstallationUUID] = w.Binding
		bindings = append(bindings, w.Binding)
	}
	m.mu.Lock()
	if err = m.usable(); err == nil {
		if limit := m.runtime.Policy.MaxInstallations; len(want) > limit {
			err = errdefs.New(errdefs.Exhausted, "desired state has %d installations, more than max_installations = %d", len(want), limit)
		} else {
			err = m.table.Candidates(bindings)
		}
	}
	if err != nil {
		m.mu.Unlock()
		return none, err
	}
	active, marks := maps.Clone(m.managed), m.table.Watermarks()
	batch := max(1, m.runtime.Policy.MaxConcurrentRestarts)
	m.mu.Unlock()

	whole := false
	defer func() { m.saveUse(whole) }()
	res := pluginwire.ReconcileResult{Applied: []string{}, Removed: []string{}, MissingArtifacts: []string{}, Failed: []pluginwire.FailedInstallation{}}
	if res.Removed, err = m.withdrawAll(ctx, active, next); err != nil {
		return none, err
	}
	// What was used last is launched first: after the runtime was restarted, its users
	// wait least.
	ordered := m.preparedFirst(m.uses.order(want))
	states := map[string]pluginwire.StateResult{}
	for start := 0; start < len(ordered); start += batch {
		part := ordered[start:min(start+batch, len(ordered))]
		done, err := m.applyBatch(ctx, part)
		if err != nil {
			return none, err
		}
		for i, s := range done {
			states[part[i].Binding.InstallationUUID] = s
		}
	}
	for _, w := range want {
		uuid := w.Binding.InstallationUUID
		res.Applied = append(res.Applied, uuid)
		switch s := states[uuid]; s.State {
		case pluginwire.StateArtifactMissing:
			res.MissingArtifacts = append(res.MissingArtifacts, uuid)
		case pluginwire.StateFailed:
			res.Failed = append(res.Failed, pluginwire.FailedInstallation{InstallationUUID: uuid, ErrorCode: s.ErrorCode, Message: s.Message})
		}
	}
	m.uses.keep(next)
	whole = true
	keep := map[string]bool{}
	for uuid := range next {
		keep[uuid] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.table.Collect(keep, marks)
	return res, nil
}

// preparedFirst puts what needs no installer before what does.
func (m *Manager) preparedFirst(want []pluginwire.DesiredState) []pluginwire.DesiredState {
	ready := map[string]bool{} // by artifact
	for _, w := range want {
		digest := w.Binding.ArtifactDigest
		if _, known := ready[digest]; !known {
			a, found, err := m.cfg.Artifacts.Lookup(digest)
			ready[digest] = err != nil || !found || m.trees.Ready(digest, a.Code)
		}
	}
	installs := func(w pluginwire.DesiredState) bool { return w.Enabled && !ready[w.Binding.ArtifactDigest] }
	return slices.Concat(slices.DeleteFunc(slices.Clone(want), installs),
		slices.DeleteFunc(slices.Clone(want), func(w pluginwire.DesiredState) bool { return !installs(w) }))
}

// withdrawers bounds how many installations a reconcile removes at a time.
const withdrawers = 32

// withdrawAll removes what is active and not wanted as it is, and returns the
// installations it removed, sorted.
func (m *Manager) withdrawAll(ctx context.Context, active, next map[string]pluginwire.Context) ([]string, error) {
	var group sync.WaitGroup
	var mu sync.Mutex
	var errs error
	removed := []string{}
	places := make(tokens, withdrawers)
	for uuid, b := range active {
		if next[uuid] == b {
			continue
		}
		free, err := places.acquire(ctx)
		if err != nil {
			mu.Lock()
			errs = errors.Join(errs, err)
			mu.Unlock()
			break
		}
		group.Go(func() {
			defer free()
			gone, err := m.withdraw(ctx, uuid, b)
			mu.Lock()
			defer mu.Unlock()
			errs = errors.Join(errs, err)
			if gone {
				removed = append(removed, uuid)
			}
		})
	}
	group.Wait()
	slices.Sort(removed)
	return removed, errs
}

// withdraw removes a binding that a reconcile does not want, if it is still the
// current one; a newer apply that came meanwhile wins.
func (m *Manager) withdraw(ctx context.Context, uuid string, b pluginwire.Context) (bool, error) {
	unlock, err := m.turn(ctx, change{b, true})
	if err != nil {
		return false, err
	}
	defer unlock()
	m.mu.Lock()
	cur, ok := m.table.Current(uuid)
	m.mu.Unlock()
	if !ok || cur != b {
		return false, nil
	}
	if err := m.deactivate(ctx, b); err != nil {
		return false, err
	}
	m.revoke(b)
	return true, nil
}

// applyBatch applies entries at the same time. If one is refused, the others are
// cancelled and waited for.
func (m *Manager) applyBatch(ctx context.Context, part []pluginwire.DesiredState) ([]pluginwire.StateResult, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := make([]pluginwire.StateResult, len(part))
	var group sync.WaitGroup
	for i, w := range part {
		group.Go(func() {
			res, err := m.applyNow(ctx, w.Binding, nil, pluginwire.ApplyRequest{Enabled: w.Enabled, Mode: w.Mode})
			if err != nil {
				cancel(err)
			}
			out[i] = res
		})
	}
	group.Wait()
	return out, context.Cause(ctx)
}
