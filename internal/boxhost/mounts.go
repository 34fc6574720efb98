package boxhost

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
)

// maxMounts bounds the mounts of one box.
const maxMounts = 64

// allowedDir is a directory below which mounts are allowed.
type allowedDir struct {
	name string // as the operator wrote it
	real string // without symbolic links
}

func openAllowed(dirs []string) ([]allowedDir, error) {
	var as []allowedDir
	for _, d := range dirs {
		if !filepath.IsAbs(d) || filepath.Clean(d) != d {
			return nil, errdefs.New(errdefs.Invalid, "the directory allowed for mounts is %q and must be an absolute, clean path", clip(d))
		}
		// The operator's own links are trusted, and resolved once.
		real, err := filepath.EvalSymlinks(d)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Invalid, "the directory allowed for mounts, %s, cannot be found", clip(d))
		}
		as = append(as, allowedDir{d, real})
	}
	return as, nil
}

// below returns the part of p below dir, "." for dir itself.
func below(p, dir string) (string, bool) {
	if p == dir {
		return ".", true
	}
	rest, ok := strings.CutPrefix(p, strings.TrimSuffix(dir, "/")+"/")
	return rest, ok
}

// openSource opens what a box asks to mount, as a path descriptor. Below an
// allowed directory no symbolic link is followed, so that nobody who can write
// there chooses what is mounted.
func (m *Manager) openSource(source string) (*os.File, error) {
	if !filepath.IsAbs(source) || filepath.Clean(source) != source || strings.ContainsRune(source, 0) || len(source) > 4096 {
		return nil, errdefs.New(errdefs.Invalid, "the mount source %q must be an absolute, clean path", clip(source))
	}
	denied := errdefs.New(errdefs.Denied, "the operator has not allowed to mount %q", clip(source)).
		WithNext("ask the operator to allow the directory (setting host.allow_mounts of the server), or copy the files into the box")
	for _, a := range m.allowed {
		rest, ok := below(source, a.name)
		if !ok {
			if rest, ok = below(source, a.real); !ok {
				continue
			}
		}
		f, err := openBelow(a.real, rest, unix.O_PATH, unix.RESOLVE_NO_SYMLINKS)
		switch {
		case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV):
			return nil, errdefs.Wrap(err, errdefs.Denied, "the mount source %q leads through a symbolic link, which is not followed below an allowed directory", clip(source)).
				WithNext("name the directory it points to, if that is allowed")
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return nil, errdefs.Wrap(err, errdefs.Invalid, "the mount source %q does not exist on the host", clip(source))
		case err != nil:
			return nil, fmt.Errorf("open a mount source: %w", err)
		}
		if err := m.fitToShow(f); err != nil {
			f.Close()
			return nil, err
		}
		return f, nil
	}
	return nil, denied
}

// fitToShow refuses what must not be shown in a box even if it lies in an
// allowed directory: our own state, and anything but directories and files.
func (m *Manager) fitToShow(f *os.File) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.IsDir() && !st.Mode().IsRegular() {
		return errdefs.New(errdefs.Invalid, "the mount source %q is neither a directory nor a file", clip(f.Name()))
	}
	real, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return err
	}
	own, err := filepath.EvalSymlinks(m.cfg.Dir)
	if err != nil {
		return err
	}
	_, inside := below(real, own)
	_, around := below(own, real)
	if inside || around {
		return errdefs.New(errdefs.Denied, "the mount source %q holds the state of Stockade itself", clip(f.Name()))
	}
	return nil
}

// openBelow opens rest below dir with openat2, never leaving dir.
func openBelow(dir, rest string, flags, resolve uint64) (*os.File, error) {
	d, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(d)
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolve | unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	for tries := 0; ; tries++ {
		fd, err := unix.Openat2(d, rest, &how)
		// The kernel says EAGAIN when something was renamed meanwhile.
		if (errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR)) && tries < 32 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), filepath.Join(dir, rest)), nil
	}
}

// checkDest refuses a destination that would hide what confines the box or what
// Stockade shows itself.
func checkDest(dest string) error {
	if !path.IsAbs(dest) || path.Clean(dest) != dest || len(dest) > 1024 || strings.ContainsFunc(dest, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return errdefs.New(errdefs.Invalid, "the mount destination %q must be an absolute, clean path of at most 1024 printable bytes", clip(dest))
	}
	for _, p := range []string{"/proc", "/dev", "/sys", "/etc", "/.stockade"} {
		if _, ok := below(dest, p); ok {
			return errdefs.New(errdefs.Invalid, "nothing can be mounted at %q: %s is the box's own", clip(dest), p).
				WithNext("choose a destination such as /workspace/NAME or /mnt/NAME")
		}
	}
	// Above or at these it would hide them.
	for _, p := range []string{"/proc", "/dev", "/sys", "/etc", "/.stockade", oci.Workspace, oci.Home, oci.Cache, "/tmp", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"} {
		if _, ok := below(p, dest); ok {
			return errdefs.New(errdefs.Invalid, "a mount at %q would hide %s", clip(dest), p).
				WithNext("choose a destination such as /workspace/NAME or /mnt/NAME")
		}
	}
	return nil
}

