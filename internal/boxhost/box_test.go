package boxhost

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/netns"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestWhatAProcessHas(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	for cmd, want := range map[string]string{
		"id -u; id -g; id -un":                                 "1000\n1000\nagent\n",
		"grep -E '^Cap' /proc/self/status | cut -f2 | sort -u": "0000000000000000\n",
		"grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status":   "NoNewPrivs:\t1\nSeccomp:\t2\n",
		"grep -E '^Groups' /proc/self/status | tr -d '\t \n'":  "Groups:",
		"ls /sys; ls -A /workspace":                            "",
		"ls -A /home/agent":                                    ".cache\n",
		"hostname; echo $$":                                    "box\n1\n",
		"pwd; echo $PATH":                                      "/workspace\n" + basePath + "\n",
		"ulimit -c":                                            "0\n",
		"cat /proc/sys/kernel/random/boot_id > /dev/null; cat /proc/self/oom_score_adj": "500\n",
		// The kernel may add fallback tunnel devices to every namespace; routes there are none.
		"cat /proc/net/route | tail -n +2":     "",
		"env | grep -v -E '^(PATH|HOME|PWD)='": "SHLVL=0\n",
		"stat -c %a /tmp /dev/shm":             "1777\n1777\n",
	} {
		out, _ := f.run(id, "", "/bin/sh", "-c", cmd)
		if strings.Contains(cmd, "env") {
			out = strings.ReplaceAll(out, "OLDPWD=/\n", "")
			want = strings.ReplaceAll(want, "SHLVL=0\n", "")
			out = strings.ReplaceAll(out, "SHLVL=0\n", "")
		}
		if out != want {
			t.Errorf("%s:\n got %q\nwant %q", cmd, out, want)
		}
	}
}

// Whatever directory there is, only the volumes and the private temporary file
// systems can be written.
func TestOnlyVolumesCanBeWritten(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	out := f.sh(id, `for d in / /bin /dev /dev/pts /dev/shm /etc /etc/ssl /home /home/agent /home/agent/.cache /lib /opt /proc /proc/sys /run /sys /tmp /usr /usr/bin /usr/local /var /var/tmp /workspace /.stockade; do
		if (echo x > $d/probe) 2>/dev/null; then echo $d; fi
	done
	(echo x > /.stockade/init) 2>/dev/null && echo init
	(echo x > /etc/passwd) 2>/dev/null && echo passwd
	for p in $(awk '{print $2}' /proc/mounts); do
		if [ -d $p ] && (echo x > $p/probe2) 2>/dev/null; then echo mount $p; fi
	done; true`)
	want := "/dev/shm\n/home/agent\n/home/agent/.cache\n/tmp\n/var/tmp\n/workspace\n" +
		"mount /dev/shm\nmount /tmp\nmount /workspace\nmount /home/agent\nmount /home/agent/.cache\n"
	if out != want {
		t.Errorf("writable:\n%s\nwant:\n%s", out, want)
	}
	// /tmp is private to the process, volumes are the box's.
	if out := f.sh(id, "ls /tmp; ls /workspace"); out != "probe\nprobe2\n" {
		t.Errorf("the next process sees %q", out)
	}
	for cmd, why := range map[string]string{
		"mount -t tmpfs none /tmp":       "mounting",
		"unshare -U true":                "a new user namespace",
		"mknod /tmp/n c 1 3":             "a device node",
		"chown root /workspace/probe":    "giving files away",
		"su -c true":                     "becoming root",
		"kill -9 1":                      "", // ignored by the kernel for PID 1
		"dmesg":                          "the kernel's log",
		"cat /proc/kcore | head -c 1":    "",
		"sysctl -w kernel.hostname=x":    "kernel settings",
		"echo 1 > /proc/sysrq-trigger":   "sysrq",
		"head -c 1 /dev/mem":             "memory of the machine",
		"ls /proc/1/root/../../../../..": "",
	} {
		out, code := f.run(id, "", "/bin/sh", "-c", cmd)
		if why != "" && code == 0 {
			t.Errorf("%s is possible: %s", why, out)
		}
	}
}

// crowd starts 64 children. The limit must leave the runtime room to start at all.
const crowd = "for i in $(seq 64); do sleep 0.5 & done; wait"

