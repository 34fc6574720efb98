package host

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/boxhost"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// Names in the host's directory.
const (
	identityFile = "host.json"
	procsDir     = "procs"
	runtimeDir   = "rt"
)

// SocketFile is the name of the host's Unix socket in its directory.
const SocketFile = "host.sock"

// GenerationFile is the name of the file that holds, as a decimal number, the
// highest server generation the host has seen.
const GenerationFile = generationFile

// Config says how a host program runs.
type Config struct {
	// Dir is the host's directory. Required, absolute. It is made if missing, mode 0700.
	Dir string
	// Version is the program's, for HostInfo.
	Version string
	// Digest names the program and arguments the host was started with, for
	// whoever starts it; may be empty.
	Digest string
	// Exe is the absolute path of the stockade-host program, which is started as
	// shim and shown to containers as their PID 1. Required.
	Exe string
	// Runtime is the OCI runtime's name or path; empty finds one.
	Runtime string
	// Profile, Tools and AllowMounts are those of boxhost.Config.
	Profile     []string
	Tools       map[string]string
	AllowMounts []string
	// LimitsOptional is that of boxhost.Config.
	LimitsOptional bool
	// CgroupRoot is where the control group hierarchies are mounted; "" is /sys/fs/cgroup.
	CgroupRoot string
	// CgroupParent is the control group under which the host makes its own,
	// STOCKADE/HOST; "" is "/stockade".
	CgroupParent string
	// Problems are features this machine lacks, by name, for HostInfo. Missing
	// controllers of control groups are added by the host itself.
	Problems []string
	// Logger may be nil.
	Logger *slog.Logger
}

// Serve runs the host program until ctx ends or a client shuts it down. Then
// processes and their shims go on; the next Serve over the same directory finds
// them. It returns conflict when another host program has the directory.
//
// Before it listens it has found every process of the directory.
func Serve(ctx context.Context, cfg Config) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if !filepath.IsAbs(cfg.Dir) || !filepath.IsAbs(cfg.Exe) {
		return errdefs.New(errdefs.Invalid, "the host's directory and program must be absolute paths").WithNext("give --dir as an absolute path")
	}
	for _, d := range []string{cfg.Dir, filepath.Join(cfg.Dir, procsDir), filepath.Join(cfg.Dir, runtimeDir)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return diskError(err, "make %s", d)
		}
	}
	lock, err := lockDir(cfg.Dir)
	if err != nil {
		return err
	}
	defer lock.Close()
	// Owners, polls and requests live under ctx; cancel ends them before the lock is given back.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	defer s.reg.wg.Wait()
	defer cancel(nil)
	if err := s.reg.adopt(); err != nil {
		return err
	}
	s.reg.goOn(ctx)
	listener, err := shim.ListenUnix(filepath.Join(cfg.Dir, SocketFile))
	if err != nil {
		return err
	}
	return s.run(ctx, listener)
}

// server is a running host program.
type server struct {
	cfg  Config
	info wire.HostInfo
	log  *slog.Logger
	gate *gate
	reg  *registry

	buffers *sync.Pool // of *[]byte, for reading logs

	lease lease

	handlers sync.WaitGroup // requests under way
	stopped  chan struct{}  // closed by the first accepted shutdown
	stopOnce sync.Once
}

