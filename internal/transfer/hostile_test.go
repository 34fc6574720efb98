package transfer

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

const childDir = "STOCKADE_TRANSFER_CHILD"

// child receives a file and a half, says so, and waits to be killed.
func child(dir string) {
	s, err := Open(Config{Dir: dir})
	if err != nil {
		panic(err)
	}
	h := s.Holder(nil)
	for _, err := range []error{push(h, "whole", []byte("w"), slotA), h.Chunk(message("part", 0, 2, nil), slotB)} {
		if err != nil {
			panic(err)
		}
	}
	fmt.Println("received")
	bufio.NewReader(os.Stdin).ReadByte()
	os.Exit(1)
}

// TestSweepAfterAKill: what a killed process left goes when nobody lives that
// could want it, and no earlier.
func TestSweepAfterAKill(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "transfers")
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childDir+"="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	defer in.Close()
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	killed := false
	kill := func() {
		if !killed {
			cmd.Process.Kill()
			cmd.Wait()
			killed = true
		}
	}
	defer kill()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "received\n" {
		t.Fatalf("the child said %q, %v", line, err)
	}
	beside := open(t, dir, 0)
	wantFile(t, beside, "whole", slotA, "w")
	if before := files(t, dir); len(before) != 5 { // two spaces, a file, a part, a record
		t.Errorf("received: %v", before)
	}
	first := space(slotA)
	must(t, beside.Close())
	kill()
	// What is not ours stays.
	must(t, os.WriteFile(filepath.Join(dir, "note"), nil, 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, first, "directory"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, ownersDir, "x.json"), nil, 0o600))
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.WriteFile(outside, []byte("stays"), 0o600))
	must(t, os.Symlink(filepath.Dir(outside), filepath.Join(dir, strings.Repeat("f", 64))))
	must(t, os.Symlink(outside, filepath.Join(dir, first, "link")))
	s := open(t, dir, 0)
	wantCode(t, "what the dead process received", second(s.Read("whole", slotA)), errdefs.NotFound)
	want := []string{first, filepath.Join(first, "directory"), strings.Repeat("f", 64), "note"}
	left := files(t, dir)
	slices.Sort(left)
	slices.Sort(want)
	if !slices.Equal(left, want) {
		t.Errorf("left %v, want %v", left, want)
	}
	if b, err := os.ReadFile(outside); err != nil || string(b) != "stays" {
		t.Errorf("a file outside: %q, %v", b, err)
	}
	// And a second store beside a living one sweeps nothing.
	h := s.Holder(nil)
	must(t, push(h, "k", []byte("1"), slotA))
	wantFile(t, open(t, dir, 0), "k", slotA, "1")
	must(t, h.Close())
}

// trap is a store whose directory somebody else writes to.
type trap struct {
	*Store
	dir, space, outside string
	h                   *Holder
}

func newTrap(t *testing.T) trap {
	t.Helper()
	base := t.TempDir()
	tr := trap{dir: filepath.Join(base, "transfers"), outside: filepath.Join(base, "outside")}
	must(t, os.Mkdir(tr.outside, 0o700))
	must(t, os.WriteFile(filepath.Join(tr.outside, "secret"), []byte("secret"), 0o600))
	tr.Store = open(t, tr.dir, 0)
	tr.space = filepath.Join(tr.dir, space(slotA))
	tr.h = tr.Holder(nil)
	t.Cleanup(func() {
		if b, err := os.ReadFile(filepath.Join(tr.outside, "secret")); err != nil || string(b) != "secret" {
			t.Errorf("the file outside: %q, %v", b, err)
		}
		if e, err := os.ReadDir(tr.outside); err != nil || len(e) != 1 {
			t.Errorf("outside: %v, %v", e, err)
		}
	})
	return tr
}

