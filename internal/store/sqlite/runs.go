package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

const (
	// The model grants of a run come as one JSON array, so that a run is always
	// read with one statement and so at one moment.
	runColumns = `id, workspace, box, target, state, token_hash, exclusive, auto_finish, installation, created, expires, finished,
		(SELECT json_group_array(json_object('Provider', m.provider, 'Port', m.port, 'Requests', m.requests,
			'BytesUp', m.bytes_up, 'BytesDown', m.bytes_down) ORDER BY m.pos) FROM run_models m WHERE m.run = runs.id)`
	selectRun = `SELECT ` + runColumns + ` FROM runs WHERE id = ?`
	runIsRun  = `id = ?`
	// usageCap is api.MaxOffset, where counters stop.
	usageCap = `9007199254740992`
	// forgetAtOnce bounds how many runs are deleted in one transaction, and so how
	// long other changes wait.
	forgetAtOnce = 100
)

func scanRun(r row) (store.Run, error) {
	var v store.Run
	var hash []byte
	var created, expires int64
	var finished sql.NullInt64
	var models, installation string
	if err := r.Scan(&v.ID, &v.Workspace, &v.Box, &v.Target, &v.State, &hash, &v.Exclusive, &v.AutoFinish, &installation, &created, &expires, &finished, &models); err != nil {
		return v, err
	}
	copy(v.TokenHash[:], hash)
	v.Created, v.Expires, v.Finished = timeOf(created), timeOf(expires), timeOrNil(finished)
	var err error
	if installation != "" {
		if v.Installation, err = fromJSON[*api.Installation](installation); err != nil {
			return v, err
		}
	}
	if models == "[]" {
		return v, nil
	}
	v.Models, err = fromJSON[[]store.ModelGrant](models)
	return v, err
}

func (t *tx) run(id string) (store.Run, error) {
	r, err := queryOne(context.Background(), t, scanRun, selectRun, id)
	if errors.Is(err, sql.ErrNoRows) {
		return r, notFound("run", id)
	}
	return r, err
}

