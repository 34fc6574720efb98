package oci

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

var update = flag.Bool("update", false, "rewrite testdata and docs/seccomp.json")

func TestMain(m *testing.M) { need.Main(m) }

func golden(t *testing.T, path string, v any) {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, b.Bytes()) {
		t.Errorf("%s is not current; look at what changed and run: go test ./internal/oci -update\n%s", path, b.Bytes())
	}
}

func plain() Container {
	return Container{
		Proc:    wire.ProcSpec{ID: "proc_a", Box: "box_a", Argv: []string{"sh", "-c", "--", "true"}, Env: []string{"HOME=/home/agent", "PATH=/bin"}},
		Cwd:     "/workspace/sub",
		Root:    "/host/boxes/box_a/root",
		Init:    "/usr/libexec/stockade-host",
		NetNS:   "/host/boxes/box_a/netns",
		UIDBase: 0x10000000,
		Cgroup:  "/stockade/h/box_a/proc_a",
		Binds: []Bind{
			{Source: "/usr", Dest: "/usr"},
			{Source: "/host/boxes/box_a/vol/workspace", Dest: Workspace, Writable: true},
			{Source: "/host/boxes/box_a/vol/home", Dest: Home, Writable: true},
			{Source: "/host/boxes/box_a/vol/cache", Dest: Cache, Writable: true},
		},
		Files: 1024, TmpBytes: 1 << 30,
		Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno},
	}
}

func TestSpec(t *testing.T) {
	t.Parallel()
	golden(t, "testdata/plain.json", Spec(plain()))
	c := plain()
	c.Proc.PTY = &api.Winsize{Rows: 24, Cols: 80}
	c.Proc.MemoryBytes, c.Proc.Pids, c.SwapLimit, c.DeepRO = 1<<28, 64, true, true
	c.Binds = append(c.Binds, Bind{Source: "/host/boxes/box_a/mnt/0", Dest: "/workspace/repo", Writable: true}, Bind{Source: "/host/boxes/box_a/mnt/1", Dest: "/mnt/data"})
	golden(t, "testdata/full.json", Spec(c))
}

// On a kernel of its own a process's limit is on what it may fork, and the
// machine's leaves room for the sandbox.
func TestOwnKernel(t *testing.T) {
	t.Parallel()
	c := plain()
	c.OwnKernel, c.Proc.Pids = true, 40
	s := Spec(c)
	if l := s.Process.Rlimits[len(s.Process.Rlimits)-1]; l.Type != "RLIMIT_NPROC" || l.Soft != 40 || l.Hard != 40 || *s.Linux.Resources.Pids.Limit != 144 {
		t.Errorf("%+v, %d", l, *s.Linux.Resources.Pids.Limit)
	}
	for _, l := range []struct{ asked, box, want int64 }{
		{0, 0, 0}, {7, 0, 7}, {0, 1024, 480}, {7, 1024, 7}, {481, 1024, 480}, {0, 16, 1},
	} {
		if got := SandboxPids(l.asked, l.box); got != l.want {
			t.Errorf("%d of a box's %d: %d, want %d", l.asked, l.box, got, l.want)
		}
	}
}

func TestCommands(t *testing.T) {
	t.Parallel()
	for kind, want := range map[string]string{
		"runc":    "/bin/x --root /r run --preserve-fds 1 id",
		"another": "/bin/x --root /r run --preserve-fds 1 id",
		"crun":    "host join --hide  /g -- /bin/x --cgroup-manager=disabled --root /r run --preserve-fds 1 id",
		"runsc":   "host join  /g -- /bin/x --ignore-cgroups --network=host --overlay2=none --gofer-network-namespace=new --root /r run --pass-fd 3:3 id",
	} {
		r := Runtime{Path: "/bin/x", Manner: mannerOf(kind)}
		argv := append(r.Command("/r", "run"), r.Manner.PassReport...)
		if got := strings.Join(r.Manner.InGroup("host", "", "/g", append(argv, "id")), " "); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", kind, got, want)
		}
	}
	for _, args := range [][]string{nil, {"--hide"}, {"", "/g", "--"}, {"", "/g", "x", "y"}} {
		if JoinMain(args) == 0 {
			t.Errorf("%q", args)
		}
	}
	if JoinMain([]string{"", "/no-such-group-" + strings.ToLower(t.Name()), "--", "/bin/true"}) == 0 {
		t.Error("it joined a group that is not there")
	}
}

