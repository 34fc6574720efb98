package storetest

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func handleOf(p store.Process) string   { return p.Handle }
func fenceID(f store.Fence) string      { return f.ID }
func eventID(a store.AuditEvent) string { return a.ID }

func cutProcess(p store.Process) store.Process {
	p = clone(p)
	p.Created = cut(p.Created)
	p.CloseAsked, p.Started, p.Exited, p.Closed = cutMaybe(p.CloseAsked), cutMaybe(p.Started), cutMaybe(p.Exited), cutMaybe(p.Closed)
	if len(p.Spec) == 0 {
		p.Spec = nil
	}
	return p
}

// CreateProcess implements [store.Store].
func (m *Memory) CreateProcess(ctx context.Context, p store.Process, c store.Capacity, a store.AuditEvent) (store.Process, bool, error) {
	if err := first(p.Validate(), a.Validate()); err != nil {
		return store.Process{}, false, err
	}
	if p.State != api.StateRequested && p.State != api.StateNeverStarted {
		return store.Process{}, false, refuse(errdefs.Invalid, "a new process is requested or never_started")
	}
	if err := m.enter(ctx); err != nil {
		return store.Process{}, false, err
	}
	defer m.mu.Unlock()
	for _, old := range m.processes {
		if old.Run == p.Run && old.RequestID == p.RequestID {
			if old.Workspace != p.Workspace {
				return store.Process{}, false, missing("run", p.Run)
			}
			return clone(old), false, nil
		}
	}
	if err := m.mayStart(&p, c); err != nil {
		return store.Process{}, false, err
	}
	if _, ok := find(m.processes, handleOf, p.Handle); ok {
		return store.Process{}, false, refuse(errdefs.Conflict, "the process %q is recorded already", p.Handle)
	}
	if err := m.addAudit(a); err != nil {
		return store.Process{}, false, err
	}
	_ = m.touch(p.Box, p.Created)
	p = cutProcess(p)
	p.Version = 1
	m.processes = append(m.processes, p)
	return clone(p), true, nil
}

func (m *Memory) mayStart(p *store.Process, c store.Capacity) error {
	r, err := m.run(p.Run)
	switch {
	case err != nil || r.Workspace != p.Workspace:
		return missing("run", p.Run)
	case r.State != api.RunActive:
		return refuse(errdefs.Conflict, "the run is %s", r.State)
	}
	specs := int64(0)
	for _, o := range m.processes {
		if o.Workspace == p.Workspace {
			specs += int64(len(o.Spec))
		}
	}
	kept := count(m.processes, func(o *store.Process) bool { return o.Workspace == p.Workspace })
	if err := room("kept_processes", kept, c.Kept.Processes); err != nil {
		return err
	}
	if n := int64(len(p.Spec)); n > 0 && c.Kept.SpecBytes > 0 && specs+n > c.Kept.SpecBytes {
		return errdefs.New(errdefs.Exhausted, "too much is recorded").With("limit", "kept_spec_bytes")
	}
	switch {
	case p.State == api.StateNeverStarted:
		return nil
	case r.Box != p.Box || r.Target != p.Target:
		return refuse(errdefs.Invalid, "the run is bound elsewhere")
	}
	if err := m.enabled(p.Target); err != nil {
		return err
	}
	if f, ok := m.standing(p.Target, p.Box); ok {
		return errdefs.New(errdefs.Fenced, "the fence %s stands", f).With("fence", f)
	}
	live := func(is func(*store.Process) bool) int {
		return count(m.processes, func(o *store.Process) bool { return o.Live() && is(o) })
	}
	for _, o := range m.processes {
		if o.Workspace == p.Workspace && o.Box == p.Box && o.Run != p.Run && o.State == api.StateClosing && o.Cleanup != api.CleanupQuiescent {
			return errdefs.New(errdefs.Cancelling, "the process %s of the box is being stopped", o.Handle).With("handle", o.Handle)
		}
	}
	return first(
		room("per_target", live(func(o *store.Process) bool { return o.Target == p.Target }), c.PerTarget),
		room("per_workspace", live(func(o *store.Process) bool { return o.Workspace == p.Workspace }), c.PerWorkspace),
		room("per_run", live(func(o *store.Process) bool { return o.Run == p.Run }), c.PerRun))
}

