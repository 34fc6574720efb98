package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/netns"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/wire"
)

// Networks of a boxed worker.
const (
	NetworkHost = "host" // the machine's own, as the published SDK does it
	NetworkNone = "none" // loopback alone
)

// BoxConfig says what boxes of workers are made of.
type BoxConfig struct {
	// Interp runs the workers and is shown in every box. Required, with the SDK.
	Interp Interpreter
	// DataDir is the runtime's data directory; it is never shown in a box, and by it
	// the leftovers of a killed runtime are known. Required.
	DataDir string
	// Policy holds the limits of installers, and of workers whose Spec has none.
	// With RequireHardLimits a machine that cannot enforce every one is refused.
	Policy pluginwire.WorkerPolicy
	// Network of workers: NetworkHost or NetworkNone; "" is NetworkHost. Installers
	// reach the package index and nothing else, whatever this says.
	Network string
	// IndexHosts are hosts that an installer may reach besides that of the index, as
	// HOST or HOST:PORT; HOST means ports 80 and 443. nil is [DefaultIndexHosts].
	IndexHosts []string
	// InitPath is the stockade-host program, PID 1 of every box. Required.
	InitPath string
	// Runtime is the OCI runtime. Required.
	Runtime oci.Runtime
	// RunDir holds what a running box needs on the machine, among it the
	// specification with the capability while the box starts. "" is a directory
	// below the first of /run and /dev/shm that is in memory, and for runsc not mounted
	// noexec, where it cannot make a root directory read-only.
	RunDir string
	// CgroupParent is the control group that holds one group per box; "" is one
	// below /stockade, named after DataDir.
	CgroupParent string
	// CgroupRoot is where the hierarchies are mounted; "" is /sys/fs/cgroup.
	CgroupRoot string
	// Logger may be nil.
	Logger *slog.Logger
}

// initTasks is what PID 1 of a box needs of the box's tasks for its own threads
// (measured: five or six), so that the policy's number is the worker's.
const initTasks = 8

// box starts workers and installers in containers.
type box struct {
	cfg     BoxConfig
	log     *slog.Logger
	dir     string // RunDir
	mode    cgroup.Mode
	seccomp *specs.LinuxSeccomp
	deepRO  bool
	shown   []string // directories of the interpreter, shown read-only
	slots   slots
	live    live

	mu     sync.Mutex
	shapes map[string]shape // by name, once made
}

// Box returns the launcher of the profile shared: every worker and every
// installer in a container of its own. It ends what a killed runtime has left for
// the same data directory. It needs root.
func Box(cfg BoxConfig) (Launcher, error) {
	b := &box{cfg: cfg, log: logger(cfg.Logger), shapes: map[string]shape{}}
	if os.Geteuid() != 0 {
		return nil, errdefs.New(errdefs.Unavailable, "workers of the profile shared run in boxes, which needs root").
			WithNext("run the runtime as root; stockade doctor says what else is missing")
	}
	switch cfg.Network {
	case "":
		b.cfg.Network = NetworkHost
	case NetworkHost, NetworkNone:
	default:
		return nil, errdefs.New(errdefs.Invalid, "the network of workers is %q and must be %s or %s", cfg.Network, NetworkHost, NetworkNone)
	}
	if cfg.IndexHosts == nil {
		b.cfg.IndexHosts = DefaultIndexHosts()
	}
	if err := checkInterp(cfg.Interp); err != nil {
		return nil, err
	}
	k, err := key(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	if cfg.CgroupParent == "" {
		b.cfg.CgroupParent = boxGroup(k)
	}
	if b.shown, err = shownDirs(cfg.Interp, cfg.DataDir); err != nil {
		return nil, err
	}
	if err := b.machine(); err != nil {
		return nil, err
	}
	if b.dir, err = runDir(cfg.RunDir, k, cfg.Runtime.Manner.OwnKernel); err != nil {
		return nil, err
	}
	// The killed runtime may have been told another profile.
	if err := endGroup(cfg.CgroupRoot, directGroup(k)); err != nil {
		return nil, err
	}
	if err := sweepOthers(cfg.CgroupRoot, k, b.dir, b.log); err != nil {
		return nil, err
	}
	if err := b.sweep(); err != nil {
		return nil, err
	}
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"", 0o711}, {"runtime", 0o700}, {"bundles", 0o700}, {"netns", 0o700}} {
		if err := makeDir(filepath.Join(b.dir, d.name), d.mode); err != nil {
			return nil, fmt.Errorf("make the directory of running boxes: %w", err)
		}
	}
	return b, nil
}

