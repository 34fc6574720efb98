package pluginruntime

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// AddressFile is where a running runtime says, below its data directory, at which
// addresses it listens.
const AddressFile = "plugin-runtime/address.json"

// dataDir is the locked data directory of a running runtime.
type dataDir struct {
	path string // absolute
	lock *os.File
}

// openDataDir makes the directory and its plugin-runtime/ where they are missing,
// and locks it for this process. The lock is flock(2): the kernel releases it when
// the process dies, however it does.
func openDataDir(path string) (*dataDir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the data directory %q is not a path", path)
	}
	own := filepath.Join(abs, "plugin-runtime")
	if err := os.MkdirAll(own, 0o700); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the data directory %s cannot be made: %v", abs, reason(err)).
			WithNext("choose another with --data-dir, or run as a user who may write there")
	}
	lock, err := os.OpenFile(filepath.Join(own, ".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the lock file of the data directory %s cannot be opened: %v", abs, reason(err)).
			WithNext("run as the user who owns it, or choose another directory with --data-dir")
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer lock.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "the data directory %s cannot be locked: %v", abs, err)
		}
		holder := make([]byte, 32)
		n, _ := lock.ReadAt(holder, 0)
		return nil, errdefs.New(errdefs.Conflict, "another plugin runtime (process %s) uses the data directory %s",
			strings.TrimSpace(string(holder[:n])), abs).WithNext("stop it, or choose another directory with --data-dir")
	}
	if err := lock.Truncate(0); err == nil {
		_, _ = lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0) // only for the message above
	}
	return &dataDir{path: abs, lock: lock}, nil
}

// publish writes the addresses for commands and tests of this machine.
func (d *dataDir) publish(a Addresses) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	tmp := filepath.Join(d.path, AddressFile+".tmp")
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(d.path, AddressFile))
}

func (d *dataDir) close() {
	_ = os.Remove(filepath.Join(d.path, AddressFile))
	d.lock.Close()
}

// reason is the system's reason without the path, which the message names already.
func reason(err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		return pe.Err
	}
	return err
}
