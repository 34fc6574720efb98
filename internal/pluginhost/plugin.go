package pluginhost

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// Plugin is one registered plugin: an installation, a slot of a pool, a plugin
// under development or a legacy one. It lives as long as its registration: when
// the worker goes, or the binding is fenced or its slot detached, every call
// under way fails and so does every later one. It is safe for concurrent use.
type Plugin struct {
	link   *link
	bound  pluginwire.Context
	author string
	name   string
	logs   *pluginlog.Buffer
	use    *atomic.Int64 // of the installation; nil for a plugin outside the desired state

	life context.Context // ended, with its cause, when the registration is
	end  context.CancelCauseFunc

	mu        sync.Mutex
	container Container
}

func newPlugin(l *link, bound pluginwire.Context, c Container, logs *pluginlog.Buffer) *Plugin {
	life, end := context.WithCancelCause(context.Background())
	p := &Plugin{link: l, bound: bound, author: c.Author, name: c.Name, logs: logs, life: life, end: end, container: c}
	if bound.IsBinding() {
		p.use = l.m.uses.of(bound.InstallationUUID)
	}
	return p
}

// touch notes that the plugin is used.
func (p *Plugin) touch() {
	if p.use != nil {
		p.link.m.uses.touch(p.use)
	}
}

// Author is the plugin's author, from its manifest.
func (p *Plugin) Author() string { return p.author }

// Name is the plugin's name, from its manifest.
func (p *Plugin) Name() string { return p.name }

// ID is "author/name".
func (p *Plugin) ID() string { return p.author + "/" + p.name }

// Binding is the context the plugin acts under: a full binding for an
// installation of the desired state, Workspace and installation for others.
func (p *Plugin) Binding() pluginwire.Context { return p.bound }

// Debug reports whether it is a plugin under development.
func (p *Plugin) Debug() bool { return p.link.kind == kindDebug }

// Container returns what the plugin is, as of now.
func (p *Plugin) Container() Container {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.container
}

// Ready reports whether the plugin is enabled in LangBot's settings and
// initialised, so that its components may be called.
func (p *Plugin) Ready() bool {
	c := p.Container()
	return c.Enabled && c.Status == StatusInitialized
}

// Gone is closed when the registration has ended.
func (p *Plugin) Gone() <-chan struct{} { return p.life.Done() }

func (p *Plugin) setContainer(c Container) {
	p.mu.Lock()
	p.container = c
	p.mu.Unlock()
}

func (p *Plugin) gone() error {
	if p.life.Err() == nil {
		return nil
	}
	return context.Cause(p.life)
}

// scope returns a context that also ends with the registration, with its cause.
func (p *Plugin) scope(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(p.life, func() { cancel(context.Cause(p.life)) })
	return ctx, func() { stop(); cancel(context.Canceled) }
}

func (p *Plugin) outcome(err error) error {
	if err == nil {
		return nil
	}
	if gone := p.gone(); gone != nil {
		return gone
	}
	if errors.Is(err, rpc.ErrClosed) { // its worker has ended, which is looked into now
		return errDisconnected(p.ID())
	}
	return err
}

// Call asks the plugin for one answer. A timeout of 0 is the protocol's default
// (15 s), a negative one is none. When ctx ends first, the worker is told to
// cancel if its SDK knows how.
func (p *Plugin) Call(ctx context.Context, action string, data any, timeout time.Duration) (json.RawMessage, error) {
	p.touch()
	return p.call(ctx, action, data, timeout)
}

// call is Call of the runtime itself, which is no use of the plugin.
func (p *Plugin) call(ctx context.Context, action string, data any, timeout time.Duration) (json.RawMessage, error) {
	if err := p.gone(); err != nil {
		return nil, err
	}
	ctx, done := p.scope(ctx)
	defer done()
	out, err := p.link.conn.Call(ctx, action, data, rpc.CallOptions{Context: p.bound, Timeout: timeout, CancelPeer: true})
	return out, p.outcome(err)
}

// Stream asks the plugin for a stream; timeout is the longest wait for a frame.
func (p *Plugin) Stream(ctx context.Context, action string, data any, timeout time.Duration) (*Stream, error) {
	p.touch()
	if err := p.gone(); err != nil {
		return nil, err
	}
	ctx, done := p.scope(ctx)
	s, err := p.link.conn.Stream(ctx, action, data, rpc.CallOptions{Context: p.bound, Timeout: timeout, CancelPeer: true})
	if err != nil {
		done()
		return nil, p.outcome(err)
	}
	return &Stream{p: p, s: s, done: done}, nil
}

// Stream is a plugin's stream of answers. One goroutine uses it, and closes it.
type Stream struct {
	p    *Plugin
	s    *rpc.Stream
	done context.CancelFunc
}

// Next returns the next frame, io.EOF after the last one.
func (s *Stream) Next(ctx context.Context) (json.RawMessage, error) {
	ctx, done := s.p.scope(ctx)
	defer done()
	out, err := s.s.Next(ctx)
	return out, s.p.outcomeOfStream(err)
}

// Close ends the stream; the worker is told if it is not at its end. It may be
// called more than once.
func (s *Stream) Close() {
	s.s.Close()
	s.done()
}

// SendFile pushes a file to the worker and returns the key it can read it by.
func (p *Plugin) SendFile(ctx context.Context, data []byte, ext string) (string, error) {
	if err := p.gone(); err != nil {
		return "", err
	}
	ctx, done := p.scope(ctx)
	defer done()
	key, err := transfer.Send(ctx, p.link.conn, data, ext, p.bound)
	return key, p.outcome(err)
}

// ReadFile reads a file the worker has pushed. Another plugin's looks missing.
func (p *Plugin) ReadFile(key string) ([]byte, error) {
	if err := p.gone(); err != nil {
		return nil, err
	}
	return p.link.files.Read(key, p.bound)
}

// DeleteFile removes a file the worker has pushed. A missing one is no error.
func (p *Plugin) DeleteFile(key string) error {
	if err := p.gone(); err != nil {
		return err
	}
	return p.link.files.Delete(key, p.bound)
}

// outcomeOfStream is outcome, but an end that was reached stays one.
func (p *Plugin) outcomeOfStream(err error) error {
	if errors.Is(err, io.EOF) {
		return err
	}
	return p.outcome(err)
}

func errDisconnected(id string) error {
	return pluginwire.WithClass(pluginwire.ClassClosed, errdefs.New(errdefs.Unavailable, "plugin %s is not connected", id).
		WithNext("its worker is being restarted; try again"))
}