// machine finds out what this machine can do, and refuses one that cannot do what
// it must.
func (b *box) machine() error {
	st, err := os.Stat(b.cfg.InitPath)
	if err != nil || !st.Mode().IsRegular() || st.Mode()&0o001 == 0 {
		return errdefs.Wrap(err, errdefs.Unavailable, "the program %q is PID 1 of every box and must be a file that everybody may execute", b.cfg.InitPath).
			WithNext("install stockade-host beside stockade, with mode 755")
	}
	if b.cfg.Runtime.Path == "" {
		return errdefs.New(errdefs.Unavailable, "there is no OCI runtime for the boxes of workers").WithNext("apt-get install runc")
	}
	if b.mode, err = cgroup.Detect(b.cfg.CgroupRoot); err != nil {
		return err
	}
	if err := b.enforces(b.cfg.Policy); err != nil {
		return err
	}
	if missing, ok := b.mode.Enforces(); !ok {
		b.log.Warn("workers run without some limits of the policy", "missing controllers", missing)
	}
	if b.seccomp, err = oci.Seccomp(); err != nil {
		return err
	}
	b.deepRO = b.cfg.Runtime.RecursiveReadOnly(context.Background())
	return nil
}

// enforces refuses a policy that requires limits this machine cannot enforce.
func (b *box) enforces(p pluginwire.WorkerPolicy) error {
	missing, ok := b.mode.Enforces()
	if ok || !p.RequireHardLimits {
		return nil
	}
	return errdefs.New(errdefs.Unavailable, "the policy requires hard limits and this machine cannot enforce them: the control group controllers %s are missing", strings.Join(missing, ", ")).
		WithNext("enable them (stockade doctor says how), or accept workers without these limits with require_hard_limits=false")
}

// Start implements Launcher.
func (b *box) Start(ctx context.Context, spec Spec) (*Process, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	switch {
	case spec.Legacy:
		return nil, errdefs.New(errdefs.Invalid, "a plugin of the legacy directory does not run in the profile shared")
	case (spec.Private == nil) == (spec.Scratch == ""):
		return nil, errdefs.New(errdefs.Invalid, "a boxed worker has either the directories of its installation or the scratch directory of its pool")
	}
	policy := spec.Policy
	if policy == (pluginwire.WorkerPolicy{}) {
		policy = b.cfg.Policy
	}
	l := launch{
		name: spec.Name, policy: policy, cwd: codeDir, stdin: true, hostNet: b.cfg.Network == NetworkHost,
		argv:  workerArgv(b.cfg.Interp.Path),
		binds: []oci.Bind{{Source: spec.Code, Dest: codeDir}, {Source: spec.SitePackages, Dest: treeDir}},
	}
	home := "/home"
	if spec.Private != nil {
		l.shape = dedicatedShape
		l.own = []oci.Bind{{Source: spec.Private.Home, Dest: "/home"}, {Source: spec.Private.Tmp, Dest: "/tmp"}, {Source: spec.Private.Data, Dest: "/data"}}
	} else {
		l.shape, home = poolShape, "/tmp"
		l.own = []oci.Bind{{Source: spec.Scratch, Dest: "/tmp"}}
	}
	l.env = []string{
		"HOME=" + home,
		envCapability + "=" + spec.Capability,
		envProfile + "=shared",
		"PYTHONDONTWRITEBYTECODE=1",
		"PYTHONPATH=" + b.cfg.Interp.ImportRoot + ":" + treeDir,
		"PYTHONUNBUFFERED=1",
		"TMPDIR=/tmp",
	}
	return b.launch(ctx, l)
}

