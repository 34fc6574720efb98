package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// querier is what a query can run on: the pool for reading, or the writer's
// transaction.
type querier interface {
	query(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

// row is the part of sql.Rows that a scan function needs.
type row interface{ Scan(dest ...any) error }

// pool is the connections for reading, with their prepared statements.
type pool struct {
	db *sql.DB

	mu     sync.Mutex
	stmts  map[string]*sql.Stmt // by text; the texts are put together from constants, so it is bounded
	closed bool
}

func newPool(db *sql.DB) *pool { return &pool{db: db, stmts: map[string]*sql.Stmt{}} }

func (p *pool) stmt(ctx context.Context, query string) (*sql.Stmt, error) {
	p.mu.Lock()
	st, ok := p.stmts[query]
	closed := p.closed
	p.mu.Unlock()
	if closed {
		return nil, errClosed
	}
	if ok {
		return st, nil
	}
	st, err := p.db.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errors.Join(errClosed, st.Close())
	}
	if other, ok := p.stmts[query]; ok {
		return other, st.Close()
	}
	p.stmts[query] = st
	return st, nil
}

func (p *pool) query(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	st, err := p.stmt(ctx, query)
	if err != nil {
		return nil, err
	}
	rows, err := st.QueryContext(ctx, args...)
	if err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.closed {
			return nil, errors.Join(errClosed, err)
		}
	}
	return rows, err
}

func (p *pool) close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	stmts := p.stmts
	p.stmts = nil
	p.mu.Unlock()
	var errs []error
	for _, st := range stmts {
		errs = append(errs, st.Close())
	}
	return errors.Join(append(errs, p.db.Close())...)
}

// queryAll returns every row.
func queryAll[T any](ctx context.Context, q querier, scan func(row) (T, error), query string, args ...any) ([]T, error) {
	rows, err := q.query(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var out []T
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, rows.Err()
}

// queryOne returns the first row, or sql.ErrNoRows.
func queryOne[T any](ctx context.Context, q querier, scan func(row) (T, error), query string, args ...any) (T, error) {
	var zero T
	rows, err := q.query(ctx, query, args...)
	if err != nil {
		return zero, err
	}
	defer rows.Close()
	if !rows.Next() {
		if err := rows.Err(); err != nil {
			return zero, err
		}
		return zero, sql.ErrNoRows
	}
	v, err := scan(rows)
	if err != nil {
		return zero, err
	}
	return v, rows.Close()
}

func scanInt(r row) (int64, error) {
	var n int64
	return n, r.Scan(&n)
}

// count runs a query for one number inside a transaction.
func (t *tx) count(query string, args ...any) (int64, error) {
	return queryOne(context.Background(), t, scanInt, query, args...)
}

// get reads one record for a caller: sql.ErrNoRows becomes not_found.
func get[T any](ctx context.Context, s *Store, what, id string, scan func(row) (T, error), query string, args ...any) (T, error) {
	v, err := queryOne(ctx, s.reads, scan, query, args...)
	return v, s.found(err, what, id)
}

func (s *Store) found(err error, what, id string) error {
	if errors.Is(err, sql.ErrNoRows) {
		return notFound(what, id)
	}
	return s.dbError(err, "reading a %s", what)
}

func notFound(what, id string) error {
	return errdefs.New(errdefs.NotFound, "there is no %s %q here", what, id)
}

// listing is a query for records of one table, newest first.
type listing struct {
	what    string // a record, in a sentence
	table   string
	id      string // its column of ids
	columns string
	index   string // the index to use; empty leaves it to SQLite
	scope   clause
	where   clause
}

// sql is the query for one page.
func (l listing) sql(p store.Page) (string, []any) {
	from := l.table
	if l.index != "" {
		from += " INDEXED BY " + l.index
	}
	all := l.scope.and(l.where)
	if p.After != "" {
		v := l.visible(p.After)
		all = all.and(clause{sql: "seq < (SELECT seq FROM " + l.table + v.where() + ")", args: v.args})
	}
	return "SELECT " + l.columns + " FROM " + from + all.where() + " ORDER BY seq DESC LIMIT ?", append(all.args, p.Limit)
}

// visible selects one record if it is in the scope.
func (l listing) visible(id string) clause {
	return clause{sql: l.id + " = ?", args: []any{id}}.and(l.scope)
}

// list reads one page. If it is to follow a record that is not there under the
// same scope, the error is not_found.
func list[T any](ctx context.Context, s *Store, l listing, p store.Page, scan func(row) (T, error)) ([]T, error) {
	if err := p.Validate(); err != nil {
		return nil, err
	}
	query, args := l.sql(p)
	out, err := queryAll(ctx, s.reads, scan, query, args...)
	if err != nil {
		return nil, s.dbError(err, "listing %s records", l.what)
	}
	if len(out) == 0 && p.After != "" {
		v := l.visible(p.After)
		_, err := queryOne(ctx, s.reads, scanInt, "SELECT 1 FROM "+l.table+v.where(), v.args...)
		if errors.Is(err, sql.ErrNoRows) {
			return nil, errdefs.New(errdefs.NotFound, "there is no %s %q for the page to follow", l.what, p.After).WithNext("start again with the first page")
		}
		if err != nil {
			return nil, s.dbError(err, "listing %s records", l.what)
		}
	}
	return out, nil
}

// clause is a condition and its arguments. Its text is made of constants only.
type clause struct {
	sql  string
	args []any
}

func (c clause) and(d clause) clause {
	switch {
	case c.sql == "":
		return d
	case d.sql == "":
		return c
	}
	return clause{sql: c.sql + " AND " + d.sql, args: append(append([]any(nil), c.args...), d.args...)}
}

func (c clause) where() string {
	if c.sql == "" {
		return ""
	}
	return " WHERE " + c.sql
}

// scoped limits a query to what a scope may see. run says, with one ?, what
// belongs to a run.
func scoped(s store.Scope, run string) clause {
	switch {
	case s.All:
		return clause{}
	case s.Workspace == "":
		return clause{sql: "0"}
	case s.Run == "":
		return clause{sql: "workspace = ?", args: []any{s.Workspace}}
	}
	// The plus keeps SQLite from walking the whole workspace: a run is the smaller part.
	return clause{sql: "+workspace = ? AND " + run, args: []any{s.Workspace, s.Run}}
}

// The forms in which values are stored.

func micros(t time.Time) int64 { return t.UnixMicro() }

func microsOrNull(t *time.Time) any {
	if t == nil {
		return nil
	}
	return t.UnixMicro()
}

func timeOf(us int64) time.Time { return time.UnixMicro(us).UTC() }

func timeOrNil(us sql.NullInt64) *time.Time {
	if !us.Valid {
		return nil
	}
	t := timeOf(us.Int64)
	return &t
}

// toJSON encodes values of our own types, which always can be.
func toJSON(v any) (string, error) {
	b, err := json.Marshal(v)
	return string(b), err
}

func fromJSON[T any](text string) (T, error) {
	var v T
	err := json.Unmarshal([]byte(text), &v)
	return v, err
}

// truncate gives a time the precision it is stored with.
func truncate(t time.Time) time.Time { return timeOf(micros(t)) }

func truncateMaybe(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	v := truncate(*t)
	return &v
}
