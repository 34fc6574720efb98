package shelf

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
)

func TestMain(m *testing.M) { need.Main(m) }

func openShelf(t *testing.T) *Shelf {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "shelf")
	s, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	plugintest.Unlock(t, dir)
	return s
}

func plain(string, fs.FileMode) fs.FileMode { return 0o444 }

func never(string) bool { return false }

// put publishes name with one file that holds content.
func put(t *testing.T, s *Shelf, name, content string, valid func(string) bool) {
	t.Helper()
	st, err := s.Stage(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(st.Path, "f"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := st.Seal(t.Context(), plain); err != nil {
		t.Fatal(err)
	}
	if err := st.Publish(valid); err != nil {
		t.Fatal(err)
	}
	if err := st.Discard(); err != nil {
		t.Errorf("discard after publish: %v", err)
	}
}

func content(t *testing.T, s *Shelf, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(s.Path(name), "f"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// only checks that nothing but names is in the directory, hidden or not.
func only(t *testing.T, s *Shelf, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("the directory holds %q, want %q", got, names)
	}
}

func TestPublish(t *testing.T) {
	t.Parallel()
	s := openShelf(t)
	put(t, s, "b", "one", never)
	put(t, s, "a", "two", never)
	if names, err := s.Names(); err != nil || strings.Join(names, " ") != "a b" {
		t.Errorf("names %q, %v", names, err)
	}
	for path, want := range map[string]fs.FileMode{"a": 0o555 | fs.ModeDir, "a/f": 0o444} {
		if info, err := os.Lstat(filepath.Join(s.dir, path)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}
	// The first wins while it is valid, and is replaced when it is not.
	put(t, s, "a", "three", func(string) bool { return true })
	if got := content(t, s, "a"); got != "two" {
		t.Errorf("a valid one was replaced by %q", got)
	}
	put(t, s, "a", "three", never)
	if got := content(t, s, "a"); got != "three" {
		t.Errorf("a damaged one was not replaced: %q", got)
	}
	only(t, s, "a", "b")
}

// What another program or a damaged disk leaves under a name does not block it.
func TestPublishOverAnything(t *testing.T) {
	t.Parallel()
	for what, leave := range map[string]func(path string) error{
		"file":         func(p string) error { return os.WriteFile(p, nil, 0o444) },
		"link":         func(p string) error { return os.Symlink("/nowhere", p) },
		"link to dir":  func(p string) error { return os.Symlink("/", p) },
		"empty":        func(p string) error { return os.Mkdir(p, 0o700) },
		"sealed empty": func(p string) error { return os.Mkdir(p, 0o555) },
		"full": func(p string) error {
			return errors.Join(os.MkdirAll(p+"/deep/er", 0o700), os.WriteFile(p+"/deep/er/f", nil, 0o400), os.Chmod(p+"/deep", 0o555))
		},
		"fifo": func(p string) error { return unix.Mkfifo(p, 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := openShelf(t)
			if err := leave(s.Path("a")); err != nil {
				t.Fatal(err)
			}
			put(t, s, "a", "new", never)
			if got := content(t, s, "a"); got != "new" {
				t.Errorf("got %q", got)
			}
			only(t, s, "a")
		})
	}
}

func TestSweepLeavesWhatIsBeingMade(t *testing.T) {
	t.Parallel()
	s := openShelf(t)
	st, err := s.Stage("a")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{".b.left", ".c.removed-1/deep", ".hidden", "kept"} {
		if err := os.MkdirAll(filepath.Join(s.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Open(s.dir, Options{ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(s.dir, ".b.left")); err != nil {
		t.Errorf("a read-only shelf swept: %v", err)
	}
	if _, err := Open(s.dir, Options{}); err != nil {
		t.Fatal(err)
	}
	only(t, s, filepath.Base(st.Path), ".hidden", "kept")
	if err := st.Discard(); err != nil {
		t.Fatal(err)
	}
	if err := st.Discard(); err != nil {
		t.Fatal(err)
	}
	only(t, s, ".hidden", "kept")
}

func TestRemove(t *testing.T) {
	t.Parallel()
	s := openShelf(t)
	put(t, s, "a", "x", never)
	for range 2 { // missing is no error
		if err := s.Remove("a"); err != nil {
			t.Fatal(err)
		}
		only(t, s)
	}
	if n, files := Usage(s.dir); n != 0 || files != 0 {
		t.Errorf("usage %d, %d", n, files)
	}
}

func TestSealRefusesLinks(t *testing.T) {
	t.Parallel()
	s := openShelf(t)
	st, err := s.Stage("a")
	if err != nil {
		t.Fatal(err)
	}
	outside := filepath.Join(t.TempDir(), "f")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Symlink(outside, filepath.Join(st.Path, "l"))); err != nil {
		t.Fatal(err)
	}
	if err := st.Seal(t.Context(), plain); !errdefs.Is(err, errdefs.Internal) {
		t.Errorf("a link was sealed: %v", err)
	}
	if info, err := os.Stat(outside); err != nil || info.Mode() != 0o600 {
		t.Errorf("what it points to was changed: %v, %v", info.Mode(), err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	if err := st.Seal(ctx, plain); err == nil || err.Error() != "enough" {
		t.Errorf("sealed without time: %v", err)
	}
	if err := st.Discard(); err != nil {
		t.Fatal(err)
	}
	only(t, s)
}

func TestTurns(t *testing.T) {
	t.Parallel()
	s := openShelf(t)
	done, err := s.Turn(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.Turn(t.Context(), "b") // another name does not wait
	if err != nil {
		t.Fatal(err)
	}
	other()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Turn(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled waiter: %v", err)
	}
	got := make(chan error)
	go func() {
		d, err := s.Turn(context.Background(), "a")
		if err == nil {
			d()
		}
		got <- err
	}()
	done()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	if n := s.turns.Len(); n != 0 {
		t.Errorf("%d turns are left", n)
	}
}

func TestLastUsed(t *testing.T) {
	t.Parallel()
	s := openShelf(t)
	put(t, s, "a", "x", never)
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(s.Path("a"), old, old); err != nil {
		t.Fatal(err)
	}
	s.Touch("a")
	if !s.LastUsed("a").After(old.Add(time.Minute)) {
		t.Errorf("last used %v", s.LastUsed("a"))
	}
	s.Touch("missing")
	if !s.LastUsed("missing").IsZero() {
		t.Error("what is missing was used")
	}
}

func TestRefusal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		code errdefs.Code
		says string
	}{
		{&fs.PathError{Op: "write", Path: "/a/secret/place", Err: unix.ENOSPC}, errdefs.Exhausted, "no space"},
		{&fs.PathError{Op: "write", Path: "/a/secret/place", Err: unix.EDQUOT}, errdefs.Exhausted, "no space"},
		{&os.LinkError{Op: "rename", Old: "/a/secret/place", New: "b", Err: unix.EIO}, errdefs.Internal, "input/output"},
	} {
		err := Refusal(c.err, "the thing %q failed", "x%s")
		if err.Code != c.code || !strings.Contains(err.Message, c.says) || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Message, `"x%s"`) || !errors.Is(err, c.err) {
			t.Errorf("%v: %v", c.err, err)
		}
	}
}
