package preflight

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/netns"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/wire"
)

func ociRuntime(name string) (oci.Runtime, Check) {
	const check = "OCI runtime"
	rt, err := oci.FindRuntime(name)
	if err != nil {
		return rt, bad(check, err.Error(), "apt-get install runc")
	}
	return rt, ok(check, rt.String()+" at "+rt.Path)
}

// otherRuntimes says of each runtime on the PATH that is not the chosen one
// whether it would work, for who thinks of choosing it.
func otherRuntimes(ctx context.Context, cfg Config, chosen oci.Runtime) []Check {
	var cs []Check
	for _, name := range oci.Runtimes() {
		rt, err := oci.FindRuntime(name)
		if err != nil || rt.Path == chosen.Path {
			continue
		}
		c := container(ctx, cfg, rt)
		c.Name, c.Needed, c.Found = "OCI runtime "+name, false, rt.String()+" at "+rt.Path+": "+c.Found
		cs = append(cs, c)
	}
	return cs
}

func hostProgram(ctx context.Context, file string) Check {
	const name = "stockade-host program"
	if file == "" {
		return bad(name, "neither beside this program nor on the PATH", "make build, and install bin/stockade-host beside stockade")
	}
	st, err := os.Stat(file)
	switch {
	case err != nil:
		return bad(name, err.Error(), "make build, and install bin/stockade-host beside stockade")
	case !st.Mode().IsRegular() || st.Mode()&0o001 == 0:
		// It is PID 1 of every container, where this machine's root is nobody.
		return bad(name, file+" may not be executed by everybody", "chmod 755 "+file)
	}
	return ok(name, file)
}

// report is what the probe's command says from inside its container.
const report = `echo "uid=$(id -u) caps=$(grep ^CapBnd: /proc/self/status | tr -dc 0-9a-f | tail -c 16)` +
	` seccomp=$(grep ^Seccomp: /proc/self/status | tr -dc 0-9) nnp=$(grep ^NoNewPrivs: /proc/self/status | tr -dc 0-9)` +
	` root=$( (echo x > /probe) 2>/dev/null && echo rw || echo ro) workspace=$(echo x > /workspace/x && echo rw)"`

// expected is the report of a confined process. On a kernel of its own it has no
// filter: none of its system calls reaches this machine's kernel.
func expected(m oci.Manner) string {
	seccomp := "2"
	if m.OwnKernel {
		seccomp = "0"
	}
	return "uid=1000 caps=0000000000000000 seccomp=" + seccomp + " nnp=1 root=ro workspace=rw"
}

// containerTime bounds the probe's container. It takes 0.1 s, with runsc 0.5 s; a
// machine that emulates another, or is busy, took 20 s.
const containerTime = time.Minute

// container starts a real container with the specification of a box and looks
// at it from inside.
func container(ctx context.Context, cfg Config, rt oci.Runtime) Check {
	const name = "container start, end to end"
	if rt.Path == "" {
		return bad(name, "not tried: there is no OCI runtime", "apt-get install runc")
	}
	if os.Geteuid() != 0 {
		return bad(name, "not tried: this is not root", "sudo stockade doctor")
	}
	if rt.Manner.Grouped && cfg.InitPath == "" {
		return bad(name, "not tried: "+rt.Name+" is started by the stockade-host program, which is missing", "make build, and install bin/stockade-host beside stockade")
	}
	ctx, cancel := context.WithTimeout(ctx, containerTime)
	defer cancel()
	begun := time.Now()
	out, err := runContainer(ctx, cfg, rt)
	if line, found := pick(out); found && line != expected(rt.Manner) {
		return bad(name, "the container is not confined as it should be: "+clip(line), "use runc 1.1 or later: apt-get install runc")
	} else if found && err == nil {
		kernel := ""
		if rt.Manner.OwnKernel {
			kernel = ", on a kernel of its own"
		}
		return ok(name, fmt.Sprintf("a confined process ran within %d ms%s", time.Since(begun).Milliseconds(), kernel))
	}
	if e, ok := errors.AsType[*errdefs.Error](err); ok && out == "" && e.Next != "" {
		return bad(name, e.Message, e.Next) // it never came to the runtime
	}
	if ctx.Err() != nil {
		return bad(name, fmt.Sprintf("no container ended within %v: %v: %s", containerTime, ctx.Err(), clip(out)),
			"the machine is busy or the runtime hangs: run stockade doctor again when it is idle")
	}
	found := clip(out)
	if err != nil {
		found = clip(err.Error() + ": " + out)
	} else if found == "" {
		found = "the container said nothing"
	}
	return bad(name, found, remedy(found))
}

func pick(out string) (string, bool) {
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "uid=") {
			return strings.TrimSpace(line), true
		}
	}
	return "", false
}

// remedy guesses from a runtime's words what would help.
func remedy(said string) string {
	for _, r := range []struct{ word, fix string }{
		{"flag provided but not defined", "this runsc is older than 2026: sh scripts/setup.sh runtimes builds the one that is tested"},
		{"max_user_namespaces", "sysctl -w user.max_user_namespaces=15000"},
		{"no space left on device", "sysctl -w user.max_user_namespaces=15000 user.max_pid_namespaces=15000 (or free disk space)"},
		{"seccomp", "install a runtime built with seccomp: apt-get install runc"},
		{"cgroup", "let this program write to /sys/fs/cgroup; in a container: mount it read-write"},
		{"apparmor", "aa-complain the profile of the runtime"},
		{"mount", "in a container, run it privileged: the kernel does not let it mount /proc"},
		{"operation not permitted", "run as root on the machine itself, or in a privileged container"},
	} {
		if strings.Contains(strings.ToLower(said), r.word) {
			return r.fix
		}
	}
	return "read what the runtime says above; journalctl -k may say more"
}

