package bench

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// RuntimeConfig says what to measure of the Plugin Runtime. Zero counts are the
// defaults named beside them.
type RuntimeConfig struct {
	Stockade  string // the stockade program; required
	Dir       string // where data goes; required, removed by the caller
	Python    string // an interpreter with the Python SDK of LangBot; required
	Version   string
	Calls     int           // tool calls one after the other: 2000
	Dedicated int           // installations with a process each: 50
	Slots     int           // installations in one process: 200
	Events    int           // events to each of the dedicated installations: 40
	Frames    int           // frames of a stream: 20,000
	FileBytes int           // bytes of a file: 32 MiB
	Idle      time.Duration // how long nothing happens, for the idle processor time: 10 s
	Progress  func(string)
}

func (c RuntimeConfig) withDefaults() RuntimeConfig {
	def := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	def(&c.Calls, 2000)
	def(&c.Dedicated, 50)
	def(&c.Slots, 200)
	def(&c.Events, 40)
	def(&c.Frames, 20_000)
	def(&c.FileBytes, 32<<20)
	if c.Idle <= 0 {
		c.Idle = 10 * time.Second
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// runtimeFigures is what was measured of one runtime.
type runtimeFigures struct {
	through              through
	applied              []time.Duration
	file                 pace          // bytes
	events               float64       // deliveries/s
	manyMemory           int64         // bytes of the runtime's own
	manyIdle             time.Duration // of processor time per second
	poolMemory           int64
	poolIdle             time.Duration
	attachP50, attachP99 time.Duration
}

// RunRuntime measures the Plugin Runtime beside the one of the Python SDK, each in a
// process of its own, with the same LangBot, the same plugin and the same worker.
func RunRuntime(ctx context.Context, cfg RuntimeConfig) (Report, error) {
	cfg = cfg.withDefaults()
	if cfg.Stockade == "" || cfg.Dir == "" {
		return Report{}, errdefs.New(errdefs.Invalid, "the bench needs the stockade program and a directory")
	}
	// What is started runs in directories of its own.
	path, err := exec.LookPath(cfg.Python)
	if err == nil {
		cfg.Python, err = filepath.Abs(path)
	}
	if err != nil {
		return Report{}, errdefs.Wrap(err, errdefs.NotFound, "there is no program %q", cfg.Python).WithNext("name an interpreter that has LangBot's SDK with --python")
	}
	out, err := exec.CommandContext(ctx, cfg.Python, "-I", "-c", "import importlib.metadata as m; print(m.version('langbot-plugin'))").CombinedOutput()
	if err != nil {
		return Report{}, errdefs.Wrap(err, errdefs.Unavailable, "%s has not got LangBot's SDK", cfg.Python).
			WithNext("name an interpreter that has, with --python: python3 -m venv V, then V/bin/pip install langbot-plugin")
	}
	r := Report{Machine: describe(cfg.Dir, "baseline: lbp rt of langbot-plugin "+strings.TrimSpace(string(out)), cfg.Version)}
	jailed, jail, err := jailPath(cfg)
	if err != nil {
		return r, err
	}
	ours := &subject{name: "stockade", argv: func(control, debug string) []string {
		return []string{cfg.Stockade, "runtime", "--python", cfg.Python, "--listen", "127.0.0.1", "--ws-control-port", control, "--ws-debug-port", debug,
			"--log-level", "error"}
	}}
	base := &subject{name: "Python", path: jailed, argv: func(control, debug string) []string {
		return []string{cfg.Python, "-m", "langbot_plugin.cli.__init__", "rt", "--ws-control-port", control, "--ws-debug-port", debug}
	}}
	cfg.Progress("one installation, in turn with a worker without a runtime")
	alone, err := measureOne(ctx, cfg, ours, base)
	if err != nil {
		return r, err
	}
	for _, part := range []struct {
		what    string
		profile pluginwire.Profile
		do      func(context.Context, RuntimeConfig, *runtimeBed, *runtimeFigures) error
	}{
		{fmt.Sprintf("%d installations", cfg.Dedicated), pluginwire.ProfileOSS, runtimeMany},
		{fmt.Sprintf("%d slots in one process", cfg.Slots), pluginwire.ProfileShared, runtimePool},
	} {
		for _, s := range []*subject{ours, base} {
			cfg.Progress(s.name + " runtime: " + part.what)
			if err := s.measure(ctx, cfg, part.what, part.profile, part.do); err != nil {
				return r, err
			}
		}
	}
	r.Results = runtimeResults(cfg, alone, &ours.figures, &base.figures, jail)
	return r, nil
}

// nsjailPython stands in for nsjail on a machine that has none.
//
//go:embed nsjail.py
var nsjailPython string

// jailPath is a PATH with nsjail on it, and what to say of it: the Python runtime
// has shared processes only in a jail.
func jailPath(cfg RuntimeConfig) (path, note string, err error) {
	if _, err := exec.LookPath("nsjail"); err == nil {
		return "", "", nil
	}
	dir := filepath.Join(cfg.Dir, "nsjail")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", "", errdefs.Wrap(err, errdefs.Unavailable, "no directory can be made: %v", err)
	}
	program := "#!" + cfg.Python + " -I\n" + nsjailPython
	if err := os.WriteFile(filepath.Join(dir, "nsjail"), []byte(program), 0o700); err != nil {
		return "", "", errdefs.Wrap(err, errdefs.Unavailable, "the stand-in of nsjail cannot be written: %v", err)
	}
	return dir + string(os.PathListSeparator) + os.Getenv("PATH"), "this machine has no nsjail: the baseline's worker runs without a jail, ours in a box", nil
}

// subject is a runtime that is measured.
type subject struct {
	name    string
	path    string // PATH of its process; "": the bench's
	argv    func(control, debug string) []string
	figures runtimeFigures
}

// measure measures one thing with a fresh process.
func (s *subject) measure(ctx context.Context, cfg RuntimeConfig, what string, profile pluginwire.Profile,
	do func(context.Context, RuntimeConfig, *runtimeBed, *runtimeFigures) error) error {
	bed, err := newRuntimeBed(ctx, cfg, s.path, profile, s.argv)
	if err != nil {
		return err
	}
	defer bed.stop()
	return s.failure(what, do(ctx, cfg, bed, &s.figures), bed)
}

func (s *subject) failure(what string, err error, bed *runtimeBed) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("measuring %s of the %s runtime: %w\n%s", what, s.name, err, bed.errs)
}