// SaveProcess implements [store.Store].
func (m *Memory) SaveProcess(ctx context.Context, p store.Process, ch store.Change) (int64, error) {
	if err := first(p.Validate(), ch.Validate(&p)); err != nil {
		return 0, err
	}
	if err := m.enter(ctx); err != nil {
		return 0, err
	}
	defer m.mu.Unlock()
	i, ok := find(m.processes, handleOf, p.Handle)
	if !ok {
		return 0, missing("process", p.Handle)
	}
	old := &m.processes[i]
	if old.Version != p.Version {
		return 0, errdefs.New(errdefs.Conflict, "the process was changed meanwhile").With("version", strconv.FormatInt(old.Version, 10))
	}
	p = cutProcess(p)
	if old.RequestID != p.RequestID || old.Digest != p.Digest || old.Workspace != p.Workspace || old.Run != p.Run ||
		old.Target != p.Target || old.Box != p.Box || old.Generation != p.Generation || !old.Created.Equal(p.Created) {
		return 0, refuse(errdefs.Invalid, "that would change what identifies the process")
	}
	if err := m.mayApply(&p, ch); err != nil {
		return 0, err
	}
	if f := ch.Fence; f != nil {
		v := clone(*f)
		v.Created = cut(v.Created)
		m.fences = append(m.fences, v)
		m.fenceRun[v.ID] = p.Run
	}
	if c := ch.ClearFence; c != nil {
		j, _ := find(m.fences, fenceID, c.ID)
		f := &m.fences[j]
		f.Cleared, f.ClearedBy, f.ClearReason = cutMaybe(&c.At), c.By, c.Reason
		_ = m.touch(p.Box, c.At) // which may be forgotten
	}
	if r := ch.Receipt; r != nil {
		v := clone(*r)
		v.Created = cut(v.Created)
		m.receipts[p.Handle] = v
	}
	if err := m.addAudit(ch.Audit...); err != nil {
		return 0, err // ruled out by mayApply
	}
	p.Version++
	p.Spec = old.Spec
	*old = p
	return p.Version, nil
}

// mayApply says whether everything of a change can be made. A fence may be
// raised and lifted in one change.
func (m *Memory) mayApply(p *store.Process, ch store.Change) error {
	if f := ch.Fence; f != nil {
		if _, ok := find(m.fences, fenceID, f.ID); ok {
			return refuse(errdefs.Conflict, "the fence %q is recorded already", f.ID)
		}
	}
	if c := ch.ClearFence; c != nil && (ch.Fence == nil || ch.Fence.ID != c.ID) {
		j, ok := find(m.fences, fenceID, c.ID)
		if !ok || m.fences[j].Handle != p.Handle {
			return missing("fence", c.ID)
		}
		if m.fences[j].Cleared != nil {
			return refuse(errdefs.Conflict, "the fence %q is lifted already", c.ID)
		}
	}
	if r := ch.Receipt; r != nil {
		if _, ok := m.receipts[p.Handle]; ok {
			return refuse(errdefs.Conflict, "the process has a receipt already")
		}
		for _, o := range m.receipts {
			if o.ID == r.ID {
				return refuse(errdefs.Conflict, "the receipt %q is recorded already", r.ID)
			}
		}
	}
	return m.auditFree(ch.Audit...)
}

func seesProcess(s store.Scope) func(store.Process) bool {
	return func(p store.Process) bool { return sees(s, p.Workspace, p.Run == s.Run) }
}

// Process implements [store.Store].
func (m *Memory) Process(ctx context.Context, s store.Scope, handle string) (store.Process, error) {
	return m.process(ctx, s, func(p store.Process) bool { return p.Handle == handle })
}

// ProcessByRequest implements [store.Store].
func (m *Memory) ProcessByRequest(ctx context.Context, s store.Scope, run, requestID string) (store.Process, error) {
	return m.process(ctx, s, func(p store.Process) bool { return p.Run == run && p.RequestID == requestID })
}

func (m *Memory) process(ctx context.Context, s store.Scope, is func(store.Process) bool) (store.Process, error) {
	if err := m.enter(ctx); err != nil {
		return store.Process{}, err
	}
	defer m.mu.Unlock()
	i := slices.IndexFunc(m.processes, is)
	if i < 0 || !seesProcess(s)(m.processes[i]) {
		return store.Process{}, missing("process", "")
	}
	return clone(m.processes[i]), nil
}

