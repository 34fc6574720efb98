package server_test

import (
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/serverproc"
)

// nemesis kills, stops and starves the parts of one server, and remembers what it
// did to which process. It signals nothing but what the server of its state
// directory started.
type nemesis struct {
	t     *testing.T
	s     *serverproc.Server
	bin   string // the programs, a directory of this test's own
	state string
	rng   *rand.Rand
	acts  map[string]int

	mu      sync.Mutex
	shims   map[string]bool // handles whose keeper was killed
	insides map[string]bool // handles that had a process of their tree killed
	full    [][2]time.Time  // when the disk was full
}

// part is a process of the server and, for a keeper or what is in a container, the
// handle it belongs to.
type part struct {
	pid    int
	start  string // field 22 of its stat: with the pid, one process for ever
	handle string
}

var (
	handleName  = regexp.MustCompile("proc_[a-z0-9]{20,}")
	hostName    = regexp.MustCompile(`"host_([a-z0-9]{20,})"`)
	runtimeName = regexp.MustCompile("^/.*(runc|crun)\x00")
)

// find returns the parts of a kind: "host", "shim", "runtime" (a runc at work) or
// "inside" (of a container).
func (n *nemesis) find(kind string) []part {
	hostDir := filepath.Join(n.state, "host")
	id := n.hostID()
	group := "/stockade/" + id + "/"
	var parts []part
	for _, pid := range pids() {
		handle := ""
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		switch kind {
		case "runtime":
			handle = handleName.FindString(string(cmdline))
			if handle == "" || !runtimeName.Match(cmdline) || !strings.Contains(string(cmdline), hostDir) {
				continue
			}
		case "inside":
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			_, after, in := strings.Cut(string(b), group)
			path, _, _ := strings.Cut(after, "\n")
			_, below, _ := strings.Cut(path, "/")
			if handle, _, _ = strings.Cut(below, "/"); !in || handle == "" || id == "" {
				continue
			}
		default:
			args := strings.Split(string(cmdline), "\x00")
			command := map[string]string{"host": "serve", "shim": "shim"}[kind]
			if len(args) < 4 || !strings.HasPrefix(args[0], n.bin) || args[1] != command || !strings.HasPrefix(args[3], hostDir) {
				continue
			}
			handle = filepath.Base(args[3])
		}
		parts = append(parts, part{pid: pid, start: startOf(pid), handle: handle})
	}
	return parts
}

// hostID is the id of the host program's directory, without its prefix: the name of
// the control group of everything that runs there.
func (n *nemesis) hostID() string {
	b, _ := os.ReadFile(filepath.Join(n.state, "host", "host.json"))
	m := hostName.FindSubmatch(b)
	if m == nil {
		return ""
	}
	return string(m[1])
}

func pids() []int {
	var all []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			all = append(all, pid)
		}
	}
	return all
}

func startOf(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return ""
	}
	return string(f[19])
}

// signal sends a signal to exactly that process, if it still is.
func (p part) signal(sig unix.Signal) {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if p.start != "" && startOf(p.pid) == p.start {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0)
	}
}

func (n *nemesis) any(kind string) (part, bool) {
	parts := n.find(kind)
	if len(parts) == 0 {
		return part{}, false
	}
	p := parts[n.rng.IntN(len(parts))]
	// Remembered before it happens, so that nobody sees the effect first.
	n.mu.Lock()
	defer n.mu.Unlock()
	switch kind {
	case "shim":
		n.shims[p.handle] = true
	case "inside", "runtime":
		n.insides[p.handle] = true
	}
	return p, true
}

func (n *nemesis) killed(handle string) (shim, inside bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.shims[handle], n.insides[handle]
}

// starved reports whether the disk was full at some time since at.
func (n *nemesis) starved(at time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.full, func(w [2]time.Time) bool { return w[1].IsZero() || w[1].After(at) })
}

// starvedIn reports whether it was full between two moments, or shortly before.
func (n *nemesis) starvedIn(from, to time.Time) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.ContainsFunc(n.full, func(w [2]time.Time) bool { return w[0].Before(to) && (w[1].IsZero() || w[1].After(from)) })
}

// restart kills the server and starts it again, on a disk with room.
func (n *nemesis) restart(ctx context.Context, before func()) {
	if err := n.s.Kill(); err != nil {
		n.t.Error(err)
	}
	before()
	if err := n.s.Start(ctx); err != nil && ctx.Err() == nil {
		n.t.Errorf("the server did not come back: %v", err)
	}
}

