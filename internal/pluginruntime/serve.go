package pluginruntime

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/rpc"
)

// Bounds of the HTTP side. Connections live for days, so only headers and what
// never becomes a WebSocket are bounded.
const (
	headerTimeout = 10 * time.Second
	idleTimeout   = 10 * time.Second
	maxHeader     = 16 << 10
	// maxConnections bounds WebSockets of one port: LangBot has one, each plugin under
	// development one.
	maxConnections = 1024
	// maxPending bounds connections of one port that are no WebSocket (yet). Beyond it
	// the oldest is closed: whoever opens connections and says nothing, or says it
	// byte by byte, keeps nobody else out.
	maxPending = 256
)

// port is one listener: health, admission, then a WebSocket that is served.
type port struct {
	name   string
	health func() (any, error)
	// admit decides by the headers and returns what serves the connection; an error
	// refuses it with 401.
	admit func(http.Header) (serve func(context.Context, rpc.Transport) error, err error)
	log   *slog.Logger

	life  context.Context // ends every connection
	conns sync.WaitGroup
	slots chan struct{}
	http  *http.Server

	mu      sync.Mutex
	pending []net.Conn // oldest first
}

// track keeps the connections that are no WebSocket within maxPending.
func (p *port) track(c net.Conn, state http.ConnState) {
	var oldest net.Conn
	p.mu.Lock()
	switch state {
	case http.StateNew:
		if len(p.pending) >= maxPending {
			oldest, p.pending = p.pending[0], p.pending[1:]
		}
		p.pending = append(p.pending, c)
	case http.StateHijacked, http.StateClosed:
		p.pending = slices.DeleteFunc(p.pending, func(o net.Conn) bool { return o == c })
	}
	p.mu.Unlock()
	if oldest != nil {
		p.log.Debug("a connection that asked for nothing was closed", "listener", p.name, "from", oldest.RemoteAddr(), "most", maxPending)
		_ = oldest.Close()
	}
}

// open listens. Connections are served as soon as it returns.
func (p *port) open(ctx context.Context, address string) (net.Addr, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		var op *net.OpError
		why := err
		if errors.As(err, &op) {
			why = op.Err
		}
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the %s address %s cannot be listened on: %v", p.name, address, why).
			WithNext("another runtime may hold it: stop it, or choose another port (--ws-control-port, --ws-debug-port)")
	}
	p.slots = make(chan struct{}, maxConnections)
	p.http = &http.Server{Handler: p, ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeader, ConnState: p.track,
		ErrorLog: slog.NewLogLogger(p.log.Handler(), slog.LevelDebug)}
	p.conns.Go(func() {
		if err := p.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			p.log.Error("a listener ended", "listener", p.name, "err", err)
		}
	})
	return l.Addr(), nil
}

// close stops listening and waits for what was served; life must have ended.
func (p *port) close() {
	if p.http == nil {
		return
	}
	_ = p.http.Close() // WebSockets have left it, and end with life
	p.conns.Wait()
}

func (p *port) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/healthz" {
		p.serveHealth(w, r)
		return
	}
	serve, err := p.admit(r.Header)
	if err != nil {
		p.log.Info("a connection was refused", "listener", p.name, "from", r.RemoteAddr, "err", err)
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = w.Write([]byte("Unauthorized"))
		return
	}
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	default:
		http.Error(w, "too many connections", http.StatusServiceUnavailable)
		return
	}
	// Before it is taken over: close waits for those it knows of.
	p.conns.Add(1)
	defer p.conns.Done()
	// A page in a browser sends its origin, LangBot and workers send none: the default
	// check keeps pages out of a runtime without a token.
	c, err := websocket.Accept(roomy{w}, r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		p.log.Info("a request was no WebSocket", "listener", p.name, "from", r.RemoteAddr, "err", err)
		return
	}
	p.log.Debug("a connection came", "listener", p.name, "from", r.RemoteAddr)
	if err := serve(p.life, rpc.WebSocket(c)); err != nil && p.life.Err() == nil {
		p.log.Info("a connection ended", "listener", p.name, "from", r.RemoteAddr, "err", err)
	}
	_ = c.CloseNow()
}

func (p *port) serveHealth(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "method not allowed", http.StatusMethodNotAllowed)
		return
	}
	status := http.StatusOK
	var b []byte
	body, err := p.health()
	if err == nil {
		b, err = json.Marshal(body) // compact, keys of maps in order
	}
	if err != nil {
		p.log.Error("health cannot be told", "err", err)
		status, b = http.StatusInternalServerError, []byte(`{"live":false}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
}

// equalSecret compares two secrets in a time that says nothing about either.
func equalSecret(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

func header(h http.Header, name string) string { return strings.TrimSpace(h.Get(name)) }
