package preflight

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
)

// capability is a bit of CapEff, from linux/capability.h, and what it is for.
type capability struct {
	bit   uint
	name  string
	needs string
}

func privileges() []Check {
	needed := []capability{
		{unix.CAP_CHOWN, "CAP_CHOWN", "volumes belong to the box's user"},
		{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE", "volumes are removed whatever their permissions"},
		{unix.CAP_FOWNER, "CAP_FOWNER", "permissions of files in volumes are set"},
		{unix.CAP_KILL, "CAP_KILL", "processes of boxes are stopped"},
		{unix.CAP_SETUID, "CAP_SETUID", "user ids are mapped"},
		{unix.CAP_SETGID, "CAP_SETGID", "group ids are mapped"},
		{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "loopback is brought up in a network namespace"},
		{unix.CAP_SYS_CHROOT, "CAP_SYS_CHROOT", "the runtime changes the root directory"},
		{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "namespaces and mounts are made"},
	}
	have, err := effective()
	if err != nil {
		return []Check{bad("root privileges", err.Error(), "run as root: sudo stockade doctor")}
	}
	var lack []string
	for _, c := range needed {
		if have>>c.bit&1 == 0 {
			lack = append(lack, c.name+" ("+c.needs+")")
		}
	}
	who := "user id " + strconv.Itoa(os.Geteuid())
	if len(lack) > 0 {
		return []Check{bad("root privileges", who+" lacks "+strings.Join(lack, ", "), "run as root: sudo stockade doctor")}
	}
	res := have>>unix.CAP_SYS_RESOURCE&1 != 0
	found := "there"
	if !res {
		found = "absent: limits of open files cannot be raised above this program's own"
	}
	return []Check{ok("root privileges", who+" with every capability that boxes need"),
		nice("CAP_SYS_RESOURCE", res, found, "start the container or service that this runs in with CAP_SYS_RESOURCE")}
}

func effective() (uint64, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if hex, found := strings.CutPrefix(line, "CapEff:"); found {
			return strconv.ParseUint(strings.TrimSpace(hex), 16, 64)
		}
	}
	return 0, errors.New("/proc/self/status names no capabilities")
}

// minKernel is the first kernel with everything the host program calls:
// close_range with CLOSE_RANGE_CLOEXEC came in 5.11, mount_setattr in 5.12.
const minMajor, minMinor = 5, 12

func kernel() []Check {
	var cs []Check
	release := text("/proc/sys/kernel/osrelease")
	fix := fmt.Sprintf("install a kernel of version %d.%d or later", minMajor, minMinor)
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major < minMajor || major == minMajor && minor < minMinor {
		cs = append(cs, bad("Linux kernel version", release, fix))
	} else {
		cs = append(cs, ok("Linux kernel version", release))
	}
	call := func(name string, needed bool, why string, err error, expected ...error) {
		good := err == nil || slices.ContainsFunc(expected, func(e error) bool { return errors.Is(err, e) })
		found := "works"
		if !good {
			found = err.Error() + ": " + why
		}
		c := Check{Name: name, Needed: needed, OK: good, Found: found}
		if !good {
			c.Fix = fix + "; if this runs in a container, its seccomp profile must allow " + name
		}
		cs = append(cs, c)
	}
	fd, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH})
	if err == nil {
		unix.Close(fd)
	}
	// Beneath the current directory "/" is refused with EXDEV: that is the proof.
	call("openat2", true, "working directories and mounts could leave their place", err, unix.EXDEV)
	fd, err = unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		unix.Close(fd)
	}
	call("pidfd_open", true, "a process number may be another process's a moment later", err)
	call("close_range", true, "a child could inherit what it must not have", unix.CloseRange(1<<30, 1<<30, unix.CLOSE_RANGE_CLOEXEC))
	// Of no mount at all it is EBADF where the call exists.
	err = unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	call("mount_setattr", true, "mounts of the host's directories cannot be restricted", err, unix.EBADF, unix.EINVAL)
	idmap := Check{Name: "idmapped mounts", OK: err == nil || errors.Is(err, unix.EBADF) || errors.Is(err, unix.EINVAL), Found: "the kernel has them; a file system may not"}
	if !idmap.OK {
		idmap.Found, idmap.Fix = "absent: in mounted directories the agent has the rights of others", fix
	}
	cs = append(cs, idmap)
	actions := text("/proc/sys/kernel/seccomp/actions_avail")
	if slices.Contains(strings.Fields(actions), "errno") {
		cs = append(cs, ok("seccomp filter", actions))
	} else {
		cs = append(cs, bad("seccomp filter", "absent", "use a kernel with CONFIG_SECCOMP_FILTER=y"))
	}
	return cs
}

func namespaces() []Check {
	var cs []Check
	for _, ns := range []struct{ file, name, config string }{
		{"user", "user namespaces", "CONFIG_USER_NS"}, {"pid", "PID namespaces", "CONFIG_PID_NS"},
		{"net", "network namespaces", "CONFIG_NET_NS"}, {"mnt", "mount namespaces", "CONFIG_NAMESPACES"},
		{"ipc", "IPC namespaces", "CONFIG_IPC_NS"}, {"uts", "UTS namespaces", "CONFIG_UTS_NS"},
		{"cgroup", "cgroup namespaces", "CONFIG_CGROUPS"},
	} {
		if _, err := os.Readlink("/proc/self/ns/" + ns.file); err != nil {
			cs = append(cs, bad(ns.name, "absent", "use a kernel with "+ns.config+"=y"))
			continue
		}
		most := text("/proc/sys/user/max_" + ns.file + "_namespaces")
		n, err := strconv.Atoi(most)
		switch {
		case err != nil: // no such limit
			cs = append(cs, ok(ns.name, "there"))
		case n < 64:
			cs = append(cs, bad(ns.name, fmt.Sprintf("user.max_%s_namespaces is %d", ns.file, n),
				fmt.Sprintf("sysctl -w user.max_%s_namespaces=15000", ns.file)))
		default:
			cs = append(cs, ok(ns.name, fmt.Sprintf("there; user.max_%s_namespaces is %d", ns.file, n)))
		}
	}
	return cs
}

func cgroups() []Check {
	mode, err := cgroup.Detect("")
	if err != nil {
		return []Check{bad("cgroups", err.Error(), "mount -t cgroup2 none /sys/fs/cgroup")}
	}
	cs := []Check{ok("cgroups", string(mode.Kind)+" with "+strings.Join(mode.Controllers, ", "))}
	for _, c := range []struct {
		name, loss string
		needed     bool
	}{
		{cgroup.CPU, "processor time of boxes is not limited", true},
		{cgroup.Memory, "memory of boxes is not limited", true},
		{cgroup.Pids, "processes in boxes are not limited", true},
		{cgroup.Freezer, "a tree that forks while it is killed takes several passes", false},
	} {
		if c.name == cgroup.Freezer && mode.Kind == cgroup.V2 {
			continue // part of the core there
		}
		check := Check{Name: "cgroup controller " + c.name, Needed: c.needed, OK: mode.Has(c.name), Found: "there"}
		if !check.OK {
			check.Found = "absent: " + c.loss
			check.Fix = "start the kernel with cgroup_enable=" + c.name + " (in GRUB_CMDLINE_LINUX, then update-grub)"
		}
		cs = append(cs, check)
	}
	return cs
}

// text is a small file's content without the space around it, "" if it cannot be
// read.
func text(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
