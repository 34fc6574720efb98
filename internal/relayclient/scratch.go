package relayclient

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// scratchPrefix begins the names of private directories.
const scratchPrefix = "stockade-relay-"

// scratch is the private directory of one client, mode 0700. It is locked by flock(2)
// for as long as the client lives, so that the next one knows which are nobody's: the
// files of runs hold tokens.
type scratch struct {
	path string
	lock *os.File
}

// newScratch removes what killed clients of this user left, and makes a directory.
// cgroupParent is Config.CgroupParent.
func newScratch(cgroupParent string, log *slog.Logger) (*scratch, error) {
	old, err := filepath.Glob(filepath.Join(os.TempDir(), scratchPrefix+"*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range old {
		s, err := lockScratch(dir)
		if err == nil {
			err = s.clear(cgroupParent)
		}
		if err != nil { // most likely it is in use, or another user's
			log.Debug("a private directory is left alone", "error", err)
		}
	}
	for {
		dir, err := os.MkdirTemp("", scratchPrefix)
		if err != nil {
			return nil, err
		}
		s, err := lockScratch(dir)
		switch {
		case err == nil:
			return s, nil
		case errors.Is(err, unix.EWOULDBLOCK), errors.Is(err, fs.ErrNotExist):
			// Another client has just taken it for one that was left.
		default:
			return nil, errors.Join(err, os.Remove(dir))
		}
	}
}

// lockScratch takes a directory that is this user's and nobody has: EWOULDBLOCK when
// somebody does, ErrNotExist when it is gone.
func lockScratch(dir string) (_ *scratch, err error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	if int(st.Uid) != os.Geteuid() {
		return nil, fs.ErrPermission
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, err
	}
	if _, err := os.Lstat(dir); err != nil { // removed by who had the lock before
		return nil, err
	}
	return &scratch{dir, f}, nil
}

// group is the control group of the client that has the directory: named like it, for
// a process id may be another's by the time that the client is gone. "" without a parent.
func (s *scratch) group(parent string) string {
	if parent == "" {
		return ""
	}
	return path.Join(parent, strings.TrimPrefix(filepath.Base(s.path), scratchPrefix))
}

// clear removes what a client made on this machine: first the control group, then the
// directory, by which the next client would find what is left of both. With processes in
// the group it does neither.
func (s *scratch) clear(cgroupParent string) error {
	if group := s.group(cgroupParent); group != "" {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if err := cgroup.New("", group).Remove(ctx); errdefs.Is(err, errdefs.Conflict) {
			return errors.Join(err, s.lock.Close())
		} // else there are no control groups
		cgroup.New("", cgroupParent).RemoveUnused() // other clients may be in it
	}
	return s.remove()
}

// remove removes the directory and gives the lock back.
func (s *scratch) remove() error {
	return errors.Join(os.RemoveAll(s.path), s.lock.Close())
}
