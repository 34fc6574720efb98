package bench

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// callsAtOnce is how many calls are under way when the rate is measured.
const callsAtOnce = 32

// rounds is into how many parts the measuring of one installation is divided. Both
// runtimes and the worker alone take their turn in each, so that what else the machine
// does meanwhile meets all of them alike.
const rounds = 10

// through is what went through a runtime to one worker, or to a worker alone.
type through struct {
	latencies []time.Duration // of calls one after the other
	calls     pace            // callsAtOnce at a time
	callCPU   time.Duration   // of the runtime, for calls
	frames    pace
}

// pace is how much was done in which time.
type pace struct {
	n  int
	in time.Duration
}

func (p *pace) add(n int, in time.Duration) { p.n, p.in = p.n+n, p.in+in }

func (p pace) perSecond() float64 { return float64(p.n) / p.in.Seconds() }

// peer is what a plugin is called through.
type peer interface {
	call(ctx context.Context) error
	stream(ctx context.Context, ask lbhost.M) (*rpc.Stream, error)
	cpu() (time.Duration, error) // what the runtime used so far
}

// measureOne measures what goes through one installation of each runtime, and what a
// worker alone does.
func measureOne(ctx context.Context, cfg RuntimeConfig, subjects ...*subject) (alone through, err error) {
	w, err := newLoneWorker(ctx, cfg)
	if err != nil {
		return alone, err
	}
	defer w.stop()
	var beds []*runtimeBed
	defer func() {
		for _, b := range beds {
			b.stop()
		}
	}()
	for _, s := range subjects {
		b, err := newRuntimeBed(ctx, cfg, s.path, pluginwire.ProfileOSS, s.argv)
		if err != nil {
			return alone, err
		}
		beds = append(beds, b)
		if err := b.apply(ctx, b.installation(1, 1, pluginwire.ModeDedicated)); err != nil {
			return alone, s.failure("one installation", err, b) // it brings the package
		}
	}
	for round := range rounds {
		if err := alone.measure(ctx, cfg, w); err != nil {
			return alone, err
		}
		for i := range subjects {
			i = (i + round) % len(subjects) // none is always the first
			err := runtimeOne(ctx, cfg, beds[i], int64(round+2), &subjects[i].figures)
			if err := subjects[i].failure("one installation", err, beds[i]); err != nil {
				return alone, err
			}
		}
	}
	return alone, nil
}

// runtimeOne is one round with one installation.
func runtimeOne(ctx context.Context, cfg RuntimeConfig, b *runtimeBed, revision int64, f *runtimeFigures) error {
	// Time to run with everything cached: each revision is a new worker.
	i := b.installation(1, revision, pluginwire.ModeDedicated)
	start := time.Now()
	if err := b.apply(ctx, i); err != nil {
		return err
	}
	f.applied = append(f.applied, time.Since(start))
	if err := f.through.measure(ctx, cfg, installed{b, i.Binding}); err != nil {
		return err
	}
	data := make([]byte, max(cfg.FileBytes/rounds, 1))
	start = time.Now()
	if _, err := b.host.Push(ctx, data, "bin", i.Binding); err != nil {
		return err
	}
	f.file.add(len(data), time.Since(start))
	return nil
}

// installed is an installation of a runtime.
type installed struct {
	b  *runtimeBed
	on pluginwire.Context
}

func (i installed) call(ctx context.Context) error {
	_, err := i.b.host.CallTool(ctx, i.on, "echo", lbhost.M{"text": "hello"})
	return err
}

func (i installed) stream(ctx context.Context, ask lbhost.M) (*rpc.Stream, error) {
	ask["include_plugins"] = nil
	return i.b.host.Stream(ctx, pluginwire.ActionExecuteCommand, ask, i.on)
}

func (i installed) cpu() (time.Duration, error) { return cpuTime(i.b.cmd.Process.Pid) }

