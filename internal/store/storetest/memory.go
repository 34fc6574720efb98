package storetest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// Memory is the ledger as plain slices behind a mutex: the model that real
// ledgers are compared with, and a store for tests that need no file. It passes
// the same suite, but for durability. Slices are in the order of recording.
type Memory struct {
	mu         sync.Mutex
	closed     bool
	generation int64
	workspaces map[string]store.Workspace
	keys       []store.Key
	targets    map[string]store.Target
	boxes      []store.Box
	runs       []store.Run
	processes  []store.Process
	receipts   map[string]store.Receipt // by handle
	fences     []store.Fence
	fenceRun   map[string]string // the run of each fence's process
	audit      []store.AuditEvent
}

var _ store.Store = (*Memory)(nil)

// NewMemory makes an empty one.
func NewMemory() *Memory {
	return &Memory{workspaces: map[string]store.Workspace{}, targets: map[string]store.Target{}, receipts: map[string]store.Receipt{}, fenceRun: map[string]string{}}
}

// enter locks, unless the store is closed or the caller has left.
func (m *Memory) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the caller did not wait")
	}
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return errdefs.New(errdefs.Unavailable, "the ledger is closed")
	}
	return nil
}

// Close implements [store.Store].
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

// Instance implements [store.Store].
func (m *Memory) Instance(ctx context.Context) (string, error) {
	if err := m.enter(ctx); err != nil {
		return "", err
	}
	defer m.mu.Unlock()
	return "inst_aaaaaaaaaaaaaaaaaaaaaaaaaa", nil
}

// NextGeneration implements [store.Store].
func (m *Memory) NextGeneration(ctx context.Context) (int64, error) {
	if err := m.enter(ctx); err != nil {
		return 0, err
	}
	defer m.mu.Unlock()
	m.generation++
	return m.generation, nil
}

func missing(what, id string) error {
	return errdefs.New(errdefs.NotFound, "there is no %s %q here", what, id)
}

func refuse(code errdefs.Code, format string, args ...any) error {
	return errdefs.New(code, format, args...)
}

func (m *Memory) addAudit(events ...store.AuditEvent) error {
	for _, a := range events {
		if slices.ContainsFunc(m.audit, func(o store.AuditEvent) bool { return o.ID == a.ID }) {
			return refuse(errdefs.Conflict, "the audit event %q is recorded already", a.ID)
		}
		a.At = cut(a.At)
		a.Detail = maps.Clone(a.Detail)
		m.audit = append(m.audit, a)
	}
	return nil
}

// auditFree says whether addAudit would succeed, so that nothing is changed if not.
func (m *Memory) auditFree(events ...store.AuditEvent) error {
	n := len(m.audit)
	err := m.addAudit(events...)
	m.audit = m.audit[:n]
	return err
}

// CreateWorkspace implements [store.Store].
func (m *Memory) CreateWorkspace(ctx context.Context, w store.Workspace, a store.AuditEvent) error {
	if err := first(w.Validate(), a.Validate()); err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	if _, ok := m.workspaces[w.Name]; ok {
		return refuse(errdefs.Conflict, "the workspace %q is recorded already", w.Name)
	}
	if err := m.addAudit(a); err != nil {
		return err
	}
	w.Created = cut(w.Created)
	m.workspaces[w.Name] = w
	return nil
}

// Workspace implements [store.Store].
func (m *Memory) Workspace(ctx context.Context, name string) (store.Workspace, error) {
	if err := m.enter(ctx); err != nil {
		return store.Workspace{}, err
	}
	defer m.mu.Unlock()
	w, ok := m.workspaces[name]
	if !ok {
		return w, missing("workspace", name)
	}
	return w, nil
}

// Workspaces implements [store.Store].
func (m *Memory) Workspaces(ctx context.Context, p store.Page) ([]store.Workspace, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	var out []store.Workspace
	for _, name := range slices.Sorted(maps.Keys(m.workspaces)) {
		if name > p.After && len(out) < p.Limit {
			out = append(out, m.workspaces[name])
		}
	}
	return out, nil
}

// CreateKey implements [store.Store].
func (m *Memory) CreateKey(ctx context.Context, k store.Key, a store.AuditEvent) error {
	if err := first(k.Validate(), a.Validate()); err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	if _, ok := m.workspaces[k.Workspace]; !ok && k.Kind == store.KeyWorkspace {
		return missing("workspace", k.Workspace)
	}
	if _, ok := find(m.keys, keyID, k.ID); ok {
		return refuse(errdefs.Conflict, "the key %q is recorded already", k.ID)
	}
	if err := m.addAudit(a); err != nil {
		return err
	}
	k.Created, k.Revoked = cut(k.Created), cutMaybe(k.Revoked)
	m.keys = append(m.keys, k)
	return nil
}

func keyID(k store.Key) string { return k.ID }

// Key implements [store.Store].
func (m *Memory) Key(ctx context.Context, id string) (store.Key, error) {
	if err := m.enter(ctx); err != nil {
		return store.Key{}, err
	}
	defer m.mu.Unlock()
	i, ok := find(m.keys, keyID, id)
	if !ok {
		return store.Key{}, missing("key", id)
	}
	return m.keys[i], nil
}

