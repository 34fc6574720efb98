package host

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// writeDurable replaces dir/name in one step that survives a power cut. After an
// error the old file, or none, is there; never half of the new one.
func writeDurable(dir, name string, content []byte) error {
	path := filepath.Join(dir, name)
	tmp := path + ".tmp"
	err := writeSynced(tmp, content)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		err = syncDir(dir)
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

// diskError gives a failed write its code: a full disk is a limit that was
// reached, everything else may go away by itself.
func diskError(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	for _, full := range []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, full) {
			return errdefs.Wrap(err, errdefs.Exhausted, "the host could not %s: %v", what, full).
				WithNext("make room on the host's disk, or raise the limit named")
		}
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the host could not %s: %v", what, err).
		WithNext("look at the host's disk and log")
}

func sumText(b []byte) string {
	return fmt.Sprintf("%08x", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// bootID names this boot of the machine.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Internal, "the boot id cannot be read: %v", err)
	}
	return strings.TrimSpace(string(b)), nil
}
