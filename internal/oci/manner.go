package oci

import "slices"

// Manner is how one runtime differs from the others. It is data, so that the
// keeper of a process can be told it in a file; nothing else in Stockade asks
// which runtime it is.
type Manner struct {
	// Flags stand before every command.
	Flags []string `json:"flags,omitempty"`
	// PassReport are the arguments of "run" that hand the runtime's descriptor 3 to
	// the container's first process, where it is 3 again.
	PassReport []string `json:"pass_report,omitempty"`
	// Grouped says that the runtime leaves control groups alone. Whoever starts it
	// makes the container's group, sets its limits and starts the runtime inside
	// ([JoinMain]); it removes the group, too.
	Grouped bool `json:"grouped,omitempty"`
	// HideGroups says that the runtime must not see the machine's control groups
	// when it starts a container.
	HideGroups bool `json:"hide_groups,omitempty"`
	// OwnKernel says that processes run on a kernel of their own and not on this
	// machine's. The specification's system call filter is not installed, and each
	// process costs several of the machine's; see [Container].
	OwnKernel bool `json:"own_kernel,omitempty"`
}

// mannerOf returns the manner of a kind of runtime. An unknown one is taken for
// a relative of runc, as most are.
func mannerOf(kind string) Manner {
	preserve := []string{"--preserve-fds", "1"}
	switch kind {
	case "crun":
		// crun refuses a machine with v1 hierarchies whose v2 one has a controller
		// left, such as hugetlb, even when it is not to manage any group ("cgroups in
		// hybrid mode not supported", 1.8.1).
		return Manner{Flags: []string{"--cgroup-manager=disabled"}, PassReport: preserve, Grouped: true, HideGroups: true}
	case "runsc":
		return Manner{
			Flags: []string{
				// It joins the v1 hierarchies it knows and not all there are, and a process
				// outside of one hierarchy is not proven gone by it.
				"--ignore-cgroups",
				// The box's network namespace has a loopback device and nothing else. With
				// a network stack of its own a sandbox would not reach what listens there.
				"--network=host",
				// The root is read-only; nothing is to be kept in memory over it.
				"--overlay2=none",
				// The default is one kept below --root, mounted there for good.
				"--gofer-network-namespace=new",
			},
			PassReport: []string{"--pass-fd", "3:3"}, Grouped: true, OwnKernel: true,
		}
	}
	return Manner{PassReport: preserve}
}

// Command returns a command line of the runtime, from its path on. root is its
// --root.
func (r Runtime) Command(root string, args ...string) []string {
	return slices.Concat([]string{r.Path}, r.Manner.Flags, []string{"--root", root}, args)
}

// A process in a sandbox with its own kernel costs two of this machine's tasks,
// and the sandbox at rest some thirty (measured with runsc 20260905 on 2
// processors: 2n+22 for n processes of one thread; more processors, more
// threads of its own). A sandbox whose control group has no room left dies, while
// one of its processes that may not fork is told so; so the latter limit comes
// first.
const sandboxTasks = 64

// HostTasks returns how many of this machine's tasks a sandbox with its own kernel
// needs for that many processes and threads.
func HostTasks(pids int64) int64 { return 2*pids + sandboxTasks }

// SandboxPids returns how many processes and threads a sandbox with its own
// kernel may have: what was asked for, 0 being no limit, but not more than a box
// with boxPids of this machine's can bear alone.
func SandboxPids(asked, boxPids int64) int64 {
	if boxPids <= 0 {
		return asked
	}
	most := max((boxPids-sandboxTasks)/2, 1)
	if asked <= 0 {
		return most
	}
	return min(asked, most)
}
