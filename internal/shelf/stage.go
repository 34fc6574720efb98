package shelf

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Stage is a directory being made. One goroutine uses it.
type Stage struct {
	Path string // absolute, empty at first, mode 0700

	shelf *Shelf
	name  string
	held  *os.File // the directory itself, flocked: a sweep leaves it alone
}

// Stage makes a directory that will become name.
func (s *Shelf) Stage(name string) (*Stage, error) {
	// A sweep may come between making and locking; then there is another try.
	for range 10 {
		path, err := os.MkdirTemp(s.dir, "."+name+".")
		if err != nil {
			return nil, Refusal(err, "the directory cannot be made")
		}
		held, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = flock(held, unix.LOCK_EX)
		}
		if err != nil {
			return nil, Refusal(errors.Join(err, held.Close(), os.Remove(path)), "the directory cannot be locked")
		}
		mine, err := held.Stat()
		if err == nil {
			if there, err := os.Lstat(path); err == nil && os.SameFile(mine, there) {
				return &Stage{Path: path, shelf: s, name: name, held: held}, nil
			}
		}
		held.Close()
	}
	return nil, Refusal(fs.ErrExist, "the directory cannot be made")
}

// Discard removes the stage. After Publish it does nothing.
func (s *Stage) Discard() error {
	if s.held == nil {
		return nil
	}
	err := removeAll(s.Path)
	err = errors.Join(err, s.held.Close())
	s.held = nil
	if err != nil {
		return Refusal(err, "what was begun cannot be removed")
	}
	return nil
}

// Seal takes the right to write from everything in the stage, and from the stage:
// directories become 0555, files what mode says of their path below the stage and
// their present mode. Only regular files and directories may be in it.
func (s *Stage) Seal(ctx context.Context, mode func(path string, now fs.FileMode) fs.FileMode) error {
	var dirs []string
	err := filepath.WalkDir(s.Path, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		if d.IsDir() {
			dirs = append(dirs, p)
			return nil
		}
		if !d.Type().IsRegular() {
			return &fs.PathError{Op: "seal", Path: p, Err: fs.ErrInvalid}
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(s.Path, p)
		if err != nil {
			return err
		}
		return os.Chmod(p, mode(rel, info.Mode()))
	})
	if err == nil {
		err = s.shelf.step("files sealed")
	}
	for i := len(dirs) - 1; err == nil && i >= 0; i-- {
		err = os.Chmod(dirs[i], 0o555)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return Refusal(err, "it cannot be made read-only")
	}
	return s.shelf.step("sealed")
}

// Publish writes the stage through to the disk and puts it on the shelf. If
// something stands there already, it wins if valid says so of its path (ours is
// discarded), and is replaced otherwise.
func (s *Stage) Publish(valid func(path string) bool) error {
	if err := s.writeThrough(); err != nil {
		return Refusal(err, "it cannot be written to the disk")
	}
	if err := s.shelf.step("written through"); err != nil {
		return err
	}
	unlock, err := s.shelf.lock()
	if err != nil {
		return err
	}
	defer unlock()
	final := s.shelf.Path(s.name)
	// The lock keeps others of our kind away, so a second try always succeeds.
	for range 2 {
		// Replaces an empty directory, refuses any other (rename(2)).
		err = unix.Rename(s.Path, final)
		if err != unix.EEXIST && err != unix.ENOTEMPTY && err != unix.ENOTDIR {
			break
		}
		if valid(final) {
			return s.Discard()
		}
		if err := s.shelf.remove(s.name); err != nil {
			return err
		}
	}
	if err != nil {
		return Refusal(err, "it cannot be published")
	}
	if err := s.shelf.step("renamed"); err != nil {
		return err
	}
	err = syncPath(s.shelf.dir)
	err = errors.Join(err, s.held.Close())
	s.held = nil
	if err != nil {
		return Refusal(err, "its publication cannot be written to the disk")
	}
	return s.shelf.step("published")
}

// few is how many files and directories are written through one by one. syncfs(2)
// is one call for any number, but also waits for what others have written: on
// ext4 it takes as long as about fifty calls of fsync(2).
const few = 50

func (s *Stage) writeThrough() error {
	var paths []string
	errMany := errors.New("many")
	err := filepath.WalkDir(s.Path, func(p string, _ fs.DirEntry, err error) error {
		if paths = append(paths, p); err == nil && len(paths) > few {
			err = errMany
		}
		return err
	})
	if errors.Is(err, errMany) {
		return unix.Syncfs(int(s.held.Fd()))
	}
	for _, p := range paths {
		if err == nil {
			err = syncPath(p)
		}
	}
	return err
}
