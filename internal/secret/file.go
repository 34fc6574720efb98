package secret

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// MaxFile bounds what [ReadFile0600] reads: secrets are short.
const MaxFile = 64 << 10

// WriteFile0600 puts data at path so that after a crash either the old or the
// new content is there, never a part: a new file of mode 0600 in the same
// directory, fsync, rename, fsync of the directory. What is at path must be a
// regular file or nothing; a symbolic link is refused (conflict) and not
// followed.
func WriteFile0600(path string, data []byte) error { return write(path, data, true) }

// CreateFile0600 is [WriteFile0600] for a file that must not exist yet: if
// anything is at path it is left as it is and the error is conflict.
func CreateFile0600(path string, data []byte) error { return write(path, data, false) }

func write(path string, data []byte, replace bool) (err error) {
	fail := func(err error, doing string) error {
		return errdefs.Wrap(err, fileCode(err), "%s: %s failed: %s", path, doing, cause(err))
	}
	// Everything happens relative to one open directory, so that nothing moves
	// under us between the steps.
	dir, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return fail(err, "opening its directory")
	}
	defer dir.Close()
	name := filepath.Base(path)
	if err := replaceable(dir, path, name, replace); err != nil {
		return err
	}

	var random [8]byte
	rand.Read(random[:])
	tmp := "." + name + "." + hex.EncodeToString(random[:]) + ".tmp"
	f, err := dir.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fail(err, "creating a new file beside it")
	}
	defer func() {
		if err != nil {
			_ = dir.Remove(tmp)
		}
	}()
	// The umask may have taken bits away; 0600 is what the reader insists on.
	err = f.Chmod(0o600)
	if err == nil {
		_, err = f.Write(data)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fail(err, "writing")
	}
	if replace {
		err = dir.Rename(tmp, name)
	} else if err = dir.Link(tmp, name); err == nil { // link, unlike rename, never replaces
		err = dir.Remove(tmp)
	}
	if errors.Is(err, fs.ErrExist) {
		return exists(path)
	}
	if err != nil {
		return fail(err, "putting it in place")
	}
	d, err := dir.Open(".")
	if err != nil {
		return fail(err, "opening its directory")
	}
	defer d.Close()
	if err = d.Sync(); err != nil {
		return fail(err, "making its directory durable")
	}
	return nil
}

func replaceable(dir *os.Root, path, name string, replace bool) error {
	st, err := dir.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return errdefs.Wrap(err, fileCode(err), "%s: looking at it failed: %s", path, cause(err))
	case !st.Mode().IsRegular():
		return notRegular(path, st.Mode())
	case !replace:
		return exists(path)
	}
	return nil
}

// ReadFile0600 reads a secret. It refuses (denied) a file that is not regular,
// that anybody but its owner may read or write, or that belongs to another user
// than this one or root; a missing one is not_found, one over [MaxFile] invalid.
func ReadFile0600(path string) ([]byte, error) {
	// O_NONBLOCK: opening a fifo that somebody put there must not hang.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		if errors.Is(err, syscall.ELOOP) {
			return nil, notRegular(path, fs.ModeSymlink)
		}
		return nil, errdefs.Wrap(err, fileCode(err), "%s: opening it failed: %s", path, cause(err))
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, errdefs.Wrap(err, fileCode(err), "%s: looking at it failed: %s", path, cause(err))
	}
	if !st.Mode().IsRegular() {
		return nil, notRegular(path, st.Mode())
	}
	if wide := st.Mode().Perm() & 0o077; wide != 0 {
		return nil, errdefs.New(errdefs.Denied, "%s holds a secret and has mode %04o, so others on this machine may have read or changed it", path, st.Mode().Perm()).
			WithNext("replace the secret if others use this machine, else run: chmod 600 %s", path)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
		return nil, errdefs.New(errdefs.Denied, "%s holds a secret and belongs to user %d, not to the user of this program (%d)", path, sys.Uid, os.Geteuid()).
			WithNext("run this program as the owner of the file, or give the file to its user with chown")
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxFile+1))
	if err != nil {
		return nil, errdefs.Wrap(err, fileCode(err), "%s: reading it failed: %s", path, cause(err))
	}
	if len(data) > MaxFile {
		return nil, errdefs.New(errdefs.Invalid, "%s is larger than %d bytes, so it holds no secret of ours", path, MaxFile)
	}
	return data, nil
}

func notRegular(path string, mode fs.FileMode) error {
	what := "not a regular file"
	if mode&fs.ModeSymlink != 0 {
		what = "a symbolic link"
	}
	code := errdefs.Conflict
	return errdefs.New(code, "%s is %s; secrets are only kept in regular files", path, what).
		WithNext("remove it or give another path")
}

func exists(path string) error {
	return errdefs.New(errdefs.Conflict, "%s exists already and is not overwritten", path).
		WithNext("move it away first if it is no longer needed")
}

func fileCode(err error) errdefs.Code {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return errdefs.NotFound
	case errors.Is(err, fs.ErrPermission):
		return errdefs.Denied
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EROFS):
		return errdefs.Unavailable
	}
	return errdefs.Internal
}

// cause is the system's own word for what went wrong, without the path and the
// system call, which the message around it names better.
func cause(err error) string {
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		return errno.Error()
	}
	return fmt.Sprint(err)
}
