package preflight

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/oci"
)

// TestMain lets the test binary be the host program: PID 1 of a container, and
// what starts a runtime inside a control group.
func TestMain(m *testing.M) {
	if len(os.Args) > 5 && os.Args[1] == "init" { // init --cwd DIR -- COMMAND…
		err := errors.Join(os.Chdir(os.Args[3]), syscall.Exec(os.Args[5], os.Args[5:], os.Environ()))
		fmt.Println(err)
		os.Exit(1)
	}
	if len(os.Args) > 1 && os.Args[1] == oci.JoinCommand {
		os.Exit(oci.JoinMain(os.Args[2:]))
	}
	if len(os.Args) == 3 && os.Args[1] == noexecRun {
		probeWithNoexecRun(os.Args[2])
		return
	}
	need.Main(m)
}

// leftovers lists what probes could leave on the machine.
func leftovers(t *testing.T) string {
	t.Helper()
	var all []string
	for _, p := range []string{"/run/stockade-preflight-*", "/sys/fs/cgroup/*/preflight-*", "/sys/fs/cgroup/preflight-*", "/sys/fs/cgroup/*/stockade-preflight-test*"} {
		m, err := filepath.Glob(p)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, m...)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, "stockade-preflight") {
			all = append(all, line)
		}
	}
	return strings.Join(all, "\n")
}

func TestThisMachine(t *testing.T) {
	need.Runc(t)
	dir := t.TempDir()
	checks := Run(t.Context(), Config{Dir: filepath.Join(dir, "not", "yet"), Tools: map[string]string{"sh": "apt-get install dash", "no-such-program": "apt-get install it"}})
	seen := map[string]Check{}
	for _, c := range checks {
		if c.Name == "" || c.Found == "" {
			t.Errorf("a check without words: %+v", c)
		}
		if c.OK == (c.Fix != "") {
			t.Errorf("%s: ok %v, fix %q", c.Name, c.OK, c.Fix)
		}
		if _, twice := seen[c.Name]; twice {
			t.Errorf("%s stands twice", c.Name)
		}
		seen[c.Name] = c
	}
	for _, m := range Missing(checks) {
		if m.Name != "stockade-host program" { // not given here
			t.Errorf("missing: %+v", m)
		}
	}
	for _, name := range []string{"root privileges", "Linux kernel version", "user namespaces", "PID namespaces", "network namespaces",
		"mount namespaces", "IPC namespaces", "UTS namespaces", "cgroup namespaces", "cgroups", "cgroup controller cpu", "cgroup controller memory",
		"cgroup controller pids", "OCI runtime", "container start, end to end", "seccomp filter", "openat2", "pidfd_open", "idmapped mounts",
		"open files (RLIMIT_NOFILE, hard)", "fs.pipe-max-size", "kernel.pid_max", "space in the state directory", "Unix sockets in the state directory"} {
		if _, ok := seen[name]; !ok {
			t.Errorf("%s is not checked", name)
		}
	}
	if !seen["container start, end to end"].OK || seen["program no-such-program"].OK || !seen["program sh"].OK {
		t.Errorf("%+v %+v", seen["container start, end to end"], seen["program sh"])
	}
	if l := leftovers(t); l != "" {
		t.Errorf("left:\n%s", l)
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) != 0 {
		t.Errorf("left in the state directory's place: %v, %v", ents, err)
	}
}

func TestEveryRuntimeIsTried(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	need.EachRuntime(t, func(t *testing.T, runtime string) {
		name := filepath.Base(runtime)
		for _, c := range Run(t.Context(), Config{InitPath: exe, Runtime: runtime}) {
			if c.Name == "container start, end to end" && (!c.OK || strings.Contains(c.Found, "kernel of its own") != (name == "runsc")) {
				t.Errorf("%+v", c)
			}
			if c.Name == "OCI runtime" && (!c.OK || !strings.HasPrefix(c.Found, name+" ")) {
				t.Errorf("%+v", c)
			}
			if strings.HasPrefix(c.Name, "OCI runtime ") && (c.Needed || !c.OK || c.Name == "OCI runtime "+name) {
				t.Errorf("another one: %+v", c)
			}
		}
	})
	if l := leftovers(t); l != "" {
		t.Errorf("left:\n%s", l)
	}
}

const noexecRun = "probe-with-noexec-run"

// A distribution with systemd mounts /run noexec, which says nothing about the
// place where boxes will be.
func TestRunIsNoexec(t *testing.T) {
	need.EachRuntime(t, func(t *testing.T, runtime string) {
		cmd := exec.Command(os.Args[0], noexecRun, runtime)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != "true" {
			t.Errorf("%v: %s", err, out)
		}
	})
	if l := leftovers(t); l != "" {
		t.Errorf("left:\n%s", l)
	}
}

// probeWithNoexecRun prints true or what the probe found. It runs in a mount
// namespace of its own.
func probeWithNoexecRun(runtime string) {
	if err := syscall.Mount("tmpfs", "/run", "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, "mode=755"); err != nil {
		fmt.Print(err)
		return
	}
	exe, _ := os.Executable()
	rt, _ := ociRuntime(runtime)
	c := container(context.Background(), Config{InitPath: exe}, rt)
	left, err := filepath.Glob("/run/stockade*") // crun leaves a directory of its own
	if !c.OK || len(left) != 0 || err != nil {
		fmt.Print(c, left, err)
		return
	}
	fmt.Print(true)
}