// Where a worker sees the plugin and its dependencies.
const (
	codeDir = "/plugin"
	treeDir = "/plugin-dependencies"
)

// launch is one container to be started.
type launch struct {
	name    string
	shape   string
	policy  pluginwire.WorkerPolicy
	argv    []string
	env     []string
	cwd     string
	stdin   bool
	hostNet bool
	netns   string
	binds   []oci.Bind // read-only or not, no business of anybody's user
	own     []oci.Bind // writable: they are given to the box's user
}

// launch starts a container. Where it fails nothing of it stays.
func (b *box) launch(ctx context.Context, l launch) (*Process, error) {
	done, err := b.live.begin()
	if err != nil {
		return nil, err
	}
	defer done()
	if err := b.enforces(l.policy); err != nil {
		return nil, err
	}
	sh, err := b.shape(l.shape)
	if err != nil {
		return nil, err
	}
	id := newID(l.name)
	t := &boxTree{rt: b.cfg.Runtime, root: filepath.Join(b.dir, "runtime"), host: b.cfg.InitPath, id: id, groups: b.cfg.CgroupRoot, log: b.log.With("worker", l.name),
		group: cgroup.New(b.cfg.CgroupRoot, b.cfg.CgroupParent+"/"+id), memory: l.policy.MaxMemoryMB, waited: make(chan struct{})}
	slot, err := b.slots.take(l.name, ownerOf(l.own))
	if err != nil {
		return nil, err
	}
	t.release = func() { b.slots.free(slot) }
	var e ends
	if err := b.begin(ctx, t, l, sh, slot, &e); err != nil {
		e.closeOurs()
		kill, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTime)
		defer cancel()
		if kerr := t.Kill(kill); kerr != nil {
			err = errors.Join(err, kerr)
		}
		return nil, err
	}
	t.handed = true
	p := NewProcess(t, e.in(), e.out(), e.err(), t.log)
	b.live.add(p)
	return p, nil
}

// begin makes what the container needs and starts it. After an error t is killed.
func (b *box) begin(ctx context.Context, t *boxTree, l launch, sh shape, s slot, e *ends) error {
	if err := b.give(ctx, l, sh, s.agent()); err != nil {
		return err
	}
	c, err := b.container(l, sh, s)
	if err != nil {
		return err
	}
	c.Cgroup = t.group.Path()
	if !l.hostNet && l.netns == "" {
		// Of our making, because not every runtime brings the loopback up. The box
		// keeps it alive, so the pin goes when that runs.
		pin := filepath.Join(b.dir, "netns", t.id)
		if err := netns.Create(pin); err != nil {
			return err
		}
		defer func() {
			if err := netns.Remove(pin); err != nil {
				t.log.Warn("the pin of a network namespace stays", "error", err)
			}
		}()
		c.NetNS = pin
	}
	if err := t.group.Create(b.limits(l.policy)); err != nil {
		return err
	}
	if err := e.open(l.stdin, s.agent()); err != nil {
		return err
	}
	defer e.closeChild()
	return t.run(ctx, filepath.Join(b.dir, "bundles", t.id), oci.Spec(c), e)
}

// give makes the writable directories those of the box's user, and makes the
// mount points that lie in them.
func (b *box) give(ctx context.Context, l launch, sh shape, agent int) error {
	for _, o := range l.own {
		if err := giveTree(ctx, o.Source, agent); err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "the directory that is %s of the worker cannot be given to it: %v", o.Dest, err)
		}
		for _, d := range sh.late {
			if rest, ok := below(d, o.Dest); ok {
				if err := mountPoint(o.Source, rest, agent); err != nil {
					return errdefs.Wrap(err, errdefs.Conflict, "%s in the worker's %s must be a directory or missing, because the interpreter is shown there: %v", d, o.Dest, err).
						WithNext("remove it, or install the interpreter somewhere else")
				}
			}
		}
	}
	return nil
}

