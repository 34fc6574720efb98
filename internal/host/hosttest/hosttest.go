// Package hosttest runs complete host programs for tests: real runtime, real
// shims, real containers, in a directory of the test's own. The test binary
// itself is the host program, the shim and the containers' PID 1; see [Main].
package hosttest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// Version is what a host program of a test says its version is.
const Version = "test"

// Main is the body of a TestMain: in a process that was started as serve, shim,
// init or join it does that and never returns; otherwise it returns run's result,
// run being the tests (m.Run, or a leak checker around it).
func Main(run func() int) int {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "serve":
			return serve(os.Args[2:])
		case "shim":
			return shim.Main(os.Args[3])
		case "init":
			return shim.InitMain(os.Args[2:])
		case oci.JoinCommand:
			return oci.JoinMain(os.Args[2:])
		}
	}
	return run()
}

func serve(args []string) int {
	cfg := host.Config{Version: Version}
	f := flag.NewFlagSet("serve", flag.ExitOnError)
	f.StringVar(&cfg.Dir, "dir", "", "")
	f.StringVar(&cfg.Digest, "digest", "", "")
	f.StringVar(&cfg.CgroupParent, "cgroup-parent", "", "")
	f.StringVar(&cfg.Runtime, "runtime", "", "")
	_ = f.Parse(args)
	syscall.Umask(0o022)
	cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	var err error
	if cfg.Exe, err = os.Executable(); err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		err = host.Serve(ctx, cfg)
	}
	if err != nil {
		cfg.Logger.Error("host program ends", "error", err)
		if errdefs.Is(err, errdefs.Conflict) {
			return host.ExitBusy
		}
		return 1
	}
	return 0
}

// Host is one host program of a test. Its methods may be called from any
// goroutine, except those that start and kill it.
type Host struct {
	Dir          string
	Exe          string
	CgroupParent string
	Generation   int64
	// Runtime is the OCI runtime, by name or path; empty finds one. It may be
	// changed before a Start.
	Runtime string

	t      testing.TB
	cmd    *exec.Cmd
	mu     sync.Mutex
	client *host.Client
	boxes  map[string]bool
}

// New starts a host program. Everything it made is gone when the test ends:
// processes, boxes, mounts, control groups; what is not is an error of the test.
// A test that needs a machine without runc or root skips.
func New(t testing.TB) *Host {
	t.Helper()
	return NewOver(t, need.Runc(t))
}

