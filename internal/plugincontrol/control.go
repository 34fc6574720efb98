package plugincontrol

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/runprocess"
	"github.com/stockade-run/stockade/internal/transfer"
)

// Config is what a Control is made of.
type Config struct {
	Manager   Manager
	Link      *Link           // shared with the plugin host, which calls LangBot through it
	Transfers *transfer.Store // where files from LangBot go
	Legacy    Legacy          // nil: the lifecycle actions of data/plugins say that there is none
	// Processes owns the right of runs to have processes; nil grants none.
	Processes *runprocess.Keeper
	DataDir   string        // for get_storage_analysis
	DebugPort func() int    // port of the debug channel, which get_debug_info tells
	PingEvery time.Duration // of the control connection; see rpc.Config
	// Configured, if set, is called for every set_runtime_config that was accepted, before
	// it is answered. It must not block.
	Configured func(pluginwire.RuntimeConfig)
	Logger     *slog.Logger // nil discards
}

// Control answers LangBot. It is safe for concurrent use.
type Control struct {
	cfg   Config
	log   *slog.Logger
	known map[string]handler
	first atomic.Bool // set_runtime_config was accepted once
}

// New makes a Control without a connection.
func New(cfg Config) *Control {
	c := &Control{cfg: cfg, log: cfg.Logger}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	c.known = c.handlers()
	return c
}

// session is one control connection.
type session struct {
	control    *Control
	conn       *rpc.Conn
	files      *transfer.Holder
	configured atomic.Bool // set_runtime_config was accepted on this connection
	superseded atomic.Bool // a newer connection took its place
}

// errSuperseded is what everything on an older connection ends with.
func errSuperseded() error {
	return errdefs.New(errdefs.Fenced, "this control connection has been superseded by a newer one").
		WithNext("close it; only the newest connection of LangBot is served")
}

// Serve makes t the active control connection, in the place of the one before,
// and serves it until it ends or ctx does. It returns nil when the peer closed
// the connection in order, a newer one took its place, or the runtime ends.
func (c *Control) Serve(ctx context.Context, t rpc.Transport) error {
	s := &session{control: c}
	s.files = c.cfg.Transfers.Holder(s.mayPush)
	defer s.files.Close()
	s.conn = rpc.New(t, rpc.Config{
		Name: "control", Handle: s.handle, Admit: s.admit, PingEvery: c.cfg.PingEvery, Logger: c.log,
		Reserved: func(action string) bool { return action == pluginwire.ActionPing },
	})
	before, ok := c.cfg.Link.set(s)
	if !ok {
		_ = t.Close()
		return nil
	}
	if before != nil {
		c.log.Info("a newer control connection takes the place of the active one")
		before.conn.Close(errSuperseded())
	}
	defer c.cfg.Link.clear(s)
	err := s.conn.Run(ctx)
	if s.superseded.Load() || errors.Is(err, rpc.ErrClosed) {
		return nil
	}
	return err
}

// Close closes the active connection, and none takes its place: it is the runtime's end.
func (c *Control) Close(err error) {
	if before := c.cfg.Link.end(); before != nil {
		before.conn.Close(err)
	}
}

// handler answers one action in a session whose request was admitted.
type handler func(ctx context.Context, s *session, in *rpc.Inbound) (any, error)

func (s *session) handle(ctx context.Context, in *rpc.Inbound) (any, error) {
	h, ok := s.control.known[in.Action]
	if !ok {
		return nil, pluginwire.UnknownAction(in.Action)
	}
	return h(ctx, s, in)
}

// told turns the failure of a call on a connection that was superseded meanwhile
// into the reason for it.
func (s *session) told(err error) error {
	if err != nil && s.superseded.Load() && !isPeerError(err) {
		return errSuperseded()
	}
	return err
}

// missed is told for what a plugin had asked of LangBot, which closes no connection.
func (s *session) missed(err error) error {
	if err != nil && s.superseded.Load() && !isPeerError(err) {
		return errdefs.New(errdefs.Unavailable, "LangBot connected anew before it had answered").
			WithNext("it may have been done or not; ask again")
	}
	return err
}

func (s *session) sendFile(ctx context.Context, data []byte, ext string, from pluginwire.Context) (string, error) {
	key, err := transfer.Send(ctx, s.conn, data, ext, from)
	return key, s.told(err)
}

// textOf is what LangBot is told of an error inside an answer: a plugin's own text as it
// is.
func textOf(err error) string {
	if peer, ok := errors.AsType[*rpc.PeerError](err); ok {
		return peer.Message
	}
	return pluginwire.FromError(err)
}

func isPeerError(err error) bool {
	_, ok := errors.AsType[*rpc.PeerError](err)
	return ok
}
