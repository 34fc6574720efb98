package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

func tempPath(t testing.TB) string { return filepath.Join(t.TempDir(), "ledger.db") }

// refused requires that Open fails with a code, and says all of these things.
func refused(t *testing.T, path string, code errdefs.Code, says ...string) {
	t.Helper()
	s, err := Open(t.Context(), Config{Path: path})
	if err == nil {
		_ = s.Close()
		t.Fatalf("%s was opened", path)
	}
	e, ok := err.(*errdefs.Error)
	if !ok || e.Code != code {
		t.Fatalf("got %T %v, want the code %s", err, err, code)
	}
	for _, word := range says {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
	if e.Next == "" {
		t.Errorf("%q says no next step", err)
	}
}

// raw changes the file behind the ledger's back.
func raw(t *testing.T, path string, queries ...string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, q := range queries {
		if _, err := db.Exec(q); err != nil {
			t.Fatalf("%s: %v", q, err)
		}
	}
}

func TestFileIsPrivate(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "new", "with ?, % and #", "ledger.db")
	s := open(t, Config{Path: path})
	if _, err := s.NextGeneration(t.Context()); err != nil {
		t.Fatal(err)
	}
	modes := map[string]os.FileMode{}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		modes[e.Name()] = info.Mode().Perm()
	}
	for _, name := range []string{"ledger.db", "ledger.db-wal", "ledger.db-shm"} {
		if modes[name] != 0o600 {
			t.Errorf("%s has mode %v, not 0600 (of %v)", name, modes[name], modes)
		}
	}
	if st, err := os.Stat(filepath.Dir(path)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the directory has mode %v, not 0700 (%v)", st.Mode().Perm(), err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := open(t, Config{Path: path}).Close(); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("a wider mode stayed: %v (%v)", st.Mode().Perm(), err)
	}
}

func TestDurabilitySettings(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Path: tempPath(t)})
	defer s.Close()
	for _, c := range []struct{ pragma, want string }{
		{"journal_mode", "wal"}, {"synchronous", "2"}, {"foreign_keys", "1"}, {"busy_timeout", "5000"},
	} {
		var onWriter string
		err := s.write.submit(t.Context(), func(tx *tx) (err error) {
			onWriter, err = queryOne(context.Background(), tx, scanText, "PRAGMA "+c.pragma)
			return err
		})
		if err != nil || onWriter != c.want {
			t.Errorf("the writer has %s = %q, want %q (%v)", c.pragma, onWriter, c.want, err)
		}
	}
	// The readers cannot write, whatever a query says.
	if rows, err := s.reads.query(t.Context(), `DELETE FROM workspaces`); err == nil {
		rows.Next()
		err = rows.Err()
		rows.Close()
		if err == nil {
			t.Error("a reader could write")
		}
	}
}

func TestRefusesNewerVersion(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	if err := open(t, Config{Path: path, Version: "9.8.7"}).Close(); err != nil {
		t.Fatal(err)
	}
	raw(t, path, `INSERT INTO goose_db_version (version_id, is_applied) VALUES (4711, 1)`)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, path, errdefs.Invalid, "Stockade 9.8.7", "schema 4711", "run that version")
	after, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(before) != string(after) {
		t.Error("the refused file was changed")
	}
	raw(t, path, `DROP TABLE instance`) // a future schema may look quite different
	refused(t, path, errdefs.Invalid, "a newer Stockade", "schema 4711")
}

func TestRefusesForeignDatabase(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	raw(t, path, `CREATE TABLE recipes (name TEXT)`)
	refused(t, path, errdefs.Invalid, "not a ledger of Stockade")
	var mode string
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRow(`PRAGMA journal_mode`).Scan(&mode); err != nil || mode == "wal" {
		t.Errorf("the foreign database was put into mode %q (%v)", mode, err)
	}
}

func TestRefusesWhatIsNoFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	target := filepath.Join(dir, "target.db")
	if err := open(t, Config{Path: target}).Close(); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link.db")
	if err := os.Symlink(target, link); err != nil {
		t.Fatal(err)
	}
	refused(t, link, errdefs.Invalid, "symbolic link")
	s, err := Open(t.Context(), Config{Path: dir})
	if err == nil {
		_ = s.Close()
		t.Fatal("a directory was opened")
	}
}

