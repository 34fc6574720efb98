package tartree

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// ExtractOptions says how an archive becomes files.
type ExtractOptions struct {
	Limits Limits
	// UID and GID own everything that is made.
	UID, GID int
	// Image extracts a layer of a root file system over the layers below it, in a
	// directory nobody else uses: an entry replaces whatever is there, whiteouts
	// of the OCI image specification delete, device nodes and FIFOs are left out
	// instead of refused, and absolute symbolic links are followed as inside a
	// container.
	Image bool
	// Perm returns the permission bits of an entry; nil is those of the archive.
	// Set-user-id, set-group-id and sticky bits are dropped in any case.
	Perm func(*tar.Header) fs.FileMode
	// Check may refuse an entry by its cleaned name, relative to root; nil takes
	// all.
	Check func(name string) error
	// Room is asked before about so many bytes more are taken of the disk, and may
	// refuse; nil never does. An archive can be far smaller than its files, where
	// these have holes.
	Room func(bytes int64) error
}

// Stats says what an archive held.
type Stats struct {
	Bytes   int64 // content of files
	Entries int
}

// Extract reads an archive to its end and makes its entries below root. Missing
// parents are made with mode 0755. An existing file or link is replaced, never
// written through; an existing directory is kept and gets the archive's mode; a
// directory is never replaced by something else. Errors: invalid for an archive
// that is damaged, cut off (without an end marker, but for an image's layer) or
// asks for what is not allowed, exhausted for limits and full disks. What was made
// before an error stays.
func Extract(ctx context.Context, root *os.Root, r io.Reader, opt ExtractOptions) (Stats, error) {
	x := &extraction{root: root, opt: opt, budget: budget{limits: opt.Limits.filled(), room: opt.Room}}
	if opt.Image {
		x.made = map[string]bool{}
	}
	var in entries = NewReader(r)
	if opt.Image {
		in = tar.NewReader(r) // some tools write no end marker, and a digest says whether a layer is whole
	}
	err := x.run(ctx, in)
	return Stats{Bytes: x.budget.bytes, Entries: x.budget.entries}, err
}

// entries is what a tar.Reader and a Reader have in common.
type entries interface {
	io.Reader
	Next() (*tar.Header, error)
}

func (x *extraction) run(ctx context.Context, tr entries) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return damaged(err)
		}
		if err := x.budget.entry(); err != nil {
			return err
		}
		if err := x.entry(ctx, h, tr); err != nil {
			return explain(err, "make", h.Name)
		}
	}
	// Hard links whose target came later in the archive.
	for _, l := range x.links {
		if err := x.link(l[0], l[1]); err != nil {
			return explain(err, "link", l[1])
		}
	}
	for _, d := range x.dirs {
		// Times are decoration; the directory may have been removed meanwhile.
		x.root.Chtimes(d.name, d.time, d.time)
	}
	return nil
}

func damaged(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, tar.ErrInsecurePath) {
		return errdefs.Wrap(err, errdefs.Invalid, "the archive is damaged, cut off, or not a tar archive")
	}
	if _, ok := errors.AsType[*errdefs.Error](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return errdefs.Wrap(err, errdefs.Invalid, "the archive cannot be read: %s", clip(err.Error()))
}

type dirTime struct {
	name string
	time time.Time
}

type extraction struct {
	root   *os.Root
	opt    ExtractOptions
	budget budget
	dirs   []dirTime       // at most one per entry
	links  [][2]string     // target, name
	made   map[string]bool // of an image: this layer's paths and their parents
}

func (x *extraction) perm(h *tar.Header) fs.FileMode {
	if x.opt.Perm != nil {
		return x.opt.Perm(h) & 0o777
	}
	return fs.FileMode(h.Mode) & 0o777
}

func (x *extraction) entry(ctx context.Context, h *tar.Header, content io.Reader) error {
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	if x.opt.Check != nil {
		if err := x.opt.Check(name); err != nil {
			return err
		}
	}
	if name, err = x.parents(name); err != nil {
		return err
	}
	if x.opt.Image {
		if done, err := x.whiteout(name); done || err != nil {
			return err
		}
		for p := name; p != "." && !x.made[p]; p = path.Dir(p) {
			x.made[p] = true
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return x.dir(name, h)
	case tar.TypeReg, tar.TypeGNUSparse: // the reader makes one of these of the old TypeRegA
		return x.file(ctx, name, h, content)
	case tar.TypeSymlink:
		return x.symlink(name, h)
	case tar.TypeLink:
		target, err := cleanName(h.Linkname)
		if err != nil {
			return err
		}
		err = x.link(target, name)
		if errors.Is(err, fs.ErrNotExist) {
			x.links = append(x.links, [2]string{target, name})
			return nil
		}
		return err
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		if x.opt.Image {
			return nil
		}
		return errdefs.New(errdefs.Invalid, "the archive holds the device or FIFO %q", clip(h.Name)).
			WithNext("leave it out: only directories, files and links are taken")
	case tar.TypeXGlobalHeader:
		return nil
	}
	if x.opt.Image {
		return nil
	}
	return errdefs.New(errdefs.Invalid, "the entry %q of the archive is of the unknown kind %q", clip(h.Name), h.Typeflag)
}

// parents makes the directories above name and returns the name to use.
func (x *extraction) parents(name string) (string, error) {
	dir := path.Dir(name)
	if dir == "." {
		return name, nil
	}
	err := x.mkdirAll(dir)
	if err != nil && x.opt.Image && escapes(err) {
		if dir, err = x.inside(dir); err == nil {
			name = path.Join(dir, path.Base(name))
			err = x.mkdirAll(dir)
		}
	}
	return name, err
}

func (x *extraction) mkdirAll(dir string) error {
	if st, err := x.root.Stat(dir); err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
		}
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if up := path.Dir(dir); up != "." {
		if err := x.mkdirAll(up); err != nil {
			return err
		}
	}
	if err := x.budget.entry(); err != nil {
		return err
	}
	if err := x.root.Mkdir(dir, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			// A symbolic link to nothing, or made by somebody else just now.
			if st, err := x.root.Stat(dir); err == nil && st.IsDir() {
				return nil
			}
			return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
		}
		return err
	}
	if err := x.root.Chmod(dir, 0o755); err != nil { // the umask
		return err
	}
	return x.root.Lchown(dir, x.opt.UID, x.opt.GID)
}

