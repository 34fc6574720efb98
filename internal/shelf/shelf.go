// Package shelf keeps directories that are made once, appear whole under a
// digest, are read-only from then on, and survive a power cut.
//
//	DIR/NAME/            on the shelf
//	DIR/.NAME.…          being made, or being removed
//
// The order of a publication is: make beside it, seal (no write bits), write
// through (syncfs(2)), rename, fsync of DIR. A crash before the rename leaves
// something that is never looked at and that the next [Open] sweeps; after the
// rename the directory is whole. What stands under a name and is not valid (a
// crash of another program that seals after its rename, a damaged disk) is moved
// aside and replaced. Several processes may share a shelf: who is making
// something holds a flock(2) on it, and publications take turns on one of DIR.
package shelf

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/turns"
)

// Options says how a shelf is opened.
type Options struct {
	// ReadOnly makes no directory and sweeps nothing.
	ReadOnly bool
	// Step, if not nil, is told each completed step of a publication or removal
	// and can stop it there: the seam for tests of crashes. An error is the
	// operation's error.
	Step func(step string) error
}

// Shelf is one directory. Its methods are safe for concurrent use, also by
// several processes.
type Shelf struct {
	dir  string
	step func(string) error

	turns turns.Turns // of the work on one name within this process
}

// Open opens a shelf and removes what crashed attempts left, but nothing another
// process is working on.
func Open(dir string, o Options) (*Shelf, error) {
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, Refusal(err, "the directory cannot be found")
	}
	s := &Shelf{dir: abs, step: o.Step}
	if s.step == nil {
		s.step = func(string) error { return nil }
	}
	if o.ReadOnly {
		return s, nil
	}
	// Others may pass through to a directory they know, but not list them.
	if err := os.MkdirAll(abs, 0o711); err != nil {
		return nil, Refusal(err, "the directory cannot be made")
	}
	if err := s.sweep(); err != nil {
		return nil, err
	}
	return s, nil
}

// Path is where a name is or would be.
func (s *Shelf) Path(name string) string { return filepath.Join(s.dir, name) }

// Names lists what stands on the shelf, sorted, valid or not.
func (s *Shelf) Names() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, Refusal(err, "the directory cannot be listed")
	}
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// Turn waits until nobody else of this process works on the name. The returned
// function ends the turn. The error is the cause of ctx.
func (s *Shelf) Turn(ctx context.Context, name string) (done func(), err error) {
	return s.turns.Take(ctx, name)
}

// LastUsed is when a name was published or last touched.
func (s *Shelf) LastUsed(name string) time.Time {
	info, err := os.Lstat(s.Path(name))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// Touch notes that a name is used now. It is a help for whoever collects what is
// unused; that it cannot be noted stops nobody.
func (s *Shelf) Touch(name string) {
	now := time.Now()
	_ = os.Chtimes(s.Path(name), now, now)
}

// Remove takes a name off the shelf: first aside, so that nothing partial is seen,
// then away. A missing name is no error.
func (s *Shelf) Remove(name string) error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	return s.remove(name)
}

// remove needs the lock.
func (s *Shelf) remove(name string) error {
	path := s.Path(name)
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && !info.IsDir() {
		err = os.Remove(path)
		if err == nil {
			return nil
		}
	}
	var aside string
	if err == nil {
		aside, err = os.MkdirTemp(s.dir, "."+name+".removed-")
	}
	if err == nil {
		err = unix.Rename(path, aside) // over the empty directory; os.Rename refuses that
	}
	if err != nil {
		return Refusal(err, "it cannot be removed")
	}
	if err := s.step("aside"); err != nil {
		return err
	}
	if err := syncPath(s.dir); err != nil {
		return Refusal(err, "its removal cannot be written to the disk")
	}
	if err := removeAll(aside); err != nil {
		return Refusal(err, "it cannot be removed")
	}
	return s.step("removed")
}

