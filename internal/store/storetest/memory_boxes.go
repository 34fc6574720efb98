package storetest

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func boxID(b store.Box) string { return b.ID }
func runID(r store.Run) string { return r.ID }

func (m *Memory) box(id string) (*store.Box, error) {
	i, ok := find(m.boxes, boxID, id)
	if !ok {
		return nil, missing("box", id)
	}
	return &m.boxes[i], nil
}

func (m *Memory) run(id string) (*store.Run, error) {
	i, ok := find(m.runs, runID, id)
	if !ok {
		return nil, missing("run", id)
	}
	return &m.runs[i], nil
}

// standing returns the oldest fence on a box or its whole target.
func (m *Memory) standing(target, box string) (string, bool) {
	for _, f := range m.fences {
		if f.Cleared == nil && f.Target == target && (f.Box == "" || f.Box == box) {
			return f.ID, true
		}
	}
	return "", false
}

func (m *Memory) enabled(name string) error {
	t, ok := m.targets[name]
	switch {
	case !ok:
		return missing("target", name)
	case !t.Enabled:
		return refuse(errdefs.Conflict, "the target %q is disabled", name)
	}
	return nil
}

// CreateBox implements [store.Store].
func (m *Memory) CreateBox(ctx context.Context, b store.Box, c store.Capacity) (store.Box, bool, error) {
	if err := b.Validate(); err != nil {
		return store.Box{}, false, err
	}
	if err := m.enter(ctx); err != nil {
		return store.Box{}, false, err
	}
	defer m.mu.Unlock()
	for _, old := range m.boxes {
		if b.Key == "" || old.Workspace != b.Workspace || old.Key != b.Key {
			continue
		}
		if old.State == api.BoxRemoving {
			return store.Box{}, false, refuse(errdefs.Conflict, "the box %s is being removed", old.ID)
		}
		return clone(old), false, nil
	}
	if _, ok := m.workspaces[b.Workspace]; !ok {
		return store.Box{}, false, missing("workspace", b.Workspace)
	}
	if err := first(m.enabled(b.Target),
		room("per_target", count(m.boxes, func(o *store.Box) bool { return o.Target == b.Target }), c.PerTarget),
		room("per_workspace", count(m.boxes, func(o *store.Box) bool { return o.Workspace == b.Workspace }), c.PerWorkspace)); err != nil {
		return store.Box{}, false, err
	}
	if _, err := m.box(b.ID); err == nil {
		return store.Box{}, false, refuse(errdefs.Conflict, "the box %q is recorded already", b.ID)
	}
	b = clone(b)
	b.Created, b.Used = cut(b.Created), cut(b.Used)
	m.boxes = append(m.boxes, b)
	return clone(b), true, nil
}

// seesBox: a run's scope sees its box.
func (m *Memory) seesBox(s store.Scope) func(store.Box) bool {
	return func(b store.Box) bool {
		r, err := m.run(s.Run)
		return sees(s, b.Workspace, err == nil && r.Box == b.ID)
	}
}

// Box implements [store.Store].
func (m *Memory) Box(ctx context.Context, s store.Scope, id string) (store.Box, error) {
	if err := m.enter(ctx); err != nil {
		return store.Box{}, err
	}
	defer m.mu.Unlock()
	b, err := m.box(id)
	if err != nil || !m.seesBox(s)(*b) {
		return store.Box{}, missing("box", id)
	}
	return clone(*b), nil
}

// Boxes implements [store.Store].
func (m *Memory) Boxes(ctx context.Context, s store.Scope, p store.Page) ([]store.Box, error) {
	return page(ctx, m, func() []store.Box { return m.boxes }, boxID, p, m.seesBox(s), nil)
}

// SetBoxState implements [store.Store].
func (m *Memory) SetBoxState(ctx context.Context, id string, state api.BoxState) error {
	if err := store.ValidateBoxState(state); err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	b, err := m.box(id)
	if err != nil {
		return err
	}
	order := map[api.BoxState]int{api.BoxCreating: 1, api.BoxReady: 2, api.BoxRemoving: 3}
	if order[state] < order[b.State] {
		return refuse(errdefs.Conflict, "the box %s is %s", id, b.State)
	}
	if state == api.BoxRemoving && b.State != state {
		if err := m.unused(b); err != nil {
			return err
		}
	}
	b.State = state
	return nil
}

