// Package sqlite keeps the ledger in one SQLite file, in WAL mode with
// synchronous=FULL, so that what a method confirmed survives a power cut.
//
// One goroutine writes. It puts the changes of all callers that wait into one
// transaction - each in a savepoint, so that the refusal of one touches no other -
// and answers them all after the one fsync (group commit). Reads go through a
// small pool of connections and never wait for the writer.
package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/pressly/goose/v3"
	"golang.org/x/sys/unix"
	driver "modernc.org/sqlite"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

//go:embed migrations/*.sql
var migrations embed.FS

const (
	// applicationID marks the file as ours: "STKD".
	applicationID = 0x53544b44
	// readers bounds the connections for reading. A read takes well under a
	// millisecond, and each connection has a page cache of 2 MiB.
	readers = 4
	// busyMillis is how long SQLite waits for another program that writes, such as
	// 'stockade key reset-admin'.
	busyMillis = 5000
	// walKept is the size to which the write-ahead log is cut after a checkpoint.
	walKept = 64 << 20
)

// Config says where the ledger is.
type Config struct {
	// Path of the database file. It is made with mode 0600 if it is missing, and
	// its directory with mode 0700. A symbolic link is refused.
	Path string
	// Version of the program, kept in the ledger so that an older program can say
	// which one wrote it. May be empty.
	Version string
	// MaxPages bounds the file, in pages of 4096 bytes; 0 is no bound. Reaching it
	// is like a full disk.
	MaxPages int
	// Logger discards when nil.
	Logger *slog.Logger
}

// Store is the ledger in a SQLite file.
type Store struct {
	path    string
	log     *slog.Logger
	reads   *pool
	write   *writer
	closing sync.Once
	closed  error
	// reserved: the write-ahead log has space of its own; set once by Open.
	reserved bool
}

var _ store.Store = (*Store)(nil)

// Open opens the ledger, makes it if there is none, and brings an older one to
// the present schema. A file that a newer Stockade made, that is damaged, or that
// is something else is left untouched and refused, saying what to do.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	path, err := filepath.Abs(cfg.Path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the path of the ledger %q cannot be resolved", cfg.Path)
	}
	if err := prepareFile(path); err != nil {
		return nil, err
	}
	// SQLite on Linux is normally built to commit with fdatasync; this build is not.
	// It leaves out only the file's timestamps. The setting is the library's, for
	// the whole program, and always the same.
	if _, err := driver.Fdatasync(true); err != nil {
		log.DebugContext(ctx, "commits use fsync", "err", err)
	}
	if err := refuseForeign(ctx, path); err != nil {
		return nil, err
	}
	s := &Store{path: path, log: log}
	if err := s.open(ctx, cfg); err != nil {
		_ = s.Close()
		return nil, s.dbError(err, "opening the ledger %s", path)
	}
	return s, nil
}

func (s *Store) open(ctx context.Context, cfg Config) error {
	pragmas := []string{"journal_mode(WAL)", fmt.Sprintf("journal_size_limit(%d)", walKept)}
	if cfg.MaxPages > 0 {
		pragmas = append(pragmas, fmt.Sprintf("max_page_count(%d)", cfg.MaxPages))
	}
	db, err := connect(s.path, pragmas...)
	if err != nil {
		return err
	}
	db.SetMaxOpenConns(1)
	// The writer takes db over, and with it the duty to close it.
	if s.write, err = newWriter(ctx, db, s.dbError, func(ctx context.Context) error { return migrate(ctx, db, cfg.Version) }); err != nil {
		return err
	}
	rdb, err := connect(s.path, "query_only(1)")
	if err != nil {
		return err
	}
	rdb.SetMaxOpenConns(readers)
	rdb.SetMaxIdleConns(readers)
	s.reads = newPool(rdb)
	if err := rdb.PingContext(ctx); err != nil {
		return err
	}
	if err := s.reserve(); err != nil {
		s.log.WarnContext(ctx, "the ledger has no space of its own for when the disk is full", "err", err)
	}
	return nil
}

// Close waits for the writes and reads under way and closes the file. It may be
// called more than once.
func (s *Store) Close() error {
	s.closing.Do(func() {
		var errs []error
		if s.reads != nil {
			errs = append(errs, s.reads.close())
		}
		if s.write != nil {
			errs = append(errs, s.write.close())
		}
		if err := errors.Join(errs...); err != nil {
			s.closed = s.dbError(err, "closing the ledger %s", s.path)
		}
	})
	return s.closed
}

// Failing reports whether the ledger takes no more changes until it is opened
// anew, because one could not be made durable. It answers at once.
func (s *Store) Failing() bool { return s.write.failed.Load() }

// Check reads the whole file and returns internal, naming the damage, if SQLite
// finds any. It takes time in proportion to the size of the file.
func (s *Store) Check(ctx context.Context) error {
	found, err := queryOne(ctx, s.reads, func(r row) (string, error) {
		var text string
		return text, r.Scan(&text)
	}, `PRAGMA quick_check(1)`)
	if err != nil {
		return s.dbError(err, "checking the ledger")
	}
	if found != "ok" {
		return damaged(errors.New(found), s.path)
	}
	return nil
}