func TestRefusesCorruptDatabase(t *testing.T) {
	t.Parallel()
	t.Run("not a database", func(t *testing.T) {
		t.Parallel()
		path := tempPath(t)
		if err := os.WriteFile(path, []byte(strings.Repeat("this is no database. ", 500)), 0o600); err != nil {
			t.Fatal(err)
		}
		refused(t, path, errdefs.Internal, "damaged", "restore a backup")
	})
	t.Run("damaged schema", func(t *testing.T) {
		t.Parallel()
		path := filled(t)
		damage(t, path, 100, 4000)
		refused(t, path, errdefs.Internal, "damaged", "restore a backup")
	})
	t.Run("damaged pages", func(t *testing.T) {
		t.Parallel()
		path := filled(t)
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		damage(t, path, st.Size()/2, int(st.Size()/2)) // the records, not the schema
		s, err := Open(t.Context(), Config{Path: path})
		if err == nil {
			defer s.Close()
			err = s.Check(t.Context())
		}
		if !errdefs.Is(err, errdefs.Internal) || !strings.Contains(err.Error(), "damaged") {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("cut short", func(t *testing.T) {
		t.Parallel()
		path := filled(t)
		if err := os.Truncate(path, 8192); err != nil {
			t.Fatal(err)
		}
		s, err := Open(t.Context(), Config{Path: path})
		if err == nil {
			defer s.Close()
			err = s.Check(t.Context())
		}
		if !errdefs.Is(err, errdefs.Internal) || !strings.Contains(err.Error(), "damaged") {
			t.Fatalf("got %v", err)
		}
	})
}

// filled makes a ledger with some hundred records and closes it.
func filled(t *testing.T) string {
	t.Helper()
	path := tempPath(t)
	s := open(t, Config{Path: path})
	r, err := seed(t.Context(), s, "w")
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		p, a := processOf(r, strings.Repeat("x", i+1))
		if _, _, err := s.CreateProcess(t.Context(), p, store.Capacity{}, a); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func damage(t *testing.T, path string, from int64, n int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte(strings.Repeat("\xff", n)), from); err != nil {
		t.Fatal(err)
	}
}

// TestHalfMade: a crash between the first marks and the tables leaves a file
// that is taken up again.
func TestHalfMade(t *testing.T) {
	t.Parallel()
	for name, queries := range map[string][]string{
		"marked":    {`PRAGMA application_id = 1398033220`, `PRAGMA journal_mode = WAL`},
		"versioned": {`PRAGMA application_id = 1398033220`, `CREATE TABLE goose_db_version (id INTEGER PRIMARY KEY AUTOINCREMENT, version_id INTEGER NOT NULL, is_applied INTEGER NOT NULL, tstamp TIMESTAMP DEFAULT (datetime('now')))`, `INSERT INTO goose_db_version (version_id, is_applied) VALUES (0, 1)`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := tempPath(t)
			raw(t, path, queries...)
			s := open(t, Config{Path: path})
			defer s.Close()
			if n, err := s.NextGeneration(t.Context()); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		})
	}
	if applicationID != 1398033220 {
		t.Error("the test's mark is not the program's")
	}
}

// TestSecondProgram: 'stockade key reset-admin' writes beside a running server.
func TestSecondProgram(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	a := open(t, Config{Path: path})
	defer a.Close()
	b := open(t, Config{Path: path})
	defer b.Close()
	seen := map[int64]bool{}
	results := make(chan int64)
	for _, s := range []*Store{a, b, a, b} {
		go func() {
			for range 25 {
				n, err := s.NextGeneration(context.WithoutCancel(t.Context()))
				if err != nil {
					t.Error(err)
				}
				results <- n
			}
		}()
	}
	for range 100 {
		n := <-results
		if seen[n] {
			t.Errorf("the generation %d was given twice", n)
		}
		seen[n] = true
	}
	id, err := a.Instance(t.Context())
	other, err2 := b.Instance(t.Context())
	if id != other || errors.Join(err, err2) != nil {
		t.Errorf("one ledger with two ids: %s %s (%v, %v)", id, other, err, err2)
	}
}

// A ledger of the first schema is brought to the present one when it is opened.
func TestUpgradesAnOlderLedger(t *testing.T) {
	t.Parallel()
	path := tempPath(t)
	s := open(t, Config{Path: path, Version: "1"})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	raw(t, path, `ALTER TABLE runs DROP COLUMN installation`)
	raw(t, path, `DELETE FROM goose_db_version WHERE version_id = 2`)
	s = open(t, Config{Path: path, Version: "2"})
	defer s.Close()
	if _, err := s.Runs(t.Context(), store.Scope{}, store.Page{Limit: 1}); err != nil {
		t.Errorf("runs of an upgraded ledger: %v", err)
	}
}
