package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// DirectConfig says how plain processes are started.
type DirectConfig struct {
	// Interp runs the workers. Required, with the SDK.
	Interp Interpreter
	// DataDir is the runtime's data directory, by which the leftovers of a killed
	// runtime are known. Required.
	DataDir string
	// CgroupRoot is where the hierarchies are mounted; "" is /sys/fs/cgroup.
	CgroupRoot string
	// Logger may be nil.
	Logger *slog.Logger
}

// direct starts workers as plain processes of this user.
type direct struct {
	cfg   DirectConfig
	log   *slog.Logger
	group string // control group of all workers; "" where none can be made
	spawn *spawner
	live  live
}

// Direct returns the launcher of the profile oss_dev: workers are processes of
// this user, without limits, with exactly the environment that the published SDK
// gives them. Each has a process group, dies with this process, and, where this
// user may make control groups, has one of its own, so that nothing it has
// forked outlives it. What a killed runtime left in such groups is ended first.
func Direct(cfg DirectConfig) (Launcher, error) {
	d := &direct{cfg: cfg, log: logger(cfg.Logger)}
	k, err := key(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	if err := checkInterp(cfg.Interp); err != nil {
		return nil, err
	}
	parent := directGroup(k)
	if err := endGroup(cfg.CgroupRoot, parent); err != nil {
		return nil, err
	}
	if os.Geteuid() == 0 {
		// The killed runtime may have been told another profile.
		if err := sweepOthers(cfg.CgroupRoot, k, "", d.log); err != nil && !errdefs.Is(err, errdefs.Unavailable) {
			return nil, err
		}
	}
	if err := cgroup.New(cfg.CgroupRoot, parent).Track(); err != nil {
		_ = endGroup(cfg.CgroupRoot, parent) // made in some hierarchies
		d.log.Info("workers have no control group: a process that leaves its worker's process group outlives it", "reason", err)
	} else {
		d.group = parent
	}
	d.spawn = newSpawner()
	return d, nil
}

// Start implements Launcher.
func (d *direct) Start(ctx context.Context, spec Spec) (*Process, error) {
	if err := spec.check(); err != nil {
		return nil, err
	}
	if !spec.Legacy && spec.TransferDir == "" {
		return nil, errdefs.New(errdefs.Invalid, "the worker has no transfer directory")
	}
	return d.start(ctx, spec.Name, command{
		path: d.cfg.Interp.Path, argv: workerArgv(d.cfg.Interp.Path), dir: spec.Code, env: d.env(spec), stdin: true,
	})
}

// workerArgv is the command line of every worker, as the published SDK 0.5.5,
// 0.6.3 and 0.7 start it: standard streams, production mode.
func workerArgv(python string) []string {
	return []string{python, "-m", "langbot_plugin.cli.__init__", "run", "-s", "--prod"}
}

// env is the whole environment of a direct worker. That of a legacy plugin has no
// profile, so that the worker loads the plugin's .env, and no transfer directory
// (published SDK 0.6.3).
func (d *direct) env(spec Spec) []string {
	path := d.cfg.Interp.ImportRoot
	if spec.SitePackages != "" {
		path += string(os.PathListSeparator) + spec.SitePackages
	}
	env := []string{
		envCapability + "=" + spec.Capability,
		"PYTHONDONTWRITEBYTECODE=1",
		"PYTHONPATH=" + path,
		"PYTHONUNBUFFERED=1",
	}
	if !spec.Legacy {
		env = append(env, envProfile+"=oss_dev", envStorage+"="+spec.TransferDir)
	}
	return env
}

// Names of variables that the published SDK reads.
const (
	envCapability = "LANGBOT_PLUGIN_REGISTRATION_CAPABILITY"
	envProfile    = "LANGBOT_PLUGIN_RUNTIME_PROFILE"
	envStorage    = "LANGBOT_PLUGIN_FILE_STORAGE_DIR"
)

// Install implements Launcher.
func (d *direct) Install(ctx context.Context, spec InstallSpec) error {
	argv, env := spec.Command()
	if len(argv) == 0 {
		return errdefs.New(errdefs.Internal, "the installer has no command")
	}
	for _, name := range deptree.HostVariables() {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	ctx, done, err := d.live.install(ctx)
	if err != nil {
		return err
	}
	defer done()
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the installer %s cannot be executed: %v", argv[0], err)
	}
	p, err := d.start(ctx, "install", command{path: path, argv: argv, dir: spec.Scratch, env: env})
	if err != nil {
		return err
	}
	return runInstaller(ctx, p)
}

// command is what is executed.
type command struct {
	path  string
	argv  []string
	dir   string
	env   []string
	stdin bool // has one; else /dev/null
}

func (d *direct) start(ctx context.Context, name string, c command) (*Process, error) {
	if err := ctx.Err(); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the worker was not started: %v", err)
	}
	done, err := d.live.begin()
	if err != nil {
		return nil, err
	}
	defer done()
	id := newID(name)
	t := &directTree{}
	if d.group != "" {
		t.group = cgroup.New(d.cfg.CgroupRoot, d.group+"/"+id)
		t.grouped = true
		if err := t.group.Track(); err != nil {
			return nil, err
		}
	}
	var e ends
	if err := e.open(c.stdin, -1); err != nil {
		t.release()
		return nil, err
	}
	defer e.closeChild()
	proc, pidfd, err := d.spawn.start(c, &e)
	if err != nil {
		e.closeOurs()
		t.release()
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be started in %s: %v", filepath.Base(c.path), c.dir, err)
	}
	t.proc, t.pidfd = proc, pidfd
	if t.grouped {
		if err := t.group.Add(proc.Pid); err != nil {
			// It is gone already, or the machine's groups have changed under us.
			d.log.Warn("a worker is not in its control group", "worker", name, "error", err)
		}
	}
	p := NewProcess(t, e.in(), e.out(), e.err(), d.log.With("worker", name))
	d.live.add(p)
	return p, nil
}

