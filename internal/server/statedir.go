package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// stateDir is the locked state directory of a running server.
type stateDir struct {
	path string
	lock *os.File
}

// openStateDir creates the directory if needed (mode 0700) and locks it for this
// process: a second server on it is a conflict that names the first. The lock is
// flock(2), which the kernel releases when the process dies.
func openStateDir(path string) (*stateDir, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the state directory %q is not a path", path)
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the state directory %s cannot be made: %v", path, errnoText(err)).
			WithNext("choose another with --state-dir, or run as a user who may write there")
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the state directory %s cannot be read: %v", path, errnoText(err))
	}
	if perm := info.Mode().Perm(); perm&0o022 != 0 {
		return nil, errdefs.New(errdefs.Denied, "the state directory %s may be written by others (mode %#o)", path, perm).
			WithNext("chmod go-w %s", path)
	}
	lock, err := os.OpenFile(filepath.Join(path, "server.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the lock file of the state directory %s cannot be opened: %v", path, errnoText(err))
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer lock.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "the state directory %s cannot be locked: %v", path, err)
		}
		holder := make([]byte, 64)
		n, _ := lock.ReadAt(holder, 0)
		return nil, errdefs.New(errdefs.Conflict, "another server (process %s) uses the state directory %s",
			strings.TrimSpace(string(holder[:n])), path).WithNext("stop it, or choose another directory with --state-dir")
	}
	if err := lock.Truncate(0); err == nil {
		_, _ = lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0) // only for the message above
	}
	return &stateDir{path: path, lock: lock}, nil
}

func (d *stateDir) file(name string) string { return filepath.Join(d.path, name) }

func (d *stateDir) close() { d.lock.Close() }

// errnoText is the system's reason without the path, which the message names already.
func errnoText(err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		return pe.Err
	}
	return err
}

// AddressFile is the name of the file, in the state directory, that holds the
// URL of the running server for commands on the same machine.
const AddressFile = "address"
