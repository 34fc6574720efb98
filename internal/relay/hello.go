package relay

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// keepMetadata is how much of a daemon's metadata is kept to be shown.
const keepMetadata = 4 << 10

func itoa(n int) string { return strconv.Itoa(n) }

// sameToken compares in a time that tells nothing but nothing.
func sameToken(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// ServeHTTP upgrades a request to WebSocket and takes the daemon in. It returns as
// soon as the connection is the hub's.
func (h *Hub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.ContentLength != 0 {
		// The server reads the body of a refused request before the answer goes out.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(h.lim.HelloTimeout))
	}
	h.mu.Lock()
	if h.stopping {
		h.mu.Unlock()
		http.Error(w, "the relay hub stops", http.StatusServiceUnavailable)
		return
	}
	h.wg.Add(1) // before Stop can wait
	h.mu.Unlock()
	handed := false
	defer func() {
		if !handed {
			h.wg.Done()
		}
	}()
	select {
	case h.greeting <- struct{}{}:
	default:
		http.Error(w, "too many daemons are connecting at once, limit "+itoa(greeting)+"; try again", http.StatusServiceUnavailable)
		return
	}
	lend := &lender{ResponseWriter: w, stall: h.lim.StallTimeout, bytes: h.lim.SocketBytes}
	l := &link{hub: h, remote: r.RemoteAddr}
	opts := &websocket.AcceptOptions{OnPingReceived: l.pinged}
	if h.cfg.Compression {
		opts.CompressionMode = websocket.CompressionNoContextTakeover
	}
	ws, err := websocket.Accept(lend, r, opts)
	if err != nil {
		<-h.greeting
		h.log.Debug("relay: no WebSocket", "remote", r.RemoteAddr, "error", err)
		return
	}
	l.ws, l.wire = ws, lend.wire
	handed = true
	h.mu.Lock()
	h.strangers[l] = true
	if h.stopping {
		l.wire.Close()
	}
	h.mu.Unlock()
	// The request's goroutine and buffers end here; the link has its own.
	go func() {
		defer h.wg.Done()
		l.serve()
	}()
}

// farewell is how long a peer that was told to go may take to say goodbye.
const farewell = time.Second

// bye closes with a reason that the peer has a chance to read.
func (l *link) bye(code websocket.StatusCode, reason string) {
	late := time.AfterFunc(farewell, func() { l.wire.Close() })
	defer late.Stop()
	l.ws.Close(code, reason)
}

// serve is the link's reader goroutine: handshake, then frames until the end.
func (l *link) serve() {
	h := l.hub
	reason, err := l.greet()
	<-h.greeting
	h.mu.Lock()
	delete(h.strangers, l)
	h.mu.Unlock()
	switch {
	case reason == relaywire.ReasonStopping:
		l.bye(relaywire.CloseGoingAway, reason)
		return
	case reason != "":
		h.log.Warn("relay: a daemon was refused", "remote", l.remote, "reason", reason)
		l.bye(relaywire.CloseRefused, reason)
		return
	case err != nil:
		// A time-out or no JSON: dropped without a word, as the protocol has it.
		h.log.Warn("relay: a connection said no hello", "remote", l.remote, "error", err)
		l.ws.CloseNow()
		return
	}
	h.log.Info("relay: daemon connected", "daemon", l.target.id, "incarnation", l.socket, "remote", l.remote)
	err = l.read()
	l.end(err)
}

// greet does the handshake. It answers a reason to refuse, or an error when the
// connection is not worth a word.
func (l *link) greet() (reason string, err error) {
	h := l.hub
	if err := l.wire.SetReadDeadline(time.Now().Add(h.lim.HelloTimeout)); err != nil {
		return "", err
	}
	l.ws.SetReadLimit(relaywire.EnvelopeBytes) // no more before it said who it is
	_, r, err := l.ws.Reader(context.Background())
	if err != nil {
		return "", err
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return "", err
	}
	f, err := relaywire.Decode(data, relaywire.EnvelopeBytes)
	if err != nil && !errors.Is(err, relaywire.ErrNotFrame) {
		return "", err
	}
	if f.Type != relaywire.Hello {
		return relaywire.ReasonHello, nil
	}
	id, err := h.checkID(f.DaemonID)
	if err != nil {
		return relaywire.ReasonID, nil
	}
	if h.cfg.Token != "" && !sameToken(f.Token, h.cfg.Token) {
		return relaywire.ReasonToken, nil
	}
	if f.Protocol != relaywire.Protocol {
		return relaywire.ReasonProtocol, nil
	}
	if err := l.wire.SetReadDeadline(time.Time{}); err != nil {
		return "", err
	}
	l.ws.SetReadLimit(excess * h.lim.ReadLimit()) // see tooLarge
	if len(f.Metadata) <= keepMetadata && relaywire.IsObject(f.Metadata) {
		l.metadata = append(json.RawMessage(nil), f.Metadata...)
	}
	return h.admit(l, id), nil
}

// comeback is how long a hello waits for the end of the daemon's last connection. The
// daemon knows of it first: it has the answer to its goodbye, or its program was killed,
// before the hub's reader has come as far. A connected id is still never replaced.
const comeback = 500 * time.Millisecond

// admit registers the link, or says why not.
func (h *Hub) admit(l *link, id string) (reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	late := time.NewTimer(h.comeback)
	defer late.Stop()
	for waits := true; waits && !h.stopping; {
		t := h.targets[keyOf(id)]
		if t == nil || t.step.Socket == 0 || t.step.Fenced {
			break
		}
		changed := h.changed
		h.mu.Unlock()
		select {
		case <-changed:
		case <-late.C:
			waits = false
		}
		h.mu.Lock()
	}
	return h.register(l, id)
}

// register is admit at its moment. Hub.mu is held.
func (h *Hub) register(l *link, id string) (reason string) {
	if h.stopping {
		return relaywire.ReasonStopping
	}
	if t := h.targets[keyOf(id)]; h.held >= h.lim.Daemons && (t == nil || t.step.Socket == 0 && !t.step.Fenced) {
		h.log.Warn("relay: too many daemons", "limit", h.lim.Daemons)
		return relaywire.ReasonTaken
	}
	t := h.at(id)
	h.sockets++
	l.socket, l.target, l.connected = h.sockets, t, time.Now()
	l.seen.Store(l.connected.UnixNano())
	l.out = outbox{ws: l.ws, max: h.lim.OutboxBytes, spawn: h.spawn, fail: l.lost}
	if refused := h.apply(t, FenceEvent{Kind: Connected, Socket: l.socket}); refused != "" {
		return relaywire.ReasonTaken
	}
	t.link = l
	// Ready is the first word on this connection: nothing else was queued yet, and
	// jobs for it need the lock.
	l.out.put(relaywire.Frame{Type: relaywire.Ready, DaemonID: id, Protocol: relaywire.Protocol}, true)
	return ""
}
