package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func scanWorkspace(r row) (store.Workspace, error) {
	var w store.Workspace
	var created int64
	err := r.Scan(&w.Name, &created)
	w.Created = timeOf(created)
	return w, err
}

// CreateWorkspace implements [store.Store].
func (s *Store) CreateWorkspace(ctx context.Context, w store.Workspace, a store.AuditEvent) error {
	if err := firstOf(w.Validate(), a.Validate()); err != nil {
		return err
	}
	return s.change(ctx, "creating a workspace", func(t *tx) error {
		if err := t.insert("workspace", w.Name, `INSERT INTO workspaces (name, created) VALUES (?, ?)`, w.Name, micros(w.Created)); err != nil {
			return err
		}
		return t.audit(a)
	})
}

// Workspace implements [store.Store].
func (s *Store) Workspace(ctx context.Context, name string) (store.Workspace, error) {
	return get(ctx, s, "workspace", name, scanWorkspace, `SELECT name, created FROM workspaces WHERE name = ?`, name)
}

// Workspaces implements [store.Store].
func (s *Store) Workspaces(ctx context.Context, p store.Page) ([]store.Workspace, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	ws, err := queryAll(ctx, s.reads, scanWorkspace, `SELECT name, created FROM workspaces WHERE name > ? ORDER BY name LIMIT ?`, p.After, p.Limit)
	return ws, s.dbError(err, "listing workspaces")
}

const keyColumns = `id, kind, workspace, name, hash, created, revoked`

func scanKey(r row) (store.Key, error) {
	var k store.Key
	var hash []byte
	var created int64
	var revoked sql.NullInt64
	err := r.Scan(&k.ID, &k.Kind, &k.Workspace, &k.Name, &hash, &created, &revoked)
	copy(k.Hash[:], hash)
	k.Created, k.Revoked = timeOf(created), timeOrNil(revoked)
	return k, err
}

// CreateKey implements [store.Store].
func (s *Store) CreateKey(ctx context.Context, k store.Key, a store.AuditEvent) error {
	if err := firstOf(k.Validate(), a.Validate()); err != nil {
		return err
	}
	return s.change(ctx, "creating a key", func(t *tx) error {
		if k.Kind == store.KeyWorkspace {
			if err := t.require("workspace", k.Workspace, `SELECT 1 FROM workspaces WHERE name = ?`, k.Workspace); err != nil {
				return err
			}
		}
		if err := t.insert("key", k.ID, `INSERT INTO keys (`+keyColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?)`,
			k.ID, k.Kind, k.Workspace, k.Name, k.Hash[:], micros(k.Created), microsOrNull(k.Revoked)); err != nil {
			return err
		}
		return t.audit(a)
	})
}

// Key implements [store.Store].
func (s *Store) Key(ctx context.Context, id string) (store.Key, error) {
	return get(ctx, s, "key", id, scanKey, `SELECT `+keyColumns+` FROM keys WHERE id = ?`, id)
}

// Keys implements [store.Store].
func (s *Store) Keys(ctx context.Context, workspace string, p store.Page) ([]store.Key, error) {
	return list(ctx, s, listing{what: "key", table: "keys", id: "id", columns: keyColumns,
		scope: clause{sql: "workspace = ?", args: []any{workspace}}}, p, scanKey)
}

// RevokeKey implements [store.Store].
func (s *Store) RevokeKey(ctx context.Context, id string, at time.Time, a store.AuditEvent) error {
	if err := a.Validate(); err != nil {
		return err
	}
	return s.change(ctx, "revoking a key", func(t *tx) error {
		n, err := t.exec(`UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL`, micros(at), id)
		switch {
		case err != nil:
			return err
		case n == 0:
			return t.require("key", id, `SELECT 1 FROM keys WHERE id = ?`, id)
		}
		return t.audit(a)
	})
}

// insert adds a record whose id may be taken.
func (t *tx) insert(what, id, query string, args ...any) error {
	_, err := t.exec(query, args...)
	if taken(err) {
		return errdefs.New(errdefs.Conflict, "the %s %q is recorded already", what, id)
	}
	return err
}

// require returns not_found unless the query finds something.
func (t *tx) require(what, id, query string, args ...any) error {
	_, err := t.count(query, args...)
	if errors.Is(err, sql.ErrNoRows) {
		return notFound(what, id)
	}
	return err
}
