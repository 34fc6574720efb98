package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"math"
	"strconv"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

const (
	processColumns = `handle, request_id, digest, workspace, run, target, box, generation, host_id, boot_id, version, state,
		exit, cleanup, reason, close_asked, grace_ms, fence, receipt, stdin, log, log_gone, created, started, exited, closed, spec`
	selectProcess = `SELECT ` + processColumns + ` FROM processes WHERE handle = ?`
	processOfRun  = `run = ?`
	// bareColumns are those without the spec.
	bareColumns = `handle, request_id, digest, workspace, run, target, box, generation, host_id, boot_id, version, state,
		exit, cleanup, reason, close_asked, grace_ms, fence, receipt, stdin, log, log_gone, created, started, exited, closed, x''`
	excessLogs = `SELECT ` + bareColumns + ` FROM processes WHERE seq IN (
		SELECT seq FROM (SELECT seq, row_number() OVER newest AS n, sum(json_extract(log, '$.next') - json_extract(log, '$.oldest')) OVER newest AS bytes
			FROM processes WHERE log_gone = 0 AND closed IS NOT NULL
			WINDOW newest AS (PARTITION BY workspace ORDER BY closed DESC, seq DESC ROWS UNBOUNDED PRECEDING))
		WHERE n > ? OR bytes > ?) ORDER BY closed, seq LIMIT ?`
)

func scanProcess(r row) (store.Process, error) {
	var p store.Process
	var digest []byte
	var exit sql.NullString
	var stdin, log string
	var created int64
	var closeAsked, started, exited, closed sql.NullInt64
	if err := r.Scan(&p.Handle, &p.RequestID, &digest, &p.Workspace, &p.Run, &p.Target, &p.Box, &p.Generation, &p.HostID, &p.BootID,
		&p.Version, &p.State, &exit, &p.Cleanup, &p.Reason, &closeAsked, &p.GraceMillis, &p.Fence, &p.Receipt, &stdin, &log, &p.LogGone,
		&created, &started, &exited, &closed, &p.Spec); err != nil {
		return p, err
	}
	copy(p.Digest[:], digest)
	p.Created, p.Started, p.Exited, p.Closed, p.CloseAsked = timeOf(created), timeOrNil(started), timeOrNil(exited), timeOrNil(closed), timeOrNil(closeAsked)
	if len(p.Spec) == 0 {
		p.Spec = nil
	}
	if exit.Valid {
		p.Exit = new(api.Exit)
		if err := json.Unmarshal([]byte(exit.String), p.Exit); err != nil {
			return p, err
		}
	}
	return p, errors.Join(json.Unmarshal([]byte(stdin), &p.Stdin), json.Unmarshal([]byte(log), &p.Log))
}

// mutable is the form in which the changing part of a process is stored.
type mutable struct{ exit, stdin, log any }

func mutableOf(p *store.Process) (m mutable, err error) {
	if p.Exit != nil {
		if m.exit, err = toJSON(p.Exit); err != nil {
			return m, err
		}
	}
	if m.stdin, err = toJSON(p.Stdin); err != nil {
		return m, err
	}
	m.log, err = toJSON(p.Log)
	return m, err
}

// CreateProcess implements [store.Store].
func (s *Store) CreateProcess(ctx context.Context, p store.Process, c store.Capacity, a store.AuditEvent) (store.Process, bool, error) {
	if err := firstOf(p.Validate(), a.Validate()); err != nil {
		return store.Process{}, false, err
	}
	if p.State != api.StateRequested && p.State != api.StateStarting && p.State != api.StateNeverStarted {
		return store.Process{}, false, errdefs.New(errdefs.Invalid, "a new process is %s, %s or %s, not %s",
			api.StateRequested, api.StateStarting, api.StateNeverStarted, p.State)
	}
	p.Version = 1
	m, err := mutableOf(&p)
	if err != nil {
		return store.Process{}, false, err
	}
	var got store.Process
	var created bool
	if err := s.roomy("recording a process"); err != nil {
		return store.Process{}, false, err
	}
	err = s.change(ctx, "recording a process", func(t *tx) error {
		got, created = store.Process{}, false
		old, err := queryOne(ctx, t, scanProcess, `SELECT `+processColumns+` FROM processes WHERE run = ? AND request_id = ?`, p.Run, p.RequestID)
		switch {
		case err == nil && old.Workspace != p.Workspace:
			return notFound("run", p.Run)
		case err == nil:
			got = old
			return nil
		case !errors.Is(err, sql.ErrNoRows):
			return err
		}
		if err := t.mayStart(&p, c); err != nil {
			return err
		}
		if err := t.insert("process", p.Handle, `INSERT INTO processes (`+processColumns+`, live) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`,
			p.Handle, p.RequestID, p.Digest[:], p.Workspace, p.Run, p.Target, p.Box, p.Generation, p.HostID, p.BootID, p.Version, string(p.State),
			m.exit, string(p.Cleanup), p.Reason, microsOrNull(p.CloseAsked), p.GraceMillis, p.Fence, p.Receipt, m.stdin, m.log, p.LogGone,
			micros(p.Created), microsOrNull(p.Started), microsOrNull(p.Exited), microsOrNull(p.Closed), blob(p.Spec), p.Live()); err != nil {
			return err
		}
		// A tombstone may name a box that is gone; there is then nothing to touch.
		if err := t.touchKept(p.Box, p.Created); err != nil {
			return err
		}
		got, created = truncated(p), true
		return t.audit(a)
	})
	if err != nil {
		return store.Process{}, false, err
	}
	return got, created, nil
}

