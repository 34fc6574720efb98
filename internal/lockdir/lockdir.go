// Package lockdir takes a directory for one program at a time.
package lockdir

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

// Words say which directory it is. All but Private stand in the errors.
type Words struct {
	Program string // who has it: "server"
	Kind    string // "state directory"
	Flag    string // what names another one: "--state-dir"
	// Lock is the file that is locked, below the directory. Where it stands is what
	// others may not write to when Private is set.
	Lock    string
	Private bool
}

// Dir is a directory that this process has.
type Dir struct {
	Path string // absolute
	lock *os.File
}

// Take makes the directory, down to where the lock stands, where it is missing (mode
// 0700), and locks it for this process until Close. The lock is flock(2): the kernel
// releases it when the process dies, however it does. Errors: Conflict, which names
// the process that has it; Denied, where it is to be private and is not; Invalid for a
// path that is none; Unavailable.
func Take(path string, w Words) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the %s %q is not a path", w.Kind, path)
	}
	file := filepath.Join(abs, filepath.FromSlash(w.Lock))
	own := filepath.Dir(file)
	if err := os.MkdirAll(own, 0o700); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the %s %s cannot be made: %v", w.Kind, abs, reason(err)).
			WithNext("choose another with %s, or run as a user who may write there", w.Flag)
	}
	if w.Private {
		info, err := os.Stat(own)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "the %s %s cannot be read: %v", w.Kind, own, reason(err))
		}
		if perm := info.Mode().Perm(); perm&0o022 != 0 {
			return nil, errdefs.New(errdefs.Denied, "the %s %s may be written by others (mode %#o)", w.Kind, own, perm).
				WithNext("chmod go-w %s", own)
		}
	}
	lock, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the lock file of the %s %s cannot be opened: %v", w.Kind, abs, reason(err)).
			WithNext("run as the user who owns it, or choose another directory with %s", w.Flag)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer lock.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "the %s %s cannot be locked: %v", w.Kind, abs, err)
		}
		holder := make([]byte, 32)
		n, _ := lock.ReadAt(holder, 0)
		return nil, errdefs.New(errdefs.Conflict, "another %s (process %s) uses the %s %s",
			w.Program, strings.TrimSpace(string(holder[:n])), w.Kind, abs).WithNext("stop it, or choose another directory with %s", w.Flag)
	}
	if err := lock.Truncate(0); err == nil {
		_, _ = lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0) // only for the message above
	}
	return &Dir{Path: abs, lock: lock}, nil
}

// File is the path of a file in the directory.
func (d *Dir) File(name string) string { return filepath.Join(d.Path, filepath.FromSlash(name)) }

// Close gives the directory back.
func (d *Dir) Close() { d.lock.Close() }

// reason is the system's reason without the path, which the message names already.
func reason(err error) error {
	if pe, ok := errors.AsType[*os.PathError](err); ok {
		return pe.Err
	}
	return err
}