// runtimeBed is a runtime with a LangBot that is connected to it.
type runtimeBed struct {
	cmd    *exec.Cmd
	errs   *tailBuffer
	dir    string
	host   *lbhost.Host
	ws     pluginwire.Context
	pkg    []byte
	digest string
}

func newRuntimeBed(ctx context.Context, cfg RuntimeConfig, path string, profile pluginwire.Profile, argv func(control, debug string) []string) (_ *runtimeBed, err error) {
	b := &runtimeBed{errs: &tailBuffer{}}
	if b.pkg, b.digest, err = benchPlugin(); err != nil {
		return nil, err
	}
	if b.dir, err = os.MkdirTemp(cfg.Dir, "runtime-"); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "no directory can be made: %v", err)
	}
	control, debug, err := twoPorts()
	if err != nil {
		return nil, err
	}
	args := argv(control, debug)
	b.cmd = exec.Command(args[0], args[1:]...)
	b.cmd.Dir = b.dir
	b.cmd.Stdout, b.cmd.Stderr = b.errs, b.errs
	b.cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	if path != "" {
		b.cmd.Env = append(b.cmd.Env, "PATH="+path)
	}
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the bench, which stops it
	if err := b.cmd.Start(); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be started: %v", args[0], err)
	}
	if err := b.connect(ctx, "ws://127.0.0.1:"+control+"/control/ws", profile); err != nil {
		b.stop()
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s did not answer: %v\n%s", args[0], err, b.errs)
	}
	return b, nil
}

// twoPorts finds two free ports. They are below those that the kernel gives to who
// asks for any, so that nobody has them before the runtime listens.
func twoPorts() (a, b string, err error) {
	var ls []net.Listener
	defer func() {
		for _, l := range ls {
			l.Close()
		}
	}()
	for tries := 0; len(ls) < 2; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", 20000+rand.N(12000)))
		if err == nil {
			ls = append(ls, l)
		} else if tries == 100 {
			return "", "", errdefs.Wrap(err, errdefs.Unavailable, "no port is free: %v", err)
		}
	}
	port := func(l net.Listener) string { return strconv.Itoa(l.Addr().(*net.TCPAddr).Port) }
	return port(ls[0]), port(ls[1]), nil
}

// connect waits for the runtime and goes through LangBot's handshake.
func (b *runtimeBed) connect(ctx context.Context, url string, profile pluginwire.Profile) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	script := lbhost.NewScript()
	script.Forget()
	policy := lbhost.DefaultPolicy()
	policy.MaxConcurrentRestarts = 4
	policy.MaxFileSizeMB = 64
	err := every(ctx, 100*time.Millisecond, func() (bool, error) {
		h, err := lbhost.Dial(ctx, url, lbhost.Config{Dir: b.dir, Script: script, Policy: &policy, Profile: profile})
		b.host = h
		return err == nil, nil
	})
	if err != nil {
		return err
	}
	b.ws = b.host.Workspace("workspace-1")
	_, err = b.host.Handshake(ctx, b.ws)
	return err
}

