package host

import (
	"encoding/json"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/shim"
)

const leaseFile = "lease"

// DefaultLease is how long processes may go on without a server when a server
// starts one and has set no lease (DESIGN: renewed every minute, for half an hour).
const DefaultLease = 30 * time.Minute

// maxLease is the longest lease a host grants.
const maxLease = 30 * 24 * time.Hour

// lease is the host's side of the lease file, which the shims read.
type lease struct {
	path string

	mu    sync.Mutex
	until time.Duration // on CLOCK_BOOTTIME
}

// open takes over what an earlier host program granted, so that a grant never
// shortens it.
func (l *lease) open(path, boot string) {
	l.path = path
	var file struct {
		BootID string `json:"boot_id"`
		Expiry int64  `json:"expiry_ns"`
	}
	b, err := os.ReadFile(path)
	if err == nil && json.Unmarshal(b, &file) == nil && file.BootID == boot {
		l.until = time.Duration(file.Expiry)
	}
}

// set grants a lease of d from now on, longer or shorter than before.
func (l *lease) set(d time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.write(d)
}

// grant sees to it that there is a lease: whoever starts a process is a living
// server.
func (l *lease) grant() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if bootTime() < l.until {
		return nil
	}
	return l.write(DefaultLease)
}

func (l *lease) write(d time.Duration) error {
	if err := shim.WriteLease(l.path, d); err != nil {
		return err
	}
	l.until = bootTime() + d
	return nil
}

// bootTime is CLOCK_BOOTTIME, which counts on while the machine sleeps.
func bootTime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0 // never on Linux; a lease is then written anew each time
	}
	return time.Duration(ts.Nano())
}
