package oci

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Paths and identities inside every container.
const (
	InitPath  = "/.stockade/init"    // this program, as PID 1
	Workspace = "/workspace"         // the workspace volume
	Home      = "/home/agent"        // the home volume
	Cache     = "/home/agent/.cache" // the cache volume
	AgentID   = 1000                 // user and group of the tenant's processes
)

// IDRange is how many user and group ids a box has: 0 to IDRange-1 inside are
// UIDBase to UIDBase+IDRange-1 outside.
const IDRange = 65536

// MaxFiles is how many open files a process should have, soft and hard. Some
// programs close every possible descriptor one by one at start, so it is not
// the kernel's million.
const MaxFiles = 65536

// shmBytes is the size of /dev/shm: the 64 MiB that programs know from Docker.
const shmBytes = 64 << 20

// SystemDirs are the directories and files of this machine that a container of
// the host profile sees, where they exist: programs and their libraries, and
// what finding and verifying them needs.
func SystemDirs() []string {
	return []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
		"/etc/ssl", "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d"}
}

// Bind shows a directory or file of the machine in the container, read-only
// unless Writable.
type Bind struct {
	Source   string
	Dest     string
	Writable bool
	NoExec   bool // Source's file system is mounted noexec: in a user namespace that may not be dropped
}

// NoExec reports whether the file system of a path is mounted noexec, for
// [Bind].NoExec. A path that cannot be looked at is unavailable.
func NoExec(path string) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be shown in a container: %v", path, err)
	}
	return st.Flags&unix.ST_NOEXEC != 0, nil
}

// Container is everything the specification of one process is made from.
type Container struct {
	Proc    wire.ProcSpec // Argv, Env (the whole environment), PTY and limits are used
	Cwd     string        // absolute, inside
	Root    string        // root directory outside; it holds a mount point for every Bind
	Binds   []Bind        // in mount order
	Init    string        // the program outside that is shown at InitPath
	NetNS   string        // path of the network namespace to join; "" makes a new one
	HostNet bool          // no network namespace: the machine's own
	UIDBase uint32        // first of the box's IDRange user and group ids outside
	Cgroup  string        // absolute path below every hierarchy

	Files     uint64              // open files: MaxFiles, or less where the machine allows no more
	TmpBytes  int64               // size of /tmp; its pages count as memory of the process. 0: /tmp is one of Binds
	Rlimits   []specs.POSIXRlimit // more limits, of each process
	SwapLimit bool                // the kernel can limit memory and swap together
	DeepRO    bool                // the runtime knows the mount option "rro"
	OwnKernel bool                // see Manner.OwnKernel: Proc.Pids counts the processes of the sandbox
	Seccomp   *specs.LinuxSeccomp
}

// Spec returns the runtime's configuration of one process.
//
// PID 1 is this program (see shim.InitMain): it enters the working directory
// and starts argv. The runtime itself starts in "/", so that no directory a
// tenant can replace is ever opened by the runtime.
func Spec(c Container) *specs.Spec {
	s := &specs.Spec{
		Version:  "1.0.2",
		Hostname: "box",
		Root:     &specs.Root{Path: c.Root, Readonly: true},
		Process:  process(c),
		Mounts:   mounts(c),
		Linux: &specs.Linux{
			UIDMappings: []specs.LinuxIDMapping{{ContainerID: 0, HostID: c.UIDBase, Size: IDRange}},
			GIDMappings: []specs.LinuxIDMapping{{ContainerID: 0, HostID: c.UIDBase, Size: IDRange}},
			CgroupsPath: c.Cgroup,
			Resources:   resources(c),
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.UserNamespace},
				{Type: specs.PIDNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.CgroupNamespace},
				{Type: specs.NetworkNamespace, Path: c.NetNS},
			},
			Seccomp: c.Seccomp,
			// What tells about the machine or lets it be changed, as Docker hides it.
			MaskedPaths: []string{"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
				"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
	if c.HostNet {
		s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.NetworkNamespace })
	}
	return s
}

func process(c Container) *specs.Process {
	// The kernel's choice in want of memory is a tenant's process before the server.
	oom := 500
	args := append([]string{InitPath, "init", "--cwd", c.Cwd, "--"}, c.Proc.Argv...)
	p := &specs.Process{
		User:            specs.User{UID: AgentID, GID: AgentID},
		Args:            args,
		Env:             append([]string{}, c.Proc.Env...),
		Cwd:             "/",
		Capabilities:    &specs.LinuxCapabilities{},
		NoNewPrivileges: true,
		OOMScoreAdj:     &oom,
		Rlimits: []specs.POSIXRlimit{
			{Type: "RLIMIT_CORE", Hard: 0, Soft: 0},
			{Type: "RLIMIT_NOFILE", Hard: c.Files, Soft: c.Files},
		},
	}
	p.Rlimits = append(p.Rlimits, c.Rlimits...)
	if c.OwnKernel && c.Proc.Pids > 0 {
		n := uint64(c.Proc.Pids)
		p.Rlimits = append(p.Rlimits, specs.POSIXRlimit{Type: "RLIMIT_NPROC", Hard: n, Soft: n})
	}
	if c.Proc.PTY != nil {
		p.Terminal = true
		p.ConsoleSize = &specs.Box{Height: uint(c.Proc.PTY.Rows), Width: uint(c.Proc.PTY.Cols)}
	}
	return p
}

func mounts(c Container) []specs.Mount {
	ms := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777", "size=" + strconv.Itoa(shmBytes)}},
	}
	if c.TmpBytes > 0 {
		ms = append(ms, specs.Mount{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", c.TmpBytes)}})
	}
	for _, b := range c.Binds {
		ms = append(ms, bind(b, c.DeepRO))
	}
	// Last, so that nothing a tenant can write lies over it.
	return append(ms, bind(Bind{Source: c.Init, Dest: InitPath}, false))
}

func bind(b Bind, deepRO bool) specs.Mount {
	// A recursive bind even where nothing is mounted below: the kernel refuses a
	// plain one over mounts that another user namespace has locked together.
	opts := []string{"rbind", "rprivate", "nosuid", "nodev"}
	switch {
	case b.Writable:
		opts = append(opts, "rw")
	case deepRO:
		opts = append(opts, "ro", "rro")
	default:
		opts = append(opts, "ro")
	}
	if b.NoExec {
		opts = append(opts, "noexec")
	}
	return specs.Mount{Destination: b.Dest, Type: "bind", Source: b.Source, Options: opts}
}

func resources(c Container) *specs.LinuxResources {
	r := &specs.LinuxResources{
		// Every device is denied; the runtime allows its defaults by itself.
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
	}
	if n := c.Proc.MemoryBytes; n > 0 {
		r.Memory = &specs.LinuxMemory{Limit: &n}
		if c.SwapLimit {
			r.Memory.Swap = &n // memory and swap together: no swap
		}
	}
	if n := c.Proc.Pids; n > 0 {
		if c.OwnKernel {
			n = HostTasks(n)
		}
		r.Pids = &specs.LinuxPids{Limit: &n}
	}
	return r
}
