// Package server is "stockade serve", put together: it locks the state
// directory, opens the ledger, starts the owners, and serves the HTTP API until
// it is told to stop. Nothing else in the tree knows all the parts.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/box"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/driver"
	boxdriver "github.com/stockade-run/stockade/internal/driver/box"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/httpapi"
	"github.com/stockade-run/stockade/internal/metrics"
	"github.com/stockade-run/stockade/internal/preflight"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store/sqlite"
	"github.com/stockade-run/stockade/internal/tenant"
)

// Options is what a server runs with.
type Options struct {
	Config  config.Config
	Version string
	Logger  *slog.Logger
	// Ready, if not nil, is called once with the URL when the API answers.
	Ready func(url string)
}

// localTarget is the name of the target that every server has: boxes of this machine.
const localTarget = "local"

// Times of the HTTP server. Bodies and answers may stream for hours, so only
// headers and idle connections are bounded; every handler bounds its own work.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute
	maxHeader     = 64 << 10
	drainTime     = 5 * time.Second  // for answers under way when it stops
	stopTime      = 20 * time.Second // for the owners
)

// Run serves until ctx ends, then stops in order: no new requests, then the
// owners, then the gateway, then the ledger. Processes in boxes go on; the host
// program is stopped too if nothing lives on it. Run returns nil after a stop
// that ctx asked for.
func Run(ctx context.Context, o Options) (err error) {
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	state, err := openStateDir(o.Config.StateDir)
	if err != nil {
		return err
	}
	defer state.Close()

	db, err := sqlite.Open(ctx, sqlite.Config{Path: state.File("ledger.db"), Version: o.Version, Logger: log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	counters := metrics.New(o.Version)
	ledger := counters.Ledger(db)
	tenants := tenant.New(tenant.Config{Store: ledger, Logger: log})
	if err := tenants.Bootstrap(ctx, state.Path, time.Now()); err != nil {
		return err
	}
	signer, err := secret.OpenSigner(state.File("receipt.key"))
	if err != nil {
		return err
	}
	local, err := localDriver(o.Config, state.Path, log)
	if err != nil {
		return err
	}
	gw, err := openGateway(o.Config, ledger, log)
	if err != nil {
		return err
	}

	brk, err := broker.New(broker.Config{
		Store: ledger, Signer: signer, Gateway: gw, Logger: log, Limits: brokerLimits(o.Config),
		Targets: []broker.TargetConfig{{Name: localTarget, Driver: local, MaxBoxes: o.Config.Box.MaxPerTarget}},
	})
	if err != nil {
		return err
	}
	boxes, err := box.New(box.Config{
		Store: ledger, Target: localTarget, Limits: boxLimits(o.Config), Logger: log,
		Hosts: func(target string) (box.Host, error) { return brk.Host(target) },
	})
	if err != nil {
		return err
	}

	rel, err := openRelay(o.Config, state.Path, ledger, log)
	if err != nil {
		return err
	}
	// What fails before the end leaves no hub; stopping it twice is harmless.
	defer func() { err = errors.Join(err, rel.stop(context.WithoutCancel(ctx))) }()

	var health atomic.Value
	health.Store("starting")
	handler, err := httpapi.New(httpapi.Config{
		Broker: brk, Boxes: boxes, Tenants: tenants, Relay: rel.api(), Metrics: counters, Version: o.Version, Logger: log,
		Health: func() string {
			if db.Failing() {
				return "failing"
			}
			return health.Load().(string)
		},
	})
	if err != nil {
		return err
	}

	// The listener opens only after keys exist and the ledger is ready (P11).
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Config.Listen)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the address %s cannot be listened on: %v", o.Config.Listen, opReason(err)).
			WithNext("choose another with --listen")
	}
	if err := brk.Start(ctx); err != nil {
		return errors.Join(err, listener.Close())
	}
	if err := boxes.Start(ctx); err != nil {
		return errors.Join(err, listener.Close(), brk.Stop(context.WithoutCancel(ctx)))
	}
	if _, err := rel.start(ctx); err != nil {
		stop := context.WithoutCancel(ctx)
		return errors.Join(err, listener.Close(), boxes.Stop(stop), brk.Stop(stop))
	}
	front := &apiServer{state: state, handler: handler, options: o, log: log, drain: drainTime}
	err = front.serve(ctx, listener, func() {
		// Requests are answered meanwhile; whoever waits for "ok" finds targets up.
		if brk.Tried(ctx) == nil {
			health.Store("ok")
		}
	})
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
	defer cancel()
	err = errors.Join(err, rel.stop(stop), boxes.Stop(stop), brk.Stop(stop), gw.Close(stop))
	switch serr := local.Stop(stop); {
	case serr == nil, errdefs.Is(serr, errdefs.Conflict): // conflict: something lives there, as it should
	default:
		log.Warn("the host program did not stop", "err", serr)
	}
	return err
}

