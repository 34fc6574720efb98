package pluginruntime

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/plugincontrol"
	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginlegacy"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/runprocess"
	"github.com/stockade-run/stockade/internal/transfer"
	"github.com/stockade-run/stockade/internal/worker"
)

// stopTime bounds the end of all workers together: each may take six seconds and
// its shutdown request five, and they end in parallel.
const stopTime = 20 * time.Second

// finishTime bounds the end of runners' runs at the broker: two seconds of grace and
// the proof. A broker that does not answer ends them when their time is over.
const finishTime = 10 * time.Second

// Run serves LangBot until ctx ends, then stops in order: LangBot's connection, the
// workers, the listeners, the stores, the lock. With Config.Stdio it also ends when
// LangBot closes standard input. Run returns nil after such an end.
func Run(ctx context.Context, o Options) (err error) {
	if err := o.Config.Validate(); err != nil {
		return err
	}
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	interp, err := worker.Probe(ctx, o.Config.Python)
	if err != nil {
		return err // before anything is made
	}
	dir, err := openDataDir(o.Config.DataDir)
	if err != nil {
		return err
	}
	defer dir.close()
	o.Config.DataDir = dir.Path
	log.Info("workers run with this interpreter", "python", interp.Path, "version", interp.Version, "sdk", interp.SDK)
	r := &runtime{Options: o, log: log, interp: interp, started: time.Now(), over: make(chan error, 1)}
	r.life, r.end = context.WithCancelCause(context.WithoutCancel(ctx))
	defer r.end(nil)
	if err := r.open(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.transfers.Close()) }()
	at, err := r.listen(ctx)
	if err != nil {
		r.live.Store(false)
		return errors.Join(err, r.stop(ctx))
	}
	if err := dir.publish(at); err != nil {
		log.Warn("the address file cannot be written", "err", err)
	}
	if o.Ready != nil {
		o.Ready(at)
	}
	quiet, hush := context.WithCancel(r.life)
	var joined sync.WaitGroup
	joined.Go(func() { giveBack(quiet) })
	defer func() { hush(); joined.Wait() }()
	select {
	case <-ctx.Done():
		log.Info("stopping")
	case err = <-r.over:
		log.Info("LangBot closed standard input: stopping")
	}
	return errors.Join(err, r.stop(ctx))
}

// runtime is the parts of a running runtime.
type runtime struct {
	Options
	log     *slog.Logger
	interp  worker.Interpreter
	started time.Time
	live    atomic.Bool

	transfers *transfer.Store
	manager   *pluginhost.Manager
	control   *plugincontrol.Control
	legacy    *pluginlegacy.Owner
	installer atomic.Pointer[deptree.Installer] // set once LangBot has configured the runtime
	processes *runprocess.Keeper                // of runners; nil: none is granted

	life                    context.Context // of every connection
	end                     context.CancelCauseFunc
	over                    chan error // how the connection over standard input ended
	stdio                   chan struct{}
	control5400, plugin5401 *port
}

// open makes the stores and the owners. Nothing runs and nothing listens yet.
func (r *runtime) open() error {
	c := r.Config
	artifacts, err := artifact.Open(artifact.Config{Dir: c.dir("plugin-runtime", "artifacts"), Logger: r.log})
	if err != nil {
		return err
	}
	// LangBot sends packages of any size; what a package may hold the store decides.
	if r.transfers, err = transfer.Open(transfer.Config{Dir: c.dir("temp", "lbp"), Logger: r.log}); err != nil {
		return err
	}
	if r.processes, err = c.processes(r.Version, r.log); err != nil {
		return errors.Join(err, r.transfers.Close())
	}
	link := plugincontrol.NewLink()
	r.manager, err = pluginhost.New(pluginhost.Config{
		DataDir: c.DataDir, Artifacts: artifacts, Launchers: r.launcher, Trees: r.openTrees, Host: link, Processes: r.processes,
		PingEvery: c.PingInterval, Logger: r.log,
	})
	if err != nil {
		return errors.Join(err, r.transfers.Close())
	}
	if err := r.openLegacy(link); err != nil {
		return errors.Join(err, r.transfers.Close())
	}
	r.control = plugincontrol.New(plugincontrol.Config{
		Legacy: legacyActions{r.legacy}, Configured: r.legacy.Configured,
		Manager: plugincontrol.Hosted(r.manager), Link: link, Processes: r.processes, Transfers: r.transfers, DataDir: c.DataDir,
		PingEvery: c.PingInterval, DebugPort: r.debugPort, Logger: r.log,
	})
	r.live.Store(true)
	return nil
}