func TestLimits(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	need.That(t, f.mode.Has("pids") && f.mode.Has("memory"), "this test needs the cgroup controllers memory and pids: see stockade doctor")
	id := f.put(nil)
	spec := wire.ProcSpec{ID: newID(ident.Process), Box: id, Env: []string{"HOME=/"}, Pids: api.MinPids, Argv: []string{"/bin/sh", "-c", crowd}}
	if out, _ := f.runSpec(spec); !strings.Contains(strings.ToLower(out), "fork") {
		t.Errorf("64 children with a limit of 32 processes: %q", out)
	}
	spec = wire.ProcSpec{ID: newID(ident.Process), Box: id, Env: []string{"HOME=/"}, MemoryBytes: 32 << 20,
		Argv: []string{"/bin/sh", "-c", "exec head -c 200000000 /dev/zero > /dev/shm/x"}}
	if out, code := f.runSpec(spec); code == 0 {
		t.Errorf("200 MB with a limit of 32 MiB: code %d, %q", code, out)
	}
	// The box's own limit holds without one of the process.
	small := f.put(func(s *wire.BoxSpec) { s.Limits.Pids = api.MinPids })
	if out, _ := f.run(small, "", "/bin/sh", "-c", crowd); !strings.Contains(strings.ToLower(out), "fork") {
		t.Errorf("64 children in a box of 32 processes: %q", out)
	}
}

func TestProfileToolsAndPath(t *testing.T) {
	t.Parallel()
	shown, err := os.MkdirTemp("/var/tmp", "stockade-test-profile-") // /tmp is the box's own
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(shown) })
	if err := os.Chmod(shown, 0o755); err != nil {
		t.Fatal(err)
	}
	tool := t.TempDir()
	writeFile(t, filepath.Join(shown, "data"), "shown", 0o644)
	writeFile(t, filepath.Join(tool, "bin", "greet"), "#!/bin/sh\necho hello\n", 0o755)
	writeFile(t, filepath.Join(tool, "node_modules", ".bin", "other"), "#!/bin/sh\necho other\n", 0o755)
	f := newFixture(t, func(c *Config) {
		link := filepath.Join(t.TempDir(), "link")
		if err := os.Symlink(tool, link); err != nil {
			t.Fatal(err)
		}
		c.Profile = []string{shown, "/usr/share", "/opt"}
		c.Tools = map[string]string{"my-tool": link}
	})
	id := f.put(nil)
	if out := f.sh(id, "greet; other; cat "+shown+"/data; echo $PATH"); out != "hello\nother\nshown/opt/my-tool/bin:/opt/my-tool/node_modules/.bin:"+basePath+"\n" {
		t.Errorf("got %q", out)
	}
	if n := len(f.boxes[id].plan.binds()); n > 16 {
		t.Errorf("%d binds: %v", n, f.boxes[id].plan.binds())
	}
	for _, bad := range []func(*Config){
		func(c *Config) { c.Profile = []string{"/etc"} },
		func(c *Config) { c.Profile = []string{"/home"} },
		func(c *Config) { c.Profile = []string{"/dev/shm"} },
		func(c *Config) { c.Profile = []string{"relative"} },
		func(c *Config) { c.Profile = []string{"/"} },
		func(c *Config) { c.Profile = []string{"/nonexistent-x"} },
		func(c *Config) { c.Profile = []string{"/proc/sys"} },
		func(c *Config) { c.Tools = map[string]string{"a/b": tool} },
		func(c *Config) { c.Tools = map[string]string{"..": tool} },
		func(c *Config) { c.Tools = map[string]string{"t": "/nonexistent-x"} },
		func(c *Config) { c.InitPath = "/nonexistent-x" },
		func(c *Config) { c.AllowMounts = []string{"rel"} },
		func(c *Config) { c.Dir = "rel" },
	} {
		cfg := f.cfg
		bad(&cfg)
		if _, err := Open(cfg); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("a configuration that cannot work: %v", err)
		}
	}
}

