package oci

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
)

// JoinCommand is the subcommand of stockade-host whose body is [JoinMain].
const JoinCommand = "join"

// hideFlag comes first among its arguments where the runtime may not see the
// machine's control groups.
const hideFlag = "--hide"

// InGroup returns the command line that starts the runtime's command line argv
// inside a control group, which is there already: argv itself for a runtime that
// sees to that. program is stockade-host, or another that hands its arguments
// after [JoinCommand] to [JoinMain]; root is where the hierarchies are, "" the
// usual place.
func (m Manner) InGroup(program, root, group string, argv []string) []string {
	if !m.Grouped {
		return argv
	}
	line := []string{program, JoinCommand}
	if m.HideGroups {
		line = append(line, hideFlag)
	}
	return slices.Concat(line, []string{root, group, "--"}, argv)
}

// JoinMain is the body of `stockade-host join [--hide] ROOT GROUP -- PROGRAM
// [ARG…]`: it moves itself into a control group, in every hierarchy, and becomes
// the program. With --hide the program finds ROOT empty, in a mount namespace of
// its own. It returns, with an exit code, only when that failed.
//
// Whatever the program starts is in the group from its first instruction on.
func JoinMain(args []string) int {
	fmt.Fprintln(os.Stderr, "stockade-host join:", join(args))
	return 1
}

func join(args []string) error {
	hide := len(args) > 0 && args[0] == hideFlag
	if hide {
		args = args[1:]
	}
	if len(args) < 4 || args[2] != "--" {
		return errors.New("its arguments are [--hide] ROOT GROUP -- PROGRAM [ARG…]")
	}
	root, group, argv := args[0], args[1], args[3:]
	if err := cgroup.New(root, group).Add(os.Getpid()); err != nil {
		return err
	}
	if hide {
		// The namespace is the thread's, and the thread that executes is the one that
		// remains.
		runtime.LockOSThread()
		if err := hideGroups(cmp.Or(root, cgroup.DefaultRoot)); err != nil {
			return fmt.Errorf("hide the control groups: %w", err)
		}
	}
	return fmt.Errorf("the runtime %s cannot be executed: %w", argv[0], syscall.Exec(argv[0], argv, os.Environ()))
}

func hideGroups(root string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return os.NewSyscallError("mount", err)
	}
	return os.NewSyscallError("mount", unix.Mount("none", root, "tmpfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=755"))
}
