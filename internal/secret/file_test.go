package secret

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

// alone requires that a directory holds these names and nothing else, such as a
// temporary file.
func alone(t *testing.T, dir string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("the directory holds %v, want %v", got, names)
	}
}

func refused(t *testing.T, err error, code errdefs.Code, says ...string) {
	t.Helper()
	if _, ok := err.(*errdefs.Error); !ok || !errdefs.Is(err, code) {
		t.Fatalf("got %T %v, want the code %s", err, err, code)
	}
	for _, word := range says {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
}

func TestWriteAndRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "a.key")
	_, err := ReadFile0600(path)
	refused(t, err, errdefs.NotFound, path)
	for _, text := range []string{"one", "", "two"} {
		if err := WriteFile0600(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		got, err := ReadFile0600(path)
		if err != nil || string(got) != text {
			t.Fatalf("%q %v", got, err)
		}
		st, err := os.Stat(path)
		if err != nil || st.Mode() != 0o600 {
			t.Fatalf("mode %v (%v)", st.Mode(), err)
		}
	}
	refused(t, CreateFile0600(path, []byte("three")), errdefs.Conflict, "exists already")
	if got, _ := ReadFile0600(path); string(got) != "two" {
		t.Errorf("the file was overwritten: %q", got)
	}
	alone(t, dir, "a.key")
	refused(t, WriteFile0600(filepath.Join(dir, "none", "a.key"), nil), errdefs.NotFound, "no such file or directory")
}

// TestUmask: the mode is 0600 whatever the umask, which belongs to the whole
// process; so this runs in a shell of its own.
func TestUmask(t *testing.T) {
	t.Parallel()
	if path := os.Getenv("STOCKADE_TEST_UMASK"); path != "" {
		if err := WriteFile0600(path, []byte("x")); err != nil {
			t.Fatal(err)
		}
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, mask := range []string{"0000", "0777"} {
		path := filepath.Join(t.TempDir(), "a.key")
		cmd := exec.Command("/bin/sh", "-c", "umask "+mask+`; exec "$0" -test.run '^TestUmask$'`, exe)
		cmd.Env = append(os.Environ(), "STOCKADE_TEST_UMASK="+path)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		if st, err := os.Stat(path); err != nil || st.Mode() != 0o600 {
			t.Errorf("with umask %s: %v (%v)", mask, st, err)
		}
	}
}

func TestLinksAreNotFollowed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	victim, link, dangling := filepath.Join(dir, "victim"), filepath.Join(dir, "link"), filepath.Join(dir, "dangling")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink(victim, link), os.Symlink(filepath.Join(dir, "new"), dangling)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, dangling} {
		refused(t, WriteFile0600(path, []byte("x")), errdefs.Conflict, "symbolic link")
		refused(t, CreateFile0600(path, []byte("x")), errdefs.Conflict, "symbolic link")
		_, err := ReadFile0600(path)
		refused(t, err, errdefs.Conflict, "symbolic link")
	}
	if got, _ := os.ReadFile(victim); string(got) != "precious" {
		t.Errorf("the file behind the link holds %q", got)
	}
	alone(t, dir, "dangling", "link", "victim")
}

func TestOddFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, dir} {
		_, err := ReadFile0600(path) // must not hang on the fifo
		refused(t, err, errdefs.Conflict, "not a regular file")
		refused(t, WriteFile0600(path, nil), errdefs.Conflict, "not a regular file")
	}
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, make([]byte, MaxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := ReadFile0600(big)
	refused(t, err, errdefs.Invalid, "larger than")
	if err := os.Truncate(big, MaxFile); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadFile0600(big); err != nil || len(got) != MaxFile {
		t.Error(len(got), err)
	}
}

func TestWiderModes(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "a.key")
	for mode := fs.FileMode(0); mode <= 0o777; mode++ {
		if mode&0o400 == 0 {
			continue // its own user cannot read it: another refusal, unless root
		}
		if err := errors.Join(os.WriteFile(path, []byte("x"), 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		_, err := ReadFile0600(path)
		if mode&0o077 == 0 {
			if err != nil {
				t.Errorf("mode %04o: %v", mode, err)
			}
		} else {
			refused(t, err, errdefs.Denied, "chmod 600 "+path)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestForeignOwner(t *testing.T) {
	t.Parallel()
	need.Root(t)
	path := filepath.Join(t.TempDir(), "a.key")
	if err := WriteFile0600(path, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(path, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	_, err := ReadFile0600(path)
	refused(t, err, errdefs.Denied, "belongs to user 12345")
}

// TestConcurrentWriters: readers see one of the whole contents, and of many
// creators one wins.
func TestConcurrentWriters(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path, once := filepath.Join(dir, "a.key"), filepath.Join(dir, "b.key")
	var wg sync.WaitGroup
	var won sync.Map
	for i := range 8 {
		text := strings.Repeat(string(rune('a'+i)), 1000)
		wg.Go(func() {
			for range 20 {
				if err := WriteFile0600(path, []byte(text)); err != nil {
					t.Error(err)
				}
				got, err := ReadFile0600(path)
				if err != nil || len(got) != 1000 || strings.Count(string(got), string(got[0])) != 1000 {
					t.Errorf("a mixed file of %d bytes (%v)", len(got), err)
				}
			}
			switch err := CreateFile0600(once, []byte(text)); {
			case err == nil:
				won.Store(text, true)
			case !errdefs.Is(err, errdefs.Conflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	n := 0
	won.Range(func(text, _ any) bool {
		n++
		if got, err := ReadFile0600(once); err != nil || string(got) != text {
			t.Errorf("the winner's text is not there: %v", err)
		}
		return true
	})
	if n != 1 {
		t.Errorf("%d creators won", n)
	}
	alone(t, dir, "a.key", "b.key")
}

// TestFailedWriteLeavesTheOld: on a full disk the old content stays, and no
// temporary file.
func TestFailedWriteLeavesTheOld(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=64k,mode=0700")
	path := filepath.Join(dir, "a.key")
	if err := WriteFile0600(path, []byte("old")); err != nil {
		t.Fatal(err)
	}
	refused(t, WriteFile0600(path, make([]byte, 256<<10)), errdefs.Unavailable, "no space left")
	if got, err := ReadFile0600(path); err != nil || string(got) != "old" {
		t.Errorf("%q %v", got, err)
	}
	alone(t, dir, "a.key")
}