// every asks f until it says yes or fails.
func every(ctx context.Context, pause time.Duration, f func() (bool, error)) error {
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for {
		if ok, err := f(); ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// stop ends the connection and the runtime: politely, else by force.
func (b *runtimeBed) stop() {
	if b.host != nil {
		_ = b.host.Close() // the runtime's end of it does not matter any more
	}
	_ = b.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(time.Minute, func() { _ = b.cmd.Process.Kill() })
	_ = b.cmd.Wait() // it was told to end; how does not matter
	kill.Stop()
}

// installation is the n-th one of a Workspace, at a revision.
func (b *runtimeBed) installation(n int, revision int64, mode pluginwire.Mode) lbhost.Installation {
	on := b.ws
	on.InstallationUUID, on.RuntimeRevision, on.ArtifactDigest = fmt.Sprintf("installation-%d", n), revision, b.digest
	return lbhost.Installation{Binding: on, Enabled: true, Mode: mode}
}

// runs waits until the installation's plugin can be called.
func (b *runtimeBed) runs(ctx context.Context, on pluginwire.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	return every(ctx, time.Millisecond, func() (bool, error) {
		list, err := b.host.ListPlugins(ctx, on)
		return len(list) == 1 && list[0]["status"] == "initialized", err
	})
}

// apply applies an installation and waits until it runs. The package is pushed where
// the runtime has not got it.
func (b *runtimeBed) apply(ctx context.Context, i lbhost.Installation) error {
	res, err := b.host.Apply(ctx, i)
	if err == nil && res.State == pluginwire.StateArtifactMissing {
		i.Package = b.pkg
		res, err = b.host.Apply(ctx, i)
	}
	if err != nil {
		return err
	}
	if res.State == pluginwire.StateFailed {
		return errdefs.New(errdefs.Unavailable, "%s is %s: %s", i.Binding.InstallationUUID, res.State, res.Message)
	}
	return b.runs(ctx, i.Binding)
}

// atOnce makes n calls, some at once.
func atOnce(n, some int, call func(int) error) error {
	var next atomic.Int64
	return parallel(some, func(int) error {
		for {
			i := int(next.Add(1) - 1)
			if i >= n {
				return nil
			}
			if err := call(i); err != nil {
				return err
			}
		}
	})
}

// runtimeMany measures with many installations that have a process each.
func runtimeMany(ctx context.Context, cfg RuntimeConfig, b *runtimeBed, f *runtimeFigures) error {
	bindings := make([]pluginwire.Context, cfg.Dedicated)
	if err := b.apply(ctx, b.installation(0, 1, pluginwire.ModeDedicated)); err != nil {
		return err // it brings the package
	}
	err := parallel(cfg.Dedicated, func(n int) error {
		i := b.installation(n, 1, pluginwire.ModeDedicated)
		bindings[n] = i.Binding
		if n == 0 {
			return nil
		}
		if _, err := b.host.Apply(ctx, i); err != nil {
			return err
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, on := range bindings {
		if err := b.runs(ctx, on); err != nil {
			return err
		}
	}
	if f.manyMemory, f.manyIdle, err = b.atRest(ctx, cfg.Idle); err != nil {
		return err
	}
	event := lbhost.Message("PersonMessageReceived", "hello")
	n := cfg.Events * cfg.Dedicated
	start := time.Now()
	err = atOnce(n, callsAtOnce, func(i int) error {
		_, err := b.host.Emit(ctx, bindings[i%len(bindings)], event, nil)
		return err
	})
	f.events = float64(n) / time.Since(start).Seconds()
	return err
}

// runtimePool measures with many slots in one process.
func runtimePool(ctx context.Context, cfg RuntimeConfig, b *runtimeBed, f *runtimeFigures) error {
	if err := b.apply(ctx, b.installation(0, 1, pluginwire.ModeShared)); err != nil {
		return err // it brings the package and starts the process
	}
	var times []time.Duration
	for n := 1; n < cfg.Slots; n++ {
		start := time.Now()
		if err := b.apply(ctx, b.installation(n, 1, pluginwire.ModeShared)); err != nil {
			return err
		}
		times = append(times, time.Since(start))
	}
	f.attachP50, f.attachP99 = quantile(times, .5), quantile(times, .99)
	var err error
	f.poolMemory, f.poolIdle, err = b.atRest(ctx, cfg.Idle)
	return err
}

// atRest is what the runtime uses of a processor while nothing happens, per second, and
// its own memory at the end of that.
func (b *runtimeBed) atRest(ctx context.Context, idle time.Duration) (memory int64, cpu time.Duration, err error) {
	pid := b.cmd.Process.Pid
	if _, err = settled(ctx, func() (int64, error) { return private(pid) }, func() bool { return true }); err != nil {
		return 0, 0, err
	}
	before, err := cpuTime(pid)
	if err != nil {
		return 0, 0, err
	}
	select {
	case <-time.After(idle):
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
	after, err := cpuTime(pid)
	if err != nil {
		return 0, 0, err
	}
	memory, err = private(pid)
	return memory, time.Duration(float64(after-before) / idle.Seconds()), err
}