func writeFile(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func TestPutIsIdempotent(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	spec := wire.BoxSpec{ID: newID(ident.Box), Limits: limits}
	first, err := f.Put(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	f.sh(spec.ID, "echo kept > /workspace/file")
	again, err := f.Put(t.Context(), spec)
	if err != nil || again.NetNS != first.NetNS {
		t.Errorf("again: %+v, %v", again, err)
	}
	other := spec
	other.Limits.Pids++
	_, err = f.Put(t.Context(), other)
	wantCode(t, err, errdefs.Conflict, "another specification")

	f.reopen()
	infos, err := f.List(t.Context())
	if err != nil || len(infos) != 1 || infos[0].Spec.ID != spec.ID || infos[0].Spec.Limits != limits {
		t.Errorf("after reopening: %+v, %v", infos, err)
	}
	_, err = f.Put(t.Context(), other)
	wantCode(t, err, errdefs.Conflict, "another specification")
	if out := f.sh(spec.ID, "cat /workspace/file"); out != "kept\n" {
		t.Errorf("after reopening: %q", out)
	}
	for _, bad := range []wire.BoxSpec{{}, {ID: "../x"}, {ID: "a/b"}, {ID: "a:b"}, {ID: "..", Limits: limits}} {
		_, err := f.Put(t.Context(), bad)
		wantCode(t, err, errdefs.Invalid, "id")
	}
	_, err = f.Put(t.Context(), wire.BoxSpec{ID: "x", Image: "sha256:" + strings.Repeat("0", 64), Limits: limits})
	wantCode(t, err, errdefs.NotFound, "no image")
	if _, err := f.Get(t.Context(), "x"); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("the refused box is there: %v", err)
	}
}

// User ids are a box's own, remembered, and used again only after removal.
func TestUserIDs(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	a, b := f.put(nil), f.put(nil)
	uid := func(id string) uint32 {
		t.Helper()
		f.sh(id, "echo > /workspace/mine")
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(f.volumeDir(id, "workspace"), "mine"), &st); err != nil {
			t.Fatal(err)
		}
		return st.Uid
	}
	ua, ub := uid(a), uid(b)
	if ua != 0x10000000+1000 || ub != 0x10000000+65536+1000 {
		t.Errorf("uids %#x, %#x", ua, ub)
	}
	f.reopen()
	if c := f.put(nil); uid(c) == ua || uid(c) == ub {
		t.Error("a range in use was given away after reopening")
	}
	if err := f.Remove(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if d := f.put(nil); uid(d) != ua {
		t.Errorf("the free range was not used again: %#x", uid(d))
	}
}

// What a reboot takes away is made again by the next use.
func TestAfterReboot(t *testing.T) {
	t.Parallel()
	allowed := t.TempDir()
	writeFile(t, filepath.Join(allowed, "f"), "mounted", 0o644)
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{allowed} })
	id := f.put(func(s *wire.BoxSpec) { s.Mounts = mount(allowed, "/mnt/m", false) })
	f.sh(id, "echo kept > file")
	reboot := func() {
		t.Helper()
		if err := unix.Unmount(f.NetNS(id), unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		if err := cgroup.New("", f.cfg.CgroupParent).Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := unix.Unmount(filepath.Join(f.boxDir(id), "mnt", "0"), unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join("/run/stockade", id)); err != nil {
			t.Fatal(err)
		}
	}
	reboot()
	f.reopen()
	if out := f.sh(id, "cat file /mnt/m/f"); out != "kept\nmounted" {
		t.Errorf("after a reboot: %q", out)
	}
	if !netns.Exists(f.NetNS(id)) {
		t.Error("the network namespace was not made again")
	}
	// Lost while the host program lives: the same.
	reboot()
	info, err := f.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Put(t.Context(), info.Spec); err != nil {
		t.Fatal(err)
	}
	if !netns.Exists(f.NetNS(id)) {
		t.Error("Put did not make the network namespace again")
	}
	if out := f.sh(id, "cat file /mnt/m/f"); out != "kept\nmounted" {
		t.Errorf("after a loss: %q", out)
	}
	// Rebooted and never used again, it can still be removed.
	reboot()
	if err := f.Remove(t.Context(), id); err != nil {
		t.Error(err)
	}
}