// Processes implements [store.Store].
func (m *Memory) Processes(ctx context.Context, s store.Scope, f store.ProcessFilter) ([]store.Process, error) {
	ps, err := page(ctx, m, func() []store.Process { return m.processes }, handleOf, f.Page, seesProcess(s), func(p store.Process) bool {
		return (f.Box == "" || p.Box == f.Box) && (f.Target == "" || p.Target == f.Target) && (!f.Live || p.Live()) && (!f.LogKept || !p.LogGone) &&
			(f.ClosedBefore.IsZero() || p.Closed != nil && p.Closed.Before(cut(f.ClosedBefore)))
	})
	for i := range ps {
		if f.NoSpec {
			ps[i].Spec = nil
		}
	}
	return ps, err
}

// ExcessLogs implements [store.Store].
func (m *Memory) ExcessLogs(ctx context.Context, logs int, maxBytes int64, limit int) ([]store.Process, error) {
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	var kept []store.Process
	for _, p := range slices.Backward(m.processes) {
		if !p.LogGone && p.Closed != nil {
			kept = append(kept, clone(p))
		}
	}
	slices.SortStableFunc(kept, func(a, b store.Process) int { return b.Closed.Compare(*a.Closed) })
	n, bytes := map[string]int{}, map[string]int64{}
	var out []store.Process
	for _, p := range kept {
		n[p.Workspace]++
		bytes[p.Workspace] += p.Log.Next - p.Log.Oldest
		if logs > 0 && n[p.Workspace] > logs || maxBytes > 0 && bytes[p.Workspace] > maxBytes {
			p.Spec = nil
			out = append(out, p)
		}
	}
	slices.Reverse(out)
	return out[:min(limit, len(out))], nil
}

// Receipt implements [store.Store].
func (m *Memory) Receipt(ctx context.Context, handle string) (store.Receipt, error) {
	if err := m.enter(ctx); err != nil {
		return store.Receipt{}, err
	}
	defer m.mu.Unlock()
	r, ok := m.receipts[handle]
	if !ok {
		return r, missing("receipt of the process", handle)
	}
	return clone(r), nil
}

// seesFence: a run's scope sees the fences its processes raised.
func (m *Memory) seesFence(s store.Scope) func(store.Fence) bool {
	return func(f store.Fence) bool { return sees(s, f.Workspace, m.fenceRun[f.ID] == s.Run) }
}

// Fence implements [store.Store].
func (m *Memory) Fence(ctx context.Context, s store.Scope, id string) (store.Fence, error) {
	if err := m.enter(ctx); err != nil {
		return store.Fence{}, err
	}
	defer m.mu.Unlock()
	i, ok := find(m.fences, fenceID, id)
	if !ok || !m.seesFence(s)(m.fences[i]) {
		return store.Fence{}, missing("fence", id)
	}
	return clone(m.fences[i]), nil
}

// Fences implements [store.Store].
func (m *Memory) Fences(ctx context.Context, s store.Scope, standing bool, p store.Page) ([]store.Fence, error) {
	return page(ctx, m, func() []store.Fence { return m.fences }, fenceID, p, m.seesFence(s),
		func(f store.Fence) bool { return !standing || f.Cleared == nil })
}

// AppendAudit implements [store.Store].
func (m *Memory) AppendAudit(ctx context.Context, a store.AuditEvent) error {
	if err := a.Validate(); err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	return m.addAudit(a)
}

// Audit implements [store.Store].
func (m *Memory) Audit(ctx context.Context, workspace string, p store.Page) ([]store.AuditEvent, error) {
	return page(ctx, m, func() []store.AuditEvent { return m.audit }, eventID, p,
		func(a store.AuditEvent) bool { return workspace == "" || a.Workspace == workspace }, nil)
}

// DeleteAuditBefore implements [store.Store].
func (m *Memory) DeleteAuditBefore(ctx context.Context, t time.Time) (int, error) {
	if err := m.enter(ctx); err != nil {
		return 0, err
	}
	defer m.mu.Unlock()
	n := len(m.audit)
	m.audit = slices.DeleteFunc(m.audit, func(a store.AuditEvent) bool { return a.At.Before(cut(t)) })
	return n - len(m.audit), nil
}
