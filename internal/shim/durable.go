package shim

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// writeDurable replaces dir/name as one step that survives a power cut: write
// beside it, fsync, rename, fsync the directory. After an error the old file, or
// none, is there; never half of the new one.
func writeDurable(dir, name string, content []byte) error {
	path := filepath.Join(dir, name)
	tmp := path + ".tmp"
	if err := writeSynced(tmp, content); err != nil {
		os.Remove(tmp)
		return diskError(err, "write %s", name)
	}
	if err := os.Rename(tmp, path); err != nil {
		os.Remove(tmp)
		return diskError(err, "write %s", name)
	}
	if err := syncDir(dir); err != nil {
		return diskError(err, "write %s", name)
	}
	return nil
}

// writeAtomic replaces dir/name as one step that readers see whole; it may be lost
// in a power cut.
func writeAtomic(dir, name string, content []byte) error {
	path := filepath.Join(dir, name)
	tmp := path + ".tmp"
	err := os.WriteFile(tmp, content, 0o600)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return diskError(err, "write %s", name)
	}
	return nil
}

func writeSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// diskError gives a failed write its code: a full disk or quota is a limit that
// was reached, everything else may go away by itself.
func diskError(err error, format string, args ...any) *errdefs.Error {
	e := errdefs.Wrap(err, errdefs.Unavailable, format, args...)
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG} {
		if errors.Is(err, full) {
			e.Code = errdefs.Exhausted
			e = e.WithNext("make room on the host's disk")
		}
	}
	e.Message += ": " + err.Error()
	return e
}