func TestPlantedNames(t *testing.T) {
	t.Parallel()
	plant := map[string]func(t *testing.T, path, outside string){
		"symlink to a file": func(t *testing.T, path, outside string) { must(t, os.Symlink(filepath.Join(outside, "secret"), path)) },
		"dangling symlink":  func(t *testing.T, path, outside string) { must(t, os.Symlink(filepath.Join(outside, "new"), path)) },
		"hard link":         func(t *testing.T, path, outside string) { must(t, os.Link(filepath.Join(outside, "secret"), path)) },
		"fifo":              func(t *testing.T, path, outside string) { must(t, unix.Mkfifo(path, 0o600)) },
		"directory":         func(t *testing.T, path, outside string) { must(t, os.Mkdir(path, 0o700)) },
		"other file":        func(t *testing.T, path, outside string) { must(t, os.WriteFile(path, []byte("planted"), 0o600)) },
	}
	for what, plant := range plant {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			for _, key := range []string{newKey(t), "old-key"} {
				// In the place of a file that has yet to come, before its first chunk and after.
				tr := newTrap(t)
				must(t, os.Mkdir(tr.space, 0o700))
				path := filepath.Join(tr.space, key)
				plant(t, path, tr.outside)
				wantCode(t, "the first chunk", tr.h.Chunk(message(key, 0, 2, []byte("x")), slotA), errdefs.Invalid)
				wantCode(t, "reading what was planted", second(tr.Read(key, slotA)), errdefs.NotFound)
				must(t, tr.Delete(key, slotA))
				must(t, os.Remove(path))
				must(t, tr.h.Chunk(message(key, 0, 2, []byte("x")), slotA))
				plant(t, path, tr.outside)
				wantCode(t, "the last chunk", tr.h.Chunk(message(key, 1, 2, []byte("x")), slotA), errdefs.Invalid)
				wantCode(t, "reading what was planted", second(tr.Read(key, slotA)), errdefs.NotFound)
				must(t, tr.h.Close())
				if _, err := os.Lstat(path); err != nil {
					t.Errorf("what was planted is gone: %v", err)
				}

				// In the place of a file that came.
				tr = newTrap(t)
				path = filepath.Join(tr.space, key)
				must(t, push(tr.h, key, []byte("mine"), slotA))
				must(t, os.Rename(path, path+"-aside"))
				plant(t, path, tr.outside)
				wantCode(t, "reading a swapped file", second(tr.Read(key, slotA)), errdefs.Invalid)
				wantCode(t, "deleting a swapped file", tr.Delete(key, slotA), errdefs.Invalid)
				wantCode(t, "closing with a swapped file", tr.h.Close(), errdefs.Invalid)
				if _, err := os.Lstat(path); err != nil {
					t.Errorf("a swapped file was removed: %v", err)
				}
				must(t, os.Remove(path))
				must(t, os.Rename(path+"-aside", path))
				wantFile(t, tr.Store, key, slotA, "mine")
				must(t, tr.h.Close())

				// In the place of the record of a file that came.
				tr = newTrap(t)
				must(t, push(tr.h, key, []byte("mine"), slotA))
				rec := filepath.Join(tr.dir, ownersDir, recordName(key, space(slotA)))
				must(t, os.Rename(rec, rec+"-aside"))
				plant(t, rec, tr.outside)
				if err := second(tr.Read(key, slotA)); !errdefs.Is(err, errdefs.Invalid) {
					t.Errorf("reading with a planted record: %v", err)
				}
				must(t, os.Remove(rec))
				wantCode(t, "reading without a record", second(tr.Read(key, slotA)), errdefs.NotFound)
				must(t, os.Rename(rec+"-aside", rec))
				wantFile(t, tr.Store, key, slotA, "mine")
				must(t, tr.h.Close())

				// In the place of the owner's directory.
				tr = newTrap(t)
				if what == "symlink to a file" {
					must(t, os.Symlink(tr.outside, tr.space))
				} else if what != "directory" {
					plant(t, tr.space, tr.outside)
				} else {
					continue
				}
				wantCode(t, "a chunk into a planted directory", tr.h.Chunk(message(key, 0, 1, nil), slotA), errdefs.Invalid)
				must(t, tr.h.Close())
			}
		})
	}
}

// TestSwappedStage: a file that comes is written to the inode that was made for
// it, whatever its name means by now, and is published only as that.
func TestSwappedStage(t *testing.T) {
	t.Parallel()
	for what, plant := range map[string]func(path, outside string) error{
		"symlink":    func(path, outside string) error { return os.Symlink(filepath.Join(outside, "secret"), path) },
		"hard link":  func(path, outside string) error { return os.Link(filepath.Join(outside, "secret"), path) },
		"other file": func(path, _ string) error { return os.WriteFile(path, []byte("planted"), 0o600) },
	} {
		tr, key := newTrap(t), newKey(t)
		must(t, tr.h.Chunk(message(key, 0, 3, []byte("one")), slotA))
		names, err := filepath.Glob(filepath.Join(tr.space, ".payload-*.tmp"))
		if err != nil || len(names) != 1 {
			t.Fatalf("%v, %v", names, err)
		}
		must(t, os.Rename(names[0], names[0]+"-aside"))
		must(t, plant(names[0], tr.outside))
		must(t, tr.h.Chunk(message(key, 1, 3, []byte("two")), slotA))
		wantCode(t, what+": the last chunk", tr.h.Chunk(message(key, 2, 3, []byte("three")), slotA), errdefs.Invalid)
		wantCode(t, what+": reading", second(tr.Read(key, slotA)), errdefs.NotFound)
		if left := files(t, tr.space); len(left) != 1 { // the one that was moved aside
			t.Errorf("%s: left %v", what, left)
		}
		must(t, tr.h.Close())
	}
}

