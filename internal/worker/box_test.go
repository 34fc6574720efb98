package worker

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// look is what a worker sees, as JSON.
const look = `
import json, os, sys
def can(path):
    try:
        with open(path, "w") as f: f.write("x")
        return True
    except OSError:
        return False
def status(name):
    for l in open("/proc/self/status"):
        if l.startswith(name + ":"): return l.split(":", 1)[1].strip()
def lists(d):
    try: return sorted(os.listdir(d))
    except OSError: return None
def connect():
    import socket
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen()
    try: socket.create_connection(s.getsockname(), 5); return "ok"
    except OSError as e: return str(e)
asked = json.loads(sys.stdin.readline() or "{}")
print(json.dumps({
    "env": sorted(open("/proc/self/environ").read().split("\0")[:-1]), "argv": sys.orig_argv, "cwd": os.getcwd(),
    "uid": os.getuid(), "caps": status("CapBnd"), "nnp": status("NoNewPrivs"), "seccomp": status("Seccomp"),
    "write": {d: can(os.path.join(d, "probe")) for d in asked.get("write", [])},
    "see": {d: lists(d) for d in asked.get("see", [])},
    "modes": {d: oct(os.stat(d).st_mode & 0o7777) for d in asked.get("modes", []) if os.path.exists(d)},
    "init": open("/proc/1/cmdline").read(), "pids": [int(p) for p in os.listdir("/proc") if p.isdigit()],
    "connect": connect() if asked.get("connect") else "",
    "net": sorted(l.split(":")[0].strip() for l in open("/proc/net/dev").readlines()[2:]),
    "resolv": os.path.getsize("/etc/resolv.conf") if os.path.exists("/etc/resolv.conf") else 0,
    "limits": {k: list(__import__("resource").getrlimit(getattr(__import__("resource"), k))) for k in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE")},
}), flush=True)
sys.stdin.read()
`

type seen struct {
	Env, Argv          []string
	Cwd                string
	UID                int
	Caps, NNP, Seccomp string
	Write              map[string]bool
	See                map[string][]string
	Modes              map[string]string
	Init, Connect      string
	Pids               []int
	Net                []string
	Resolv             int
	Limits             map[string][]int64
}

func looks(t *testing.T, r rig, ask string) seen {
	t.Helper()
	p := start(t, r, r.spec)
	fmt.Fprintln(p.Stdin, strings.ReplaceAll(ask, "\n", " "))
	said := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(p.Stderr)
		said <- string(b)
	}()
	defer func() {
		p.Stop(0)
		if s := <-said; s != "" {
			t.Log(s)
		}
	}()
	var s seen
	decode(t, line(t, bufio.NewReader(p.Stdout)), &s)
	if o := p.Stop(0); o.How != Graceful || o.Err != nil {
		t.Errorf("%+v", o)
	}
	return s
}

// Counterpart of WL-09, WL-10: a direct worker's command, directory and exact
// environment, from relative paths.
func TestDirectEnvironment(t *testing.T) {
	i := bare(t, look)
	r := newDirect(t, i)
	t.Chdir(r.dir)
	r.spec.TransferDir = "installations/inst-a/rpc-transfer"
	s := looks(t, r, "{}")
	want := []string{
		"LANGBOT_PLUGIN_FILE_STORAGE_DIR=" + filepath.Join(r.dir, "installations/inst-a/rpc-transfer"),
		"LANGBOT_PLUGIN_REGISTRATION_CAPABILITY=" + capability,
		"LANGBOT_PLUGIN_RUNTIME_PROFILE=oss_dev",
		"PYTHONDONTWRITEBYTECODE=1",
		"PYTHONPATH=" + i.ImportRoot + ":" + r.spec.SitePackages,
		"PYTHONUNBUFFERED=1",
	}
	if !slices.Equal(s.Env, want) {
		t.Errorf("environment %q", s.Env)
	}
	if s.Cwd != r.spec.Code {
		t.Errorf("cwd %s", s.Cwd)
	}
	if got := strings.Join(s.Argv[1:], " "); got != "-m langbot_plugin.cli.__init__ run -s --prod" {
		t.Errorf("argv %q", s.Argv)
	}
	r.spec.Legacy, r.spec.SitePackages, r.spec.TransferDir = true, "", ""
	s = looks(t, r, "{}")
	want = []string{"LANGBOT_PLUGIN_REGISTRATION_CAPABILITY=" + capability, "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=" + i.ImportRoot, "PYTHONUNBUFFERED=1"}
	if !slices.Equal(s.Env, want) {
		t.Errorf("legacy environment %q", s.Env)
	}
}

