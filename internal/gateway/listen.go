package gateway

import (
	"net"

	"github.com/stockade-run/stockade/internal/netns"
)

// listenIn is the default [Listen].
func listenIn(path, network, addr string) (net.Listener, error) {
	return netns.Listen(path, network, addr)
}