func (b *box) container(l launch, sh shape, s slot) (oci.Container, error) {
	binds := append(append(append([]oci.Bind{}, sh.binds...), l.binds...), writable(l.own)...)
	for _, d := range sh.late { // above a writable mount: after it
		binds = append(binds, oci.Bind{Source: d, Dest: d})
	}
	for i := range binds {
		var err error
		if binds[i].NoExec, err = oci.NoExec(binds[i].Source); err != nil {
			return oci.Container{}, err
		}
	}
	files, err := hard(unix.RLIMIT_NOFILE)
	if err != nil {
		return oci.Container{}, err
	}
	if n := l.policy.MaxOpenFiles; n > 0 {
		files = min(files, uint64(n))
	}
	var limits []specs.POSIXRlimit
	for _, r := range []struct {
		name  string
		res   int
		value int // 0: as high as it may be
	}{
		{"RLIMIT_AS", unix.RLIMIT_AS, 0},
		{"RLIMIT_FSIZE", unix.RLIMIT_FSIZE, l.policy.MaxFileSizeMB << 20},
		{"RLIMIT_NPROC", unix.RLIMIT_NPROC, tasks(l.policy)},
	} {
		most, err := hard(r.res)
		if err != nil {
			return oci.Container{}, err
		}
		if r.value > 0 {
			most = min(most, uint64(r.value))
		}
		limits = append(limits, specs.POSIXRlimit{Type: r.name, Hard: most, Soft: most})
	}
	return oci.Container{
		Proc: wire.ProcSpec{Argv: l.argv, Env: l.env}, Cwd: l.cwd, Root: sh.root, Binds: binds, Init: b.cfg.InitPath,
		NetNS: l.netns, HostNet: l.hostNet, UIDBase: s.base(), Files: files, Rlimits: limits, DeepRO: b.deepRO, Seccomp: b.seccomp,
	}, nil
}

func writable(bs []oci.Bind) []oci.Bind {
	out := make([]oci.Bind, len(bs))
	for i, b := range bs {
		out[i] = oci.Bind{Source: b.Source, Dest: b.Dest, Writable: true}
	}
	return out
}

// hard is this process's hard limit: raising it takes a capability that root in a
// container may lack.
func hard(resource int) (uint64, error) {
	var own unix.Rlimit
	if err := unix.Getrlimit(resource, &own); err != nil {
		return 0, os.NewSyscallError("getrlimit", err)
	}
	return own.Max, nil
}

func tasks(p pluginwire.WorkerPolicy) int {
	if p.MaxPids <= 0 {
		return 0
	}
	return p.MaxPids + initTasks
}

// limits are those that control groups of this machine can enforce.
func (b *box) limits(p pluginwire.WorkerPolicy) api.BoxLimits {
	millis := int64(p.MaxCPUs * 1000)
	if p.MaxCPUs > 0 {
		millis = max(1, millis)
	}
	pids := int64(tasks(p))
	if pids > 0 && b.cfg.Runtime.Manner.OwnKernel {
		pids = oci.HostTasks(pids)
	}
	return b.mode.Enforceable(api.BoxLimits{
		CPUMillis:   millis,
		MemoryBytes: int64(p.MaxMemoryMB) << 20,
		Pids:        pids,
	})
}

// Close implements Launcher.
func (b *box) Close() error {
	if again, err := b.live.close(); again || err != nil {
		return err
	}
	return b.sweep()
}

func (b *box) sweep() error {
	return sweepBoxes(b.cfg.CgroupRoot, b.cfg.CgroupParent, b.dir, &b.cfg.Runtime, b.log)
}