// mayStart returns why p may not be recorded.
func (t *tx) mayStart(p *store.Process, c store.Capacity) error {
	r, err := queryOne(context.Background(), t, func(r row) (v store.Run, err error) {
		return v, r.Scan(&v.Workspace, &v.Box, &v.Target, &v.State)
	}, `SELECT workspace, box, target, state FROM runs WHERE id = ?`, p.Run)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return notFound("run", p.Run)
	case err != nil:
		return err
	case r.Workspace != p.Workspace:
		return notFound("run", p.Run)
	case r.State != api.RunActive:
		return errdefs.New(errdefs.Conflict, "the run %s is %s, so nothing new starts in it", p.Run, r.State).WithNext("create a new run")
	}
	if err := t.kept(p, c.Kept); err != nil {
		return err
	}
	switch {
	case p.State == api.StateNeverStarted:
		return nil // a tombstone starts nothing
	case r.Box != p.Box || r.Target != p.Target:
		return errdefs.New(errdefs.Invalid, "the run %s is bound to the box %s on the target %q, not to %s on %q", p.Run, r.Box, r.Target, p.Box, p.Target)
	}
	if err := t.enabled(p.Target); err != nil {
		return err
	}
	if err := t.unfenced(p.Target, p.Box); err != nil {
		return err
	}
	closing, err := queryOne(context.Background(), t, scanText, `SELECT handle FROM processes WHERE workspace = ? AND box = ? AND run <> ?
		AND state = 'closing' AND cleanup <> 'quiescent' LIMIT 1`, p.Workspace, p.Box, p.Run)
	if err == nil {
		return errdefs.New(errdefs.Cancelling, "the process %s of another run in the box %s is being stopped and its end is not proven yet", closing, p.Box).
			WithNext("try again when it is closed").With("handle", closing)
	}
	if !errors.Is(err, sql.ErrNoRows) {
		return err
	}
	if err := t.room("live processes on the target "+p.Target, "per_target", c.PerTarget,
		`SELECT live FROM targets WHERE name = ?`, p.Target); err != nil {
		return err
	}
	if err := t.room("live processes in the workspace "+p.Workspace, "per_workspace", c.PerWorkspace,
		`SELECT live FROM workspaces WHERE name = ?`, p.Workspace); err != nil {
		return err
	}
	return t.room("live processes in the run "+p.Run, "per_run", c.PerRun,
		`SELECT live FROM runs WHERE id = ?`, p.Run)
}

// kept returns exhausted if the workspace has no room for one more record.
func (t *tx) kept(p *store.Process, k store.Kept) error {
	return firstOf(
		t.roomKept("processes", p.Workspace, "kept_processes", `SELECT processes FROM workspaces WHERE name = ?`, 1, int64(k.Processes)),
		t.roomKept("bytes of arguments", p.Workspace, "kept_spec_bytes", `SELECT spec_bytes FROM workspaces WHERE name = ?`, int64(len(p.Spec)), k.SpecBytes))
}

// roomKept returns exhausted if what is recorded of a workspace would exceed the
// bound with more.
func (t *tx) roomKept(what, workspace, limit, query string, more, bound int64) error {
	if bound <= 0 || more == 0 {
		return nil
	}
	n, err := t.count(query, workspace)
	if err == nil && n+more > bound {
		err = errdefs.New(errdefs.Exhausted, "%d %s are recorded of the workspace %s, %d more would exceed the limit of %d", n, what, workspace, more, bound).
			WithNext("finish runs: records go some time after their run finished; or ask the operator for a higher limit").
			With("limit", limit).With("bound", strconv.FormatInt(bound, 10))
	}
	return err
}