// ResetAdmin makes a new admin key in the state directory of a stopped server.
func ResetAdmin(ctx context.Context, dir string) (api.Key, error) {
	state, err := openStateDir(dir)
	if err != nil {
		return api.Key{}, err
	}
	defer state.Close()
	ledger, err := sqlite.Open(ctx, sqlite.Config{Path: state.File("ledger.db")})
	if err != nil {
		return api.Key{}, err
	}
	key, err := tenant.New(tenant.Config{Store: ledger}).ResetAdmin(ctx, state.Path)
	return key, errors.Join(err, ledger.Close())
}

// Preflight is the configuration of the checks that "stockade doctor" makes.
func Preflight(c config.Config) preflight.Config {
	p := preflight.Config{Dir: c.StateDir, Runtime: c.Host.Runtime}
	if exe, err := host.FindProgram(c.Host.Program); err == nil {
		p.InitPath = exe
	}
	return p
}

// stoppingDriver is a driver that ends its host program with the server when
// nothing lives there.
type stoppingDriver interface {
	driver.Driver
	driver.Stopper
}

func localDriver(c config.Config, state string, log *slog.Logger) (stoppingDriver, error) {
	if c.Host.Socket != "" {
		return foreignHost{socket: c.Host.Socket}, nil
	}
	exe, err := host.FindProgram(c.Host.Program)
	if err != nil {
		return nil, err
	}
	var args []string
	if c.Host.Runtime != "" {
		args = append(args, "--runtime", c.Host.Runtime)
	}
	for _, dir := range c.Host.ProfileDirs {
		args = append(args, "--profile-dir", dir)
	}
	for _, tool := range c.Host.Tools {
		args = append(args, "--tool", tool)
	}
	if !c.Host.RequireHardLimits {
		args = append(args, "--limits-optional")
	}
	for _, dir := range c.Host.AllowMounts {
		args = append(args, "--allow-mount", dir)
	}
	return boxdriver.New(boxdriver.Config{
		HostExe: exe, Dir: filepath.Join(state, "host"), Args: args, Logger: log,
	}), nil
}

func openGateway(c config.Config, usage gateway.Usage, log *slog.Logger) (*gateway.Gateway, error) {
	models, err := c.ParseModels()
	if err != nil {
		return nil, err
	}
	providers := map[string]gateway.Provider{}
	for _, m := range models {
		key, err := m.ReadKey()
		if err != nil {
			return nil, err
		}
		providers[m.Name] = gateway.Provider{BaseURL: m.BaseURL, Key: key, Style: gateway.Style(m.Style)}
		log.Info("model provider", "provider", m.String(), "key", key != "")
	}
	return gateway.New(gateway.Config{Providers: providers, Usage: usage, Logger: log})
}

func brokerLimits(c config.Config) broker.Limits {
	return broker.Limits{
		DefaultDeadline: c.Process.Deadline, DefaultSpool: c.Process.SpoolBytes, MaxSpool: c.Process.MaxSpoolBytes,
		PerRun: c.Process.MaxPerRun, PerWorkspace: c.Process.MaxPerWorkspace, DefaultRunTTL: c.Run.TTL, RunsPerWorkspace: c.Run.MaxPerWorkspace,
		KeptRuns: c.Retention.MaxRuns, KeptProcesses: c.Retention.MaxProcesses, KeptSpecBytes: c.Retention.MaxSpecBytes,
		KeptLogs: c.Retention.MaxLogs, KeptLogBytes: c.Retention.MaxLogBytes,
		Lease: c.Host.Lease, LeaseEvery: c.Host.Lease / 30,
		LogRetention: c.Retention.Log, RecordRetention: c.Retention.Record, AuditRetention: c.Retention.Audit,
	}
}

func boxLimits(c config.Config) box.Limits {
	return box.Limits{
		PerTarget: c.Box.MaxPerTarget, PerWorkspace: c.Box.MaxPerWorkspace, Idle: c.Box.Idle,
		Default: api.BoxLimits{CPUMillis: c.Box.CPUMillis, MemoryBytes: c.Box.MemoryBytes, Pids: c.Box.Pids},
		Max: api.BoxLimits{CPUMillis: max(c.Box.CPUMillis, c.Box.MaxCPUMillis), MemoryBytes: max(c.Box.MemoryBytes, c.Box.MaxMemoryBytes),
			Pids: max(c.Box.Pids, c.Box.MaxPids)},
	}
}

func opReason(err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return fmt.Errorf("%w", op.Err)
	}
	return err
}