// connect opens the file; each new connection runs the pragmas.
func connect(path string, pragmas ...string) (*sql.DB, error) {
	q := url.Values{}
	// busy_timeout comes first: the others may already have to wait.
	for _, p := range append([]string{fmt.Sprintf("busy_timeout(%d)", busyMillis), "foreign_keys(1)", "synchronous(FULL)",
		"temp_store(MEMORY)"}, pragmas...) {
		q.Add("_pragma", p)
	}
	u := url.URL{Scheme: "file", Path: path, RawQuery: q.Encode()}
	return sql.Open("sqlite", u.String())
}

// prepareFile makes the directory and the file so that nobody else can read
// them; SQLite gives its side files the mode of the main one.
func prepareFile(path string) error {
	fail := func(err error) error {
		code := errdefs.Internal
		switch {
		case errors.Is(err, syscall.ELOOP):
			return errdefs.Wrap(err, errdefs.Invalid, "the ledger %s is a symbolic link", path).WithNext("give the path of the file itself")
		case errors.Is(err, fs.ErrPermission):
			code = errdefs.Denied
		case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EROFS):
			code = errdefs.Unavailable
		}
		return errdefs.Wrap(err, code, "the ledger cannot be opened: %v", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fail(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fail(err)
	}
	if !st.Mode().IsRegular() {
		return errdefs.New(errdefs.Invalid, "the ledger %s is not a regular file", path)
	}
	if st.Mode().Perm() != 0o600 {
		if err := f.Chmod(0o600); err != nil {
			return fail(err)
		}
	}
	// Before SQLite has the file: closing it later would drop SQLite's locks.
	_ = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, st.Size()+reserveBytes)
	if st.Size() == 0 {
		// A new file must still have its name after a power cut.
		if err := durable.SyncDir(filepath.Dir(path)); err != nil {
			return fail(err)
		}
	}
	return nil
}

// refuseForeign looks at the file without changing it.
func refuseForeign(ctx context.Context, path string) error {
	db, err := connect(path)
	if err != nil {
		return dbError(path, err, "opening the ledger %s", path)
	}
	defer db.Close()
	var app, tables, schema int64
	err = db.QueryRowContext(ctx, `SELECT (SELECT application_id FROM pragma_application_id),
		(SELECT count(*) FROM sqlite_master), (SELECT count(*) FROM sqlite_master WHERE name = 'goose_db_version')`).Scan(&app, &tables, &schema)
	if err != nil {
		return dbError(path, err, "opening the ledger %s", path)
	}
	if app != applicationID {
		if tables == 0 && app == 0 {
			return nil // new
		}
		return errdefs.New(errdefs.Invalid, "%s is a SQLite database, but not a ledger of Stockade", path).
			WithNext("give the path of another state directory")
	}
	if schema == 0 {
		return nil // made, and not filled before a crash
	}
	var have int64
	if err := db.QueryRowContext(ctx, `SELECT coalesce(max(version_id), 0) FROM goose_db_version WHERE is_applied`).Scan(&have); err != nil {
		return dbError(path, err, "reading the schema version of the ledger %s", path)
	}
	know, err := newest()
	if err != nil {
		return err
	}
	if have <= know {
		return nil
	}
	by := "a newer Stockade"
	var version string
	// The table may look different by then; its answer is only for the message.
	if db.QueryRowContext(ctx, `SELECT version FROM instance`).Scan(&version) == nil && version != "" {
		by = "Stockade " + version
	}
	return errdefs.New(errdefs.Invalid, "the ledger %s was last written by %s and has schema %d; this program knows schemas up to %d and would damage it", path, by, have, know).
		WithNext("run that version or a later one, or restore the backup that was made before the upgrade").
		With("schema", fmt.Sprint(have)).With("known", fmt.Sprint(know))
}

func provider(db *sql.DB) (*goose.Provider, error) {
	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	// Without the global registry: what another package registers is not ours to run.
	return goose.NewProvider(goose.DialectSQLite3, db, dir, goose.WithDisableGlobalRegistry(true))
}

// newest returns the schema version this program makes.
func newest() (int64, error) {
	names, err := fs.Glob(migrations, "migrations/*.sql")
	if err != nil || len(names) == 0 {
		return 0, errdefs.Wrap(err, errdefs.Internal, "the program holds no migrations")
	}
	return goose.NumericComponent(names[len(names)-1])
}

func migrate(ctx context.Context, db *sql.DB, version string) error {
	// Before the first table, so that a crash half-way leaves a file that is known as ours.
	if _, err := db.ExecContext(ctx, fmt.Sprintf(`PRAGMA application_id = %d`, applicationID)); err != nil {
		return err
	}
	p, err := provider(db)
	if err != nil {
		return err
	}
	if _, err := p.Up(ctx); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, `INSERT INTO instance (one, id, generation, version) VALUES (1, ?, 0, ?)
		ON CONFLICT DO UPDATE SET version = excluded.version WHERE excluded.version <> '' AND excluded.version <> instance.version`, instanceID(), version)
	return err
}
