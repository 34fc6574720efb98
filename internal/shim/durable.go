package shim

import (
	"errors"
	"syscall"

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

// writeAtomic is durable.Atomic with a coded error.
func writeAtomic(dir, name string, content []byte) error {
	if err := durable.Atomic(dir, name, content); err != nil {
		return diskError(err, "write %s", name)
	}
	return nil
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