// Counterpart of WL-01, WL-02, WL-04, WL-07, WL-09: what a boxed worker sees and
// may do, of an installation and of a pool.
func TestBoxView(t *testing.T) {
	t.Parallel()
	i := bare(t, look)
	r := newBox(t, i)
	other := newSpec(t, r.dir, "inst-b")
	if err := os.WriteFile(filepath.Join(r.spec.Code, "main.py"), []byte("x"), 0o444); err != nil {
		t.Fatal(err)
	}
	ask := fmt.Sprintf(`{"write":["/","/plugin","/plugin-dependencies","/home","/tmp","/data","/usr","/etc","/.stockade",%q,%q],
		"see":["/plugin",%q,%q,%q,"/opt","/data"],"modes":["/home","/tmp","/data"]}`, i.Prefix, i.ImportRoot, r.dir, filepath.Join(r.dir, "installations"), other.Private.Home)
	s := looks(t, r, ask)
	env := func(home string) []string {
		return []string{"HOME=" + home, "LANGBOT_PLUGIN_REGISTRATION_CAPABILITY=" + capability, "LANGBOT_PLUGIN_RUNTIME_PROFILE=shared",
			"PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=" + i.ImportRoot + ":/plugin-dependencies", "PYTHONUNBUFFERED=1", "TMPDIR=/tmp"}
	}
	if !slices.Equal(s.Env, env("/home")) {
		t.Errorf("environment %q", s.Env)
	}
	if s.Cwd != "/plugin" || s.UID != 1000 || strings.Trim(s.Caps, "0") != "" || s.NNP != "1" || s.Seccomp != "2" {
		t.Errorf("%+v", s)
	}
	for d, ok := range s.Write {
		if want := d == "/home" || d == "/tmp" || d == "/data"; ok != want {
			t.Errorf("it may write to %s: %v", d, ok)
		}
	}
	if !slices.Equal(s.See["/plugin"], []string{"main.py"}) || s.See[filepath.Join(r.dir, "installations")] != nil || s.See[other.Private.Home] != nil {
		t.Errorf("it sees %v", s.See)
	}
	if strings.Contains(s.Init, capability) || strings.Contains(strings.Join(s.Argv, " "), capability) {
		t.Errorf("the capability is in a command line: %q, %q", s.Init, s.Argv)
	}
	if len(s.Pids) > 2 || s.Modes["/home"] != "0o700" || s.Modes["/tmp"] != "0o700" || s.Modes["/data"] != "0o700" {
		t.Errorf("%+v", s)
	}
	if len(s.Net) < 1 {
		t.Errorf("the machine's network is not there: %v", s.Net)
	}
	files := int64(min(211, must(hard(unix.RLIMIT_NOFILE))))
	want := map[string][]int64{"RLIMIT_NOFILE": {files, files}, "RLIMIT_FSIZE": {97 << 20, 97 << 20}, "RLIMIT_NPROC": {73 + initTasks, 73 + initTasks}, "RLIMIT_CORE": {0, 0}}
	if !reflect.DeepEqual(s.Limits, want) {
		t.Errorf("limits %v", s.Limits)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(r.spec.Private.Data, "probe"), &st); err != nil || slotOf(st.Uid) < 0 {
		t.Errorf("what it wrote belongs to %d, %v", st.Uid, err)
	}
	// It keeps its files and its user over a restart.
	first := st.Uid
	if s := looks(t, r, `{"see":["/data"],"write":["/data"]}`); !slices.Equal(s.See["/data"], []string{"probe"}) || !s.Write["/data"] {
		t.Errorf("after a restart: %+v", s)
	}
	if err := unix.Stat(r.spec.Private.Data, &st); err != nil || st.Uid != first || st.Mode&0o7777 != 0o700 {
		t.Errorf("after a restart its directory is of %d, mode %o", st.Uid, st.Mode)
	}

	// A pool.
	pool := r
	pool.spec.Private, pool.spec.Scratch = nil, filepath.Join(r.dir, "scratch")
	s = looks(t, pool, ask)
	if !slices.Equal(s.Env, env("/tmp")) {
		t.Errorf("environment of a pool %q", s.Env)
	}
	for d, ok := range s.Write {
		if want := d == "/tmp"; ok != want {
			t.Errorf("a pool's worker may write to %s: %v", d, ok)
		}
	}
	if len(s.See["/data"]) != 0 {
		t.Errorf("a pool's worker sees %v", s.See)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestBoxesAreApart: two workers of one launcher have users of their own, even if
// one installation's files were the other's user's.
func TestBoxesAreApart(t *testing.T) {
	t.Parallel()
	r := newBox(t, bare(t, "import os,sys\nopen('/data/x','w').close()\nprint('up',flush=True)\nsys.stdin.read()\n"), noNetwork)
	a := start(t, r, r.spec)
	line(t, bufio.NewReader(a.Stdout))
	var sa, sb unix.Stat_t
	if err := unix.Stat(r.spec.Private.Data, &sa); err != nil {
		t.Fatal(err)
	}
	other := newSpec(t, r.dir, "inst-b")
	if err := os.Chown(other.Private.Home, int(sa.Uid), int(sa.Uid)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(other.Private.Data, "link")); err != nil {
		t.Fatal(err)
	}
	b := start(t, r, other)
	line(t, bufio.NewReader(b.Stdout))
	if err := unix.Stat(filepath.Join(other.Private.Data, "x"), &sb); err != nil {
		t.Fatal(err)
	}
	if sa.Uid == sb.Uid || slotOf(sa.Uid) < 0 || slotOf(sb.Uid) < 0 {
		t.Errorf("users %d and %d", sa.Uid, sb.Uid)
	}
	var passwd unix.Stat_t
	if err := unix.Stat("/etc/passwd", &passwd); err != nil || passwd.Uid != 0 {
		t.Errorf("/etc/passwd is of %d, %v", passwd.Uid, err)
	}
	// Nothing that holds the capability is left on disk while they run.
	err := filepath.WalkDir(r.box.dir, func(p string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(p)
		if strings.Contains(string(b), capability) {
			t.Errorf("%s holds the capability", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for _, p := range []*Process{a, b} {
		cmd, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID()))
		if err != nil || strings.Contains(string(cmd), capability) {
			t.Errorf("%q, %v", cmd, err)
		}
	}
}

func TestNoNetwork(t *testing.T) {
	t.Parallel()
	need.EachRuntime(t, func(t *testing.T, path string) {
		t.Parallel()
		r := newBox(t, bare(t, look), with(t, path), noNetwork)
		s := looks(t, r, `{"connect":true}`)
		if !slices.Equal(s.Net, []string{"lo"}) || s.Resolv != 0 || s.Connect != "ok" {
			t.Errorf("%v, loopback %s, a resolver of %d bytes", s.Net, s.Connect, s.Resolv)
		}
	})
}

// TestLimitsBite: each limit of the policy ends what goes over it, and only that.
func TestLimitsBite(t *testing.T) {
	t.Parallel()
	need.EachRuntime(t, limitsBite)
}

func limitsBite(t *testing.T, path string) {
	t.Parallel()
	script := `
import os, sys, time
what = sys.stdin.readline().strip()
if what == "memory":
    b = bytearray()
    while True: b.extend(b"x" * (1 << 20))
if what == "child memory":
    if os.fork() == 0:
        b = bytearray()
        while True: b.extend(b"x" * (1 << 20))
    os.wait()
    print("the parent lives", flush=True)
    sys.exit(3)
if what == "pids":
    n = 0
    try:
        while n < 1000:
            if os.fork() == 0: time.sleep(600)
            n += 1
    except OSError as e:
        print(n, e.errno, flush=True)
if what == "fsize":
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open("/data/big", "wb") as f:
        n = 0
        try:
            while n < 64: f.write(b"x" * (1 << 20)); f.flush(); n += 1
        except OSError as e:
            print(n, e.errno, flush=True)
if what == "files":
    fs = []
    try:
        while len(fs) < 10000: fs.append(open("/dev/null"))
    except OSError as e:
        print(len(fs), e.errno, flush=True)
`
	r := newBox(t, bare(t, script), with(t, path), noNetwork)
	ownKernel := r.box.cfg.Runtime.Manner.OwnKernel
	r.spec.Policy = pluginwire.WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 64, MaxPids: 20, MaxOpenFiles: 64, MaxFileSizeMB: 5, RequireHardLimits: true}
	for _, c := range []struct {
		what  string
		check func(out, text string, code int) bool
	}{
		{"memory", func(out, text string, code int) bool {
			return strings.Contains(text, "lack of memory (limit 64 MiB)") && code == -1
		}},
		{"child memory", func(out, text string, code int) bool {
			if ownKernel { // the kernel is in the group itself
				return strings.Contains(text, "lack of memory (limit 64 MiB)")
			}
			return code == 3 && strings.Contains(out, "lives") && strings.Contains(text, "1 of its processes for lack of memory")
		}},
		{"pids", func(out, text string, code int) bool {
			var n, errno int
			fmt.Sscan(out, &n, &errno)
			return code == 0 && n >= 15 && n <= 28 && errno == int(unix.EAGAIN)
		}},
		{"fsize", func(out, text string, code int) bool { return out == fmt.Sprintf("5 %d\n", unix.EFBIG) }},
		{"files", func(out, text string, code int) bool {
			var n, errno int
			fmt.Sscan(out, &n, &errno)
			return n > 50 && n < 64 && errno == int(unix.EMFILE)
		}},
	} {
		t.Run(c.what, func(t *testing.T) {
			spec := newSpec(t, r.dir, strings.ReplaceAll(c.what, " ", "-"))
			spec.Policy = r.spec.Policy
			if ownKernel && c.what == "pids" {
				spec.Policy.MaxMemoryMB = 512 // processes of a sandbox share less
			}
			p := start(t, r, spec)
			fmt.Fprintln(p.Stdin, c.what)
			out, said := finish(t, p)
			if text, code := p.Exit(); !c.check(out, text, code) {
				t.Errorf("%q, %q, %d; it said %s", out, text, code, said)
			}
		})
	}
	t.Run("cpu", func(t *testing.T) {
		p := start(t, r, r.spec)
		var found []string
		for _, f := range []string{"/sys/fs/cgroup/cpu*" + r.box.cfg.CgroupParent + "/w-inst-a-*/cpu.cfs_quota_us", "/sys/fs/cgroup" + r.box.cfg.CgroupParent + "/w-inst-a-*/cpu.max"} {
			m, _ := filepath.Glob(f)
			for _, f := range m {
				b, _ := os.ReadFile(f)
				found = append(found, strings.TrimSpace(string(b)))
			}
		}
		if !slices.ContainsFunc(found, func(s string) bool { return strings.HasPrefix(s, "100000") }) {
			t.Errorf("quotas %q", found)
		}
		p.Stop(0)
	})
}

// Counterpart of WL-05, WL-06, WL-19.
func TestBoxRefuses(t *testing.T) {
	t.Parallel()
	i := bare(t, "")
	good := boxConfig(t, i)
	groups := t.TempDir()
	if err := os.WriteFile(filepath.Join(groups, "cgroup.controllers"), []byte("memory io\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	noSDK := i
	noSDK.SDK = ""
	for name, c := range map[string]struct {
		change func(*BoxConfig)
		code   errdefs.Code
		words  []string
	}{
		"hard limits":  {func(c *BoxConfig) { c.CgroupRoot = groups }, errdefs.Unavailable, []string{"cpu", "pids", "requires hard limits"}},
		"no cgroups":   {func(c *BoxConfig) { c.CgroupRoot = t.TempDir() }, errdefs.Unavailable, []string{"control groups"}},
		"no runtime":   {func(c *BoxConfig) { c.Runtime.Path = "" }, errdefs.Unavailable, []string{"OCI runtime"}},
		"no init":      {func(c *BoxConfig) { c.InitPath = "/nonexistent" }, errdefs.Unavailable, []string{"PID 1"}},
		"network":      {func(c *BoxConfig) { c.Network = "some" }, errdefs.Invalid, []string{"some"}},
		"no data":      {func(c *BoxConfig) { c.DataDir = "" }, errdefs.Invalid, []string{"data directory"}},
		"no SDK":       {func(c *BoxConfig) { c.Interp = noSDK }, errdefs.Unavailable, []string{"SDK"}},
		"relative run": {func(c *BoxConfig) { c.RunDir = "x" }, errdefs.Invalid, []string{"absolute"}},
		"foreign run":  {func(c *BoxConfig) { c.RunDir = "/tmp" }, errdefs.Denied, []string{"this user alone"}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good
			c.change(&cfg)
			l, err := Box(cfg)
			if err == nil {
				l.Close()
			}
			if !errdefs.Is(err, c.code) {
				t.Fatalf("%v", err)
			}
			for _, w := range c.words {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%v lacks %q", err, w)
				}
			}
		})
	}

	r := newBox(t, i)
	for name, change := range map[string]func(*Spec){
		"legacy":          func(s *Spec) { s.Legacy = true },
		"no directories":  func(s *Spec) { s.Private = nil },
		"both":            func(s *Spec) { s.Scratch = r.dir },
		"no tree":         func(s *Spec) { s.SitePackages = "" },
		"no code":         func(s *Spec) { s.Code = "" },
		"no name":         func(s *Spec) { s.Name = "" },
		"no capability":   func(s *Spec) { s.Capability = "" },
		"line capability": func(s *Spec) { s.Capability = "a\nb" },
		"NUL":             func(s *Spec) { s.Code = "/a\x00b" },
	} {
		spec := r.spec
		change(&spec)
		if p, err := r.Start(t.Context(), spec); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
	missing := r.spec
	missing.Code = filepath.Join(r.dir, "none")
	if _, err := r.Start(t.Context(), missing); !errdefs.Is(err, errdefs.Unavailable) || strings.Contains(err.Error(), capability) {
		t.Errorf("%v", err)
	}
	gone := r.spec
	gone.Private = &Private{Home: r.spec.Private.Home, Tmp: r.spec.Private.Tmp, Data: filepath.Join(r.dir, "none")}
	if _, err := r.Start(t.Context(), gone); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("%v", err)
	}
	if len(r.box.slots.used) != 0 {
		t.Errorf("failed starts keep user ids: %v", r.box.slots.used)
	}
	if left, _ := filepath.Glob(filepath.Join(r.box.dir, "*", "*", "config.json")); len(left) > 0 {
		t.Errorf("failed starts leave %v", left)
	}
}

// TestPolicyWithoutControllers: where hard limits are not required the others
// hold.
func TestPolicyWithoutHardLimits(t *testing.T) {
	t.Parallel()
	b := &box{}
	if l := b.limits(policy()); l.MemoryBytes != 0 || l.CPUMillis != 0 || l.Pids != 0 {
		t.Errorf("%+v", l)
	}
	b.mode.Controllers = []string{"cpu", "memory", "pids"}
	if l := b.limits(policy()); l.MemoryBytes != 384<<20 || l.CPUMillis != 1500 || l.Pids != 73+initTasks {
		t.Errorf("%+v", l)
	}
	if l := b.limits(pluginwire.WorkerPolicy{MaxCPUs: 0.0001}); l.CPUMillis != 1 {
		t.Errorf("%+v", l)
	}
}

// The data directory may be on a file system that is mounted noexec: a worker executes
// nothing from there.
func TestBoxOfANoexecDataDirectory(t *testing.T) {
	t.Parallel()
	r := newBox(t, bare(t, look))
	base := filepath.Dir(r.spec.Private.Data)
	err := unix.Mount("tmpfs", base, "tmpfs", unix.MS_NOEXEC, "mode=755,size=1m")
	need.That(t, err == nil, "this test mounts a tmpfs, which is refused: %v", err)
	t.Cleanup(func() {
		if err := unix.Unmount(base, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	for _, d := range []string{r.spec.Private.Home, r.spec.Private.Tmp, r.spec.Private.Data} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if s := looks(t, r, `{"write":["/data"]}`); !s.Write["/data"] {
		t.Errorf("%+v", s)
	}
}