// NewOver is New with an OCI runtime, by name or path.
func NewOver(t testing.TB, runtime string) *Host {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := &Host{
		Dir: filepath.Join(t.TempDir(), "host"), Exe: exe, Generation: 1, Runtime: runtime, t: t, boxes: map[string]bool{},
		CgroupParent: fmt.Sprintf("/stockade-test-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:8])),
	}
	t.Cleanup(h.cleanup)
	h.Start()
	return h
}

// Start starts the host program and waits until it answers.
func (h *Host) Start() {
	h.t.Helper()
	if err := os.MkdirAll(h.Dir, 0o700); err != nil {
		h.t.Fatal(err)
	}
	log, err := os.OpenFile(filepath.Join(h.Dir, "host.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		h.t.Fatal(err)
	}
	defer log.Close()
	h.cmd = exec.Command(h.Exe, "serve", "--dir", h.Dir, "--cgroup-parent", h.CgroupParent, "--runtime", h.Runtime)
	h.cmd.Stdout, h.cmd.Stderr = log, log
	h.cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	h.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := h.cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	h.mu.Lock()
	h.client = host.NewClient(h.Dial, h.Generation)
	h.mu.Unlock()
	Eventually(h.t, "the host program answers", func() bool {
		_, err := h.Client().Info(context.Background())
		return err == nil
	})
}

// Dial connects to the host program.
func (h *Host) Dial(ctx context.Context) (net.Conn, error) {
	return shim.DialUnix(ctx, filepath.Join(h.Dir, host.SocketFile))
}

// Client returns a client of the host's generation, shared by all callers.
func (h *Host) Client() *host.Client {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.client
}

// As returns a new client of another generation.
func (h *Host) As(generation int64) *host.Client {
	c := host.NewClient(h.Dial, generation)
	h.t.Cleanup(c.CloseIdle)
	return c
}

// Kill ends the host program with SIGKILL. Shims and processes go on.
func (h *Host) Kill() {
	h.t.Helper()
	_ = h.cmd.Process.Kill()
	_ = h.cmd.Wait()
	h.Client().CloseIdle()
}

// Restart kills the host program and starts it again.
func (h *Host) Restart() {
	h.t.Helper()
	h.Kill()
	h.Start()
}

// NewID mints an identifier.
func NewID(kind ident.Kind) string {
	var b [16]byte
	rand.Read(b[:])
	return ident.From(kind, b)
}

// Box makes a box.
func (h *Host) Box() string {
	h.t.Helper()
	id := NewID(ident.Box)
	h.mu.Lock()
	h.boxes[id] = true
	h.mu.Unlock()
	_, err := h.Client().PutBox(context.Background(), wire.BoxSpec{
		ID: id, Limits: api.BoxLimits{CPUMillis: 4000, MemoryBytes: 2 << 30, Pids: 4096},
	})
	if err != nil {
		h.t.Fatalf("make a box: %v", err)
	}
	return id
}

// Spec returns the spec of a new process that runs argv in a box.
func Spec(box string, argv ...string) wire.ProcSpec {
	return wire.ProcSpec{
		ID: NewID(ident.Process), Box: box, Argv: argv, Env: []string{"HOME=/home/agent", "LANG=C.UTF-8"},
		DeadlineMillis: (10 * time.Minute).Milliseconds(), SpoolBytes: 64 << 20, Overflow: api.OverflowBlock,
	}
}

// Sh returns the spec of a new process that runs a shell script in a box.
func Sh(box, script string) wire.ProcSpec { return Spec(box, "/bin/sh", "-c", script) }

// Run starts a process.
func (h *Host) Run(spec wire.ProcSpec) wire.ProcSpec {
	h.t.Helper()
	if _, err := h.Client().Start(context.Background(), spec); err != nil {
		h.t.Fatalf("start %v: %v", spec.Argv, err)
	}
	return spec
}

// Phase waits until a process is in a phase, or beyond it, and returns its state.
func (h *Host) Phase(id string, want wire.Phase) wire.ProcState {
	h.t.Helper()
	order := map[wire.Phase]int{wire.PhaseAccepted: 0, wire.PhaseStarting: 1, wire.PhaseRunning: 2, wire.PhaseStopping: 3, wire.PhaseEnded: 4}
	var st wire.ProcState
	Eventually(h.t, "process "+id+" is "+string(want), func() bool {
		var err error
		st, err = h.Client().Proc(context.Background(), id)
		return err == nil && order[st.Phase] >= order[want]
	})
	return st
}

// Output follows a process's log to its end and returns its two streams.
func (h *Host) Output(id string) (stdout, stderr []byte) {
	h.t.Helper()
	body, err := h.Client().Log(context.Background(), id, host.LogQuery{Follow: true})
	if err != nil {
		h.t.Fatalf("log of %s: %v", id, err)
	}
	defer body.Close()
	r := host.NewFrameReader(body, 0)
	for {
		b, err := r.Next()
		if err != nil {
			h.t.Fatalf("log of %s: %v", id, err)
		}
		for f, p := range host.Frames(b.Frames) {
			if f.Kind == wire.KindStdout {
				stdout = append(stdout, p...)
			} else {
				stderr = append(stderr, p...)
			}
		}
		if b.Gap != nil {
			h.t.Fatalf("log of %s: gap %+v", id, b.Gap)
		}
		if b.Status != nil {
			if b.Status.Error != nil || !b.Status.EOF {
				h.t.Fatalf("log of %s ends with %+v", id, b.Status)
			}
			return stdout, stderr
		}
	}
}

// File returns the content of a file in a box; nil if it is not there.
func (h *Host) File(box, path string) []byte {
	h.t.Helper()
	var b bytes.Buffer
	if err := h.Client().GetFiles(context.Background(), box, path, &b); err != nil {
		if errdefs.Is(err, errdefs.NotFound) {
			return nil
		}
		h.t.Fatalf("file %s: %v", path, err)
	}
	tr := tar.NewReader(&b)
	if _, err := tr.Next(); err != nil {
		h.t.Fatalf("file %s: %v", path, err)
	}
	content, err := io.ReadAll(tr)
	if err != nil {
		h.t.Fatalf("file %s: %v", path, err)
	}
	return content
}

// Programs returns the processes of this machine whose command line names the
// host's directory: host program, shims, runtimes.
func (h *Host) Programs(command string) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		b, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		args := strings.Split(string(b), "\x00")
		if len(args) > 1 && (command == "" || args[1] == command) && strings.Contains(string(b), h.Dir) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Shim returns the pid of the shim of a process.
func (h *Host) Shim(id string) int {
	h.t.Helper()
	pid := 0
	Eventually(h.t, "the shim of "+id+" is there", func() bool {
		for _, p := range h.Programs("shim") {
			b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p))
			if strings.Contains(string(b), id) {
				pid = p
				return true
			}
		}
		return false
	})
	return pid
}

