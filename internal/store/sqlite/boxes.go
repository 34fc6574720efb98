package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

const (
	boxColumns = `id, workspace, key, target, state, image, limits, mounts, idle_ms, created, used`
	selectBox  = `SELECT ` + boxColumns + ` FROM boxes WHERE id = ?`
	// boxOfRun says that a box belongs to a run.
	boxOfRun = `id = (SELECT r.box FROM runs r WHERE r.id = ?)`

	// What keeps a box b from being removed.
	liveInBox   = `EXISTS (SELECT 1 FROM processes p WHERE p.workspace = b.workspace AND p.box = b.id AND p.live = 1)`
	runInBox    = `EXISTS (SELECT 1 FROM runs r WHERE r.box = b.id AND r.state <> 'finished')`
	fencedBox   = `EXISTS (SELECT 1 FROM fences f WHERE f.target = b.target AND f.box IN (b.id, '') AND f.cleared IS NULL)`
	standingFor = `SELECT id FROM fences WHERE target = ? AND box IN (?, '') AND cleared IS NULL ORDER BY seq LIMIT 1`
)

func scanBox(r row) (store.Box, error) {
	var b store.Box
	var limits, mounts string
	var created, used int64
	if err := r.Scan(&b.ID, &b.Workspace, &b.Key, &b.Target, &b.State, &b.Image, &limits, &mounts, &b.IdleMillis, &created, &used); err != nil {
		return b, err
	}
	b.Created, b.Used = timeOf(created), timeOf(used)
	return b, errors.Join(json.Unmarshal([]byte(limits), &b.Limits), json.Unmarshal([]byte(mounts), &b.Mounts))
}

func (t *tx) box(id string) (store.Box, error) {
	b, err := queryOne(context.Background(), t, scanBox, selectBox, id)
	if errors.Is(err, sql.ErrNoRows) {
		return b, notFound("box", id)
	}
	return b, err
}

// CreateBox implements [store.Store].
func (s *Store) CreateBox(ctx context.Context, b store.Box, c store.Capacity) (store.Box, bool, error) {
	if err := b.Validate(); err != nil {
		return store.Box{}, false, err
	}
	limits, err := toJSON(b.Limits)
	if err != nil {
		return store.Box{}, false, err
	}
	mounts, err := toJSON(b.Mounts)
	if err != nil {
		return store.Box{}, false, err
	}
	var got store.Box
	var created bool
	if err := s.roomy("creating a box"); err != nil {
		return store.Box{}, false, err
	}
	err = s.change(ctx, "creating a box", func(t *tx) error {
		got, created = store.Box{}, false
		if b.Key != "" {
			old, err := queryOne(ctx, t, scanBox, `SELECT `+boxColumns+` FROM boxes WHERE workspace = ? AND key = ? AND key <> ''`, b.Workspace, b.Key)
			if err == nil && old.State == api.BoxRemoving {
				return errdefs.New(errdefs.Conflict, "the box %s with the key %q is being removed", old.ID, b.Key).WithNext("try again when it is gone, or use another key")
			}
			if !errors.Is(err, sql.ErrNoRows) {
				got = old
				return err
			}
		}
		if err := t.require("workspace", b.Workspace, `SELECT 1 FROM workspaces WHERE name = ?`, b.Workspace); err != nil {
			return err
		}
		if err := t.enabled(b.Target); err != nil {
			return err
		}
		if err := t.room("boxes on the target "+b.Target, "per_target", c.PerTarget, `SELECT count(*) FROM boxes WHERE target = ?`, b.Target); err != nil {
			return err
		}
		if err := t.room("boxes in the workspace "+b.Workspace, "per_workspace", c.PerWorkspace, `SELECT count(*) FROM boxes WHERE workspace = ?`, b.Workspace); err != nil {
			return err
		}
		if err := t.insert("box", b.ID, `INSERT INTO boxes (`+boxColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			b.ID, b.Workspace, b.Key, b.Target, string(b.State), b.Image, limits, mounts, b.IdleMillis, micros(b.Created), micros(b.Used)); err != nil {
			return err
		}
		got, created = b, true
		got.Created, got.Used, got.Mounts = truncate(b.Created), truncate(b.Used), slices.Clone(b.Mounts)
		return nil
	})
	if err != nil {
		return store.Box{}, false, err
	}
	return got, created, nil
}

// room returns exhausted if one more would exceed the bound.
func (t *tx) room(what, limit string, bound int, query string, args ...any) error {
	if bound <= 0 {
		return nil
	}
	n, err := t.count(query, args...)
	if err == nil && n >= int64(bound) {
		err = errdefs.New(errdefs.Exhausted, "there are %d %s, the limit is %d", n, what, bound).
			WithNext("wait until one has ended or end one, or ask the operator for a higher limit").
			With("limit", limit).With("bound", strconv.Itoa(bound))
	}
	return err
}

// Box implements [store.Store].
func (s *Store) Box(ctx context.Context, sc store.Scope, id string) (store.Box, error) {
	c := clause{sql: "id = ?", args: []any{id}}.and(scoped(sc, boxOfRun))
	return get(ctx, s, "box", id, scanBox, `SELECT `+boxColumns+` FROM boxes`+c.where(), c.args...)
}

