package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// lease is the content of a lease file. The expiry counts on CLOCK_BOOTTIME,
// which goes on while the machine sleeps and which nobody can set; it means
// something only within one boot.
type lease struct {
	BootID string `json:"boot_id"`
	Expiry int64  `json:"expiry_ns"`
}

// bootTime returns CLOCK_BOOTTIME.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("no CLOCK_BOOTTIME: " + err.Error()) // Linux has it since 2.6.39
	}
	return time.Duration(ts.Nano())
}

// WriteLease renews a lease: the processes whose Config names this file may go on
// for d from now. Shims read the file again when the lease they know runs out.
func WriteLease(path string, d time.Duration) error {
	if d <= 0 {
		return errdefs.New(errdefs.Invalid, "a lease of %v", d).WithNext("give a positive time")
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	b, err := json.Marshal(lease{BootID: boot, Expiry: int64(bootTime() + d)})
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "encode the lease")
	}
	return writeDurable(filepath.Dir(path), filepath.Base(path), b)
}

// leaseLeft returns how much of a lease is left, never negative. A file that is
// missing, damaged or of another boot grants nothing: what cannot be shown to be
// allowed ends.
func leaseLeft(path, boot string) (time.Duration, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errors.New("there is no lease")
	}
	if err != nil {
		return 0, err
	}
	var l lease
	if err := json.Unmarshal(b, &l); err != nil {
		return 0, fmt.Errorf("the lease is damaged: %w", err)
	}
	if l.BootID != boot {
		return 0, errors.New("the lease is of another boot")
	}
	return max(0, time.Duration(l.Expiry)-bootTime()), nil
}