// docs/seccomp.json is the filter that containers on amd64 get.
func TestPublishedSeccomp(t *testing.T) {
	t.Parallel()
	p, err := Seccomp()
	if err != nil {
		t.Fatal(err)
	}
	if p.DefaultAction != specs.ActErrno {
		t.Errorf("what is not listed is %s", p.DefaultAction)
	}
	allowed := map[string]bool{}
	for _, s := range p.Syscalls {
		if s.Action == specs.ActAllow && len(s.Args) == 0 {
			for _, n := range s.Names {
				allowed[n] = true
			}
		}
	}
	for _, n := range []string{"mount", "umount2", "pivot_root", "setns", "unshare", "clone3", "bpf", "perf_event_open", "kexec_load",
		"init_module", "finit_module", "reboot", "swapon", "open_by_handle_at", "keyctl", "add_key", "userfaultfd", "move_mount", "fsopen", "open_tree", "clone"} {
		if allowed[n] {
			t.Errorf("%s is allowed without a condition", n)
		}
	}
	for _, n := range []string{"read", "write", "execve", "openat2", "futex", "epoll_wait", "landlock_create_ruleset"} {
		if !allowed[n] && runtime.GOARCH == "amd64" {
			t.Errorf("%s is not allowed", n)
		}
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("docs/seccomp.json is written on amd64")
	}
	golden(t, "../../docs/seccomp.json", p)
}

// Whatever a container is made from, these hold.
func TestEveryContainerIsConfined(t *testing.T) {
	t.Parallel()
	path := rapid.StringMatching(`/[a-z]{1,8}(/[a-z.]{1,8}){0,3}`)
	rapid.Check(t, func(t *rapid.T) {
		c := Container{
			Proc: wire.ProcSpec{
				Argv:        rapid.SliceOfN(rapid.String(), 1, 4).Draw(t, "argv"),
				Env:         rapid.SliceOf(rapid.String()).Draw(t, "env"),
				MemoryBytes: rapid.Int64Min(0).Draw(t, "memory"), Pids: rapid.Int64Min(0).Draw(t, "pids"),
			},
			Cwd: path.Draw(t, "cwd"), Root: path.Draw(t, "root"), Init: path.Draw(t, "init"), NetNS: path.Draw(t, "netns"), Cgroup: path.Draw(t, "cgroup"),
			UIDBase: rapid.Uint32Range(1<<20, 1<<30).Draw(t, "uid"), Files: 1024, TmpBytes: rapid.Int64Min(1).Draw(t, "tmp"),
			SwapLimit: rapid.Bool().Draw(t, "swap"), DeepRO: rapid.Bool().Draw(t, "deep"),
			Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno},
		}
		if rapid.Bool().Draw(t, "pty") {
			c.Proc.PTY = &api.Winsize{Rows: 1, Cols: 1}
		}
		for _, d := range rapid.SliceOfDistinct(path, rapid.ID[string]).Draw(t, "binds") {
			c.Binds = append(c.Binds, Bind{Source: "/src" + d, Dest: d, Writable: rapid.Bool().Draw(t, "writable")})
		}
		s := Spec(c)
		p := s.Process
		if caps := p.Capabilities; len(caps.Bounding)+len(caps.Effective)+len(caps.Inheritable)+len(caps.Permitted)+len(caps.Ambient) != 0 {
			t.Error("it has capabilities")
		}
		if !p.NoNewPrivileges || !s.Root.Readonly || s.Linux.Seccomp == nil || p.User.UID != 1000 || p.User.GID != 1000 || len(p.User.AdditionalGids) != 0 {
			t.Error("it can get privileges")
		}
		if p.Cwd != "/" || !slices.Equal(p.Args, append([]string{"/.stockade/init", "init", "--cwd", c.Cwd, "--"}, c.Proc.Argv...)) {
			t.Errorf("it starts %q in %q", p.Args, p.Cwd)
		}
		kinds := map[specs.LinuxNamespaceType]string{}
		for _, ns := range s.Linux.Namespaces {
			kinds[ns.Type] = ns.Path
		}
		for _, k := range []specs.LinuxNamespaceType{"user", "pid", "mount", "ipc", "uts", "cgroup"} {
			if at, ok := kinds[k]; !ok || at != "" {
				t.Errorf("%s namespace: %q, %v", k, at, ok)
			}
		}
		if kinds["network"] != c.NetNS {
			t.Errorf("network namespace %q", kinds["network"])
		}
		for _, m := range [][]specs.LinuxIDMapping{s.Linux.UIDMappings, s.Linux.GIDMappings} {
			if len(m) != 1 || m[0].HostID != c.UIDBase || m[0].ContainerID != 0 || m[0].Size != 65536 {
				t.Errorf("ids %+v", m)
			}
		}
		if d := s.Linux.Resources.Devices; len(d) != 1 || d[0].Allow || d[0].Access != "rwm" || len(s.Linux.Devices) != 0 {
			t.Errorf("devices %+v", d)
		}
		checkMounts(t, c, s.Mounts)
	})
}

