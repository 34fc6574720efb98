package boxhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/tartree"
)

// PutFiles extracts a tar archive into the directory at path, an absolute path
// inside the box that lies in one of its volumes (/workspace, /home/agent,
// /home/agent/.cache).
//
// As with docker cp, the archive's names are relative to path, an existing file
// is replaced, an existing directory is kept, a directory and a file never
// replace each other, and permissions and times are the archive's. Unlike it,
// missing directories above path are made, everything belongs to the agent, and
// set-user-id bits are dropped. Devices, FIFOs, and names or links that lead out
// of path are invalid. What was extracted before an error stays.
func (m *Manager) PutFiles(ctx context.Context, id, at string, r io.Reader) error {
	b, v, rest, err := m.useFiles(id, at)
	if err != nil {
		return err
	}
	defer b.files.RUnlock()
	root, err := os.OpenRoot(m.volumeDir(id, v.name))
	if err != nil {
		return fmt.Errorf("open a volume: %w", err)
	}
	defer root.Close()
	st, err := root.Stat(rest)
	switch {
	case err == nil && !st.IsDir():
		return errdefs.New(errdefs.Invalid, "%q in the box is not a directory to put files into", clip(at)).
			WithNext("name the directory that holds it")
	case errors.Is(err, fs.ErrNotExist):
		if err := m.volumePoint(b, v, rest, false); err != nil {
			return err
		}
	case err != nil:
		return unusable(err, at)
	}
	dir, err := root.OpenRoot(rest)
	if err != nil {
		return unusable(err, at)
	}
	defer dir.Close()
	left := &space{dir: m.volumeDir(id, v.name), spare: m.spare}
	_, err = tartree.Extract(ctx, dir, r, tartree.ExtractOptions{
		Limits: m.limits, UID: b.rec.agent(), GID: b.rec.agent(),
		Check: func(name string) error { return b.hidden(v, path.Join(v.dest, rest, name)) },
		Room:  left.take,
	})
	return err
}

// GetFiles writes what is at path as a tar archive. As with docker cp, its
// entries begin with path's last element; with a path that ends in "/." they are
// relative to that directory. Symbolic links stay links; sockets, FIFOs and what
// is mounted below path (the cache in the home) are left out.
func (m *Manager) GetFiles(ctx context.Context, id, at string, w io.Writer) error {
	contents := strings.HasSuffix(at, "/.")
	b, v, rest, err := m.useFiles(id, at)
	if err != nil {
		return err
	}
	defer b.files.RUnlock()
	root, err := os.OpenRoot(m.volumeDir(id, v.name))
	if err != nil {
		return fmt.Errorf("open a volume: %w", err)
	}
	defer root.Close()
	as := path.Base(path.Join(v.dest, rest))
	if contents {
		as = ""
		if st, err := root.Stat(rest); err != nil {
			return unusable(err, at)
		} else if !st.IsDir() {
			return errdefs.New(errdefs.Invalid, "%q in the box is not a directory", clip(at))
		}
	}
	return tartree.Write(ctx, root, rest, w, tartree.WriteOptions{
		Limits: m.limits, As: as, UID: oci.AgentID, GID: oci.AgentID, User: "agent",
	})
}

const (
	// spareBytes is the free space under which no more files are taken. What root
	// writes may use the part of a file system that is kept for root, which the
	// ledger and the records of processes need when tenants have filled the rest.
	spareBytes = 32 << 20
	// spaceEvery is after how many bytes the free space is looked at again.
	spaceEvery = 8 << 20
)

// space takes files as long as there is space for them.
type space struct {
	dir   string
	spare uint64
	next  int64 // bytes until the next look
}

func (s *space) take(bytes int64) error {
	if s.next -= bytes; s.next > 0 {
		return nil
	}
	s.next = spaceEvery
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err == nil && st.Bavail*uint64(st.Bsize) < s.spare {
		return errdefs.New(errdefs.Exhausted, "the disk is as good as full: less than %d bytes are free for files", s.spare).
			WithNext("remove files in boxes, or ask the operator for space")
	}
	return nil
}

func unusable(err error, at string) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.Wrap(err, errdefs.NotFound, "%q does not exist in the box", clip(at))
	}
	return errdefs.Wrap(err, errdefs.Invalid, "%q in the box cannot be used: it leads out of its volume or through something that is not a directory", clip(at))
}

// useFiles finds the volume of a path in a box and keeps the box from being
// removed until files is unlocked.
func (m *Manager) useFiles(id, at string) (*box, volume, string, error) {
	if !path.IsAbs(at) || strings.ContainsRune(at, 0) || len(at) > 4096 {
		return nil, volume{}, "", errdefs.New(errdefs.Invalid, "the path %q must be absolute, as seen inside the box", clip(at))
	}
	for part := range strings.SplitSeq(at, "/") {
		if part == ".." {
			return nil, volume{}, "", errdefs.New(errdefs.Invalid, "the path %q holds '..'", clip(at))
		}
	}
	v, rest, ok := volumeOf(path.Clean(at))
	if !ok {
		return nil, volume{}, "", errdefs.New(errdefs.Invalid, "%q does not lie in a volume of the box", clip(at)).
			WithNext("use a path below %s or %s", oci.Workspace, oci.Home)
	}
	b, err := m.use(id)
	if err != nil {
		return nil, volume{}, "", err
	}
	defer b.mu.Unlock()
	if err := b.hidden(v, path.Clean(at)); err != nil {
		return nil, volume{}, "", err
	}
	b.files.RLock()
	return b, v, rest, nil
}

// hidden refuses a path of a volume that is seen through another mount inside
// the box, so that what was put there would not be seen.
func (b *box) hidden(v volume, at string) error {
	for _, mt := range b.rec.Spec.Mounts {
		if _, ok := below(at, mt.Dest); ok {
			return errdefs.New(errdefs.Invalid, "%q lies in a directory of the host that is mounted in the box", clip(at)).
				WithNext("change it on the host")
		}
	}
	if rest, ok := below(at, oci.Cache); ok && v.dest != oci.Cache && rest != "." {
		return errdefs.New(errdefs.Invalid, "%q lies in the cache, which is a volume of its own", clip(at)).
			WithNext("put it there with the path %s", oci.Cache)
	}
	return nil
}
