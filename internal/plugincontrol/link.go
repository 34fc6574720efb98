package plugincontrol

import (
	"context"
	"encoding/json"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// ReconnectWait bounds how long a call of a plugin waits for LangBot to come
// back. LangBot's first try to reconnect comes after one second.
const ReconnectWait = 2 * time.Second

// Link is the way from plugins to LangBot: the active control connection once it
// has said who it is, or none. It outlives connections. It is safe for concurrent use.
type Link struct {
	mu      sync.Mutex
	active  *session
	changed chan struct{} // closed and replaced whenever active or its readiness changes
	over    bool          // no session becomes the active one any more
}

// NewLink makes a link without a connection.
func NewLink() *Link { return &Link{changed: make(chan struct{})} }

// set makes s the active session and returns the one before; false: the link is over.
func (l *Link) set(s *session) (before *session, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil, false
	}
	return l.replaceLocked(s), true
}

// end ends the link and returns the session that was active.
func (l *Link) end() (before *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	return l.replaceLocked(nil)
}

func (l *Link) replaceLocked(s *session) (before *session) {
	before, l.active = l.active, s
	if before != nil {
		before.superseded.Store(true)
	}
	l.wake()
	return before
}

// clear ends s, if it is still the active session.
func (l *Link) clear(s *session) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.active == s {
		l.active = nil
		l.wake()
	}
}

// ready tells waiting calls that the session's handshake is over.
func (l *Link) ready() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wake()
}

func (l *Link) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// Connected reports whether LangBot is connected and has said who it is.
func (l *Link) Connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.active.answers()
}

// answers reports whether LangBot is there and has said who it is. A connection that has
// ended stays the active one until all that it had in flight has ended, too.
func (s *session) answers() bool {
	return s != nil && s.configured.Load() && s.conn.Err() == nil
}

// current returns the session that calls go to. It waits a little for LangBot to
// come back: what a plugin asks while LangBot reconnects is not lost.
func (l *Link) current(ctx context.Context, timeout time.Duration) (*session, error) {
	wait := ReconnectWait
	if timeout > 0 {
		wait = min(wait, timeout)
	}
	var timer *time.Timer
	for {
		l.mu.Lock()
		s, changed := l.active, l.changed
		l.mu.Unlock()
		if s.answers() {
			return s, nil
		}
		if timer == nil {
			timer = time.NewTimer(wait)
			defer timer.Stop()
		}
		select {
		case <-changed:
		case <-timer.C:
			return nil, errdefs.New(errdefs.Unavailable, "LangBot is not connected to the plugin runtime").
				WithNext("try again when it is back")
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Call asks LangBot on behalf of from. A timeout of 0 is the protocol's 15 s,
// below 0 is none.
func (l *Link) Call(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (json.RawMessage, error) {
	s, err := l.current(ctx, timeout)
	if err != nil {
		return nil, err
	}
	out, err := s.conn.Call(ctx, action, data, rpc.CallOptions{Context: from, Timeout: timeout})
	return out, s.missed(err)
}

// Stream asks LangBot for an answer in frames; the timeout is per frame.
func (l *Link) Stream(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (*rpc.Stream, error) {
	s, err := l.current(ctx, timeout)
	if err != nil {
		return nil, err
	}
	out, err := s.conn.Stream(ctx, action, data, rpc.CallOptions{Context: from, Timeout: timeout})
	return out, s.missed(err)
}

// ReadFile returns what LangBot pushed under a key, to whom may read it.
func (l *Link) ReadFile(ctx context.Context, key string, as pluginwire.Context) ([]byte, error) {
	s, err := l.current(ctx, 0)
	if err != nil {
		return nil, err
	}
	return s.control.cfg.Transfers.Read(key, as)
}

// DeleteFile removes what LangBot pushed under a key. It needs no connection.
func (l *Link) DeleteFile(key string, as pluginwire.Context) error {
	l.mu.Lock()
	s := l.active
	l.mu.Unlock()
	if s == nil {
		return nil // with its connection, all it pushed is gone
	}
	return s.control.cfg.Transfers.Delete(key, as)
}

// SendFile pushes bytes to LangBot and returns the key it finds them under.
func (l *Link) SendFile(ctx context.Context, data []byte, ext string, from pluginwire.Context) (string, error) {
	s, err := l.current(ctx, 0)
	if err != nil {
		return "", err
	}
	key, err := transfer.Send(ctx, s.conn, data, ext, from)
	return key, s.missed(err)
}