// Keys implements [store.Store].
func (m *Memory) Keys(ctx context.Context, workspace string, p store.Page) ([]store.Key, error) {
	return page(ctx, m, func() []store.Key { return m.keys }, keyID, p,
		func(k store.Key) bool { return k.Workspace == workspace }, nil)
}

// RevokeKey implements [store.Store].
func (m *Memory) RevokeKey(ctx context.Context, id string, at time.Time, a store.AuditEvent) error {
	if err := a.Validate(); err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	i, ok := find(m.keys, keyID, id)
	switch {
	case !ok:
		return missing("key", id)
	case m.keys[i].Revoked != nil:
		return nil
	}
	if err := m.addAudit(a); err != nil {
		return err
	}
	m.keys[i].Revoked = cutMaybe(&at)
	return nil
}

// PutTarget implements [store.Store].
func (m *Memory) PutTarget(ctx context.Context, t store.Target) (store.Target, error) {
	if err := t.Validate(); err != nil {
		return store.Target{}, err
	}
	if err := m.enter(ctx); err != nil {
		return store.Target{}, err
	}
	defer m.mu.Unlock()
	if old, ok := m.targets[t.Name]; ok {
		return old, nil
	}
	t.Generation = max(t.Generation, 1)
	m.targets[t.Name] = t
	return t, nil
}

// Target implements [store.Store].
func (m *Memory) Target(ctx context.Context, name string) (store.Target, error) {
	if err := m.enter(ctx); err != nil {
		return store.Target{}, err
	}
	defer m.mu.Unlock()
	t, ok := m.targets[name]
	if !ok {
		return t, missing("target", name)
	}
	return t, nil
}

// Targets implements [store.Store].
func (m *Memory) Targets(ctx context.Context) ([]store.Target, error) {
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	var out []store.Target
	for _, name := range slices.Sorted(maps.Keys(m.targets)) {
		out = append(out, m.targets[name])
	}
	return out, nil
}

// SetTargetEnabled implements [store.Store].
func (m *Memory) SetTargetEnabled(ctx context.Context, name string, enabled bool, a store.AuditEvent) (store.Target, error) {
	if err := a.Validate(); err != nil {
		return store.Target{}, err
	}
	if err := m.enter(ctx); err != nil {
		return store.Target{}, err
	}
	defer m.mu.Unlock()
	t, ok := m.targets[name]
	if !ok {
		return t, missing("target", name)
	}
	if t.Enabled == enabled {
		return t, nil
	}
	if err := m.addAudit(a); err != nil {
		return store.Target{}, err
	}
	t.Enabled = enabled
	t.Generation++
	m.targets[name] = t
	return t, nil
}

// SetTargetHost implements [store.Store].
func (m *Memory) SetTargetHost(ctx context.Context, name, hostID, bootID string) error {
	if err := (store.Target{Name: name, Kind: "box", HostID: hostID, BootID: bootID}).Validate(); err != nil {
		return err
	}
	if err := m.enter(ctx); err != nil {
		return err
	}
	defer m.mu.Unlock()
	t, ok := m.targets[name]
	if !ok {
		return missing("target", name)
	}
	t.HostID, t.BootID = hostID, bootID
	m.targets[name] = t
	return nil
}

// room returns exhausted if one more than n would exceed the bound.
func room(what string, n, bound int) error {
	if bound > 0 && n >= bound {
		return errdefs.New(errdefs.Exhausted, "there are %d %s, the limit is %d", n, what, bound).With("limit", what).With("bound", strconv.Itoa(bound))
	}
	return nil
}

func find[T any](all []T, id func(T) string, want string) (int, bool) {
	i := slices.IndexFunc(all, func(v T) bool { return id(v) == want })
	return i, i >= 0
}

func count[T any](all []T, is func(*T) bool) int {
	n := 0
	for i := range all {
		if is(&all[i]) {
			n++
		}
	}
	return n
}

// page returns the records of a listing, newest first. visible is the scope,
// match the filter (nil takes all).
func page[T any](ctx context.Context, m *Memory, all func() []T, id func(T) string, p store.Page, visible, match func(T) bool) ([]T, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	if err := m.enter(ctx); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	records := all()
	start := len(records)
	if p.After != "" {
		i, ok := find(records, id, p.After)
		if !ok || !visible(records[i]) {
			return nil, missing("record", p.After)
		}
		start = i
	}
	var out []T
	for i := start - 1; i >= 0 && len(out) < p.Limit; i-- {
		if visible(records[i]) && (match == nil || match(records[i])) {
			out = append(out, clone(records[i]))
		}
	}
	return out, nil
}

// clone copies a record with all it points to, the way a database would.
func clone[T any](v T) T {
	b, err := json.Marshal(v)
	var out T
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		panic(fmt.Sprintf("storetest: a record cannot be copied: %v", err)) // our own types always can
	}
	return out
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// cut gives a time the precision and zone that a ledger keeps.
func cut(t time.Time) time.Time { return time.UnixMicro(t.UnixMicro()).UTC() }

func cutMaybe(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	v := cut(*t)
	return &v
}

func sees(s store.Scope, workspace string, ofRun bool) bool {
	return s.All || s.Workspace != "" && s.Workspace == workspace && (s.Run == "" || ofRun)
}
