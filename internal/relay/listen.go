package relay

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// listener is the hub's own listener, if it has one.
type listener struct {
	mu     sync.Mutex
	at     Endpoint
	url    string
	server *http.Server
	done   chan struct{}
}

func (l *listener) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server == nil {
		return nil
	}
	err := l.server.Close()
	<-l.done
	return err
}

// Endpoint is where a hub listens by itself.
type Endpoint struct {
	Host  string // 127.0.0.1 when empty
	Port  int    // 0: any free one
	Token string // must be the hub's
}

// Start listens at the endpoint and serves daemons there until Stop; it returns the
// WebSocket URL. Equal calls, however many at once, make one listener; another
// endpoint is refused as daemon_hub_conflict. A hub that is only mounted with
// ServeHTTP does not need it.
func (h *Hub) Start(ctx context.Context, at Endpoint) (url string, err error) {
	if err := checkToken(h.cfg.Profile, h.cfg.Prefix, at.Token); err != nil {
		return "", err
	}
	if at.Host == "" {
		at.Host = "127.0.0.1"
	}
	if !sameToken(at.Token, h.cfg.Token) {
		return "", h.conflict("with another token")
	}
	l := &h.listen
	l.mu.Lock()
	defer l.mu.Unlock()
	h.mu.Lock()
	stopping := h.stopping
	h.mu.Unlock()
	if stopping {
		return "", h.notStarted()
	}
	if l.server != nil {
		if l.at != at {
			return "", h.conflict("at " + l.url)
		}
		return l.url, nil
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", net.JoinHostPort(at.Host, strconv.Itoa(at.Port)))
	if err != nil {
		return "", h.errorf(relaywire.CodeBindFailed, "the relay cannot listen at %s:%d: %v", at.Host, at.Port, err).
			WithNext("set a unique daemon-port, or stop what listens there")
	}
	l.at, l.url = at, "ws://"+ln.Addr().String()
	l.server = &http.Server{Handler: h, ReadHeaderTimeout: h.lim.HelloTimeout, IdleTimeout: h.lim.HelloTimeout, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelDebug)}
	l.done = make(chan struct{})
	server, done := l.server, l.done
	go func() {
		defer close(done)
		_ = server.Serve(ln) // ErrServerClosed
	}()
	return l.url, nil
}

func (h *Hub) conflict(how string) error {
	return h.errorf(relaywire.CodeHubConflict, "this hub was already started %s; another configuration cannot share it", how).
		WithNext("use the same host, port and token, or a hub of its own")
}
