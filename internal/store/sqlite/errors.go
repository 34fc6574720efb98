package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"

	driver "modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// errClosed is what the writer and the pool answer after Close.
var errClosed = errors.New("the ledger is closed")

func (s *Store) dbError(err error, doing string, args ...any) error {
	return dbError(s.path, err, doing, args...)
}

// dbError turns an error of the database into one of ours, saying what was being
// done and what to do now. Ours pass as they are.
func dbError(path string, err error, doing string, args ...any) error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e
	}
	what := fmt.Sprintf(doing, args...)
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return errdefs.Wrap(err, errdefs.Unavailable, "%s was given up because its caller did not wait", what)
	case errors.Is(err, errClosed), errors.Is(err, sql.ErrConnDone):
		return errdefs.Wrap(err, errdefs.Unavailable, "%s: the ledger is closed, the server is stopping", what).WithNext("try again when it has started")
	}
	code, ok := codeOf(err)
	if !ok {
		return errdefs.Wrap(err, errdefs.Internal, "%s failed", what)
	}
	switch code & 0xff {
	case lib.SQLITE_FULL:
		return full(err, path, what)
	case lib.SQLITE_BUSY, lib.SQLITE_LOCKED:
		return errdefs.Wrap(err, errdefs.Unavailable, "%s: another program kept the ledger %s locked for %d seconds", what, path, busyMillis/1000).
			WithNext("try again; if it stays, look for a second program that has the file open")
	case lib.SQLITE_READONLY, lib.SQLITE_CANTOPEN, lib.SQLITE_PERM:
		return errdefs.Wrap(err, errdefs.Unavailable, "%s: the ledger %s cannot be opened for writing", what, path).
			WithNext("check that the disk is mounted writable and that this user owns %s", filepath.Dir(path))
	case lib.SQLITE_CORRUPT, lib.SQLITE_NOTADB:
		return damaged(err, path)
	case lib.SQLITE_NOMEM:
		return errdefs.Wrap(err, errdefs.Unavailable, "%s: the server is out of memory", what)
	case lib.SQLITE_INTERRUPT:
		return errdefs.Wrap(err, errdefs.Unavailable, "%s was given up because its caller did not wait", what)
	case lib.SQLITE_TOOBIG:
		return errdefs.Wrap(err, errdefs.Invalid, "%s: the record is too large", what)
	case lib.SQLITE_IOERR:
		// The side file for shared memory is extended outside SQLite's own check for a full disk.
		if code == lib.SQLITE_IOERR_SHMSIZE || errors.Is(err, syscall.ENOSPC) {
			return full(err, path, what)
		}
		return errdefs.Wrap(err, errdefs.Unavailable, "%s: the disk under %s answered with an error (SQLite code %d)", what, filepath.Dir(path), code).
			WithNext("look at the kernel's log (dmesg) and at the state of the disk")
	}
	return errdefs.Wrap(err, errdefs.Internal, "%s failed (SQLite code %d)", what, code)
}

func full(err error, path, what string) error {
	return errdefs.Wrap(err, errdefs.Unavailable, "%s: the disk is full, so nothing can be recorded; what is recorded can still be read", what).
		WithNext("free space on the file system of %s", filepath.Dir(path)).With("reason", "disk_full")
}

func damaged(err error, path string) error {
	return errdefs.Wrap(err, errdefs.Internal, "the ledger %s is damaged: %s", path, err.Error()).
		WithNext("stop the server, keep a copy of the file, then restore a backup or rebuild it with: sqlite3 %s .recover", path)
}

// codeOf returns SQLite's extended result code.
func codeOf(err error) (int, bool) {
	e, ok := errors.AsType[*driver.Error](err)
	if !ok {
		return 0, false
	}
	return e.Code(), true
}

// taken reports whether a record was refused because its id or another unique
// thing is recorded already.
func taken(err error) bool {
	code, ok := codeOf(err)
	return ok && (code == lib.SQLITE_CONSTRAINT_UNIQUE || code == lib.SQLITE_CONSTRAINT_PRIMARYKEY)
}

// firstOf returns the first error there is.
func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
