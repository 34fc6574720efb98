package preflight

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func limits() []Check {
	var cs []Check
	var files unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files)
	found := fmt.Sprintf("%d", files.Max)
	if err != nil {
		found = err.Error()
	}
	// A host program holds a few descriptors per process; 1,024 are used up by 200.
	cs = append(cs, nice("open files (RLIMIT_NOFILE, hard)", err == nil && files.Max >= 16384, found,
		"ulimit -Hn 65536, or LimitNOFILE=65536 in the service"))
	number := func(name, file string, least int, fix string) {
		n, err := strconv.Atoi(text(file))
		found := strconv.Itoa(n)
		if err != nil {
			found = "unknown"
		}
		cs = append(cs, nice(name, err == nil && n >= least, found, fix))
	}
	number("fs.pipe-max-size", "/proc/sys/fs/pipe-max-size", 1<<20, "sysctl -w fs.pipe-max-size=1048576")
	number("kernel.pid_max", "/proc/sys/kernel/pid_max", 32768, "sysctl -w kernel.pid_max=4194304")
	number("fs.inotify.max_user_watches", "/proc/sys/fs/inotify/max_user_watches", 8192, "sysctl -w fs.inotify.max_user_watches=65536")
	return cs
}

// minSpace is what a state directory should have free: the ledger and a few logs
// of 64 MiB.
const minSpace = 1 << 30

// stateDir checks the place where state is or will be kept.
func stateDir(dir string) []Check {
	if dir == "" {
		return nil
	}
	at, err := filepath.Abs(dir)
	if err != nil {
		return []Check{bad("state directory", err.Error(), "name an absolute path")}
	}
	// What is not there yet is judged by the directory it will be made in.
	for {
		st, err := os.Stat(at)
		if err == nil && st.IsDir() {
			break
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) || err == nil {
			return []Check{bad("state directory", fmt.Sprintf("%s is not a directory that can be used", at), "name another place with --state-dir")}
		}
		at = filepath.Dir(at)
	}
	cs := []Check{space(at)}
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err == nil {
		noexec := st.Flags&unix.ST_NOEXEC != 0
		found := "programs in workspaces can be run"
		if noexec {
			found = "the file system of " + at + " is mounted noexec: no program in a workspace can be run"
		}
		c := Check{Name: "state directory allows execution", Needed: true, OK: !noexec, Found: found}
		if noexec {
			c.Fix = "choose another place with --state-dir, or mount -o remount,exec it"
		}
		durable := st.Type != unix.TMPFS_MAGIC && st.Type != unix.RAMFS_MAGIC
		found = "on a disk"
		if !durable {
			found = at + " is in memory: the ledger does not survive a reboot"
		}
		cs = append(cs, c, nice("state directory is durable", durable, found, "choose a place on a disk with --state-dir"))
	}
	return append(cs, unixSocket(at))
}

func space(at string) Check {
	const name = "space in the state directory"
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		return bad(name, err.Error(), "look at "+at)
	}
	free := st.Bavail * uint64(st.Bsize)
	found := fmt.Sprintf("%.1f GiB free below %s", float64(free)/(1<<30), at)
	// Some file systems count no inodes and say 0 of 0.
	if st.Files > 0 && st.Ffree < 10_000 {
		return bad(name, fmt.Sprintf("only %d inodes free below %s", st.Ffree, at), "remove files, or choose another place with --state-dir")
	}
	if free < minSpace {
		return bad(name, found, "free some, or choose another place with --state-dir")
	}
	return ok(name, found)
}

// unixSocket listens and connects in the state directory.
func unixSocket(at string) Check {
	const name = "Unix sockets in the state directory"
	fix := "choose a place on a local file system with --state-dir, writable for root"
	dir, err := os.MkdirTemp(at, ".preflight-")
	if err != nil {
		return bad(name, err.Error(), fix)
	}
	defer os.RemoveAll(dir)
	d, err := os.Open(dir)
	if err != nil {
		return bad(name, err.Error(), fix)
	}
	defer d.Close()
	// A socket's address has at most 108 bytes; by the descriptor of its
	// directory it fits wherever it is.
	addr := fmt.Sprintf("/proc/self/fd/%d/s", d.Fd())
	l, err := net.Listen("unix", addr)
	if err != nil {
		return bad(name, err.Error(), fix)
	}
	defer l.Close()
	c, err := net.DialTimeout("unix", addr, 5*time.Second)
	if err != nil {
		return bad(name, err.Error(), fix)
	}
	c.Close()
	return ok(name, "work below "+at)
}

// tools looks for programs that are useful but not needed.
func tools(ctx context.Context, want map[string]string) []Check {
	var cs []Check
	for name, fix := range want {
		path, err := exec.LookPath(name)
		if err != nil {
			cs = append(cs, nice("program "+name, false, "not on the PATH", fix))
			continue
		}
		out, err := output(ctx, path, "--version")
		found := path
		if line, _, _ := strings.Cut(strings.TrimSpace(out), "\n"); err == nil && line != "" {
			found = clip(line) + " at " + path
		}
		cs = append(cs, nice("program "+name, true, found, ""))
	}
	slices.SortFunc(cs, func(a, b Check) int { return cmp.Compare(a.Name, b.Name) })
	return cs
}

// output runs a program and returns what it said on both streams.
func output(ctx context.Context, path string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func clip(s string) string {
	s = strings.ToValidUTF8(strings.TrimSpace(s), "?")
	if len(s) > 400 {
		return strings.ToValidUTF8(s[:400], "") + "…"
	}
	return s
}