func TestReplacedDirectory(t *testing.T) {
	t.Parallel()
	tr := newTrap(t)
	must(t, push(tr.h, "k", []byte("mine"), slotA))
	must(t, tr.h.Chunk(message("part", 0, 2, nil), slotA))
	must(t, os.Rename(tr.dir, tr.dir+"-aside"))
	for name, replace := range map[string]func() error{
		"nothing":   func() error { return nil },
		"directory": func() error { return os.Mkdir(tr.dir, 0o700) },
		"symlink":   func() error { return os.Symlink(tr.dir+"-aside", tr.dir) },
	} {
		must(t, replace())
		wantCode(t, name+": chunk", tr.h.Chunk(message("part", 1, 2, nil), slotA), errdefs.Unavailable)
		wantCode(t, name+": read", second(tr.Read("k", slotA)), errdefs.Unavailable)
		wantCode(t, name+": delete", tr.Delete("k", slotA), errdefs.Unavailable)
		if name == "symlink" {
			if s, err := Open(Config{Dir: tr.dir}); err == nil {
				s.Close()
				t.Error("a symbolic link was opened")
			}
		}
		os.Remove(tr.dir)
	}
	must(t, os.Rename(tr.dir+"-aside", tr.dir))
	wantFile(t, tr.Store, "k", slotA, "mine")
	must(t, tr.h.Close())
}

// TestForgedRecord: a record's owner and inode are all that it says; a record that
// names another file is none.
func TestForgedRecord(t *testing.T) {
	t.Parallel()
	for what, text := range map[string]string{
		"no JSON":       `{`,
		"empty":         ``,
		"other owner":   `{"owner":null,"payload_dev":1,"payload_ino":1}`,
		"no inode":      `{"owner":null}`,
		"wrong context": `{"owner":{"instance_uuid":"i","workspace_uuid":"w","placement_generation":1,"x":1},"payload_dev":1,"payload_ino":1}`,
		"long":          `{"owner":null,"payload_dev":1,"payload_ino":1}` + strings.Repeat(" ", maxRecord),
	} {
		tr, key := newTrap(t), newKey(t)
		must(t, push(tr.h, key, []byte("mine"), slotA))
		must(t, os.WriteFile(filepath.Join(tr.dir, ownersDir, recordName(key, "")), []byte(text), 0o600))
		if err := second(tr.Read(key, slotA)); !errdefs.Is(err, errdefs.Invalid) && !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%s: %v", what, err)
		}
		must(t, tr.h.Close())
	}
}

// TestDiskFull: a file that does not fit is refused as exhausted and leaves nothing.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=256k")
	s := open(t, dir, 0)
	defer s.Close()
	h := s.Holder(nil)
	must(t, push(h, "first", []byte("there"), slotA))
	for range 3 {
		err := push(h, "large", bytes.Repeat([]byte("x"), 1<<20), slotA)
		if !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "full") {
			t.Fatalf("a megabyte: %v", err)
		}
		if h.Held() != 1 {
			t.Errorf("holds %d", h.Held())
		}
	}
	must(t, push(h, "second", bytes.Repeat([]byte("x"), 100<<10), slotA)) // what was dropped made room
	wantFile(t, s, "first", slotA, "there")
	must(t, h.Close())
	if left := files(t, dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestPublish: with renameat2(2) and without, a name that is taken stays as it is.
func TestPublish(t *testing.T) {
	t.Parallel()
	for name, publish := range map[string]func(f folder, from, to string) error{"rename": folder.publish, "link": folder.relink} {
		dir := t.TempDir()
		f, err := openFolder(dir)
		must(t, err)
		for _, n := range []string{"a", "b"} {
			must(t, os.WriteFile(filepath.Join(dir, n), []byte(n), 0o600))
		}
		must(t, publish(f, "a", "c"))
		if err := publish(f, "b", "c"); err != unix.EEXIST {
			t.Errorf("%s: %v", name, err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, "c")); err != nil || string(got) != "a" || len(files(t, dir)) != 2 {
			t.Errorf("%s: %q, %v, %v", name, got, err, files(t, dir))
		}
		f.close()
	}
}