// launcher makes what starts workers, once LangBot has said in which profile.
func (r *runtime) launcher(cfg pluginwire.RuntimeConfig) (worker.Launcher, error) {
	if cfg.Profile != pluginwire.ProfileShared {
		if cfg.Policy.RequireHardLimits {
			return nil, errdefs.New(errdefs.Invalid, "require_hard_limits needs boxes, and plugins of the profile %s run as plain processes", cfg.Profile).
				WithNext("use the profile %s, or do without hard limits", pluginwire.ProfileShared)
		}
		return worker.Direct(worker.DirectConfig{Interp: r.interp, DataDir: r.Config.DataDir, Logger: r.log})
	}
	oci, err := oci.FindRuntime(r.Config.OCIRuntime)
	if err != nil {
		return nil, err
	}
	program, err := host.FindProgram(r.Config.HostProgram)
	if err != nil {
		return nil, err
	}
	return worker.Box(worker.BoxConfig{
		Interp: r.interp, DataDir: r.Config.DataDir, Policy: cfg.Policy, Network: r.Config.WorkerNetwork, IndexHosts: r.Config.IndexHosts,
		InitPath: program, Runtime: oci, Logger: r.log,
	})
}

func (r *runtime) openTrees(cfg pluginwire.RuntimeConfig, l worker.Launcher) (pluginhost.Trees, error) {
	c := r.Config
	installer := deptree.Installer(l)
	r.installer.Store(&installer)
	trees, err := deptree.Open(deptree.Config{
		Dir: c.dir("plugin-runtime", "environments"), Interp: r.interp, Install: l, Profile: string(cfg.Profile),
		IndexURL: c.IndexURL, TrustedHosts: c.TrustedHosts, Uv: c.uv(), RelaxedPin: c.SDKPin == PinRelaxed, Logger: r.log,
	})
	if err != nil {
		return nil, err
	}
	return trees, nil
}

// listen opens both channels. The plugin channel comes first: LangBot is told its port.
func (r *runtime) listen(ctx context.Context) (at Addresses, err error) {
	c := r.Config
	r.plugin5401 = &port{name: "plugin", health: r.health, admit: r.admitPlugin, log: r.log, life: r.life}
	addr, err := r.plugin5401.open(ctx, c.address(c.PluginPort))
	if err != nil {
		return at, err
	}
	at.Plugin = "ws://" + here(addr) + "/plugin/debug/ws"
	r.Config.PluginPort = addr.(*net.TCPAddr).Port
	if c.Stdio {
		r.stdio = make(chan struct{})
		go func() {
			defer close(r.stdio)
			t := rpc.Stdio(r.Stdin, r.Stdout, func() error { return errors.Join(r.Stdin.Close(), r.Stdout.Close()) })
			r.over <- r.control.Serve(r.life, t)
		}()
		r.log.Info("LangBot speaks over standard input and output", "plugin", at.Plugin)
		return at, nil
	}
	if c.ControlToken == "" && !loopback(c.Listen) {
		r.log.Warn("anyone who reaches the control port commands this runtime: there is no control token",
			"set", EnvControlToken, "or", "--listen 127.0.0.1")
	}
	r.control5400 = &port{name: "control", health: r.health, admit: r.admitControl, log: r.log, life: r.life}
	if addr, err = r.control5400.open(ctx, c.address(c.ControlPort)); err != nil {
		return at, err
	}
	at.Control = "ws://" + here(addr) + "/control/ws"
	r.log.Info("waiting for LangBot", "control", at.Control, "plugin", at.Plugin, "token", c.ControlToken != "")
	return at, nil
}

// here is an address at which this machine reaches a listener.
func here(a net.Addr) string {
	tcp := a.(*net.TCPAddr)
	if tcp.IP.IsUnspecified() {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(tcp.Port))
	}
	return tcp.String()
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// debugPort is where developers connect; LangBot tells them.
func (r *runtime) debugPort() int { return r.Config.PluginPort }

// errUnauthorized refuses a connection; the reason is for the log.
func errUnauthorized(format string, args ...any) error {
	return errdefs.New(errdefs.Unauthenticated, format, args...)
}

func (r *runtime) admitControl(h http.Header) (func(context.Context, rpc.Transport) error, error) {
	if want := r.Config.ControlToken; want != "" && !equalSecret(header(h, headerControlToken), want) {
		return nil, errUnauthorized("the control token is missing or wrong")
	}
	if !r.live.Load() {
		return func(_ context.Context, t rpc.Transport) error { return t.Close() }, nil // stopping
	}
	return r.control.Serve, nil
}

func (r *runtime) admitPlugin(h http.Header) (func(context.Context, rpc.Transport) error, error) {
	adm, err := r.manager.CheckAdmission(header(h, headerDebugKey), header(h, headerCapability))
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, t rpc.Transport) error { return r.manager.ServeWorker(ctx, t, adm) }, nil
}

// stop ends everything that runs. It is called once, and ends whatever becomes of
// the caller's context.
func (r *runtime) stop(ctx context.Context) error {
	r.live.Store(false)
	gone := errdefs.New(errdefs.Unavailable, "the plugin runtime is shutting down")
	r.control.Close(gone)
	r.legacy.Close()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	// Runs are finished while the workers stop: their rights ended first.
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		ctx, cancel := context.WithTimeout(stop, finishTime)
		defer cancel()
		if err := r.processes.Close(ctx); err != nil {
			r.log.Warn("processes of runners may still run", "err", err)
		}
	}()
	err := r.manager.Shutdown(stop)
	<-finished
	r.end(gone)
	for _, p := range []*port{r.control5400, r.plugin5401} {
		if p != nil {
			p.close()
		}
	}
	if r.stdio != nil {
		<-r.stdio
	}
	return err
}