// Whatever is wrong, the check says so, says what helps, and leaves nothing.
func TestWhatIsMissing(t *testing.T) {
	need.Runc(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	fake := func(name, body string) string {
		p := filepath.Join(dir, name)
		need.Program(t, p, "#!/bin/sh\n"+body+"\n")
		return p
	}
	version := `[ "$1" = --version ] && { echo runc version 1.0; exit; }`
	noExec := filepath.Join(dir, "private")
	if err := os.WriteFile(noExec, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg        Config
		check      string
		found, fix string
	}{
		"no runtime": {Config{Runtime: "no-such-runtime"}, "OCI runtime", "not on the PATH", "apt-get install runc"},
		"no joiner":  {Config{Runtime: fake("joined", `echo crun version 1.0`)}, "container start, end to end", "stockade-host program, which is missing", "make build"},
		"old runsc": {Config{InitPath: exe, Runtime: fake("old", `[ "$1" = --version ] && { echo runsc version 1.0; exit; }
			echo "flag provided but not defined: $1" >&2; exit 2`)}, "container start, end to end", "not defined: --", "setup.sh runtimes"},
		"no container":     {Config{Runtime: "no-such-runtime"}, "container start, end to end", "no OCI runtime", "apt-get install runc"},
		"failing runtime":  {Config{Runtime: fake("failing", version+"\necho 'clone: no space left on device' >&2; exit 1")}, "container start, end to end", "no space left", "max_user_namespaces"},
		"lying runtime":    {Config{Runtime: fake("lying", version+"\n[ \"$3\" = run ] && echo 'uid=0 caps=000001ffffffffff seccomp=0 nnp=0 root=rw workspace=rw'; exit 0")}, "container start, end to end", "not confined", "runc"},
		"silent runtime":   {Config{Runtime: fake("silent", version)}, "container start, end to end", "", "runtime says"},
		"no host program":  {Config{}, "stockade-host program", "neither", "install"},
		"gone":             {Config{InitPath: filepath.Join(dir, "none")}, "stockade-host program", "no such file", "install"},
		"private":          {Config{InitPath: noExec}, "stockade-host program", "everybody", "chmod 755"},
		"no directory":     {Config{Dir: filepath.Join(noExec, "x")}, "state directory", "not a directory", "state-dir"},
		"a file":           {Config{Dir: noExec}, "state directory", "not a directory", "state-dir"},
		"no space":         {Config{Dir: "/proc"}, "space in the state directory", "", "state-dir"},
		"no sockets there": {Config{Dir: "/proc"}, "Unix sockets in the state directory", "", "local file system"},
	} {
		var got Check
		for _, check := range Run(t.Context(), c.cfg) {
			if check.Name == c.check {
				got = check
			}
		}
		if got.OK || !got.Needed || !strings.Contains(got.Found, c.found) || !strings.Contains(got.Fix, c.fix) {
			t.Errorf("%s: %+v", name, got)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range Run(ctx, Config{}) {
		if c.Name == "container start, end to end" && (c.OK || !strings.Contains(c.Fix, "again")) {
			t.Errorf("a cancelled probe: %+v", c)
		}
	}
	if l := leftovers(t); l != "" {
		t.Errorf("left:\n%s", l)
	}
}

func TestPlugins(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pretend := func(name, sdk string) string {
		path := filepath.Join(dir, name)
		answer := `{"executable":"/venv/bin/python","prefix":"/venv","base_prefix":"/usr","version":"3.11","full_version":"3.11.7","cache_tag":"cpython-311","implementation":"cpython","import_root":"/venv/lib","sdk":"` + sdk + `"}`
		need.Program(t, path, "#!/bin/sh\necho '"+answer+"'\n")
		return path
	}
	boxes := []Check{ok("seccomp filter", "there")}
	for name, c := range map[string]struct {
		python      string
		soFar       []Check
		sdk, shared bool
		word        string
	}{
		"all there": {pretend("good", "0.7.18"), boxes, true, true, "with SDK 0.7.18"},
		"no SDK":    {pretend("bare", ""), boxes, false, false, "pip install langbot-plugin"},
		"no Python": {filepath.Join(dir, "none"), boxes, false, false, "no Python interpreter"},
		"no boxes":  {pretend("alone", "0.7.18"), []Check{bad("OCI runtime", "none", "apt-get install runc")}, true, false, "missing: OCI runtime"},
	} {
		cs := plugins(t.Context(), c.python, c.soFar)
		if len(cs) != 2 || cs[0].OK != c.sdk || cs[1].OK != c.shared || len(Missing(cs)) != 0 {
			t.Errorf("%s: %+v", name, cs)
		}
		if all := cs[0].Found + cs[0].Fix + cs[1].Found; !strings.Contains(all, c.word) {
			t.Errorf("%s: %s", name, all)
		}
	}
}
