package transfer

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// folder is a directory that is held open. Every name is one component, made or
// checked by this package; no symbolic link is followed.
type folder struct{ fd int }

// inode is which file a name means.
type inode struct {
	dev, ino uint64
	size     int64
	regular  bool
}

func (i inode) is(o inode) bool { return i.dev == o.dev && i.ino == o.ino }

func openFolder(path string) (folder, error) {
	return folder{unix.AT_FDCWD}.open(path, unix.O_DIRECTORY)
}

func (f folder) open(name string, flags int) (folder, error) {
	for {
		fd, err := unix.Openat(f.fd, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != unix.EINTR {
			return folder{fd}, err
		}
	}
}

func (f folder) close() { unix.Close(f.fd) }

// sub opens a directory inside, and makes it first if it must be.
func (f folder) sub(name string, create bool) (folder, error) {
	if create {
		if err := unix.Mkdirat(f.fd, name, 0o700); err != nil && err != unix.EEXIST {
			return folder{}, err
		}
	}
	dir, err := f.open(name, unix.O_DIRECTORY)
	if err == unix.ENOTDIR || err == unix.ELOOP { // a symbolic link, or a file, was planted
		err = errCapability()
	}
	return dir, err
}

// create makes a file that must not exist, for writing, mode 0600.
func (f folder) create(name string) (*os.File, error) {
	for {
		fd, err := unix.Openat(f.fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err == nil {
			return os.NewFile(uintptr(fd), name), nil
		}
		if err != unix.EINTR {
			return nil, err
		}
	}
}

// read opens a regular file for reading. What is there and is no regular file is
// errCapability.
func (f folder) read(name string) (*os.File, inode, error) {
	at, err := f.open(name, unix.O_RDONLY|unix.O_NONBLOCK) // a FIFO does not hold us up
	if err == unix.ELOOP || err == unix.ENXIO {
		return nil, inode{}, errCapability()
	}
	if err != nil {
		return nil, inode{}, err
	}
	file := os.NewFile(uintptr(at.fd), name)
	id, err := identify(file)
	if err == nil && !id.regular {
		err = errCapability()
	}
	if err != nil {
		file.Close()
		return nil, inode{}, err
	}
	return file, id, nil
}

// identify says which inode an open file is.
func identify(f *os.File) (inode, error) {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	return inodeOf(&st), err
}

func (f folder) stat(name string) (inode, error) {
	var st unix.Stat_t
	err := unix.Fstatat(f.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return inodeOf(&st), err
}

func inodeOf(st *unix.Stat_t) inode {
	return inode{st.Dev, st.Ino, st.Size, st.Mode&unix.S_IFMT == unix.S_IFREG}
}

// publish gives a file its name unless that is taken: EEXIST. It is renameat2(2)
// with RENAME_NOREPLACE, or link(2) where the file system has no such thing.
func (f folder) publish(from, to string) error {
	err := unix.Renameat2(f.fd, from, f.fd, to, unix.RENAME_NOREPLACE)
	if err != unix.EINVAL && err != unix.ENOSYS {
		return err
	}
	return f.relink(from, to)
}

func (f folder) relink(from, to string) error {
	if err := unix.Linkat(f.fd, from, f.fd, to, 0); err != nil {
		return err
	}
	return f.unlink(from)
}

func (f folder) rename(from, to string) error { return unix.Renameat(f.fd, from, f.fd, to) }
func (f folder) unlink(name string) error     { return unix.Unlinkat(f.fd, name, 0) }
func (f folder) rmdir(name string) error      { return unix.Unlinkat(f.fd, name, unix.AT_REMOVEDIR) }

// each calls do with every name, some hundred of them in memory at a time.
func (f folder) each(do func(name string) error) error {
	at, err := f.open(".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	dir := os.NewFile(uintptr(at.fd), ".")
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(256)
		for _, name := range names {
			if err := do(name); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// diskError is what the caller is told of a failed step on disk.
func diskError(err error, what string) error {
	if _, ok := errors.AsType[*errdefs.Error](err); ok {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.Wrap(err, errdefs.Exhausted, "the disk of the transfer directory is full; %s", what).
			WithNext("free space below the runtime's data directory")
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the transfer directory cannot be used; %s", what).
		WithNext("see the runtime's log")
}