// Inside returns the processes in a process's control group.
func (h *Host) Inside(box, id string) []int {
	h.t.Helper()
	info, err := h.Client().Info(context.Background())
	if err != nil {
		h.t.Fatal(err)
	}
	parent := h.CgroupParent + "/" + strings.TrimPrefix(info.HostID, "host_")
	pids, err := cgroup.New("", parent+"/"+box+"/"+id).Procs()
	if err != nil {
		h.t.Fatal(err)
	}
	return pids
}

// cleanup takes everything away and says what a well-behaved host would not have left.
func (h *Host) cleanup() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if h.cmd == nil {
		return
	}
	if err := h.cmd.Process.Signal(syscall.Signal(0)); err != nil {
		h.Start()
	}
	c := h.As(1 << 40)
	procs, err := c.Procs(ctx)
	if err != nil {
		h.t.Errorf("clean up: processes: %v", err)
	}
	for _, p := range procs {
		if st, err := c.CloseProc(ctx, p.ID, wire.Close{Reason: "test ends"}); err != nil || st.Proof == nil {
			h.t.Errorf("clean up: close %s: %+v, %v", p.ID, st, err)
		} else if err := c.Forget(ctx, p.ID); err != nil {
			h.t.Errorf("clean up: forget %s: %v", p.ID, err)
		}
	}
	boxes, err := c.Boxes(ctx)
	if err != nil {
		h.t.Errorf("clean up: boxes: %v", err)
	}
	for _, b := range boxes {
		if err := c.RemoveBox(ctx, b.Spec.ID); err != nil {
			h.t.Errorf("clean up: box %s: %v", b.Spec.ID, err)
		}
	}
	if err := c.Shutdown(ctx, false); err != nil {
		h.t.Errorf("clean up: shutdown: %v", err)
		_ = h.cmd.Process.Kill()
	}
	if err := h.cmd.Wait(); err != nil {
		h.t.Errorf("the host program ended with: %v", err)
	}
	c.CloseIdle()
	h.Client().CloseIdle()
	// A program's last moments may outlast what it did: the race detector's exit
	// takes a second.
	for end := time.Now().Add(3 * time.Minute); len(h.Programs("")) > 0 && time.Now().Before(end); {
		<-time.After(10 * time.Millisecond)
	}
	for _, pid := range h.Programs("") {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		h.t.Errorf("left behind: process %d %q", pid, b)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if strings.HasPrefix(f[4], h.Dir) {
			h.t.Errorf("left behind: mount %s", f[4])
			_ = unix.Unmount(f[4], unix.MNT_DETACH)
		}
	}
	group := cgroup.New("", h.CgroupParent)
	if pids, err := group.Procs(); err != nil || len(pids) > 0 {
		h.t.Errorf("left behind: in control group %s: %v, %v", h.CgroupParent, pids, err)
		_ = group.Kill(ctx)
	}
	if err := group.Remove(ctx); err != nil {
		h.t.Errorf("left behind: control group: %v", err)
	}
	log, _ := os.ReadFile(filepath.Join(h.Dir, "host.log"))
	if strings.Contains(string(log), "DATA RACE") || strings.Contains(string(log), "panic") {
		h.t.Errorf("the host program complains:\n%s", log)
	} else if h.t.Failed() {
		h.t.Logf("log of the host program:\n%s", log)
	}
}

// Eventually waits for a condition and fails the test if it does not come true
// within three minutes, which an emulated machine may need.
func Eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	end := time.Now().Add(3 * time.Minute)
	for wait := time.Millisecond; !cond(); wait = min(2*wait, 50*time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came true: %s", what)
		}
		<-time.After(wait)
	}
}