type reporter interface{ Errorf(string, ...any) }

func checkMounts(t reporter, c Container, ms []specs.Mount) {
	var writable []string
	for _, b := range c.Binds {
		if b.Writable {
			writable = append(writable, b.Source+" "+b.Dest)
		}
	}
	for i, m := range ms {
		has := func(o string) bool { return slices.Contains(m.Options, o) }
		switch m.Type {
		case "bind":
			if !has("nosuid") || !has("nodev") || !has("rprivate") || !has("rbind") {
				t.Errorf("%s: %v", m.Destination, m.Options)
			}
			may := slices.Contains(writable, m.Source+" "+m.Destination) && (m.Destination != InitPath || i < len(ms)-1)
			if has("rw") != may || has("ro") == may {
				t.Errorf("%s: writable %v, asked %v", m.Destination, has("rw"), may)
			}
			if has("rro") && (may || !c.DeepRO) {
				t.Errorf("%s: %v", m.Destination, m.Options)
			}
		case "tmpfs":
			if !slices.Contains([]string{"/dev", "/dev/shm", "/tmp"}, m.Destination) || !has("nosuid") ||
				!slices.ContainsFunc(m.Options, func(o string) bool { return strings.HasPrefix(o, "size=") }) {
				t.Errorf("tmpfs at %s: %v", m.Destination, m.Options)
			}
		case "proc", "devpts":
		default:
			t.Errorf("a mount of type %s at %s", m.Type, m.Destination)
		}
	}
	if last := ms[len(ms)-1]; last.Destination != InitPath || last.Source != c.Init {
		t.Errorf("the last mount is %+v", last)
	}
}

func TestSpecChangesNothingItWasGiven(t *testing.T) {
	t.Parallel()
	c := plain()
	c.Proc.Argv = append(make([]string, 0, 10), "a")
	s := Spec(c)
	s.Process.Args[5] = "changed"
	s.Process.Env[0] = "changed"
	if c.Proc.Argv[0] != "a" || c.Proc.Env[0] != "HOME=/home/agent" {
		t.Error("the specification shares memory with what it was made from")
	}
}

func TestFindRuntime(t *testing.T) {
	need.Tool(t, "runc", "runc")
	r, err := FindRuntime("runc")
	if err != nil || r.Name != "runc" || !filepath.IsAbs(r.Path) || r.Version == "" || r.String() != "runc "+r.Version {
		t.Errorf("%+v, %v", r, err)
	}
	first, err := FindRuntime("")
	if err != nil || !slices.Contains(Runtimes(), first.Name) {
		t.Errorf("%+v, %v", first, err)
	}
	if byPath, err := FindRuntime(r.Path); err != nil || byPath.Path != r.Path {
		t.Errorf("%+v, %v", byPath, err)
	}
	// Only programs that answer are runtimes; the first that does is taken.
	dir := t.TempDir()
	for name, body := range map[string]string{"runc": "exit 1", "crun": "echo crun version 9.9; echo commit: x", "silent": "exit 0"} {
		need.Program(t, filepath.Join(dir, name), "#!/bin/sh\n"+body+"\n")
	}
	t.Setenv("PATH", dir)
	if r, err := FindRuntime(""); err != nil || r.Name != "crun" || r.Version != "9.9" {
		t.Errorf("%+v, %v", r, err)
	}
	for _, name := range []string{"runc", "silent", "none", "/none"} {
		if _, err := FindRuntime(name); !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "install") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestUnknownContainers(t *testing.T) {
	t.Parallel()
	need.EachRuntime(t, unknownContainers)
}

func unknownContainers(t *testing.T, runtime string) {
	r, err := FindRuntime(runtime)
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	if _, err := r.State(t.Context(), root, "none"); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("State: %v", err)
	}
	if err := r.Kill(t.Context(), root, "none", 9, true); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("Kill: %v", err)
	}
	if err := r.Delete(t.Context(), root, "none"); err != nil {
		t.Errorf("Delete: %v", err)
	}
	broken := Runtime{Name: "x", Path: "/bin/false"}
	if err := broken.Delete(t.Context(), root, "none"); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("a runtime that fails: %v", err)
	}
	gone := Runtime{Name: "x", Path: "/nonexistent/runc"}
	if err := gone.Delete(t.Context(), root, "none"); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("a runtime that is not there: %v", err)
	}
	if broken.RecursiveReadOnly(t.Context()) {
		t.Error("a runtime that says nothing has features")
	}
}