// Close implements Launcher.
func (d *direct) Close() error {
	again, err := d.live.close()
	if again {
		return nil
	}
	d.spawn.close()
	if d.group != "" {
		err = errors.Join(err, endGroup(d.cfg.CgroupRoot, d.group))
	}
	return err
}

// directTree is a plain process and what it has forked.
type directTree struct {
	proc    *os.Process
	pidfd   *os.File
	group   cgroup.Group
	grouped bool
}

func (t *directTree) PID() int { return t.proc.Pid }

func (t *directTree) Wait() Exit {
	awaitPidfd(t.pidfd)
	_ = t.pidfd.Close()
	// Before it is waited for its number is nobody else's, so its group is its own.
	_ = unix.Kill(-t.proc.Pid, unix.SIGKILL)
	st, err := t.proc.Wait()
	if err != nil {
		return Exit{Text: "ended in a way that cannot be told: " + err.Error(), Code: -1}
	}
	return exitOf(st.Sys().(syscall.WaitStatus))
}

func exitOf(ws syscall.WaitStatus) Exit {
	if ws.Signaled() {
		return Exit{Text: "ended by " + unix.SignalName(ws.Signal()), Code: -1}
	}
	return Exit{Text: fmt.Sprintf("exited with code %d", ws.ExitStatus()), Code: ws.ExitStatus()}
}

func (t *directTree) Terminate() { _ = t.proc.Signal(unix.SIGTERM) }

func (t *directTree) Kill(ctx context.Context) error {
	// Wait ends its process group with it.
	_ = t.proc.Kill()
	if !t.grouped {
		return nil
	}
	if err := t.group.Kill(ctx); err != nil {
		return err
	}
	return t.group.Remove(ctx)
}

// release takes away the group of a process that was never started.
func (t *directTree) release() {
	if t.grouped {
		ctx, cancel := context.WithTimeout(context.Background(), killTime)
		defer cancel()
		_ = t.group.Remove(ctx)
	}
}