func open(ctx context.Context, cfg Config) (*server, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	id, err := hostID(cfg.Dir)
	if err != nil {
		return nil, err
	}
	runtime, err := oci.FindRuntime(cfg.Runtime)
	if err != nil {
		return nil, err
	}
	s := &server{cfg: cfg, log: cfg.Logger, stopped: make(chan struct{}), buffers: newBuffers()}
	s.lease.open(filepath.Join(cfg.Dir, leaseFile), boot)
	s.info = wire.HostInfo{
		HostID: id, BootID: boot, Protocol: wire.Protocol, Version: cfg.Version, Digest: cfg.Digest,
		Runtime: runtime.String(), Started: time.Now().UTC(), Problems: slices.Clone(cfg.Problems),
	}
	mode, err := cgroup.Detect(cfg.CgroupRoot)
	if err != nil {
		return nil, err
	}
	s.info.Problems = append(s.info.Problems, mode.Missing...)
	if s.gate, err = openGate(ctx, cfg.Dir); err != nil {
		return nil, err
	}
	s.reg = &registry{
		dir: filepath.Join(cfg.Dir, procsDir), exe: cfg.Exe, boot: boot, runtime: runtime,
		rt: filepath.Join(cfg.Dir, runtimeDir), lease: filepath.Join(cfg.Dir, leaseFile), cgroups: cfg.CgroupRoot,
		hub: newHub(), log: cfg.Logger, ctx: ctx,
		procs: map[string]*proc{}, claims: map[string]chan struct{}{}, live: map[string]int{},
	}
	parent := cfg.CgroupParent
	if parent == "" {
		parent = boxhost.DefaultCgroup
	}
	s.reg.boxes, err = boxhost.Open(boxhost.Config{
		Dir: cfg.Dir, Profile: cfg.Profile, Tools: cfg.Tools, AllowMounts: cfg.AllowMounts, InitPath: cfg.Exe,
		Runtime: runtime, CgroupParent: filepath.Join(parent, strings.TrimPrefix(id, string(ident.Host)+"_")),
		CgroupRoot: cfg.CgroupRoot, LimitsOptional: cfg.LimitsOptional, Live: s.reg.liveIn, Logger: cfg.Logger,
	})
	return s, err
}

// hostID reads or mints the id of a host directory.
func hostID(dir string) (string, error) {
	var file struct {
		HostID string `json:"host_id"`
	}
	b, err := os.ReadFile(filepath.Join(dir, identityFile))
	switch {
	case notExist(err):
		var random [16]byte
		rand.Read(random[:])
		file.HostID = ident.From(ident.Host, random)
		text, err := json.Marshal(file)
		if err != nil {
			return "", err
		}
		return file.HostID, writeDurable(dir, identityFile, text)
	case err != nil:
		return "", errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be read: %v", identityFile, err)
	}
	// A new id in place of a damaged one would make the server believe that this is another host.
	if err := json.Unmarshal(b, &file); err != nil || !ident.Valid(ident.Host, file.HostID) {
		return "", errdefs.New(errdefs.Internal, "%s is damaged", filepath.Join(dir, identityFile)).
			WithNext("write the host's id into it again; the server shows it with the target")
	}
	return file.HostID, nil
}

// Times of the HTTP server.
const (
	headerTime = 10 * time.Second // to send a request's header
	bodyTime   = 30 * time.Second // to send a small body, or the next part of a large one
	idleTime   = 3 * time.Minute  // of a kept connection; longer than the client's own 90 s
	drainTime  = 5 * time.Second  // of requests under way at the end
)

func (s *server) run(ctx context.Context, listener net.Listener) error {
	requests, end := context.WithCancelCause(ctx)
	defer end(nil)
	srv := &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: headerTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    16 << 10,
		BaseContext:       func(net.Listener) context.Context { return requests },
		ConnContext:       wideSocket,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(listener) }()
	s.log.Info("host program ready", "host", s.info.HostID, "runtime", s.info.Runtime, "processes", len(s.reg.ids()))
	var err error
	select {
	case err = <-served:
		served = nil
	case <-ctx.Done():
	case <-s.stopped:
	}
	_ = s.reg.close(true)
	end(errdefs.New(errdefs.Unavailable, "the host program is stopping").WithNext("try again when it is back"))
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer cancel()
	if srv.Shutdown(drain) != nil {
		srv.Close()
	}
	s.handlers.Wait() // their contexts have ended and their connections are closed
	if served != nil {
		<-served
		return nil
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the host program cannot listen: %v", err)
}

// socketBuffer lets a log stream hand over large pieces at once: with the
// kernel's default of about 200 KiB the two ends wake each other for every
// frame. It is a bound, not memory taken (unix(7), SO_SNDBUF).
const socketBuffer = 2 << 20

func wideSocket(ctx context.Context, c net.Conn) context.Context {
	if u, ok := c.(*net.UnixConn); ok {
		_ = u.SetWriteBuffer(socketBuffer) // slower without, not wrong
	}
	return ctx
}
