package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/shim"
)

const (
	// startTime bounds the runtime's start of a container; it takes 50 ms.
	startTime = 30 * time.Second
	// runtimeText is how much of a runtime's own words goes into an error.
	runtimeText = 1 << 10
)

// boxTree is a container.
type boxTree struct {
	rt      oci.Runtime
	root    string // the runtime's --root
	host    string // the program stockade-host
	id      string
	group   cgroup.Group
	groups  string // where control groups are, "" the usual place
	memory  int    // its limit in MiB, for people
	log     *slog.Logger
	release func() // gives back what the container used

	pid    int
	pidfd  *os.File // of PID 1; nil if it never ran
	report *os.File // from and to PID 1

	handed bool          // to a Process, which calls Wait
	waited chan struct{} // closed when Wait has returned
	mu     sync.Mutex    // held by Kill
	gone   bool
	once   sync.Once
	ooms   int64
}

// run starts the container and returns when its PID 1 runs. The specification,
// which holds the capability, is on disk for as long as that takes.
func (t *boxTree) run(ctx context.Context, bundle string, spec *specs.Spec, e *ends) error {
	js, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	if err := os.Mkdir(bundle, 0o700); err != nil {
		return fmt.Errorf("make a bundle: %w", err)
	}
	defer func() {
		if err := os.RemoveAll(bundle); err != nil {
			t.log.Error("the specification of a box, with its capability, stays on disk", "error", err)
		}
	}()
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), js, 0o600); err != nil {
		return fmt.Errorf("write a bundle: %w", err)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	t.report = ours
	said, pidFile := filepath.Join(bundle, "runtime.log"), filepath.Join(bundle, "init.pid")
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	argv := t.rt.Command(t.root, "--log", said, "--log-format", "json", "run", "--detach", "--pid-file", pidFile, "--bundle", bundle)
	argv = append(append(argv, t.rt.Manner.PassReport...), t.id)
	argv = t.rt.Manner.InGroup(t.host, t.groups, t.group.Path(), argv)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = bundle
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = e.inR, e.outW, e.errW
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	err = cmd.Run()
	_ = theirs.Close()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return errdefs.Wrap(err, errdefs.Unavailable, "the box of a worker was not started: %v: %s", err, runtimeSaid(said))
	}
	return t.adopt(pidFile)
}

// adopt takes hold of PID 1.
func (t *boxTree) adopt(pidFile string) error {
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the OCI runtime did not say which process it started")
	}
	if t.pid, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil || t.pid <= 1 {
		return errdefs.Wrap(err, errdefs.Unavailable, "the OCI runtime says it started process %q", text)
	}
	fd, err := unix.PidfdOpen(t.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil // it has ended already; its report says how
	}
	if err == nil {
		t.pidfd, err = pollable(fd)
	}
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the first process of the box cannot be held: %v", err)
	}
	// The number is that of the process we mean as long as that is in the group.
	pids, err := t.group.Procs()
	if err != nil {
		return err
	}
	if !slices.Contains(pids, t.pid) {
		_ = t.pidfd.Close()
		t.pidfd = nil
	}
	return nil
}

func (t *boxTree) PID() int { return t.pid }

func (t *boxTree) Wait() Exit {
	defer close(t.waited)
	rep, _, ended, err := shim.ReadReport(t.report)
	if err != nil {
		t.log.Warn("the report of a box makes no sense", "error", err)
		_, _ = io.Copy(io.Discard, t.report)
	}
	// The end of PID 1 is the end of its PID namespace (pid_namespaces(7)).
	if t.pidfd != nil {
		awaitPidfd(t.pidfd)
	}
	// It is our child where this process is the reaper of this machine or container.
	_, _ = unix.Wait4(t.pid, nil, unix.WNOHANG, nil)
	ooms := t.oomKills()
	x := Exit{Text: "ended without a report", Code: -1}
	switch {
	case ended && rep.Kind == api.ExitExited:
		x = Exit{Text: fmt.Sprintf("exited with code %d", rep.Code), Code: rep.Code}
	case ended && rep.Kind == api.ExitSpawnFailed:
		x.Text = "could not be executed: " + rep.Detail
	case ended:
		x.Text = "ended by " + rep.Signal
	}
	switch {
	case ooms > 0 && (!ended || rep.Signal == "SIGKILL"):
		x.OOM = true
		x.Text = fmt.Sprintf("ended by the kernel for lack of memory (limit %d MiB)", t.memory)
	case ooms > 0:
		x.OOM = true
		x.Text += fmt.Sprintf("; the kernel had ended %d of its processes for lack of memory (limit %d MiB)", ooms, t.memory)
	}
	return x
}

// oomKills is counted once, before the group is removed.
func (t *boxTree) oomKills() int64 {
	t.once.Do(func() { t.ooms, _ = t.group.OOMKills() })
	return t.ooms
}

// Terminate tells PID 1, which hands it on to the worker's process group.
func (t *boxTree) Terminate() { _, _ = t.report.Write([]byte{byte(unix.SIGTERM)}) }

func (t *boxTree) Kill(ctx context.Context) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.gone {
		return nil
	}
	if err := t.group.Kill(ctx); err != nil {
		return err
	}
	if t.handed {
		if err := t.awaitEnd(ctx); err != nil {
			return err
		}
	}
	t.oomKills()
	if err := t.rt.Delete(ctx, t.root, t.id); err != nil {
		return err
	}
	if err := t.group.Remove(ctx); err != nil {
		return err
	}
	if t.report != nil {
		_ = t.report.Close()
	}
	if t.pidfd != nil {
		_ = t.pidfd.Close()
	}
	t.gone = true
	t.release()
	return nil
}

// awaitEnd waits until Wait has returned: then PID 1 and its namespace are gone.
func (t *boxTree) awaitEnd(ctx context.Context) error {
	select {
	case <-t.waited:
		return nil
	case <-ctx.Done():
		return errdefs.Wrap(context.Cause(ctx), errdefs.Indeterminate, "the first process of box %s is still there after SIGKILL", t.id).
			WithNext("look at what it waits for in the kernel: /proc/%d/stack", t.pid)
	}
}

// socketPair is the channel to PID 1; the other end is descriptor 3 there.
func socketPair() (ours, theirs *os.File, err error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	_ = unix.SetNonblock(p[0], true)
	return os.NewFile(uintptr(p[0]), "report"), os.NewFile(uintptr(p[1]), "report"), nil
}

// runtimeSaid returns the last error in a runtime's log of JSON lines.
func runtimeSaid(log string) string {
	b, err := os.ReadFile(log)
	if err != nil {
		return "the OCI runtime said nothing"
	}
	said := "the OCI runtime said nothing"
	for line := range bytes.Lines(b[max(0, len(b)-(64<<10)):]) {
		var l struct{ Level, Msg string }
		if json.Unmarshal(line, &l) == nil && l.Level == "error" && l.Msg != "" {
			said = l.Msg
		}
	}
	said = strings.ToValidUTF8(said, "?")
	return said[:min(len(said), runtimeText)]
}