// blob keeps an empty value from becoming NULL.
func blob(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// truncated is p as it will be read back.
func truncated(p store.Process) store.Process {
	p.Created = truncate(p.Created)
	p.CloseAsked, p.Started, p.Exited, p.Closed = truncateMaybe(p.CloseAsked), truncateMaybe(p.Started), truncateMaybe(p.Exited), truncateMaybe(p.Closed)
	if len(p.Spec) == 0 {
		p.Spec = nil
	}
	return p
}

// SaveProcess implements [store.Store].
func (s *Store) SaveProcess(ctx context.Context, p store.Process, ch store.Change) (int64, error) {
	if err := firstOf(p.Validate(), ch.Validate(&p)); err != nil {
		return 0, err
	}
	m, err := mutableOf(&p)
	if err != nil {
		return 0, err
	}
	err = s.change(ctx, "saving a process", func(t *tx) error {
		n, err := t.exec(`UPDATE processes SET host_id = ?, boot_id = ?, version = version + 1, state = ?, live = ?, exit = ?, cleanup = ?, reason = ?,
			close_asked = ?, grace_ms = ?, fence = ?, receipt = ?, stdin = ?, log = ?, log_gone = ?, started = ?, exited = ?, closed = ?
			WHERE handle = ? AND version = ? AND request_id = ? AND digest = ? AND workspace = ? AND run = ? AND target = ? AND box = ? AND generation = ? AND created = ?`,
			p.HostID, p.BootID, string(p.State), p.Live(), m.exit, string(p.Cleanup), p.Reason,
			microsOrNull(p.CloseAsked), p.GraceMillis, p.Fence, p.Receipt, m.stdin, m.log, p.LogGone, microsOrNull(p.Started), microsOrNull(p.Exited), microsOrNull(p.Closed),
			p.Handle, p.Version, p.RequestID, p.Digest[:], p.Workspace, p.Run, p.Target, p.Box, p.Generation, micros(p.Created))
		if err != nil {
			return err
		}
		if n == 0 {
			return t.notSaved(&p)
		}
		return t.apply(&p, ch)
	})
	if err != nil {
		return 0, err
	}
	return p.Version + 1, nil
}

// notSaved says why no record matched.
func (t *tx) notSaved(p *store.Process) error {
	old, err := queryOne(context.Background(), t, scanProcess, selectProcess, p.Handle)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return notFound("process", p.Handle)
	case err != nil:
		return err
	case old.Version != p.Version:
		return errdefs.New(errdefs.Conflict, "the process %s was changed meanwhile: it has version %d, not %d", p.Handle, old.Version, p.Version).
			WithNext("read it again").With("version", strconv.FormatInt(old.Version, 10))
	}
	return errdefs.New(errdefs.Invalid, "a save of the process %s would change what identifies it", p.Handle)
}

// Process implements [store.Store].
func (s *Store) Process(ctx context.Context, sc store.Scope, handle string) (store.Process, error) {
	c := clause{sql: "handle = ?", args: []any{handle}}.and(scoped(sc, processOfRun))
	return get(ctx, s, "process", handle, scanProcess, `SELECT `+processColumns+` FROM processes`+c.where(), c.args...)
}

// ProcessByRequest implements [store.Store].
func (s *Store) ProcessByRequest(ctx context.Context, sc store.Scope, run, requestID string) (store.Process, error) {
	c := clause{sql: "run = ? AND request_id = ?", args: []any{run, requestID}}.and(scoped(sc, processOfRun))
	return get(ctx, s, "process with the request id", requestID, scanProcess, `SELECT `+processColumns+` FROM processes`+c.where(), c.args...)
}

// Processes implements [store.Store].
func (s *Store) Processes(ctx context.Context, sc store.Scope, f store.ProcessFilter) ([]store.Process, error) {
	return list(ctx, s, processListing(sc, f), f.Page, scanProcess)
}

func processListing(sc store.Scope, f store.ProcessFilter) listing {
	var where clause
	if f.Box != "" {
		where = where.and(clause{sql: "box = ?", args: []any{f.Box}})
	}
	if f.Target != "" {
		where = where.and(clause{sql: "target = ?", args: []any{f.Target}})
	}
	if f.Live {
		where = where.and(clause{sql: "live = 1"})
	}
	if !f.ClosedBefore.IsZero() {
		where = where.and(clause{sql: "closed < ?", args: []any{micros(f.ClosedBefore)}})
	}
	if f.LogKept {
		where = where.and(clause{sql: "log_gone = 0"})
	}
	columns := processColumns
	if f.NoSpec {
		columns = bareColumns
	}
	return listing{what: "process", table: "processes", id: "handle", columns: columns, index: indexFor(sc, f),
		scope: scoped(sc, processOfRun), where: where}
}

// ExcessLogs implements [store.Store].
func (s *Store) ExcessLogs(ctx context.Context, logs int, maxBytes int64, limit int) ([]store.Process, error) {
	most, mostBytes := int64(logs), maxBytes
	if most <= 0 {
		most = math.MaxInt64
	}
	if mostBytes <= 0 {
		mostBytes = math.MaxInt64
	}
	ps, err := queryAll(ctx, s.reads, scanProcess, excessLogs, most, mostBytes, limit)
	return ps, s.dbError(err, "looking for logs beyond what is kept")
}

// indexFor names the index where SQLite, which keeps no statistics, would walk
// the whole history backwards instead.
func indexFor(sc store.Scope, f store.ProcessFilter) string {
	switch {
	case sc.Run != "", !sc.All && sc.Workspace == "": // few records, or none
		return ""
	case f.Live && f.Box == "":
		return "processes_live_order"
	case !f.ClosedBefore.IsZero() && f.LogKept:
		return "processes_kept"
	}
	return ""
}