// unused returns why a box may not be removed.
func (m *Memory) unused(b *store.Box) error {
	if f, ok := m.standing(b.Target, b.ID); ok {
		return errdefs.New(errdefs.Fenced, "the fence %s stands", f).With("fence", f)
	}
	busy := count(m.processes, func(p *store.Process) bool { return p.Box == b.ID && p.Workspace == b.Workspace && p.Live() }) +
		count(m.runs, func(r *store.Run) bool { return r.Box == b.ID && r.State != api.RunFinished })
	if busy > 0 {
		return refuse(errdefs.Conflict, "the box %s is in use", b.ID)
	}
	return nil
}

// TouchBox implements [store.Store].
func (m *Memory) TouchBox(ctx context.Context, id string, used time.Time) error {
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	return m.touch(id, used)
}

func (m *Memory) touch(id string, used time.Time) error {
	b, err := m.box(id)
	if err != nil {
		return err
	}
	if used = cut(used); used.After(b.Used) {
		b.Used = used
	}
	return nil
}

// DeleteBox implements [store.Store].
func (m *Memory) DeleteBox(ctx context.Context, id string) error {
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	b, err := m.box(id)
	switch {
	case err != nil:
		return err
	case b.State == api.BoxReady:
		return refuse(errdefs.Conflict, "the box %s is ready", id)
	}
	m.boxes = slices.DeleteFunc(m.boxes, func(b store.Box) bool { return b.ID == id })
	return nil
}

// IdleBoxes implements [store.Store].
func (m *Memory) IdleBoxes(ctx context.Context, now time.Time) ([]store.Box, error) {
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	var out []store.Box
	for i := range m.boxes {
		b := &m.boxes[i]
		if b.State == api.BoxReady && b.Used.Add(time.Duration(b.IdleMillis)*time.Millisecond).Before(cut(now)) && m.unused(b) == nil {
			out = append(out, clone(*b))
		}
	}
	slices.SortStableFunc(out, func(a, b store.Box) int { return cmp.Compare(a.Used.UnixMicro(), b.Used.UnixMicro()) })
	return out, nil
}

// CreateRun implements [store.Store].
func (m *Memory) CreateRun(ctx context.Context, r store.Run, c store.Capacity) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if r.State != api.RunActive {
		return refuse(errdefs.Invalid, "a new run is active")
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	b, err := m.box(r.Box)
	switch {
	case err != nil || b.Workspace != r.Workspace:
		return missing("box", r.Box)
	case b.Target != r.Target:
		return refuse(errdefs.Invalid, "the box is elsewhere")
	case b.State != api.BoxReady:
		return refuse(errdefs.Conflict, "the box is %s", b.State)
	}
	if f, ok := m.standing(r.Target, r.Box); ok {
		return errdefs.New(errdefs.Fenced, "the fence %s stands", f).With("fence", f)
	}
	mine := func(o *store.Run) bool { return o.Workspace == r.Workspace }
	if err := first(
		room("per_workspace", count(m.runs, func(o *store.Run) bool { return mine(o) && o.State != api.RunFinished }), c.PerWorkspace),
		room("kept_runs", count(m.runs, mine), c.Kept.Runs)); err != nil {
		return err
	}
	for _, o := range m.runs {
		if o.Box == r.Box && o.State != api.RunFinished && (o.Exclusive || r.Exclusive) {
			return refuse(errdefs.Conflict, "the run %s is in the box", o.ID)
		}
	}
	if _, err := m.run(r.ID); err == nil {
		return refuse(errdefs.Conflict, "the run %q is recorded already", r.ID)
	}
	r = clone(r)
	r.Created, r.Expires = cut(r.Created), cut(r.Expires)
	if len(r.Models) == 0 {
		r.Models = nil
	}
	m.runs = append(m.runs, r)
	return m.touch(r.Box, r.Created)
}