// Boxes implements [store.Store].
func (s *Store) Boxes(ctx context.Context, sc store.Scope, p store.Page) ([]store.Box, error) {
	return list(ctx, s, listing{what: "box", table: "boxes", id: "id", columns: boxColumns, scope: scoped(sc, boxOfRun)}, p, scanBox)
}

// boxOrder is the order of the states, for "forward only".
func boxOrder(s api.BoxState) int {
	return slices.Index([]api.BoxState{api.BoxCreating, api.BoxReady, api.BoxRemoving}, s)
}

// SetBoxState implements [store.Store].
func (s *Store) SetBoxState(ctx context.Context, id string, state api.BoxState) error {
	if err := store.ValidateBoxState(state); err != nil {
		return err
	}
	return s.change(ctx, "changing the state of a box", func(t *tx) error {
		b, err := t.box(id)
		switch {
		case err != nil:
			return err
		case boxOrder(state) < boxOrder(b.State):
			return errdefs.New(errdefs.Conflict, "the box %s is %s and cannot become %s again", id, b.State, state)
		case state == b.State:
			return nil
		}
		if state == api.BoxRemoving {
			if err := t.unused(b); err != nil {
				return err
			}
		}
		_, err = t.exec(`UPDATE boxes SET state = ? WHERE id = ?`, string(state), id)
		return err
	})
}

// unused returns why a box may not be removed.
func (t *tx) unused(b store.Box) error {
	if err := t.unfenced(b.Target, b.ID); err != nil {
		return err
	}
	for _, what := range []struct{ name, query string }{
		{"process", `SELECT count(*) FROM processes p WHERE p.workspace = ?2 AND p.box = ?1 AND p.live = 1`},
		{"run", `SELECT count(*) FROM runs r WHERE r.box = ?1 AND ?2 = ?2 AND r.state <> 'finished'`},
	} {
		n, err := t.count(what.query, b.ID, b.Workspace)
		if err != nil {
			return err
		}
		if n > 0 {
			return errdefs.New(errdefs.Conflict, "the box %s is in use: %d live %s", b.ID, n, plural(what.name, n)).
				WithNext("finish its runs first; that closes their processes")
		}
	}
	return nil
}

// unfenced returns fenced while a fence stands on a box or its whole target.
func (t *tx) unfenced(target, box string) error {
	fence, err := queryOne(context.Background(), t, scanText, standingFor, target, box)
	switch {
	case err == nil:
		return fenced(fence, "the box "+box)
	case errors.Is(err, sql.ErrNoRows):
		return nil
	}
	return err
}

func plural(noun string, n int64) string {
	switch {
	case n == 1:
		return noun
	case noun == "process":
		return "processes"
	}
	return noun + "s"
}

func fenced(id, where string) error {
	return errdefs.New(errdefs.Fenced, "the fence %s stands on %s: something may still be running there", id, where).
		WithNext("wait until its end is proven, or let the operator look at the evidence and clear the fence").With("fence", id)
}

func scanText(r row) (string, error) {
	var s string
	return s, r.Scan(&s)
}

// TouchBox implements [store.Store].
func (s *Store) TouchBox(ctx context.Context, id string, used time.Time) error {
	return s.change(ctx, "recording the use of a box", func(t *tx) error { return t.touch(id, used) })
}

func (t *tx) touch(id string, used time.Time) error {
	n, err := t.exec(`UPDATE boxes SET used = max(used, ?) WHERE id = ?`, micros(used), id)
	if err == nil && n == 0 {
		err = notFound("box", id)
	}
	return err
}

// touchKept touches a box unless it is forgotten already.
func (t *tx) touchKept(id string, at time.Time) error {
	if err := t.touch(id, at); err != nil && !errdefs.Is(err, errdefs.NotFound) {
		return err
	}
	return nil
}

// DeleteBox implements [store.Store].
func (s *Store) DeleteBox(ctx context.Context, id string) error {
	return s.change(ctx, "deleting a box", func(t *tx) error {
		n, err := t.exec(`DELETE FROM boxes WHERE id = ? AND state <> 'ready'`, id)
		if err != nil || n > 0 {
			return err
		}
		if _, err := t.box(id); err != nil {
			return err
		}
		return errdefs.New(errdefs.Conflict, "the box %s is ready, so it cannot be forgotten", id).WithNext("remove it first")
	})
}

// IdleBoxes implements [store.Store].
func (s *Store) IdleBoxes(ctx context.Context, now time.Time) ([]store.Box, error) {
	bs, err := queryAll(ctx, s.reads, scanBox, fmt.Sprintf(`SELECT %s FROM boxes b WHERE b.state = 'ready' AND b.used + b.idle_ms * 1000 < ?
		AND NOT %s AND NOT %s AND NOT %s ORDER BY b.used, b.seq`, boxColumns, liveInBox, runInBox, fencedBox), micros(now))
	return bs, s.dbError(err, "listing idle boxes")
}