// checkMounts refuses mounts that this host would not make.
func (m *Manager) checkMounts(mounts []api.Mount) error {
	for i, mt := range mounts {
		if err := checkDest(mt.Dest); err != nil {
			return err
		}
		for _, other := range mounts[:i] {
			_, a := below(mt.Dest, other.Dest)
			_, b := below(other.Dest, mt.Dest)
			if a || b {
				return errdefs.New(errdefs.Invalid, "the mounts at %q and %q lie one over the other", clip(other.Dest), clip(mt.Dest))
			}
		}
		f, err := m.openSource(mt.Source)
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
}

func (m *Manager) pinPath(b *box, i int) string {
	return filepath.Join(m.boxDir(b.id), "mnt", strconv.Itoa(i))
}

// pin mounts what was checked at a path of our own, so that what a box sees is
// what was checked, whatever happens to the source's path later. It reports
// whether it is a file.
func (m *Manager) pin(b *box, i int) (file bool, err error) {
	mt := b.rec.Spec.Mounts[i]
	at := m.pinPath(b, i)
	if mounted(at) {
		st, err := os.Stat(at)
		return err == nil && st.Mode().IsRegular(), err
	}
	src, err := m.openSource(mt.Source)
	if err != nil {
		return false, err
	}
	defer src.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(src.Fd()), &st); err != nil {
		return false, err
	}
	file = st.Mode&unix.S_IFMT == unix.S_IFREG
	if err := os.MkdirAll(filepath.Dir(at), 0o711); err != nil {
		return false, err
	}
	if err := makePoint(at, file); err != nil {
		return false, err
	}
	tree, err := unix.OpenTree(int(src.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return false, fmt.Errorf("take a mount source: %w", err)
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV, Propagation: unix.MS_PRIVATE}
	if !mt.Writable {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return false, fmt.Errorf("restrict a mount: %w", err)
	}
	m.mapOwner(b, tree, st)
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return false, fmt.Errorf("pin a mount: %w", err)
	}
	return file, nil
}

// mapOwner shows the source's owner as the box's agent, by an idmapped mount, so
// that a person's own files can be read and, if asked, changed in the box and
// stay that person's. Files of others, and everything of root's, keep belonging
// to nobody inside. Where the kernel or the file system cannot do it, the agent
// has the rights of others there.
func (m *Manager) mapOwner(b *box, tree int, st unix.Stat_t) {
	if st.Uid == 0 {
		// Otherwise a program made inside with the set-user-id bit would be root's
		// on the machine.
		return
	}
	agent := b.rec.agent()
	gids := []syscall.SysProcIDMap{{ContainerID: int(st.Gid), HostID: agent, Size: 1}}
	if st.Gid == 0 {
		// The same with the set-group-id bit. It is the box's root group, which the
		// agent is not in; what the agent makes has its own.
		gids = []syscall.SysProcIDMap{{ContainerID: 0, HostID: int(b.rec.uidBase()), Size: 1}, {ContainerID: agent, HostID: agent, Size: 1}}
	}
	userns, err := userNamespace([]syscall.SysProcIDMap{{ContainerID: int(st.Uid), HostID: agent, Size: 1}}, gids)
	if err == nil {
		defer userns.Close()
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(userns.Fd())}
		err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr)
	}
	if err != nil {
		m.log.Warn("a mount's owner is not mapped to the box's agent", "box", b.id, "error", err)
	}
}

// makePoint makes an empty file or directory to mount on.
func makePoint(at string, file bool) error {
	if !file {
		if err := os.Mkdir(at, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		return nil
	}
	f, err := os.OpenFile(at, os.O_CREATE|os.O_RDONLY, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// mounted reports whether something is mounted at exactly this path.
func mounted(at string) bool {
	var here unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, at, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT, 0, &here)
	return err == nil && here.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 && here.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// unpin takes away every mount at a path.
func unpin(at string) error {
	for mounted(at) {
		if err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("take away the mount at %s: %w", at, err)
		}
	}
	return nil
}