func seesRun(s store.Scope) func(store.Run) bool {
	return func(r store.Run) bool { return sees(s, r.Workspace, r.ID == s.Run) }
}

// Run implements [store.Store].
func (m *Memory) Run(ctx context.Context, s store.Scope, id string) (store.Run, error) {
	if err := m.enter(ctx); err != nil {
		return store.Run{}, err
	}
	defer m.mu.Unlock()
	r, err := m.run(id)
	if err != nil || !seesRun(s)(*r) {
		return store.Run{}, missing("run", id)
	}
	return clone(*r), nil
}

// SetRunState implements [store.Store].
func (m *Memory) SetRunState(ctx context.Context, id string, state api.RunState, at time.Time) (store.Run, error) {
	if err := store.ValidateRunState(state); err != nil {
		return store.Run{}, err
	}
	if err := m.enter(ctx); err != nil {
		return store.Run{}, err
	}
	defer m.mu.Unlock()
	r, err := m.run(id)
	if err != nil {
		return store.Run{}, err
	}
	order := map[api.RunState]int{api.RunActive: 1, api.RunFinishing: 2, api.RunFinished: 3}
	if order[state] < order[r.State] {
		return store.Run{}, refuse(errdefs.Conflict, "the run %s is %s", id, r.State)
	}
	if state == api.RunFinished && r.State != state {
		r.Finished = cutMaybe(&at)
		_ = m.touch(r.Box, at) // which may be forgotten
	}
	r.State = state
	return clone(*r), nil
}

// AddRunUsage implements [store.Store].
func (m *Memory) AddRunUsage(ctx context.Context, id, provider string, requests, up, down int64) error {
	if min(requests, up, down) < 0 || max(requests, up, down) > api.MaxOffset {
		return refuse(errdefs.Invalid, "usage out of range")
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	r, err := m.run(id)
	if err != nil {
		return err
	}
	for i := range r.Models {
		if g := &r.Models[i]; g.Provider == provider {
			g.Requests = min(g.Requests+requests, api.MaxOffset)
			g.BytesUp = min(g.BytesUp+up, api.MaxOffset)
			g.BytesDown = min(g.BytesDown+down, api.MaxOffset)
			return nil
		}
	}
	return missing("model grant", provider)
}

// Runs implements [store.Store].
func (m *Memory) Runs(ctx context.Context, s store.Scope, p store.Page) ([]store.Run, error) {
	return page(ctx, m, func() []store.Run { return m.runs }, runID, p, seesRun(s), nil)
}

// UnfinishedRuns implements [store.Store].
func (m *Memory) UnfinishedRuns(ctx context.Context) ([]store.Run, error) {
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	var out []store.Run
	for _, r := range m.runs {
		if r.State != api.RunFinished {
			out = append(out, clone(r))
		}
	}
	return out, nil
}

// DeleteRunsFinishedBefore implements [store.Store].
func (m *Memory) DeleteRunsFinishedBefore(ctx context.Context, t time.Time) (int, error) {
	if err := m.enter(ctx); err != nil {
		return 0, err
	}
	defer m.mu.Unlock()
	n := 0
	m.runs = slices.DeleteFunc(m.runs, func(r store.Run) bool {
		if r.Finished == nil || !r.Finished.Before(cut(t)) {
			return false
		}
		for i := range m.processes {
			p := &m.processes[i]
			if p.Run == r.ID && (p.Live() || !p.LogGone && p.State != api.StateNeverStarted || m.fencedBy(p.Handle)) {
				return false
			}
		}
		m.processes = slices.DeleteFunc(m.processes, func(p store.Process) bool {
			if p.Run == r.ID {
				delete(m.receipts, p.Handle)
			}
			return p.Run == r.ID
		})
		n++
		return true
	})
	return n, nil
}

func (m *Memory) fencedBy(handle string) bool {
	return slices.ContainsFunc(m.fences, func(f store.Fence) bool { return f.Handle == handle && f.Cleared == nil })
}
