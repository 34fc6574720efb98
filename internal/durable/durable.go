// Package durable writes small files so that a power cut leaves the old content
// or the new, never a part: the state that must be saved before its effects.
package durable

import (
	"errors"
	"os"
	"path/filepath"
)

// Write replaces dir/name with content, mode 0600, in one step that survives a
// power cut: write beside it, fsync, rename, fsync of the directory (rename(2),
// fsync(2)). After an error the old file, or none, is there; if only the last
// step failed, the new one may be.
func Write(dir, name string, content []byte) error {
	return replace(dir, name, content, true)
}

// Atomic replaces dir/name like Write in one step that readers see whole, but
// without making it last through a power cut.
func Atomic(dir, name string, content []byte) error {
	return replace(dir, name, content, false)
}

func replace(dir, name string, content []byte, sync bool) error {
	path := filepath.Join(dir, name)
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil && sync {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return err
	}
	if !sync {
		return nil
	}
	return SyncDir(dir)
}

// SyncDir makes the names in a directory last through a power cut.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
