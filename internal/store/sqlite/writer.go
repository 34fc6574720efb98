package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"

	lib "modernc.org/sqlite/lib"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// maxBatch bounds how many changes share a transaction, and so how long the
// first of them waits for the others.
const maxBatch = 256

// The life of a job: its caller may give up while it waits and not after.
const (
	jobWaiting int32 = iota
	jobTaken
	jobGivenUp
)

// job is one change that a caller waits for.
type job struct {
	// do makes the change. It may run more than once (see alone) and must set its
	// results anew each time.
	do    func(*tx) error
	state atomic.Int32
	done  chan error // has room for the one answer
}

// writer owns the one connection that writes. Only its goroutine touches tx
// after newWriter has returned.
type writer struct {
	db   *sql.DB
	conn *sql.Conn
	tx   *tx
	jobs chan *job     // unbuffered: what was not taken needs no answer
	stop chan struct{} // closed by close
	done chan struct{} // closed when the goroutine has ended
	fail func(err error, doing string, args ...any) error
	// broken is set once a commit failed in a way that leaves open what the disk
	// holds. Writing on could bury a confirmed change; reading goes on.
	broken error
	failed atomic.Bool // broken is set; for everybody
}

// newWriter runs prepare, which may use db, and starts the writer. It closes db
// on failure and, in the end, with the writer.
func newWriter(ctx context.Context, db *sql.DB, fail func(error, string, ...any) error, prepare func(context.Context) error) (*writer, error) {
	if err := prepare(ctx); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	w := &writer{db: db, conn: conn, tx: &tx{conn: conn, stmts: map[string]*sql.Stmt{}}, fail: fail,
		jobs: make(chan *job), stop: make(chan struct{}), done: make(chan struct{})}
	go w.run()
	return w, nil
}

func (w *writer) close() error {
	close(w.stop)
	<-w.done
	return errors.Join(w.tx.close(), w.conn.Close(), w.db.Close())
}

