package bench

import (
	"bufio"
	"context"
	_ "embed" // the baseline's text
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

//go:embed relay_hub.py
var relayHubPython []byte

// hubProcess is a hub in a process of its own, pinned to one processor.
type hubProcess struct {
	name string
	url  string
	cmd  *exec.Cmd
	in   io.WriteCloser
	errs *tailBuffer

	mu     sync.Mutex
	last   int
	asked  map[int]chan hubReply
	dead   error
	joined chan struct{}
}

// startHub starts argv, which must say its URL in its first line.
func startHub(ctx context.Context, name string, argv []string) (*hubProcess, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the bench, which stops it
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "no pipe: %v", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "no pipe: %v", err)
	}
	h := &hubProcess{name: name, cmd: cmd, in: in, errs: &tailBuffer{}, asked: map[int]chan hubReply{}, joined: make(chan struct{})}
	cmd.Stderr = h.errs
	if err := startPinned(cmd); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the %s hub cannot be started: %v", name, err)
	}
	first := make(chan hubReply, 1)
	h.asked[0] = first
	go h.read(out)
	select {
	case r := <-first:
		h.url = r.URL
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(30 * time.Second):
		err = errors.New("it said nothing for 30 s")
	}
	if h.url == "" {
		h.stop()
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the %s hub did not start:\n%s", name, h.errs.String())
	}
	return h, nil
}

// startPinned starts a command on the first processor this process may use: a
// child inherits the affinity of the thread that forks it (sched_setaffinity(2)).
func startPinned(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, one unix.CPUSet
	if unix.SchedGetaffinity(0, &all) == nil {
		for i := range 1024 {
			if all.IsSet(i) {
				one.Set(i)
				break
			}
		}
		if unix.SchedSetaffinity(0, &one) == nil {
			defer unix.SchedSetaffinity(0, &all)
		}
	}
	return cmd.Start()
}

func (h *hubProcess) read(out io.Reader) {
	defer close(h.joined)
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var r hubReply
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			continue
		}
		h.mu.Lock()
		ch := h.asked[r.ID]
		delete(h.asked, r.ID)
		h.mu.Unlock()
		if ch != nil {
			ch <- r
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dead = errdefs.New(errdefs.Unavailable, "the %s hub ended:\n%s", h.name, h.errs.String())
	for id, ch := range h.asked {
		ch <- hubReply{ID: id, Error: h.dead.Error()}
		delete(h.asked, id)
	}
}

// begin sends a request; the reply comes over the channel.
func (h *hubProcess) begin(ask hubAsk) (<-chan hubReply, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead != nil {
		return nil, h.dead
	}
	h.last++
	ask.ID = h.last
	ch := make(chan hubReply, 1)
	h.asked[ask.ID] = ch
	b, err := json.Marshal(ask)
	if err != nil {
		return nil, err
	}
	_, err = h.in.Write(append(b, '\n'))
	return ch, err
}

// ask sends a request and waits for the reply.
func (h *hubProcess) ask(ctx context.Context, ask hubAsk) (hubReply, error) {
	ch, err := h.begin(ask)
	if err != nil {
		return hubReply{}, err
	}
	return h.await(ctx, ch)
}

func (h *hubProcess) await(ctx context.Context, ch <-chan hubReply) (hubReply, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	select {
	case r := <-ch:
		if r.Error != "" {
			return r, errdefs.New(errdefs.Unavailable, "the %s hub: %s", h.name, r.Error)
		}
		return r, nil
	case <-ctx.Done():
		return hubReply{}, errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "the %s hub did not answer", h.name)
	}
}

// stop ends the process: by the end of its input, else by force.
func (h *hubProcess) stop() {
	h.in.Close()
	kill := time.AfterFunc(20*time.Second, func() { _ = h.cmd.Process.Kill() })
	<-h.joined
	_ = h.cmd.Wait() // it was told to end; how does not matter
	kill.Stop()
}

// cpu is the processor time the process has used.
func (h *hubProcess) cpu() (time.Duration, error) { return cpuTime(h.cmd.Process.Pid) }

// tailBuffer keeps the end of what is written to it.
type tailBuffer struct {
	mu sync.Mutex
	b  []byte
}

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.b = append(t.b, p...); len(t.b) > 4096 {
		t.b = append([]byte(nil), t.b[len(t.b)-4096:]...)
	}
	return len(p), nil
}

func (t *tailBuffer) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}

// pythonHub is the command line of the baseline, or why there is none.
func pythonHub(ctx context.Context, cfg RelayConfig) ([]string, error) {
	if out, err := exec.CommandContext(ctx, cfg.Python, "-c", "import websockets; print(websockets.__version__)").CombinedOutput(); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s has no websockets library: %s", cfg.Python, strings.TrimSpace(string(out))).
			WithNext("apt-get install python3-websockets, or name another interpreter with --python")
	}
	path := filepath.Join(cfg.Dir, "relay_hub.py")
	if err := os.WriteFile(path, relayHubPython, 0o600); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the baseline cannot be written: %v", err)
	}
	return []string{cfg.Python, path, "--token", benchToken}, nil
}