// A crash at any point of making or removing a box is finished later.
func TestAfterCrash(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	// Only the record was written.
	spec := wire.BoxSpec{ID: newID(ident.Box), Limits: limits}
	if err := f.record(&box{id: spec.ID, rec: record{Spec: spec, Slot: 7}}); err != nil {
		t.Fatal(err)
	}
	// Not even that.
	if err := os.Mkdir(f.boxDir("half"), 0o700); err != nil {
		t.Fatal(err)
	}
	f.reopen()
	if _, err := os.Stat(f.boxDir("half")); !os.IsNotExist(err) {
		t.Errorf("a directory without a record stays: %v", err)
	}
	if out := f.sh(spec.ID, "echo works"); out != "works\n" {
		t.Errorf("the half-made box: %q", out)
	}
	// Removal was recorded, then half done.
	b, err := f.hold(spec.ID)
	if err != nil {
		t.Fatal(err)
	}
	rec := b.rec
	rec.Removing = true
	if err := f.mark(b, rec); err != nil {
		t.Fatal(err)
	}
	b.mu.Unlock()
	if err := netns.Remove(f.NetNS(spec.ID)); err != nil {
		t.Fatal(err)
	}
	f.reopen()
	_, err = f.Put(t.Context(), spec)
	wantCode(t, err, errdefs.Conflict, "being removed")
	_, err = f.Bundle(t.Context(), wire.ProcSpec{ID: "p", Box: spec.ID, Argv: []string{"true"}}, t.TempDir())
	wantCode(t, err, errdefs.Conflict, "being removed")
	wantCode(t, f.PutFiles(t.Context(), spec.ID, "/workspace", strings.NewReader("")), errdefs.Conflict, "being removed")
	if err := f.Remove(t.Context(), spec.ID); err != nil {
		t.Error(err)
	}
	wantCode(t, f.Remove(t.Context(), spec.ID), errdefs.NotFound, "no box")
	// A damaged record is told, not skipped: its user ids must not be reused.
	if err := os.Mkdir(f.boxDir("bad"), 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(f.boxDir("bad"), "box.json"), "{", 0o600)
	if _, err := Open(f.cfg); !errdefs.Is(err, errdefs.Internal) || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged record: %v", err)
	}
	if err := os.RemoveAll(f.boxDir("bad")); err != nil {
		t.Fatal(err)
	}
}

// Many callers at once: one box per id, one range per box, nothing left.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	const boxes, callers = 6, 4
	var wg sync.WaitGroup
	for i := range boxes {
		spec := wire.BoxSpec{ID: newID(ident.Box), Limits: limits}
		f.ids[spec.ID] = true
		for range callers {
			wg.Go(func() {
				if _, err := f.Put(t.Context(), spec); err != nil {
					t.Errorf("Put: %v", err)
					return
				}
				if _, err := f.Bundle(t.Context(), wire.ProcSpec{ID: newID(ident.Process), Box: spec.ID, Argv: []string{"true"}}, t.TempDir()); err != nil && !errdefs.Is(err, errdefs.NotFound) {
					t.Errorf("Bundle: %v", err)
				}
				if _, err := f.List(t.Context()); err != nil {
					t.Errorf("List: %v", err)
				}
			})
		}
		if i%2 == 0 {
			continue
		}
		wg.Go(func() {
			if err := f.PutFiles(t.Context(), spec.ID, "/workspace", strings.NewReader(strings.Repeat("\x00", 1024))); err != nil && !errdefs.Is(err, errdefs.NotFound) {
				t.Errorf("PutFiles: %v", err)
			}
		})
	}
	wg.Wait()
	slots := map[int]bool{}
	for _, b := range f.boxes {
		slots[b.rec.Slot] = true
	}
	if len(f.boxes) != boxes || len(slots) != boxes {
		t.Errorf("%d boxes, %d ranges of ids", len(f.boxes), len(slots))
	}
	var removed atomic.Int64
	for id := range maps.Clone(f.boxes) {
		for range callers {
			wg.Go(func() {
				switch err := f.Remove(t.Context(), id); errdefs.CodeOf(err) {
				case "":
					removed.Add(1)
				case errdefs.NotFound:
				default:
					t.Errorf("Remove: %v", err)
				}
			})
		}
	}
	wg.Wait()
	if removed.Load() != boxes {
		t.Errorf("%d removals of %d boxes", removed.Load(), boxes)
	}
}

// Without the controllers of every limit there are no boxes, unless the operator
// accepts that.
func TestLimitsAreRequired(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("cpu memory\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := f.cfg
	cfg.Dir, cfg.CgroupRoot = t.TempDir(), root
	if _, err := Open(cfg); !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "pids are missing") {
		t.Errorf("opened without the pids controller: %v", err)
	}
	cfg.LimitsOptional = true
	if _, err := Open(cfg); err != nil {
		t.Errorf("the operator accepted it: %v", err)
	}
}