// runContainer makes everything a container needs, runs report in it, and takes
// it all away again.
func runContainer(ctx context.Context, cfg Config, rt oci.Runtime) (out string, err error) {
	// The root directory must be reachable for ids that are nobody's here, as /run is.
	dir, err := os.MkdirTemp("/run", "stockade-preflight-")
	if err != nil {
		return "", err
	}
	// A distribution may have mounted /run noexec, and a runtime cannot show a
	// directory from there without: boxes are kept elsewhere, see [stateDir].
	if err := unix.Mount("stockade-preflight", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=711"); err != nil {
		return "", errors.Join(os.NewSyscallError("mount", err), os.Remove(dir))
	}
	id := "preflight-" + strings.ToLower(rand.Text())
	group := cgroup.New("", path.Join("/", cfg.CgroupParent, id))
	ns, bundle := filepath.Join(dir, "netns"), filepath.Join(dir, "bundle")
	defer func() {
		// Detached: it must be done even when ctx has ended.
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTime)
		defer cancel()
		err = errors.Join(err, rt.Delete(clean, filepath.Join(dir, "rt"), id), group.Kill(clean), group.Remove(clean),
			netns.Remove(ns), os.NewSyscallError("umount2", unix.Unmount(dir, unix.MNT_DETACH)), os.Remove(dir))
	}()
	if err := netns.Create(ns); err != nil {
		return "", err
	}
	if err := group.Create(api.BoxLimits{}); err != nil {
		return "", err
	}
	c, err := probeContainer(dir, ns, cfg.InitPath)
	if err != nil {
		return "", err
	}
	c.Cgroup = path.Join("/", cfg.CgroupParent, id, "p")
	js, err := json.Marshal(oci.Spec(c))
	if err != nil {
		return "", err
	}
	if err := os.Mkdir(bundle, 0o700); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), js, 0o600); err != nil {
		return "", err
	}
	// PID 1 wants to report on descriptor 3; here nobody reads it.
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	near, far := os.NewFile(uintptr(pair[0]), "report"), os.NewFile(uintptr(pair[1]), "report")
	defer near.Close()
	defer far.Close()
	argv := append(rt.Command(filepath.Join(dir, "rt"), "run", "--bundle", bundle), rt.Manner.PassReport...)
	argv = append(argv, id)
	if rt.Manner.Grouped {
		if err := cgroup.New("", c.Cgroup).Create(api.BoxLimits{}); err != nil {
			return "", err
		}
	}
	argv = rt.Manner.InGroup(cfg.InitPath, "", c.Cgroup, argv)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.ExtraFiles = []*os.File{far}
	cmd.WaitDelay = time.Second
	b, err := cmd.CombinedOutput()
	return string(b), err
}

// probeContainer makes the directories of the probe's container.
func probeContainer(dir, ns, init string) (oci.Container, error) {
	const base = 0x6fff0000 // the last range of ids that boxes could get
	root, workspace := filepath.Join(dir, "root"), filepath.Join(dir, "workspace")
	var binds []oci.Bind
	err := os.Mkdir(workspace, 0o700)
	if err == nil {
		err = os.Chown(workspace, base+oci.AgentID, base+oci.AgentID)
	}
	for _, d := range []string{"proc", "dev", "tmp", "workspace", ".stockade", "etc"} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(root, d), 0o755))
	}
	err = errors.Join(err, os.WriteFile(filepath.Join(root, oci.InitPath), nil, 0o644))
	for _, d := range oci.SystemDirs() {
		st, serr := os.Lstat(d)
		if serr != nil || strings.HasPrefix(d, "/etc/") {
			continue
		}
		if st.Mode()&os.ModeSymlink != 0 {
			target, lerr := os.Readlink(d)
			err = errors.Join(err, lerr, os.Symlink(target, filepath.Join(root, d)))
			continue
		}
		err = errors.Join(err, os.MkdirAll(filepath.Join(root, d), 0o755))
		binds = append(binds, oci.Bind{Source: d, Dest: d})
	}
	binds = append(binds, oci.Bind{Source: workspace, Dest: oci.Workspace, Writable: true})
	if init == "" {
		init = filepath.Join(dir, "init")
		err = errors.Join(err, os.WriteFile(init, []byte("#!/bin/sh\nshift 4\nexec \"$@\"\n"), 0o755))
	}
	filter, serr := oci.Seccomp()
	var files unix.Rlimit
	err = errors.Join(err, serr, unix.Getrlimit(unix.RLIMIT_NOFILE, &files))
	return oci.Container{
		Proc: wire.ProcSpec{Argv: []string{"/bin/sh", "-c", report}, Env: []string{"PATH=/usr/bin:/bin"}},
		Cwd:  oci.Workspace, Root: root, Binds: binds, Init: init, NetNS: ns, UIDBase: base,
		Files: min(files.Max, 1024), TmpBytes: 1 << 20, Seccomp: filter,
	}, err
}
