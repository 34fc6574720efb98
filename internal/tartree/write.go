package tartree

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// WriteOptions says how files become an archive.
type WriteOptions struct {
	Limits Limits
	// As is the name of the first entry; everything below it follows with names
	// that start with it. "" leaves the first entry out if it is a directory, and
	// names are relative to it.
	As string
	// UID, GID and User stand as the owner of every entry.
	UID, GID int
	User     string
}

// Write writes name, a path below root, and everything below it as an archive.
// Symbolic links stay links; sockets, FIFOs and devices are left out; hard links
// become separate files. A file that grows meanwhile is cut at the size it had;
// one that shrinks is a conflict. Nothing is written when name does not exist.
func Write(ctx context.Context, root *os.Root, name string, w io.Writer, opt WriteOptions) error {
	tw := tar.NewWriter(w)
	a := &archive{root: root, w: tw, opt: opt, budget: budget{limits: opt.Limits.filled()}}
	if err := a.entry(ctx, name, opt.As, 0); err != nil {
		return explain(err, "read", name)
	}
	return tw.Close()
}

type archive struct {
	root   *os.Root
	w      *tar.Writer
	opt    WriteOptions
	budget budget
}

// entry writes one path under the name as; "" writes only what is below it.
func (a *archive) entry(ctx context.Context, name, as string, depth int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if depth > maxDepth {
		return errdefs.New(errdefs.Invalid, "the tree at %q is deeper than %d directories, the limit", clip(name), maxDepth)
	}
	st, err := a.root.Lstat(name)
	if err != nil {
		if depth > 0 && errors.Is(err, fs.ErrNotExist) {
			return nil // gone since it was listed
		}
		return err
	}
	if as == "" && !st.IsDir() {
		as = path.Base(name)
	}
	switch {
	case st.Mode().IsRegular():
		return a.file(ctx, name, as, st)
	case st.Mode()&fs.ModeSymlink != 0:
		target, err := a.root.Readlink(name)
		if err != nil {
			return err
		}
		return a.header(st, as, target)
	case st.IsDir():
		return a.dir(ctx, name, as, st, depth)
	}
	return nil
}

func (a *archive) header(st fs.FileInfo, as, target string) error {
	if err := a.budget.entry(); err != nil {
		return err
	}
	h, err := tar.FileInfoHeader(st, target)
	if err != nil {
		return err
	}
	h.Name = as
	if st.IsDir() {
		h.Name += "/"
	}
	h.Mode &= 0o777
	h.Uid, h.Gid, h.Uname, h.Gname = a.opt.UID, a.opt.GID, a.opt.User, a.opt.User
	h.Format = tar.FormatPAX
	return a.w.WriteHeader(h)
}

// open opens what st describes. Between the two looks the path may have become
// something else, such as a FIFO: opening never waits, and another file than the
// one that was seen is refused.
func (a *archive) open(name string, st fs.FileInfo) (*os.File, error) {
	f, err := a.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	now, err := f.Stat()
	if err == nil && !os.SameFile(st, now) {
		err = errdefs.New(errdefs.Conflict, "%q was replaced while it was read", clip(name)).WithNext("try again")
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (a *archive) file(ctx context.Context, name, as string, st fs.FileInfo) error {
	f, err := a.open(name, st)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := a.header(st, as, ""); err != nil {
		return err
	}
	err = a.budget.copy(ctx, a.w, f, st.Size())
	if errors.Is(err, io.EOF) {
		return errdefs.New(errdefs.Conflict, "%q shrank while it was read", clip(name)).WithNext("try again")
	}
	return err
}

func (a *archive) dir(ctx context.Context, name, as string, st fs.FileInfo, depth int) error {
	if as != "" {
		if err := a.header(st, as, ""); err != nil {
			return err
		}
	}
	f, err := a.open(name, st)
	if err != nil {
		return err
	}
	defer f.Close()
	for {
		// A directory of any size is read in pieces.
		ents, err := f.ReadDir(1024)
		for _, e := range ents {
			if err := a.entry(ctx, path.Join(name, e.Name()), path.Join(as, e.Name()), depth+1); err != nil {
				return err
			}
		}
		if err == io.EOF || err == nil && len(ents) == 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
