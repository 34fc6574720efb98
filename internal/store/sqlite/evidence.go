package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

const (
	fenceColumns = `id, workspace, target, box, handle, reason, evidence, created, cleared, cleared_by, clear_reason`
	fenceOfRun   = `run = ?`
	auditColumns = `id, at, actor, workspace, action, object, detail`
	// pruneAtOnce bounds how many acts are deleted in one transaction.
	pruneAtOnce = 1000
)

// apply commits what comes with a save of p.
func (t *tx) apply(p *store.Process, ch store.Change) error {
	if f := ch.Fence; f != nil {
		evidence, err := toJSON(f.Evidence)
		if err != nil {
			return err
		}
		if err := t.insert("fence", f.ID, `INSERT INTO fences (id, workspace, target, box, handle, run, reason, evidence, created, cleared_by, clear_reason)
			VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '', '')`,
			f.ID, f.Workspace, f.Target, f.Box, f.Handle, p.Run, f.Reason, evidence, micros(f.Created)); err != nil {
			return err
		}
	}
	if c := ch.ClearFence; c != nil {
		// Only the process that raised a fence lifts it.
		n, err := t.exec(`UPDATE fences SET cleared = ?, cleared_by = ?, clear_reason = ? WHERE id = ? AND handle = ? AND cleared IS NULL`,
			micros(c.At), c.By, c.Reason, c.ID, p.Handle)
		if err != nil {
			return err
		}
		if n == 0 {
			if err := t.require("fence", c.ID, `SELECT 1 FROM fences WHERE id = ? AND handle = ?`, c.ID, p.Handle); err != nil {
				return err
			}
			return errdefs.New(errdefs.Conflict, "the fence %s is lifted already", c.ID)
		}
		if err := t.touchKept(p.Box, c.At); err != nil {
			return err
		}
	}
	if r := ch.Receipt; r != nil {
		body, err := json.Marshal(r.Body)
		if err != nil {
			return err
		}
		if err := t.insert("receipt of the process", r.Handle, `INSERT INTO receipts (id, handle, created, body) VALUES (?, ?, ?, ?)`,
			r.ID, r.Handle, micros(r.Created), body); err != nil {
			return err
		}
	}
	for _, a := range ch.Audit {
		if err := t.audit(a); err != nil {
			return err
		}
	}
	return nil
}

// Receipt implements [store.Store].
func (s *Store) Receipt(ctx context.Context, handle string) (store.Receipt, error) {
	return get(ctx, s, "receipt of the process", handle, func(r row) (store.Receipt, error) {
		var v store.Receipt
		var created int64
		var body []byte
		if err := r.Scan(&v.ID, &v.Handle, &created, &body); err != nil {
			return v, err
		}
		v.Created = timeOf(created)
		return v, json.Unmarshal(body, &v.Body)
	}, `SELECT id, handle, created, body FROM receipts WHERE handle = ?`, handle)
}

func scanFence(r row) (store.Fence, error) {
	var f store.Fence
	var evidence string
	var created int64
	var cleared sql.NullInt64
	if err := r.Scan(&f.ID, &f.Workspace, &f.Target, &f.Box, &f.Handle, &f.Reason, &evidence, &created, &cleared, &f.ClearedBy, &f.ClearReason); err != nil {
		return f, err
	}
	f.Created, f.Cleared = timeOf(created), timeOrNil(cleared)
	return f, json.Unmarshal([]byte(evidence), &f.Evidence)
}

// Fence implements [store.Store].
func (s *Store) Fence(ctx context.Context, sc store.Scope, id string) (store.Fence, error) {
	c := clause{sql: "id = ?", args: []any{id}}.and(scoped(sc, fenceOfRun))
	return get(ctx, s, "fence", id, scanFence, `SELECT `+fenceColumns+` FROM fences`+c.where(), c.args...)
}

// Fences implements [store.Store].
func (s *Store) Fences(ctx context.Context, sc store.Scope, standing bool, p store.Page) ([]store.Fence, error) {
	var where clause
	if standing {
		where.sql = "cleared IS NULL"
	}
	return list(ctx, s, listing{what: "fence", table: "fences", id: "id", columns: fenceColumns, scope: scoped(sc, fenceOfRun), where: where}, p, scanFence)
}

func (t *tx) audit(a store.AuditEvent) error {
	detail, err := toJSON(a.Detail)
	if err != nil {
		return err
	}
	return t.insert("audit event", a.ID, `INSERT INTO audit (`+auditColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?)`,
		a.ID, micros(a.At), a.Actor, a.Workspace, a.Action, a.Object, detail)
}

// AppendAudit implements [store.Store].
func (s *Store) AppendAudit(ctx context.Context, a store.AuditEvent) error {
	if err := a.Validate(); err != nil {
		return err
	}
	return s.change(ctx, "recording an act", func(t *tx) error { return t.audit(a) })
}

// Audit implements [store.Store].
func (s *Store) Audit(ctx context.Context, workspace string, p store.Page) ([]store.AuditEvent, error) {
	var scope clause
	if workspace != "" {
		scope = clause{sql: "workspace = ?", args: []any{workspace}}
	}
	return list(ctx, s, listing{what: "audit event", table: "audit", id: "id", columns: auditColumns, scope: scope}, p, func(r row) (store.AuditEvent, error) {
		var a store.AuditEvent
		var at int64
		var detail string
		if err := r.Scan(&a.ID, &at, &a.Actor, &a.Workspace, &a.Action, &a.Object, &detail); err != nil {
			return a, err
		}
		a.At = timeOf(at)
		return a, json.Unmarshal([]byte(detail), &a.Detail)
	})
}

// DeleteAuditBefore implements [store.Store].
func (s *Store) DeleteAuditBefore(ctx context.Context, before time.Time) (int, error) {
	total := 0
	for {
		var n int64
		err := s.change(ctx, "forgetting old acts", func(t *tx) (err error) {
			n, err = t.exec(`DELETE FROM audit WHERE seq IN (SELECT seq FROM audit WHERE at < ? LIMIT ?)`, micros(before), pruneAtOnce)
			return err
		})
		total += int(n)
		if err != nil || n < pruneAtOnce {
			return total, err
		}
	}
}
