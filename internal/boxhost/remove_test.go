package boxhost

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestRemoveRefusesWhileInUse(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	f.mu.Lock()
	f.live[id] = 2
	f.mu.Unlock()
	if info, err := f.Get(t.Context(), id); err != nil || info.Procs != 2 {
		t.Errorf("%+v, %v", info, err)
	}
	wantCode(t, f.Remove(t.Context(), id), errdefs.Conflict, "2 processes live")
	f.mu.Lock()
	f.live[id] = 0
	f.mu.Unlock()
	// Files on their way keep the box, too.
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() { done <- f.PutFiles(t.Context(), id, "/workspace", r) }()
	if _, err := io.WriteString(w, strings.Repeat("\x00", 512)); err != nil { // it is reading now
		t.Fatal(err)
	}
	wantCode(t, f.Remove(t.Context(), id), errdefs.Conflict, "being copied")
	if _, err := io.WriteString(w, strings.Repeat("\x00", 512)); err != nil { // the rest of an archive's end
		t.Error(err)
	}
	w.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := f.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
}

// The removal of a box may take as long as a tenant has files. Nobody waits for it
// but who asked for it.
func TestNobodyWaitsForARemoval(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	if err := f.Retire(id); err != nil {
		t.Fatal(err)
	}
	f.Manager.mu.Lock()
	b := f.boxes[id]
	f.Manager.mu.Unlock()
	b.mu.Lock() // as while it is removed
	spec := b.rec.Spec
	if err := f.Retire(id); err != nil {
		t.Error(err)
	}
	_, err := f.Put(t.Context(), spec)
	wantCode(t, err, errdefs.Conflict, "being removed")
	_, err = f.Bundle(t.Context(), wire.ProcSpec{ID: "p", Box: id, Argv: []string{"true"}}, t.TempDir())
	wantCode(t, err, errdefs.Conflict, "being removed")
	wantCode(t, f.PutFiles(t.Context(), id, "/workspace", strings.NewReader("")), errdefs.Conflict, "being removed")
	b.mu.Unlock()
	if err := f.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
	wantCode(t, f.Retire(id), errdefs.NotFound, "no box")
}

// A box that has filled the disk can be removed, and makes room thereby.
func TestRemoveOnAFullDisk(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *Config) {
		disk := t.TempDir()
		need.Disk(t, disk, "size=1m,mode=0711")
		c.Dir = filepath.Join(disk, "host")
	})
	fill := func(id string) {
		t.Helper()
		file, err := os.Create(filepath.Join(f.volumeDir(id, "workspace"), "filler"))
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		for err == nil {
			_, err = file.Write(make([]byte, 4096))
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
	}
	id := f.put(nil)
	fill(id)
	if err := f.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
	// That it goes is known after a crash as well.
	id = f.put(nil)
	fill(id)
	if err := f.Retire(id); err != nil {
		t.Fatal(err)
	}
	f.reopen()
	wantCode(t, f.Retire(id), errdefs.NotFound, "no box")
	if ents, err := os.ReadDir(f.boxesDir()); err != nil || len(ents) != 0 {
		t.Errorf("left: %v, %v", ents, err)
	}
}

// Whatever a tenant leaves in its volumes goes, and nothing else.
func TestRemoveHostileTrees(t *testing.T) {
	t.Parallel()
	outside := t.TempDir()
	writeFile(t, filepath.Join(outside, "precious"), "x", 0o644)
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{outside} })
	id := f.put(func(s *wire.BoxSpec) { s.Mounts = mount(outside, "/workspace/m", true) })
	f.sh(id, `ln -s `+outside+` link; ln -s / root; ln -s loop loop
		mkdir -p ro/sub; echo x > ro/sub/f; chmod 0 ro/sub ro
		mkfifo fifo; for i in $(seq 300); do : > "many-$i"; done; printf x > "$(printf 'new\nline')"
		mkdir -p ~/$(printf 'deep/%.0s' $(seq 500))`)
	if err := f.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(outside, "precious")); err != nil || string(b) != "x" {
		t.Errorf("what was outside: %q, %v", b, err)
	}
}

func TestRemoveTree(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := removeTree(filepath.Join(dir, "none", "such")); err != nil {
		t.Errorf("nothing to remove: %v", err)
	}
	// Deeper than descriptors or path names allow, with branches below the turn.
	top := filepath.Join(dir, "tree")
	if err := os.Mkdir(top, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(top, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5000 {
		if i%7 == 0 {
			if err := unix.Mkdirat(fd, fmt.Sprint("b", i), 0); err != nil {
				t.Fatal(err)
			}
		}
		if err := unix.Mkdirat(fd, "d", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, "d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = next
	}
	unix.Close(fd)
	// What a removal that was interrupted had moved up is no obstacle, and goes too.
	if err := os.MkdirAll(filepath.Join(dir, ".deep-tree-1", "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := removeTree(top); err != nil {
		t.Fatal(err)
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) != 0 {
		t.Errorf("left: %v, %v", ents, err)
	}
}

// A mount that nobody knows of is never emptied.
func TestRemoveTreeStopsAtMounts(t *testing.T) {
	t.Parallel()
	need.Root(t)
	outside, top := t.TempDir(), filepath.Join(t.TempDir(), "top")
	writeFile(t, filepath.Join(outside, "precious"), "x", 0o644)
	at := filepath.Join(top, "a", "b")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(outside, at, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(at, unix.MNT_DETACH)
	if err := removeTree(top); err == nil {
		t.Error("the tree with a mount in it was deleted")
	}
	if _, err := os.Stat(filepath.Join(outside, "precious")); err != nil {
		t.Errorf("what was mounted is damaged: %v", err)
	}
}

// Programs run in a root directory that is kept apart, though /run be noexec.
func TestRootOnANoexecFileSystem(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	need.Root(t)
	disk, err := os.MkdirTemp("/run", "stockade-test-") // everybody may enter it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(disk) })
	if err := unix.Mount("tmpfs", disk, "tmpfs", unix.MS_NOEXEC|unix.MS_NOSUID|unix.MS_NODEV, "size=1m,mode=0711"); err != nil {
		need.That(t, false, "this test mounts a tmpfs, which is refused: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(disk, 0); err != nil { // fails if a mount is left in it
			t.Error(err)
		}
	})
	f.public = filepath.Join(disk, "stockade")
	f.roots = f.public
	id := f.put(nil)
	for range 2 {
		f.sh(id, "true")
		var st unix.Statfs_t
		if err := unix.Statfs(f.rootDir(id), &st); err != nil || st.Flags&unix.ST_NOEXEC != 0 || st.Flags&unix.ST_NOSUID == 0 {
			t.Errorf("flags %#x, %v", st.Flags, err)
		}
	}
	if err := f.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
	if ents, err := os.ReadDir(disk); err != nil || len(ents) != 0 {
		t.Errorf("left: %v, %v", ents, err)
	}
}
