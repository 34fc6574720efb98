// Package driver is the seam between the broker and a kind of target. A driver
// is a dialer: it yields byte streams to a host program, and everything else -
// supervision, the log, cancellation - is the host program's own and the same
// for every kind. drivertest is the conformance suite all drivers pass.
package driver

import (
	"context"
	"net"
)

// Driver reaches the host program of one target. Implementations are safe for
// concurrent use.
type Driver interface {
	// Kind is the target kind it serves: "box", later "ssh" and "daemon".
	Kind() string
	// Ensure makes the host program reachable, starting it where the driver can.
	// It is called at server start and whenever dialing failed; calling it while
	// the host answers changes nothing. Errors are unavailable, naming what is
	// missing and what to do.
	Ensure(ctx context.Context) error
	// Dial opens one byte stream to the host API.
	Dial(ctx context.Context) (net.Conn, error)
}

// Stopper is a driver that can end its host program. Stop returns conflict,
// changing nothing, while a process lives there.
type Stopper interface {
	Stop(ctx context.Context) error
}
