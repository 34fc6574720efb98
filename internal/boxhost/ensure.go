package boxhost

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/netns"
	"github.com/stockade-run/stockade/internal/oci"
)

// volume is one of a box's writable directories.
type volume struct {
	name string // below vol/
	dest string
}

// volumes lists them in mount order.
func volumes() []volume {
	return []volume{{"workspace", oci.Workspace}, {"home", oci.Home}, {"cache", oci.Cache}}
}

func (m *Manager) volumeDir(id, name string) string {
	return filepath.Join(m.boxDir(id), "vol", name)
}

// ensure makes whatever of a box is missing: everything for a new one, what a
// reboot took for an old one, nothing for one in use. The caller holds b.mu.
func (m *Manager) ensure(ctx context.Context, b *box) error {
	if b.plan == nil {
		if err := m.checkMounts(b.rec.Spec.Mounts); err != nil {
			return err
		}
	}
	for _, v := range volumes() {
		if err := makeVolume(m.volumeDir(b.id, v.name), b.rec.agent()); err != nil {
			return fmt.Errorf("make a volume: %w", err)
		}
	}
	if !netns.Exists(m.NetNS(b.id)) {
		if err := netns.Create(m.NetNS(b.id)); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := m.group(b.id).Create(m.mode.Enforceable(b.rec.Spec.Limits)); err != nil {
		return err
	}
	return m.ensureRoot(b)
}

func makeVolume(dir string, agent int) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o711); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return err
	}
	if int(st.Uid) == agent {
		return nil
	}
	return os.Lchown(dir, agent, agent)
}

// ensureRoot pins the mounts and makes the root directory.
func (m *Manager) ensureRoot(b *box) error {
	files := make([]bool, len(b.rec.Spec.Mounts))
	for i := range b.rec.Spec.Mounts {
		var err error
		if files[i], err = m.pin(b, i); err != nil {
			return err
		}
	}
	if err := m.ensureVolumePoints(b, files); err != nil {
		return err
	}
	if b.plan != nil {
		if _, err := os.Stat(m.rootDir(b.id)); err == nil {
			return m.allowExec(b.id)
		}
	}
	p, err := m.makePlan(b, files)
	if err != nil {
		return err
	}
	err = p.build(m.rootDir(b.id))
	if errors.Is(err, errClash) && m.cfg.Live(b.id) == 0 {
		// The machine's directories have changed since; nobody looks at the old root.
		if err = removeTree(m.rootDir(b.id)); err == nil {
			err = p.build(m.rootDir(b.id))
		}
	}
	if errors.Is(err, errClash) {
		return errdefs.Wrap(err, errdefs.Conflict, "the machine's directories have changed under box %s while processes live in it", b.id).
			WithNext("close them and try again")
	}
	if err != nil {
		return fmt.Errorf("make a root directory: %w", err)
	}
	b.plan = p
	return m.allowExec(b.id)
}

// allowExec lets programs run below a root directory of publicRoots where /run is
// mounted noexec, as on Debian with systemd: runsc makes the root read-only with
// flags that do not keep that one, which in a user namespace is refused.
func (m *Manager) allowExec(id string) error {
	if m.roots == "" {
		return nil
	}
	dir := filepath.Join(m.roots, id)
	noexec, err := oci.NoExec(dir)
	if err != nil || !noexec {
		return err
	}
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("open_tree", err)
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_NOEXEC, Propagation: unix.MS_PRIVATE}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return os.NewSyscallError("mount_setattr", err)
	}
	return os.NewSyscallError("move_mount", unix.MoveMount(tree, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH))
}

func (m *Manager) makePlan(b *box, files []bool) (*plan, error) {
	var p *plan
	if b.rec.Spec.Image == "" {
		var err error
		if p, err = planProfile(m.profile); err != nil {
			return nil, err
		}
	} else {
		img, err := m.images.Get(b.rec.Spec.Image)
		if err != nil {
			return nil, err
		}
		if img.Digest != b.rec.Spec.Image {
			return nil, errdefs.New(errdefs.Invalid, "a box names its image by digest, not as %q", clip(b.rec.Spec.Image)).
				WithNext("use %s", img.Digest)
		}
		if p, err = planImage(img, filepath.Join(m.boxDir(b.id), "etc")); err != nil {
			return nil, err
		}
	}
	for _, t := range toolSources(m.cfg.Tools) {
		if err := p.bind(t.dest, t.source); err != nil {
			return nil, err
		}
	}
	for _, d := range []string{"/proc", "/dev", "/tmp", oci.Workspace, oci.Home} {
		if err := p.point(d, false); err != nil {
			return nil, err
		}
	}
	// Runtimes before runc 1.2 give a tmpfs the mode of its mount point, whatever
	// the configuration says.
	p.root.children["tmp"].open = true
	if err := p.point(oci.InitPath, true); err != nil {
		return nil, err
	}
	for i, mt := range b.rec.Spec.Mounts {
		if _, _, inVolume := volumeOf(mt.Dest); inVolume {
			continue
		}
		if _, inTmp := below(mt.Dest, "/tmp"); inTmp {
			continue // the runtime makes it in the fresh tmpfs
		}
		if err := p.point(mt.Dest, files[i]); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// volumeOf finds the volume that holds a path of the box and the path in it.
func volumeOf(p string) (volume, string, bool) {
	vs := volumes()
	for i := len(vs) - 1; i >= 0; i-- { // the deepest first
		if rest, ok := below(p, vs[i].dest); ok {
			return vs[i], rest, true
		}
	}
	return volume{}, "", false
}

// ensureVolumePoints makes the mount points that lie in volumes: the cache in
// the home, and asked-for mounts. A tenant can change them, so each is looked
// at before every start and must be what it should be, without links.
func (m *Manager) ensureVolumePoints(b *box, files []bool) error {
	if err := m.volumePoint(b, volumes()[1], path.Base(oci.Cache), false); err != nil {
		return err
	}
	for i, mt := range b.rec.Spec.Mounts {
		if v, rest, ok := volumeOf(mt.Dest); ok {
			if err := m.volumePoint(b, v, rest, files[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Manager) volumePoint(b *box, v volume, rest string, file bool) error {
	root, err := os.OpenRoot(m.volumeDir(b.id, v.name))
	if err != nil {
		return fmt.Errorf("open a volume: %w", err)
	}
	defer root.Close()
	agent := b.rec.agent()
	at := "."
	parts := split(rest)
	for i, part := range parts {
		at = path.Join(at, part)
		wantFile := file && i == len(parts)-1
		st, err := root.Lstat(at)
		switch {
		case err == nil && (wantFile && st.Mode().IsRegular() || !wantFile && st.IsDir()):
			continue
		case err == nil:
			return errdefs.New(errdefs.Conflict, "%s in the box is in the way of a mount: it must be a directory or missing", path.Join(v.dest, at)).
				WithNext("remove it in the box")
		case !errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("look at a mount point: %w", err)
		case wantFile:
			f, err := root.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
			if err != nil {
				return fmt.Errorf("make a mount point: %w", err)
			}
			f.Close()
		default:
			if err := root.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return fmt.Errorf("make a mount point: %w", err)
			}
		}
		if err := root.Lchown(at, agent, agent); err != nil {
			return fmt.Errorf("make a mount point: %w", err)
		}
	}
	return nil
}
