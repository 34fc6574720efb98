package server

import (
	"context"
	"net"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// foreignHost is a host program on this machine that somebody else starts and
// stops, such as a service manager.
type foreignHost struct{ socket string }

// Kind is that of boxes.
func (foreignHost) Kind() string { return "box" }

// Ensure finds out whether it answers; it cannot start it.
func (f foreignHost) Ensure(ctx context.Context) error {
	c, err := f.Dial(ctx)
	if err != nil {
		return err
	}
	return c.Close()
}

// Dial connects to its socket.
func (f foreignHost) Dial(ctx context.Context) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", f.socket)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "no host program answers on %s: %v", f.socket, opReason(err)).
			WithNext("start it: stockade-host serve")
	}
	return c, nil
}

// Stop leaves it running: it is not ours.
func (foreignHost) Stop(context.Context) error { return nil }