// act does one thing. It returns when the server runs and nothing is stopped.
func (n *nemesis) act(ctx context.Context) {
	pause := func(least int) { idle(ctx, time.Duration(least+n.rng.IntN(400))*time.Millisecond) }
	kill := func(kind string) {
		if p, ok := n.any(kind); ok {
			p.signal(unix.SIGKILL)
		}
	}
	stop := func(p part) {
		p.signal(unix.SIGSTOP)
		pause(20)
		p.signal(unix.SIGCONT)
	}
	server := func() part { return part{pid: n.s.PID(), start: startOf(n.s.PID())} }
	what := []string{"server", "server", "host", "host", "shim", "shim", "inside", "inside", "runtime", "server+host", "host+shim", "host+inside",
		"runtime+shim", "all", "full", "full+host", "full+server", "stop server", "stop host", "stop shim", "stop inside", "term"}
	if n.acts == nil {
		n.acts = map[string]int{}
	}
	w := what[n.rng.IntN(len(what))]
	n.acts[w]++
	switch w {
	case "server":
		n.restart(ctx, func() {})
	case "term":
		stopCtx, cancel := context.WithTimeout(ctx, time.Minute)
		if err := n.s.Stop(stopCtx); err != nil {
			n.t.Errorf("a polite stop: %v", err)
		}
		cancel()
		n.restart(ctx, func() {})
	case "host", "shim", "inside", "runtime":
		kill(w)
	case "runtime+shim":
		kill("runtime")
		kill("shim")
	case "host+inside":
		kill("host")
		kill("inside")
	case "server+host":
		n.restart(ctx, func() { kill("host") })
	case "host+shim":
		kill("host")
		kill("shim")
	case "all":
		n.restart(ctx, func() { kill("shim"); kill("host"); kill("inside") })
	case "full", "full+host", "full+server":
		n.fill()
		if w == "full+host" {
			kill("host")
		} else if w == "full+server" {
			if err := n.s.Kill(); err != nil {
				n.t.Error(err)
			}
		}
		pause(100)
		n.free()
		if w == "full+server" {
			n.restart(ctx, func() {})
		} else if n.rng.IntN(2) == 0 {
			n.restart(ctx, func() {})
		}
	case "stop server":
		stop(server())
	case "stop host", "stop shim", "stop inside":
		if p, ok := n.any(strings.TrimPrefix(w, "stop ")); ok {
			stop(p)
		}
	}
}

func (n *nemesis) filler() string { return filepath.Join(n.state, "fill") }

func (n *nemesis) fill() {
	n.mu.Lock()
	n.full = append(n.full, [2]time.Time{time.Now()})
	n.mu.Unlock()
	f, err := os.Create(n.filler())
	if err != nil {
		return // full already
	}
	defer f.Close()
	for block := make([]byte, 1<<20); len(block) > 0; {
		if _, err := f.Write(block); err != nil {
			block = block[:len(block)/2]
		}
	}
}

func (n *nemesis) free() {
	if err := os.Remove(n.filler()); err != nil && !os.IsNotExist(err) {
		n.t.Error(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.full[len(n.full)-1][1] = time.Now()
}

// idle lets the clients work for a while.
func idle(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// alive returns the processes of the machine whose environment holds a word.
func alive(word string) []string {
	var found []string
	for _, pid := range pids() {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if bytes.Contains(b, []byte(word)) {
			cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			found = append(found, fmt.Sprintf("%d %q", pid, cmd))
		}
	}
	return found
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// leftovers says what is left of the server after everything was closed, the boxes
// were removed and it was stopped.
func (n *nemesis) leftovers(boxes []string) []string {
	var left []string
	for _, id := range boxes {
		if root := "/run/stockade/" + id; exists(root) {
			left = append(left, "root "+root)
		}
	}
	for _, pid := range pids() {
		cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if pid != os.Getpid() && (bytes.Contains(cmd, []byte(n.bin)) || bytes.Contains(cmd, []byte(n.state))) {
			left = append(left, fmt.Sprintf("process %d %q", pid, cmd))
		}
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); strings.HasPrefix(f[4], n.state+"/") {
			left = append(left, "mount "+f[4])
		}
	}
	if boxes, _ := os.ReadDir(filepath.Join(n.state, "host", "boxes")); len(boxes) > 0 {
		left = append(left, fmt.Sprint("boxes ", boxes))
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && d.Name() == n.hostID() {
			left = append(left, "control group "+path)
		}
		return nil
	})
	if held, err := host.Locked(filepath.Join(n.state, "host")); err != nil || held {
		left = append(left, fmt.Sprint("the host's lock ", err))
	}
	return left
}
