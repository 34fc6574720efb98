package worker

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/python"
)

// Interpreter is the Python that workers run with.
type Interpreter = deptree.Interpreter

// InstallSpec is one run of the dependency installer.
type InstallSpec = deptree.InstallSpec

// Probe asks an interpreter what it is; "" is the first on the PATH. Without the
// SDK it is an unavailable error, because no worker can run then. See
// [python.Probe].
func Probe(ctx context.Context, path string) (Interpreter, error) {
	i, err := python.Probe(ctx, path)
	if err == nil {
		err = i.CheckSDK()
	}
	return i, err
}

// Launcher starts plugin workers and dependency installers. It is safe for
// concurrent use; only one may be open on a data directory.
type Launcher interface {
	// Start starts one worker. ctx bounds the start, not the worker's life. Errors:
	// invalid for a Spec that cannot be started, unavailable when the machine lacks
	// what it needs or the start failed.
	Start(ctx context.Context, spec Spec) (*Process, error)
	// Installer runs the dependency installer to its end, or to that of ctx, and
	// leaves no process of it behind.
	deptree.Installer
	// Close ends the workers and installers that are left and takes away what the
	// launcher made on the machine. It returns an error when something stayed.
	Close() error
}

// Private are the directories that belong to one installation, or to one legacy
// plugin. They must exist.
type Private struct{ Home, Tmp, Data string }

// Spec is what one worker is started from. Paths are made absolute first.
type Spec struct {
	// Name names the worker in logs, such as the installation's id. It is no secret
	// and appears in the names of control groups.
	Name string
	// Code is the plugin's directory: the artifact's code, or a legacy plugin's.
	Code string
	// SitePackages is the dependency tree's directory. It may be empty only for a
	// legacy plugin.
	SitePackages string
	// Private are the installation's directories; nil for the worker of a pool,
	// which has Scratch instead. In direct mode neither is used.
	Private *Private
	// Scratch is the directory of a pool that its worker may write to, as /tmp.
	Scratch string
	// TransferDir is the SDK's directory for file transfers, in direct mode.
	TransferDir string
	// Capability is the registration capability. It is given to the worker in its
	// environment alone.
	Capability string
	// Policy holds the limits of the worker, in a box.
	Policy pluginwire.WorkerPolicy
	// Legacy starts a plugin of the legacy directory: without profile and without
	// transfer directory, so that the worker loads the plugin's own .env.
	Legacy bool
}

// Start begins no worker with a Spec that check refuses.
func (s *Spec) check() error {
	for what, p := range map[string]*string{"code": &s.Code, "dependency tree": &s.SitePackages, "transfer": &s.TransferDir, "scratch": &s.Scratch} {
		if *p == "" {
			continue
		}
		abs, err := absolute(what, *p)
		if err != nil {
			return err
		}
		*p = abs
	}
	if s.Private != nil {
		own := *s.Private
		for what, p := range map[string]*string{"home": &own.Home, "tmp": &own.Tmp, "data": &own.Data} {
			abs, err := absolute(what, *p)
			if err != nil {
				return err
			}
			*p = abs
		}
		s.Private = &own
	}
	switch {
	case s.Name == "":
		return errdefs.New(errdefs.Invalid, "the worker has no name")
	case s.Code == "":
		return errdefs.New(errdefs.Invalid, "the worker has no plugin directory")
	case s.SitePackages == "" && !s.Legacy:
		return errdefs.New(errdefs.Invalid, "the worker has no dependency environment").WithNext("prepare it before the worker is started")
	case s.Capability == "":
		return errdefs.New(errdefs.Invalid, "the worker has no registration capability")
	case strings.ContainsAny(s.Capability, "\x00\n"):
		return errdefs.New(errdefs.Invalid, "the worker's registration capability holds a control character")
	}
	return nil
}

func absolute(what, p string) (string, error) {
	if p == "" || strings.ContainsRune(p, 0) {
		return "", errdefs.New(errdefs.Invalid, "the worker's %s directory has no usable path", what)
	}
	abs, err := filepath.Abs(p)
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Invalid, "the worker's %s directory cannot be named: %v", what, err)
	}
	return abs, nil
}

// Tree is the processes of one worker, as a launcher holds them.
type Tree interface {
	// PID is the worker's process, for people.
	PID() int
	// Wait returns when the worker itself has ended. It is called once.
	Wait() Exit
	// Terminate asks the worker to end (SIGTERM).
	Terminate()
	// Kill kills whatever is left of the tree, proves that nothing is left, and
	// takes away what was made for it. It may be called while Wait waits, and again.
	Kill(ctx context.Context) error
}

// Exit says how a worker ended.
type Exit struct {
	Text string // for people, such as "exited with code 1"
	Code int    // exit code; -1 when it was ended by a signal or cannot be told
	OOM  bool   // the kernel ended it for lack of memory
}