// measure adds one round of calls and of a stream.
func (t *through) measure(ctx context.Context, cfg RuntimeConfig, p peer) error {
	n := max(cfg.Calls/rounds, 1)
	for i := range n + n/10 + 1 {
		start := time.Now()
		if err := p.call(ctx); err != nil {
			return err
		}
		if i > n/10 { // the first are the warm-up
			t.latencies = append(t.latencies, time.Since(start))
		}
	}
	before, err := p.cpu()
	if err != nil {
		return err
	}
	start := time.Now()
	if err := atOnce(2*n, callsAtOnce, func(int) error { return p.call(ctx) }); err != nil {
		return err
	}
	t.calls.add(2*n, time.Since(start))
	after, err := p.cpu()
	if err != nil {
		return err
	}
	t.callCPU += after - before
	frames := max(cfg.Frames/rounds, 1)
	start = time.Now()
	if err := countFrames(ctx, p, frames); err != nil {
		return err
	}
	t.frames.add(frames, time.Since(start))
	return nil
}

// countFrames streams the frames of a command's answer.
func countFrames(ctx context.Context, p peer, n int) error {
	s, err := p.stream(ctx, lbhost.M{"command_context": lbhost.CommandContext("count", "to", strconv.Itoa(n))})
	if err != nil {
		return err
	}
	defer s.Close()
	got := 0
	for {
		if _, err := s.Next(ctx); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		got++
	}
	if got != n {
		return errdefs.New(errdefs.Internal, "%d of %d frames arrived", got, n)
	}
	return nil
}

// loneWorker is a worker that the bench itself calls, without a runtime between: what no
// runtime can undercut.
type loneWorker struct {
	cmd  *exec.Cmd
	conn *rpc.Conn
	ran  chan error
}

func newLoneWorker(ctx context.Context, cfg RuntimeConfig) (*loneWorker, error) {
	dir, err := os.MkdirTemp(cfg.Dir, "worker-")
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "no directory can be made: %v", err)
	}
	if err := os.CopyFS(dir, pluginFiles); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the plugin cannot be written: %v", err)
	}
	cmd := exec.Command(cfg.Python, "-m", "langbot_plugin.cli.__init__", "run", "-s", "--prod")
	cmd.Dir = filepath.Join(dir, "plugin")
	cmd.Env = append(slices.Clone(os.Environ()), "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1",
		"LANGBOT_PLUGIN_REGISTRATION_CAPABILITY="+strings.Repeat("x", 64), "LANGBOT_PLUGIN_FILE_STORAGE_DIR="+filepath.Join(dir, "files"))
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "no pipe: %v", err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "no pipe: %v", err)
	}
	w := &loneWorker{cmd: cmd, ran: make(chan error, 1)}
	errs := &tailBuffer{}
	cmd.Stderr = errs
	if err := cmd.Start(); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be started: %v", cfg.Python, err)
	}
	ready := make(chan error, 1)
	w.conn = rpc.New(rpc.Stdio(out, in, in.Close), rpc.Config{Name: "worker", Handle: func(ctx context.Context, r *rpc.Inbound) (any, error) {
		if r.Action != pluginwire.ActionRegisterPlugin {
			return nil, errdefs.New(errdefs.NotFound, "the bench does not answer %s", r.Action)
		}
		settings := lbhost.M{"enabled": true, "priority": 0, "plugin_config": lbhost.M{}}
		_, err := r.Conn.Call(ctx, pluginwire.ActionInitializePlugin, lbhost.M{"plugin_settings": settings}, rpc.CallOptions{})
		ready <- err
		return struct{}{}, nil
	}})
	go func() { w.ran <- w.conn.Run(context.WithoutCancel(ctx)) }()
	select {
	case err = <-ready:
	case <-w.conn.Done():
		err = w.conn.Err()
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		w.stop()
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the worker did not start: %v\n%s", err, errs)
	}
	return w, nil
}

func (w *loneWorker) stop() {
	w.conn.Close(nil)
	<-w.ran
	kill := time.AfterFunc(20*time.Second, func() { _ = w.cmd.Process.Kill() })
	_ = w.cmd.Wait() // it was told to end; how does not matter
	kill.Stop()
}

func (w *loneWorker) call(ctx context.Context) error {
	ask := lbhost.M{"tool_name": "echo", "tool_parameters": lbhost.M{"text": "hello"}, "session": lbhost.Session(), "query_id": 1}
	_, err := w.conn.Call(ctx, pluginwire.ActionCallTool, ask, rpc.CallOptions{})
	return err
}

func (w *loneWorker) stream(ctx context.Context, ask lbhost.M) (*rpc.Stream, error) {
	return w.conn.Stream(ctx, pluginwire.ActionExecuteCommand, ask, rpc.CallOptions{})
}

func (w *loneWorker) cpu() (time.Duration, error) { return 0, nil }
