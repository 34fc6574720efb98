package sqlite

import (
	"context"
	"database/sql"
	"errors"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

const (
	targetColumns = `name, kind, generation, enabled, max_boxes, host_id, boot_id`
	selectTarget  = `SELECT ` + targetColumns + ` FROM targets WHERE name = ?`
)

func scanTarget(r row) (store.Target, error) {
	var t store.Target
	err := r.Scan(&t.Name, &t.Kind, &t.Generation, &t.Enabled, &t.MaxBoxes, &t.HostID, &t.BootID)
	return t, err
}

func (t *tx) target(name string) (store.Target, error) {
	v, err := queryOne(context.Background(), t, scanTarget, selectTarget, name)
	if errors.Is(err, sql.ErrNoRows) {
		return v, notFound("target", name)
	}
	return v, err
}

// enabled returns conflict for a target that is switched off.
func (t *tx) enabled(name string) error {
	v, err := t.target(name)
	if err == nil && !v.Enabled {
		err = errdefs.New(errdefs.Conflict, "the target %q is disabled", name).WithNext("use another target, or ask the operator to enable it")
	}
	return err
}

// PutTarget implements [store.Store].
func (s *Store) PutTarget(ctx context.Context, v store.Target) (store.Target, error) {
	if err := v.Validate(); err != nil {
		return store.Target{}, err
	}
	var got store.Target
	err := s.change(ctx, "recording a target", func(t *tx) (err error) {
		if _, err = t.exec(`INSERT INTO targets (`+targetColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			v.Name, v.Kind, max(v.Generation, 1), v.Enabled, v.MaxBoxes, v.HostID, v.BootID); err != nil {
			return err
		}
		got, err = t.target(v.Name)
		return err
	})
	if err != nil {
		return store.Target{}, err
	}
	return got, nil
}

// Target implements [store.Store].
func (s *Store) Target(ctx context.Context, name string) (store.Target, error) {
	return get(ctx, s, "target", name, scanTarget, selectTarget, name)
}

// Targets implements [store.Store].
func (s *Store) Targets(ctx context.Context) ([]store.Target, error) {
	ts, err := queryAll(ctx, s.reads, scanTarget, `SELECT `+targetColumns+` FROM targets ORDER BY name`)
	return ts, s.dbError(err, "listing targets")
}

// SetTargetEnabled implements [store.Store].
func (s *Store) SetTargetEnabled(ctx context.Context, name string, enabled bool, a store.AuditEvent) (store.Target, error) {
	if err := a.Validate(); err != nil {
		return store.Target{}, err
	}
	var got store.Target
	err := s.change(ctx, "changing a target", func(t *tx) error {
		n, err := t.exec(`UPDATE targets SET enabled = ?1, generation = generation + 1 WHERE name = ?2 AND enabled <> ?1`, enabled, name)
		if err != nil {
			return err
		}
		if got, err = t.target(name); err != nil || n == 0 {
			return err
		}
		return t.audit(a)
	})
	if err != nil {
		return store.Target{}, err // what was read is not what is recorded
	}
	return got, nil
}

// SetTargetHost implements [store.Store].
func (s *Store) SetTargetHost(ctx context.Context, name, hostID, bootID string) error {
	if err := (store.Target{Name: name, Kind: "box", HostID: hostID, BootID: bootID}).Validate(); err != nil {
		return err
	}
	return s.change(ctx, "recording the host of a target", func(t *tx) error {
		n, err := t.exec(`UPDATE targets SET host_id = ?, boot_id = ? WHERE name = ?`, hostID, bootID, name)
		if err == nil && n == 0 {
			err = notFound("target", name)
		}
		return err
	})
}
