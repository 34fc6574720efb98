package host

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

const lockFile = "lock"

// ExitBusy is the exit code of a host program that found another one in its
// directory (EX_TEMPFAIL of sysexits.h).
const ExitBusy = 75

// A killed host program's lock may outlive it for a moment, in a child that was
// forked and had not executed the shim or the runtime yet.
const (
	lockPatience = 2 * time.Second
	lockPause    = 5 * time.Millisecond
)

// lockDir takes the host's directory for this process, until the file is closed
// or the process ends. It is an open-file-description lock (fcntl_locking(2))
// because [Locked] can ask for one without taking it.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, diskError(err, "open its lock")
	}
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	for end := time.Now().Add(lockPatience); ; time.Sleep(lockPause) {
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk)
		if err == nil || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		f.Close()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return nil, errdefs.New(errdefs.Conflict, "another host program works in %s", dir).
				WithNext("use that one, or stop it first")
		}
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the host's directory cannot be locked: %v", err)
	}
	return f, nil
}

// Locked reports whether a host program has the directory.
func Locked(dir string) (bool, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR, 0)
	if notExist(err) {
		return false, nil
	}
	if err != nil {
		return false, errdefs.Wrap(err, errdefs.Unavailable, "the host's lock cannot be opened: %v", err)
	}
	defer f.Close()
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return false, errdefs.Wrap(err, errdefs.Unavailable, "the host's lock cannot be asked for: %v", err)
	}
	return lk.Type != unix.F_UNLCK, nil
}