// submit hands a change to the writer and waits for its answer. If ctx ends
// before the writer takes it, it is never made.
func (w *writer) submit(ctx context.Context, do func(*tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	j := &job{do: do, done: make(chan error, 1)}
	select {
	case <-w.stop:
		return errClosed
	default:
	}
	select {
	case w.jobs <- j:
	case <-ctx.Done():
		return ctx.Err()
	case <-w.stop:
		return errClosed
	}
	select {
	case err := <-j.done:
		return err
	case <-ctx.Done():
		if j.state.CompareAndSwap(jobWaiting, jobGivenUp) {
			return ctx.Err()
		}
		return <-j.done // under way: the answer must be the true one
	}
}

func (w *writer) run() {
	defer close(w.done)
	for {
		select {
		case <-w.stop:
			return
		case j := <-w.jobs:
			w.batch(j)
		}
	}
}

// batch makes the changes of first and of everybody who waits meanwhile in one
// transaction, and answers them when it is durable.
func (w *writer) batch(first *job) {
	if w.broken != nil {
		first.done <- w.broken
		return
	}
	if err := w.tx.plain(`BEGIN IMMEDIATE`); err != nil {
		first.done <- w.fail(err, "recording a change")
		return
	}
	var made []*job
	var errs []error
	for j, more := first, true; more; j, more = w.next(len(made)) {
		if !j.state.CompareAndSwap(jobWaiting, jobTaken) {
			continue
		}
		made = append(made, j)
		err, open := w.savepoint(j)
		errs = append(errs, err)
		if !open {
			// SQLite rolled back the whole transaction (disk full, I/O error): nobody's
			// change is there. Make them again, each for itself, so that one that cannot
			// be made fails alone.
			w.alone(made)
			return
		}
	}
	if err := w.tx.plain(`COMMIT`); err != nil {
		err = w.commitFailed(err)
		for _, j := range made {
			j.done <- err
		}
		return
	}
	for i, j := range made {
		j.done <- errs[i]
	}
}

// next takes one more job if somebody waits.
func (w *writer) next(have int) (*job, bool) {
	if have >= maxBatch {
		return nil, false
	}
	select {
	case j := <-w.jobs:
		return j, true
	default:
		return nil, false
	}
}

// savepoint makes one change; if it is refused nothing of it stays. open is
// false when the transaction around it is gone.
func (w *writer) savepoint(j *job) (err error, open bool) { //nolint:staticcheck // the error is the answer, open the state
	if err := w.tx.plain(`SAVEPOINT one`); err != nil {
		return w.fail(err, "recording a change"), w.rollback()
	}
	if err = j.do(w.tx); err != nil {
		err = w.fail(err, "recording a change")
		if w.tx.plain(`ROLLBACK TO one`) != nil {
			return err, w.rollback()
		}
	}
	if rerr := w.tx.plain(`RELEASE one`); rerr != nil {
		return w.fail(rerr, "recording a change"), w.rollback()
	}
	return err, true
}

// rollback ends the transaction if SQLite has not done so itself.
func (w *writer) rollback() (open bool) {
	_ = w.tx.plain(`ROLLBACK`) // fails when there is none any more, which is what is wanted
	return false
}

// alone makes each change in a transaction of its own.
func (w *writer) alone(jobs []*job) {
	for _, j := range jobs {
		j.done <- w.one(j)
	}
}

func (w *writer) one(j *job) error {
	if w.broken != nil {
		return w.broken
	}
	if err := w.tx.plain(`BEGIN IMMEDIATE`); err != nil {
		return w.fail(err, "recording a change")
	}
	if err := j.do(w.tx); err != nil {
		w.rollback()
		return w.fail(err, "recording a change")
	}
	if err := w.tx.plain(`COMMIT`); err != nil {
		return w.commitFailed(err)
	}
	return nil
}

// commitFailed rolls back and says whether one may go on. A full disk or a lock
// is known before anything is durable. After any other failure, a failed fsync
// above all, the pages may or may not be on the disk and the kernel will not say
// so again, so a later success would prove nothing.
func (w *writer) commitFailed(err error) error {
	w.rollback()
	code, _ := codeOf(err)
	switch code & 0xff {
	case lib.SQLITE_FULL, lib.SQLITE_BUSY:
		return w.fail(err, "making a change durable")
	}
	w.failed.Store(true)
	w.broken = errdefs.Wrap(err, errdefs.Unavailable, "the ledger takes no more changes, because one could not be made durable: %v", err).
		WithNext("look at the kernel's log (dmesg) and at the disk, then restart the server")
	return errdefs.Wrap(err, errdefs.Internal, "a change could not be made durable, and whether it is recorded will only be known after a restart").
		WithNext("look at the kernel's log (dmesg) and at the disk, then restart the server")
}

// tx is the writer's transaction, with its prepared statements. Only the
// writer's goroutine may use it. Statements run without a context: a change
// under way is finished.
type tx struct {
	conn  *sql.Conn
	stmts map[string]*sql.Stmt // by text; the texts are constants, so it is bounded
}

func (t *tx) stmt(query string) (*sql.Stmt, error) {
	if st, ok := t.stmts[query]; ok {
		return st, nil
	}
	st, err := t.conn.PrepareContext(context.Background(), query)
	if err != nil {
		return nil, fmt.Errorf("preparing %q: %w", query, err)
	}
	t.stmts[query] = st
	return st, nil
}

func (t *tx) plain(query string) error {
	st, err := t.stmt(query)
	if err != nil {
		return err
	}
	_, err = st.ExecContext(context.Background())
	return err
}

// exec returns how many rows it changed.
func (t *tx) exec(query string, args ...any) (int64, error) {
	st, err := t.stmt(query)
	if err != nil {
		return 0, err
	}
	res, err := st.ExecContext(context.Background(), args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

func (t *tx) query(_ context.Context, query string, args ...any) (*sql.Rows, error) {
	st, err := t.stmt(query)
	if err != nil {
		return nil, err
	}
	return st.QueryContext(context.Background(), args...)
}

func (t *tx) close() error {
	var errs []error
	for _, st := range t.stmts {
		errs = append(errs, st.Close())
	}
	return errors.Join(errs...)
}