// Collect removes what keep does not want and was neither published nor touched since
// before. It must not run beside another process that uses the shelf: what that one
// uses is not known here. After an error, removed still says what is gone.
func (s *Shelf) Collect(ctx context.Context, keep func(name string) bool, before time.Time) (removed []string, bytes int64, err error) {
	names, err := s.Names()
	if err != nil {
		return nil, 0, err
	}
	for _, name := range names {
		if keep(name) {
			continue
		}
		n, err := s.collect(ctx, name, before)
		if err != nil {
			return removed, bytes, err
		}
		if n >= 0 {
			removed, bytes = append(removed, name), bytes+n
		}
	}
	return removed, bytes, nil
}

// collect returns the bytes it freed, -1 for none because it was used since.
func (s *Shelf) collect(ctx context.Context, name string, before time.Time) (int64, error) {
	done, err := s.Turn(ctx, name)
	if err != nil {
		return -1, err
	}
	defer done()
	if !s.LastUsed(name).Before(before) {
		return -1, nil
	}
	n, _ := Usage(s.Path(name))
	return n, s.Remove(name)
}

// lock takes the turn of this process among all that publish or remove.
func (s *Shelf) lock() (unlock func(), err error) {
	d, err := os.Open(s.dir)
	if err != nil {
		return nil, Refusal(err, "the directory cannot be opened")
	}
	if err := flock(d, unix.LOCK_EX); err != nil {
		d.Close()
		return nil, Refusal(err, "the directory cannot be locked")
	}
	return func() { d.Close() }, nil // closing gives the lock back, flock(2)
}

// sweep removes what nobody works on any more.
func (s *Shelf) sweep() error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return Refusal(err, "the directory cannot be listed")
	}
	for _, e := range entries {
		// ".NAME.…": ours and the Python runtime's.
		if name := e.Name(); !strings.HasPrefix(name, ".") || strings.Count(name, ".") < 2 || !e.IsDir() {
			continue
		}
		path := filepath.Join(s.dir, e.Name())
		d, err := os.Open(path)
		if err != nil {
			continue
		}
		if flock(d, unix.LOCK_EX|unix.LOCK_NB) == nil {
			err = removeAll(path)
		}
		if err = errors.Join(err, d.Close()); err != nil {
			return Refusal(err, "what a crashed attempt left cannot be removed")
		}
	}
	return nil
}

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if err != unix.EINTR {
			return err
		}
	}
}

// syncPath is fsync(2) of a file or a directory.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// removeAll removes a tree that may be read-only.
func removeAll(path string) error {
	err := os.RemoveAll(path)
	if err == nil || !errors.Is(err, fs.ErrPermission) {
		return err
	}
	_ = filepath.WalkDir(path, func(p string, d fs.DirEntry, _ error) error {
		if d != nil && d.IsDir() {
			_ = os.Chmod(p, 0o700) // before it is listed, fs.WalkDirFunc
		}
		return nil
	})
	return os.RemoveAll(path)
}

// Refusal turns a failure of the file system into an error for people: a full
// disk or quota is exhausted, anything else internal. The cause is kept.
func Refusal(err error, format string, args ...any) *errdefs.Error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.Wrap(err, errdefs.Exhausted, format+": no space left on the disk", args...).
			WithNext("free some space, for example with stockade artifact gc")
	}
	reason := err
	if p, ok := errors.AsType[*fs.PathError](err); ok {
		reason = p.Err
	}
	if l, ok := errors.AsType[*os.LinkError](err); ok {
		reason = l.Err
	}
	return errdefs.Wrap(err, errdefs.Internal, format+": %v", append(slices.Clone(args), reason)...)
}

// Usage counts the bytes and the number of the regular files of a tree. What
// cannot be read counts nothing.
func Usage(dir string) (bytes int64, files int) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if info, err := d.Info(); err == nil {
				bytes, files = bytes+info.Size(), files+1
			}
		}
		return nil
	})
	return bytes, files
}
