package relayclient

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
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
func newScratch(log *slog.Logger) (*scratch, error) {
	old, err := filepath.Glob(filepath.Join(os.TempDir(), scratchPrefix+"*"))
	if err != nil {
		return nil, err
	}
	for _, dir := range old {
		s, err := lockScratch(dir)
		if err == nil {
			err = s.remove()
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

// remove removes the directory and gives the lock back.
func (s *scratch) remove() error {
	return errors.Join(os.RemoveAll(s.path), s.lock.Close())
}
