package boxhost

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

func mount(source, dest string, writable bool) []api.Mount {
	return []api.Mount{{Source: source, Dest: dest, Writable: writable}}
}

func TestMountRefusals(t *testing.T) {
	t.Parallel()
	allowed := t.TempDir()
	writeFile(t, filepath.Join(allowed, "dir", "f"), "x", 0o644)
	for name, target := range map[string]string{"out": "/etc", "in": "dir"} {
		if err := os.Symlink(target, filepath.Join(allowed, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(allowed, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{allowed, filepath.Dir(c.Dir)} })
	good := filepath.Join(allowed, "dir")
	for _, c := range []struct {
		source, dest string
		code         errdefs.Code
		part         string
	}{
		{"/etc", "/mnt/x", errdefs.Denied, "not allowed"},
		{"/", "/mnt/x", errdefs.Denied, "not allowed"},
		{allowed + "-other", "/mnt/x", errdefs.Denied, "not allowed"},
		{allowed + "/../etc", "/mnt/x", errdefs.Invalid, "clean"},
		{"dir", "/mnt/x", errdefs.Invalid, "absolute"},
		{filepath.Join(allowed, "out"), "/mnt/x", errdefs.Denied, "symbolic link"},
		{filepath.Join(allowed, "in"), "/mnt/x", errdefs.Denied, "symbolic link"},
		{filepath.Join(allowed, "in", "f"), "/mnt/x", errdefs.Denied, "symbolic link"},
		{filepath.Join(allowed, "none"), "/mnt/x", errdefs.Invalid, "does not exist"},
		{filepath.Join(allowed, "fifo"), "/mnt/x", errdefs.Invalid, "neither"},
		{f.cfg.Dir, "/mnt/x", errdefs.Denied, "state of Stockade"},
		{filepath.Join(f.cfg.Dir, "boxes"), "/mnt/x", errdefs.Denied, "state of Stockade"},
		{filepath.Dir(f.cfg.Dir), "/mnt/x", errdefs.Denied, "state of Stockade"},
		{good, "mnt", errdefs.Invalid, "absolute"},
		{good, "/mnt/", errdefs.Invalid, "clean"},
		{good, "/", errdefs.Invalid, "hide"},
		{good, "/home", errdefs.Invalid, "hide"},
		{good, "/home/agent", errdefs.Invalid, "hide"},
		{good, "/home/agent/.cache", errdefs.Invalid, "hide"},
		{good, "/workspace", errdefs.Invalid, "hide"},
		{good, "/tmp", errdefs.Invalid, "hide"},
		{good, "/usr", errdefs.Invalid, "hide"},
		{good, "/proc/self", errdefs.Invalid, "own"},
		{good, "/dev/x", errdefs.Invalid, "own"},
		{good, "/sys", errdefs.Invalid, "own"},
		{good, "/etc/x", errdefs.Invalid, "own"},
		{good, "/.stockade/init", errdefs.Invalid, "own"},
		{good, "/.stockade", errdefs.Invalid, "own"},
		{good, "/usr/bin/new-name", errdefs.Invalid, "entries"},
	} {
		_, err := f.Put(t.Context(), wire.BoxSpec{ID: newID(ident.Box), Limits: limits, Mounts: mount(c.source, c.dest, false)})
		if !errdefs.Is(err, c.code) {
			t.Errorf("%s at %s: %v, want %s", c.source, c.dest, err, c.code)
			continue
		}
		wantCode(t, err, c.code, c.part)
	}
	_, err := f.Put(t.Context(), wire.BoxSpec{ID: "twice", Limits: limits,
		Mounts: append(mount(good, "/mnt/a", false), mount(good, "/mnt/a/b", false)...)})
	wantCode(t, err, errdefs.Invalid, "one over the other")
	if infos, err := f.List(t.Context()); err != nil || len(infos) != 0 {
		t.Errorf("refused boxes are there: %v, %v", infos, err)
	}
	// Without anything allowed, nothing is.
	f.cfg.AllowMounts = nil
	f.reopen()
	_, err = f.Put(t.Context(), wire.BoxSpec{ID: "none", Limits: limits, Mounts: mount(good, "/mnt/a", false)})
	wantCode(t, err, errdefs.Denied, "ask the operator")
}

func TestMounts(t *testing.T) {
	t.Parallel()
	allowed := t.TempDir()
	// A person's directory: files of theirs, one of somebody else.
	const person = 4711
	for _, d := range []string{"ro", "rw", "swap/real"} {
		writeFile(t, filepath.Join(allowed, d, "theirs"), "theirs", 0o600)
		writeFile(t, filepath.Join(allowed, d, "others"), "others", 0o600)
		if os.Geteuid() == 0 {
			for _, p := range []string{filepath.Join(allowed, d), filepath.Join(allowed, d, "theirs")} {
				if err := os.Chown(p, person, person); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	writeFile(t, filepath.Join(allowed, "one-file"), "single", 0o644)
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{allowed} })
	id := f.put(func(s *wire.BoxSpec) {
		s.Mounts = []api.Mount{
			{Source: filepath.Join(allowed, "ro"), Dest: "/mnt/ro"},
			{Source: filepath.Join(allowed, "rw"), Dest: "/workspace/repo", Writable: true},
			{Source: filepath.Join(allowed, "swap/real"), Dest: "/home/agent/.cache/x/y"},
			{Source: filepath.Join(allowed, "one-file"), Dest: "/workspace/file.txt"},
			{Source: filepath.Join(allowed, "ro"), Dest: "/tmp/ro"},
			{Source: filepath.Join(allowed, "ro"), Dest: "/usr/share/doc"},
		}
	})
	if out := f.sh(id, `cat /mnt/ro/theirs /workspace/repo/theirs /home/agent/.cache/x/y/theirs file.txt /tmp/ro/theirs /usr/share/doc/theirs
		cat /mnt/ro/others 2>/dev/null && echo LEAK
		(echo > /mnt/ro/new) 2>/dev/null && echo RO-WRITTEN
		(echo > file.txt) 2>/dev/null && echo FILE-WRITTEN
		echo changed > repo/new; echo more >> repo/theirs; mkdir repo/sub; ls /workspace`); out != "theirstheirstheirssingletheirstheirsfile.txt\nrepo\n" {
		t.Errorf("got %q", out)
	}
	// What the agent made is the person's outside.
	for _, p := range []string{"new", "sub", "theirs"} {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(allowed, "rw", p), &st); err != nil || st.Uid != person || st.Gid != person {
			t.Errorf("%s: owner %d:%d, %v", p, st.Uid, st.Gid, err)
		}
	}
	// A working directory may lie in a mount.
	if out, code := f.run(id, "repo/sub", "/bin/pwd"); code != 0 || out != "/workspace/repo/sub\n" {
		t.Errorf("cwd in a mount: %q, %d", out, code)
	}
	// What was checked is what is seen, even if the path is swapped afterwards.
	if err := os.Rename(filepath.Join(allowed, "swap"), filepath.Join(allowed, "moved")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(allowed, "swap"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", filepath.Join(allowed, "swap", "real")); err != nil {
		t.Fatal(err)
	}
	if out := f.sh(id, "ls /home/agent/.cache/x/y"); out != "others\ntheirs\n" {
		t.Errorf("after swapping the source: %q", out)
	}
	// After that, a reopened host that still has the mount pinned keeps it, and
	// refuses once it is lost.
	f.reopen()
	_, err := f.Bundle(t.Context(), wire.ProcSpec{ID: "p", Box: id, Argv: []string{"true"}}, t.TempDir())
	wantCode(t, err, errdefs.Denied, "symbolic link")

	// A tenant cannot move a mount point in its volumes somewhere else.
	if err := os.Remove(filepath.Join(allowed, "swap", "real")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(allowed, "moved", "real"), filepath.Join(allowed, "swap", "real")); err != nil {
		t.Fatal(err)
	}
	ws := f.volumeDir(id, "workspace")
	if err := os.Remove(filepath.Join(ws, "repo")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/usr", filepath.Join(ws, "repo")); err != nil {
		t.Fatal(err)
	}
	_, err = f.Bundle(t.Context(), wire.ProcSpec{ID: "p", Box: id, Argv: []string{"true"}}, t.TempDir())
	wantCode(t, err, errdefs.Conflict, "in the way of a mount")
}

// A person's directory may have root's group. The agent can write there, and make
// no program that would run as that group on the machine.
func TestMountOfRootsGroup(t *testing.T) {
	t.Parallel()
	const person = 4321
	allowed := t.TempDir()
	var mounts []api.Mount
	for name, mode := range map[string]uint32{"plain": 0o755, "inherits": 0o2775} {
		dir := filepath.Join(allowed, name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if os.Geteuid() == 0 {
			if err := os.Chown(dir, person, 0); err != nil {
				t.Fatal(err)
			}
		}
		if err := unix.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		mounts = append(mounts, mount(dir, "/mnt/"+name, true)...)
	}
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{allowed} })
	id := f.put(func(s *wire.BoxSpec) { s.Mounts = mounts })
	for _, m := range mounts {
		f.sh(id, "cp /bin/true "+m.Dest+"/evil; chmod 2755 "+m.Dest+"/evil")
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(m.Source, "evil"), &st); err != nil || st.Uid != person || st.Gid == 0 && st.Mode&unix.S_ISGID != 0 {
			t.Errorf("%s: owner %d:%d, mode %o, %v", m.Dest, st.Uid, st.Gid, st.Mode, err)
		}
	}
}

// A directory of a file system that is mounted noexec can be shown: there it stays.
func TestMountsOfANoexecFileSystem(t *testing.T) {
	t.Parallel()
	need.Runc(t)
	allowed := t.TempDir()
	err := unix.Mount("tmpfs", allowed, "tmpfs", unix.MS_NOEXEC, "mode=755,size=1m")
	need.That(t, err == nil, "this test mounts a tmpfs, which is refused: %v", err)
	t.Cleanup(func() {
		if err := unix.Unmount(allowed, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	writeFile(t, filepath.Join(allowed, "x"), "#!/bin/sh\necho ran\n", 0o755)
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{allowed} })
	for _, writable := range []bool{false, true} {
		id := f.put(func(s *wire.BoxSpec) {
			s.Mounts = []api.Mount{{Source: allowed, Dest: "/mnt/data", Writable: writable}}
		})
		if out := f.sh(id, `tail -n 1 /mnt/data/x; /mnt/data/x 2>/dev/null || echo refused`); out != "echo ran\nrefused\n" {
			t.Errorf("writable %v: got %q", writable, out)
		}
	}
}