// CreateRun implements [store.Store].
func (s *Store) CreateRun(ctx context.Context, r store.Run, c store.Capacity) error {
	if err := r.Validate(); err != nil {
		return err
	}
	if r.State != api.RunActive {
		return errdefs.New(errdefs.Invalid, "a new run is %s, not %s", api.RunActive, r.State)
	}
	if err := s.roomy("creating a run"); err != nil {
		return err
	}
	installation := ""
	if r.Installation != nil {
		text, err := toJSON(r.Installation)
		if err != nil {
			return err
		}
		installation = text
	}
	return s.change(ctx, "creating a run", func(t *tx) error {
		b, err := t.box(r.Box)
		switch {
		case err != nil:
			return err
		case b.Workspace != r.Workspace:
			return notFound("box", r.Box)
		case b.Target != r.Target:
			return errdefs.New(errdefs.Invalid, "the box %s is on the target %q, not on %q", r.Box, b.Target, r.Target)
		case b.State != api.BoxReady:
			return errdefs.New(errdefs.Conflict, "the box %s is %s, not ready", r.Box, b.State).WithNext("acquire a box and use the one that comes back")
		}
		// What may still run there would share the new run's rights (P8).
		if err := t.unfenced(r.Target, r.Box); err != nil {
			return err
		}
		if err := t.room("unfinished runs in the workspace "+r.Workspace, "per_workspace", c.PerWorkspace,
			`SELECT open_runs FROM workspaces WHERE name = ?`, r.Workspace); err != nil {
			return err
		}
		if err := t.roomKept("runs", r.Workspace, "kept_runs", `SELECT runs FROM workspaces WHERE name = ?`, 1, int64(c.Kept.Runs)); err != nil {
			return err
		}
		query := `SELECT id FROM runs WHERE box = ? AND state <> 'finished' AND exclusive = 1 LIMIT 1`
		if r.Exclusive {
			query = `SELECT id FROM runs WHERE box = ? AND state <> 'finished' LIMIT 1`
		}
		other, err := queryOne(ctx, t, scanText, query, r.Box)
		if err == nil {
			return errdefs.New(errdefs.Conflict, "the run %s is in the box %s, and a run with models has its box to itself", other, r.Box).
				WithNext("finish that run first, or acquire another box").With("run", other)
		}
		if !errors.Is(err, sql.ErrNoRows) {
			return err
		}
		if err := t.insert("run", r.ID, `INSERT INTO runs (id, workspace, box, target, state, token_hash, exclusive, auto_finish, installation, created, expires) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			r.ID, r.Workspace, r.Box, r.Target, string(r.State), r.TokenHash[:], r.Exclusive, r.AutoFinish, installation, micros(r.Created), micros(r.Expires)); err != nil {
			return err
		}
		for i, m := range r.Models {
			if _, err := t.exec(`INSERT INTO run_models (run, provider, pos, port, requests, bytes_up, bytes_down) VALUES (?, ?, ?, ?, ?, ?, ?)`,
				r.ID, m.Provider, i, m.Port, m.Requests, m.BytesUp, m.BytesDown); err != nil {
				return err
			}
		}
		return t.touch(r.Box, r.Created)
	})
}

// Run implements [store.Store].
func (s *Store) Run(ctx context.Context, sc store.Scope, id string) (store.Run, error) {
	c := clause{sql: "id = ?", args: []any{id}}.and(scoped(sc, runIsRun))
	return get(ctx, s, "run", id, scanRun, `SELECT `+runColumns+` FROM runs`+c.where(), c.args...)
}

// SetRunState implements [store.Store].
func (s *Store) SetRunState(ctx context.Context, id string, state api.RunState, at time.Time) (store.Run, error) {
	if err := store.ValidateRunState(state); err != nil {
		return store.Run{}, err
	}
	order := []api.RunState{api.RunActive, api.RunFinishing, api.RunFinished}
	var got store.Run
	err := s.change(ctx, "changing the state of a run", func(t *tx) (err error) {
		if got, err = t.run(id); err != nil {
			return err
		}
		switch have, want := slices.Index(order, got.State), slices.Index(order, state); {
		case want == have:
			return nil
		case want < have:
			return errdefs.New(errdefs.Conflict, "the run %s is %s and cannot become %s again", id, got.State, state).WithNext("create a new run")
		}
		got.State = state
		if state == api.RunFinished {
			got.Finished = truncateMaybe(&at)
			if err := t.touchKept(got.Box, at); err != nil {
				return err
			}
		}
		_, err = t.exec(`UPDATE runs SET state = ?, finished = ? WHERE id = ?`, string(state), microsOrNull(got.Finished), id)
		return err
	})
	if err != nil {
		return store.Run{}, err
	}
	return got, nil
}

// AddRunUsage implements [store.Store].
func (s *Store) AddRunUsage(ctx context.Context, id, provider string, requests, up, down int64) error {
	if min(requests, up, down) < 0 || max(requests, up, down) > api.MaxOffset {
		return errdefs.New(errdefs.Invalid, "usage of %d requests, %d bytes up and %d down is outside 0 to 2^53", requests, up, down)
	}
	return s.change(ctx, "counting the use of a model", func(t *tx) error {
		n, err := t.exec(`UPDATE run_models SET requests = min(requests + ?, `+usageCap+`), bytes_up = min(bytes_up + ?, `+usageCap+`),
			bytes_down = min(bytes_down + ?, `+usageCap+`) WHERE run = ? AND provider = ?`, requests, up, down, id, provider)
		if err != nil || n > 0 {
			return err
		}
		if err := t.require("run", id, `SELECT 1 FROM runs WHERE id = ?`, id); err != nil {
			return err
		}
		return notFound("model grant", provider)
	})
}

// Runs implements [store.Store].
func (s *Store) Runs(ctx context.Context, sc store.Scope, p store.Page) ([]store.Run, error) {
	return list(ctx, s, listing{what: "run", table: "runs", id: "id", columns: runColumns, scope: scoped(sc, runIsRun)}, p, scanRun)
}

// UnfinishedRuns implements [store.Store].
func (s *Store) UnfinishedRuns(ctx context.Context) ([]store.Run, error) {
	rs, err := queryAll(ctx, s.reads, scanRun, `SELECT `+runColumns+` FROM runs WHERE state <> 'finished' ORDER BY seq`)
	return rs, s.dbError(err, "listing unfinished runs")
}

// DeleteRunsFinishedBefore implements [store.Store].
func (s *Store) DeleteRunsFinishedBefore(ctx context.Context, before time.Time) (int, error) {
	total := 0
	for {
		var n int64
		err := s.change(ctx, "forgetting old runs", func(t *tx) (err error) {
			// Processes, receipts and model grants go with the run (ON DELETE CASCADE).
			n, err = t.exec(`DELETE FROM runs WHERE seq IN (SELECT r.seq FROM runs r WHERE r.finished < ?
				AND NOT EXISTS (SELECT 1 FROM processes p WHERE p.run = r.id AND (p.live = 1 OR p.log_gone = 0 AND p.state <> 'never_started'))
				AND NOT EXISTS (SELECT 1 FROM fences f WHERE f.run = r.id AND f.cleared IS NULL)
				LIMIT ?)`, micros(before), forgetAtOnce)
			return err
		})
		total += int(n)
		if err != nil || n < forgetAtOnce {
			return total, err
		}
	}
}