// inside resolves a directory the way a process inside the image would: an
// absolute symbolic link starts at the root again. Only for directories that
// nobody else changes.
func (x *extraction) inside(dir string) (string, error) {
	todo := strings.Split(dir, "/")
	done := "."
	for hops := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			done = path.Dir(done)
			continue
		}
		next := path.Join(done, part)
		st, err := x.root.Lstat(next)
		if err != nil || st.Mode()&fs.ModeSymlink == 0 {
			done = next // what is missing will be made
			continue
		}
		if hops++; hops > 40 { // the kernel's own limit, MAXSYMLINKS
			return "", &fs.PathError{Op: "resolve", Path: dir, Err: unix.ELOOP}
		}
		target, err := x.root.Readlink(next)
		if err != nil {
			return "", err
		}
		if path.IsAbs(target) {
			done = "."
		}
		todo = append(strings.Split(target, "/"), todo...)
		if len(todo) > maxName {
			return "", &fs.PathError{Op: "resolve", Path: dir, Err: unix.ELOOP}
		}
	}
	return done, nil
}

func (x *extraction) dir(name string, h *tar.Header) error {
	if name == "." && !x.opt.Image {
		return nil // the directory it is extracted into keeps its mode
	}
	if name != "." {
		if err := x.mkdir(name, h); err != nil {
			return err
		}
	}
	if err := x.root.Chmod(name, x.perm(h)); err != nil {
		return err
	}
	if err := x.root.Chown(name, x.opt.UID, x.opt.GID); err != nil {
		return err
	}
	x.dirs = append(x.dirs, dirTime{name, h.ModTime})
	return nil
}

func (x *extraction) mkdir(name string, h *tar.Header) error {
	err := x.root.Mkdir(name, 0o755)
	if !errors.Is(err, fs.ErrExist) {
		return err
	}
	if x.opt.Image {
		if st, err := x.root.Lstat(name); err != nil || st.IsDir() {
			return err
		}
		if err := x.root.Remove(name); err != nil {
			return err
		}
		return x.root.Mkdir(name, 0o755)
	}
	st, err := x.root.Stat(name)
	if err == nil && !st.IsDir() {
		err = errdefs.New(errdefs.Invalid, "%q exists and is not a directory", clip(h.Name))
	}
	return err
}

// clear makes room for a file or link at name. A directory is removed only by
// the layer of an image.
func (x *extraction) clear(name string) error {
	if name == "." {
		return errdefs.New(errdefs.Invalid, "the archive would replace its own directory by a file")
	}
	st, err := x.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st.IsDir() {
		if x.opt.Image {
			return x.root.RemoveAll(name)
		}
		return errdefs.New(errdefs.Invalid, "%q exists and is a directory; a directory is not replaced by a file", clip(name)).
			WithNext("remove it first")
	}
	return x.root.Remove(name)
}

func (x *extraction) file(ctx context.Context, name string, h *tar.Header, content io.Reader) error {
	if err := x.clear(name); err != nil {
		return err
	}
	f, err := x.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = x.fill(ctx, f, h, content)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		x.root.Remove(name) // half a file is worse than none
		return err
	}
	// Times are decoration.
	x.root.Chtimes(name, h.ModTime, h.ModTime)
	return nil
}

func (x *extraction) fill(ctx context.Context, f *os.File, h *tar.Header, content io.Reader) error {
	if err := x.budget.copy(ctx, f, content, h.Size); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return damaged(io.ErrUnexpectedEOF)
		}
		return err
	}
	if err := f.Chown(x.opt.UID, x.opt.GID); err != nil {
		return err
	}
	return f.Chmod(x.perm(h))
}

func (x *extraction) symlink(name string, h *tar.Header) error {
	if h.Linkname == "" || len(h.Linkname) > maxName {
		return errdefs.New(errdefs.Invalid, "the symbolic link %q has no usable target", clip(h.Name))
	}
	if err := x.clear(name); err != nil {
		return err
	}
	// Where it points is not looked at: it is followed only by those who are
	// confined to the box, or by os.Root, which does not leave the volume.
	if err := x.root.Symlink(h.Linkname, name); err != nil {
		return err
	}
	return x.root.Lchown(name, x.opt.UID, x.opt.GID)
}

func (x *extraction) link(target, name string) error {
	if target == name {
		return errdefs.New(errdefs.Invalid, "%q is a hard link to itself", clip(name))
	}
	if x.opt.Image {
		dir, err := x.inside(path.Dir(target))
		if err != nil {
			return err
		}
		target = path.Join(dir, path.Base(target))
	}
	st, err := x.root.Lstat(target)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() && st.Mode()&fs.ModeSymlink == 0 {
		return errdefs.New(errdefs.Invalid, "%q is a hard link to something that is not a file", clip(name))
	}
	if err := x.clear(name); err != nil {
		return err
	}
	return x.root.Link(target, name)
}
