package boxhost

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/wire"
)

// maxTmp is the most /tmp may hold. Its pages count as memory of the process
// that wrote them, so it is half of the box's memory where that is less.
const maxTmp = 1 << 30

// Launch is what a keeper must know of a bundle.
type Launch struct {
	Container string // container id
	Cgroup    string // control group of the process, below every hierarchy
}

// Bundle makes the box whole and writes dir/config.json, from which the runtime
// starts the process. It refuses, as invalid, a working directory that is
// absolute, leads out of the workspace, is missing or is no directory; "" and
// "." are the workspace itself.
func (m *Manager) Bundle(ctx context.Context, spec wire.ProcSpec, dir string) (Launch, error) {
	if err := checkProc(spec); err != nil {
		return Launch{}, err
	}
	b, err := m.use(spec.Box)
	if err != nil {
		return Launch{}, err
	}
	defer b.mu.Unlock()
	if err := m.ensure(ctx, b); err != nil {
		return Launch{}, err
	}
	cwd, err := m.workdir(b, spec.Cwd)
	if err != nil {
		return Launch{}, err
	}
	c, err := m.container(b, spec)
	if err != nil {
		return Launch{}, err
	}
	c.Cwd = cwd
	js, err := json.Marshal(oci.Spec(c))
	if err != nil {
		return Launch{}, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return Launch{}, fmt.Errorf("make a bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), js, 0o600); err != nil {
		return Launch{}, fmt.Errorf("write a bundle: %w", err)
	}
	return Launch{Container: spec.ID, Cgroup: c.Cgroup}, nil
}

func (m *Manager) container(b *box, spec wire.ProcSpec) (oci.Container, error) {
	search := m.path
	if b.rec.Spec.Image != "" {
		img, err := m.images.Get(b.rec.Spec.Image)
		if err != nil {
			return oci.Container{}, err
		}
		if search = img.Path; search == "" {
			search = basePath
		}
		search = withTools(search, m.cfg.Tools)
	}
	if !slices.ContainsFunc(spec.Env, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		spec.Env = append(slices.Clone(spec.Env), "PATH="+search)
	}
	binds := b.plan.binds()
	for _, v := range volumes() {
		binds = append(binds, oci.Bind{Source: m.volumeDir(b.id, v.name), Dest: v.dest, Writable: true})
	}
	for i, mt := range b.rec.Spec.Mounts {
		pin := m.pinPath(b, i)
		noexec, err := oci.NoExec(pin)
		if err != nil {
			return oci.Container{}, err
		}
		binds = append(binds, oci.Bind{Source: pin, Dest: mt.Dest, Writable: mt.Writable, NoExec: noexec})
	}
	limits := m.mode.Enforceable(b.rec.Spec.Limits)
	tmp := int64(maxTmp)
	if n := limits.MemoryBytes; n > 0 {
		tmp = min(tmp, max(n/2, 1<<20))
	}
	if !m.mode.Has("memory") {
		spec.MemoryBytes = 0
	}
	if !m.mode.Has("pids") {
		spec.Pids = 0
	}
	own := m.cfg.Runtime.Manner.OwnKernel
	if own {
		spec.Pids = oci.SandboxPids(spec.Pids, limits.Pids)
	}
	return oci.Container{
		Proc: spec, Root: m.rootDir(b.id), Binds: binds, Init: m.cfg.InitPath, NetNS: m.NetNS(b.id),
		UIDBase: b.rec.uidBase(), Cgroup: m.cfg.CgroupParent + "/" + b.id + "/" + spec.ID,
		Files: m.files, TmpBytes: tmp, SwapLimit: m.swap, DeepRO: m.deepRO, OwnKernel: own, Seccomp: m.seccomp,
	}, nil
}

// checkProc refuses what would make the runtime's configuration mean something
// else. The rules of argv and environment are the server's.
func checkProc(spec wire.ProcSpec) error {
	if err := ident.CheckName("the process's id", spec.ID); err != nil {
		return err
	}
	if strings.ContainsRune(spec.ID, ':') {
		return errdefs.New(errdefs.Invalid, "the process's id holds a colon")
	}
	if len(spec.Argv) == 0 || spec.Argv[0] == "" {
		return errdefs.New(errdefs.Invalid, "argv is empty").WithNext("name a program")
	}
	for what, list := range map[string][]string{"argv": spec.Argv, "the environment": spec.Env, "cwd": {spec.Cwd}} {
		for _, s := range list {
			if strings.ContainsRune(s, 0) {
				return errdefs.New(errdefs.Invalid, "%s holds a NUL byte", what)
			}
		}
	}
	for _, kv := range spec.Env {
		if i := strings.IndexByte(kv, '='); i < 1 {
			return errdefs.New(errdefs.Invalid, "the environment holds %q, which is not NAME=VALUE", clip(kv))
		}
	}
	return nil
}

// workdir checks a working directory and returns it as a path inside.
func (m *Manager) workdir(b *box, cwd string) (string, error) {
	if cwd == "" {
		return oci.Workspace, nil
	}
	if path.IsAbs(cwd) {
		return "", errdefs.New(errdefs.Invalid, "the working directory %q is absolute", clip(cwd)).
			WithNext("give it relative to the workspace, or leave it out")
	}
	if len(cwd) > 4095 {
		return "", errdefs.New(errdefs.Invalid, "the working directory has %d bytes, the limit is 4095", len(cwd))
	}
	inside := path.Join(oci.Workspace, cwd)
	if _, ok := below(inside, oci.Workspace); !ok {
		return "", errdefs.New(errdefs.Invalid, "the working directory %q leads out of the workspace", clip(cwd)).
			WithNext("give a directory below the workspace")
	}
	// An asked-for mount in the workspace is another tree.
	dir, rest := m.volumeDir(b.id, "workspace"), strings.TrimPrefix(strings.TrimPrefix(inside, oci.Workspace), "/")
	for i, mt := range b.rec.Spec.Mounts {
		if r, ok := below(inside, mt.Dest); ok {
			dir, rest = m.pinPath(b, i), r
		}
	}
	if rest == "" {
		rest = "."
	}
	f, err := openBelow(dir, rest, unix.O_PATH|unix.O_DIRECTORY, 0)
	switch {
	case err == nil:
		f.Close()
		return inside, nil
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP):
		return "", errdefs.Wrap(err, errdefs.Invalid, "the working directory %q leads out of the workspace through a symbolic link", clip(cwd)).
			WithNext("give a directory below the workspace")
	case errors.Is(err, unix.ENOENT):
		return "", errdefs.Wrap(err, errdefs.Invalid, "the working directory %q does not exist in the workspace", clip(cwd)).
			WithNext("make it first, or put files there")
	case errors.Is(err, unix.ENOTDIR):
		return "", errdefs.Wrap(err, errdefs.Invalid, "the working directory %q is not a directory", clip(cwd))
	case errors.Is(err, unix.ENAMETOOLONG):
		return "", errdefs.Wrap(err, errdefs.Invalid, "the working directory %q has a name that is too long", clip(cwd))
	}
	return "", fmt.Errorf("look at a working directory: %w", err)
}
