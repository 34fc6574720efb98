package boxhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/netns"
)

// Retire begins the removal of a box: from now on nothing can be done with it but
// to remove it, and that it goes is durable. It is quick, as the removal of many
// files is not. While a process lives in it, or files go in or out, it is a
// conflict.
func (m *Manager) Retire(id string) error {
	if m.retired(id) { // it may be locked by its removal
		return nil
	}
	b, err := m.hold(id)
	if err != nil {
		return err
	}
	defer b.mu.Unlock()
	return m.retire(b)
}

// retired reports whether the removal of a box has begun, without waiting for it.
func (m *Manager) retired(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[id]
	return b != nil && b.rec.Removing
}

// Remove takes a box away with everything in it, as Retire does not. An interrupted
// removal is finished by calling it again.
func (m *Manager) Remove(ctx context.Context, id string) error {
	b, err := m.hold(id)
	if err != nil {
		return err
	}
	defer b.mu.Unlock()
	if err := m.retire(b); err != nil {
		return err
	}
	return m.destroy(context.WithoutCancel(ctx), b)
}

// retire looks whether a box is used and marks it. The caller holds b.mu.
func (m *Manager) retire(b *box) error {
	if n := m.cfg.Live(b.id); n > 0 {
		return errdefs.New(errdefs.Conflict, "%d processes live in box %s", n, b.id).WithNext("close them first").With("processes", fmt.Sprint(n))
	}
	if !b.files.TryLock() {
		return errdefs.New(errdefs.Conflict, "files are being copied in or out of box %s", b.id).WithNext("try again when that has ended")
	}
	b.files.Unlock() // who takes it next holds b.mu as well, and sees the mark
	if some, err := m.group(b.id).Populated(); err != nil {
		return err
	} else if some {
		return errdefs.New(errdefs.Conflict, "the control group of box %s holds processes that are not on record", b.id).
			WithNext("look at them in %s/%s, and end them", m.cfg.CgroupParent, b.id)
	}
	if b.rec.Removing {
		return nil
	}
	rec := b.rec
	rec.Removing = true
	err := m.mark(b, rec)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		// The box may be what fills the disk. That it has no record says the same
		// (load), and needs no room.
		err = m.unmark(b, rec)
	}
	return err
}

// unmark is mark by taking the record away.
func (m *Manager) unmark(b *box, rec record) error {
	dir := m.boxDir(b.id)
	if err := os.Remove(filepath.Join(dir, recordFile)); err != nil {
		return fmt.Errorf("take away the record of a box: %w", err)
	}
	m.mu.Lock()
	b.rec = rec
	m.mu.Unlock()
	return durable.SyncDir(dir)
}

// mark records a box's new state before anything is done about it.
func (m *Manager) mark(b *box, rec record) error {
	m.mu.Lock()
	old := b.rec
	b.rec = rec
	m.mu.Unlock()
	if err := m.record(b); err != nil {
		m.mu.Lock()
		b.rec = old
		m.mu.Unlock()
		return err
	}
	return nil
}

// destroy takes away whatever there is of a box, the record last, and forgets
// it. The caller holds b.mu.
func (m *Manager) destroy(ctx context.Context, b *box) error {
	if err := m.group(b.id).Remove(ctx); err != nil {
		return err
	}
	if err := m.discard(b.id); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.boxes, b.id)
	b.gone = true
	if len(m.boxes) == 0 {
		// Nothing of ours stays in the hierarchies of an idle machine. A box that is
		// claimed from now on makes the group again.
		if err := cgroup.New(m.cfg.CgroupRoot, m.cfg.CgroupParent).Remove(ctx); err != nil {
			m.log.Warn("the control group of all boxes stays", "error", err)
		} else if path.Dir(m.cfg.CgroupParent) == DefaultCgroup {
			cgroup.New(m.cfg.CgroupRoot, DefaultCgroup).RemoveUnused()
		}
	}
	return nil
}

// discard deletes the directories of a box, and first what is mounted there.
func (m *Manager) discard(id string) error {
	dir := m.boxDir(id)
	if err := netns.Remove(m.NetNS(id)); err != nil {
		return err
	}
	pins, err := os.ReadDir(filepath.Join(dir, "mnt"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for the mounts of a box: %w", err)
	}
	for _, p := range pins {
		if err := unpin(filepath.Join(dir, "mnt", p.Name())); err != nil {
			return err
		}
	}
	// There even if it is not used now: permissions above Dir may have changed.
	if err := unpin(filepath.Join(m.public, id)); err != nil {
		return err
	}
	if err := removeTree(filepath.Join(m.public, id)); err != nil {
		return err
	}
	os.Remove(m.public) // fails while another box has a root there
	ents, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read a box's directory: %w", err)
	}
	for _, e := range ents {
		if e.Name() == recordFile {
			continue
		}
		if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	if err := removeTree(dir); err != nil {
		return err
	}
	return durable.SyncDir(m.boxesDir())
}

// removeDepth is how many directories deep removeTree goes with one descriptor
// each; what is deeper is moved up first.
const removeDepth = 64

// removeTree deletes a path and everything below it. It follows no link, never
// enters another mount, and copes with trees of any depth and with directories
// that forbid everything. A path that does not exist is deleted. Nobody else may
// change the tree meanwhile.
func removeTree(path string) error {
	parent, err := unix.Open(filepath.Dir(path), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", path, err)
	}
	defer unix.Close(parent)
	r := remover{top: parent, prefix: ".deep-" + filepath.Base(path) + "-"}
	if len(r.prefix) > 200 {
		r.prefix = ".deep-"
	}
	if r.mount, err = mountID(parent, ""); err == nil {
		err = r.remove(parent, filepath.Base(path), 0)
	}
	// What was moved up lies beside the path now; it may grow while it is deleted.
	for i := 0; err == nil && i < r.moved; i++ {
		err = r.remove(parent, fmt.Sprint(r.prefix, i), 0)
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", path, err)
	}
	return nil
}

type remover struct {
	top    int    // directory that holds the tree
	mount  uint64 // its mount
	prefix string // of what is moved up into top
	moved  int
}

var errOtherMount = errors.New("something is mounted there")

func mountID(dir int, name string) (uint64, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var st unix.Statx_t
	if err := unix.Statx(dir, name, flags, unix.STATX_MNT_ID, &st); err != nil {
		return 0, err
	}
	if st.Mask&unix.STATX_MNT_ID == 0 {
		return 0, nil // before Linux 5.8: unlink and rmdir refuse a mount point anyway
	}
	return st.Mnt_id, nil
}

func (r *remover) remove(dir int, name string, depth int) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	// Unlinking a directory is EISDIR on Linux; EPERM is POSIX's word for it.
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); err == nil {
		return nil
	}
	if id, err := mountID(dir, name); err != nil {
		return err
	} else if id != r.mount {
		return fmt.Errorf("%s: %w", name, errOtherMount)
	}
	if depth >= removeDepth {
		for {
			to := fmt.Sprint(r.prefix, r.moved)
			r.moved++
			// What an interrupted removal has moved there goes with the rest.
			if err := unix.Renameat(dir, name, r.top, to); !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
				return err
			}
		}
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	for {
		names, err := f.Readdirnames(1024)
		for _, n := range names {
			if err := r.remove(fd, n, depth+1); err != nil {
				return err
			}
		}
		if err == io.EOF || err == nil && len(names) == 0 {
			break
		}
		if err != nil {
			return err
		}
		// Deleting while listing may make some file systems skip entries.
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}
