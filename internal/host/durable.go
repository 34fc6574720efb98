package host

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// writeDurable is durable.Write with a coded error.
func writeDurable(dir, name string, content []byte) error {
	if err := durable.Write(dir, name, content); err != nil {
		return diskError(err, "write %s", name)
	}
	return nil
}

// diskError gives a failed write its code: a full disk is a limit that was
// reached, everything else may go away by itself.
func diskError(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	if full := limitOf(err); full != nil {
		return errdefs.Wrap(err, errdefs.Exhausted, "the host could not %s: %v", what, full).
			WithNext("make room on the host's disk, or raise the limit named")
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the host could not %s: %v", what, err).
		WithNext("look at the host's disk and log")
}

// limitOf is the system's word for a limit that a failed write reached, nil if
// it failed for another reason.
func limitOf(err error) error {
	for _, full := range []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG, unix.EMFILE, unix.ENFILE} {
		if errors.Is(err, full) {
			return full
		}
	}
	return nil
}

// limitError gives an error of boxes that is the system's own word its code where
// that says that a limit was reached. What is left is a fault of the host.
func limitError(err error, what string) error {
	if _, coded := errors.AsType[*errdefs.Error](err); coded || limitOf(err) == nil {
		return err
	}
	return diskError(err, "%s", what)
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
