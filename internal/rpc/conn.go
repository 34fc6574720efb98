package rpc

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// waiter waits for the responses to one outbound request.
type waiter interface {
	// deliver takes one response and reports whether it was the last. It is called by
	// the reader alone. The parts of r are valid during the call only, unless own.
	deliver(r *pluginwire.Response, own bool) (last bool)
	// fail ends the wait. It is called at most once, and not after the last response.
	fail(err error)
}

// Conn is one connection. Any goroutine may call its methods.
type Conn struct {
	t    Transport
	cfg  Config
	log  *slog.Logger
	seq  atomic.Int64
	turn chan struct{} // held by the one that writes
	done chan struct{} // closed when the connection has ended

	requests, busy, cancelled, calls, timeouts, ignored, late atomic.Uint64

	root context.Context // of inbound actions; set by Run before the first
	stop context.CancelCauseFunc
	wg   sync.WaitGroup // inbound actions, the answers' writer, the closing

	mu       sync.Mutex
	err      error // why it ended; nil: it has not
	failed   error // the part of err that Run returns
	waiting  map[int64]waiter
	inbound  map[*Inbound]struct{}
	bySeq    map[int64]*Inbound
	running  [lanes]int // by lane
	held     int        // bytes of the data of inbound
	answers  [][]byte   // of the connection itself, to be written
	writing  bool       // a goroutine writes answers
	haveRoom *sync.Cond
	free     []*call

	contexts map[string]pluginwire.Context // decoded before; the reader's own
}

// maxContexts bounds the contexts that are kept decoded: the slots of a busy pool.
const maxContexts = 256

// New makes a connection over t. It sends at once; it receives while Run runs.
func New(t Transport, cfg Config) *Conn {
	c := &Conn{
		t: t, cfg: cfg, log: cfg.Logger,
		turn: make(chan struct{}, 1), done: make(chan struct{}),
		waiting: map[int64]waiter{}, inbound: map[*Inbound]struct{}{}, bySeq: map[int64]*Inbound{},
		contexts: map[string]pluginwire.Context{},
	}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if cfg.Name != "" {
		c.log = c.log.With("connection", cfg.Name)
	}
	c.haveRoom = sync.NewCond(&c.mu)
	if c.cfg.InflightBytes <= 0 {
		c.cfg.InflightBytes = pluginwire.InflightBytes
	}
	if c.cfg.FirstSeq == 0 {
		c.cfg.FirstSeq = rand.Int64N(100001)
	}
	c.seq.Store(c.cfg.FirstSeq)
	return c
}

// Run, to be called once, reads until the connection ends and then joins what it started: the inbound
// actions too, so a handler that ignores its context holds it. When ctx ends, the
// connection is closed and every inbound action cancelled. It returns nil when the
// peer ended the connection in an orderly way, or Close or ctx did; else why it broke.
func (c *Conn) Run(ctx context.Context) error {
	c.root, c.stop = context.WithCancelCause(ctx)
	defer c.stop(ErrCancelled)
	unhook := context.AfterFunc(ctx, func() { c.Close(context.Cause(ctx)) })
	defer unhook()
	if p, ok := c.t.(interface{ ping(context.Context) error }); ok && c.cfg.PingEvery >= 0 {
		c.wg.Go(func() { c.keepAlive(p.ping) })
	}
	c.end(c.read(), false)
	c.wg.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed
}

// Close ends the connection: calls and streams fail with an error that wraps ErrClosed
// and err, which may be nil. It does not wait.
func (c *Conn) Close(err error) { c.end(err, true) }

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err is nil, or why the connection ended, wrapping ErrClosed.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// end ends the connection. ours: because this side wanted it.
func (c *Conn) end(cause error, ours bool) {
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	if errors.Is(cause, io.EOF) {
		cause = nil
	}
	c.err = closedError(cause)
	if !ours {
		c.failed = cause
	}
	err := c.err
	waiting := c.waiting
	c.waiting, c.answers = nil, nil
	for in := range c.inbound {
		c.cancelLocked(in)
	}
	close(c.done)
	c.haveRoom.Broadcast()
	// Under the lock, so that Run cannot have joined before.
	c.wg.Go(func() { _ = c.t.Close() })
	c.mu.Unlock()
	for _, w := range waiting {
		w.fail(err)
	}
}

func (c *Conn) keepAlive(ping func(context.Context) error) {
	every := c.cfg.PingEvery
	if every == 0 {
		every = 20 * time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-c.done:
			return
		case <-tick.C:
		}
		ctx, cancel := context.WithTimeout(c.root, every)
		err := ping(ctx)
		cancel()
		if err != nil {
			c.end(err, false)
			return
		}
	}
}

// Counters returns what was counted so far.
func (c *Conn) Counters() Counters {
	c.mu.Lock()
	defer c.mu.Unlock()
	return Counters{
		Requests: c.requests.Load(), Busy: c.busy.Load(), Cancelled: c.cancelled.Load(), Calls: c.calls.Load(),
		Timeouts: c.timeouts.Load(), Ignored: c.ignored.Load(), Late: c.late.Load(),
		InFlight: len(c.inbound), Waiting: len(c.waiting),
	}
}

// read is the reading goroutine. It never waits for a write but for the room of the
// connection's own answers.
func (c *Conn) read() error {
	var m pluginwire.Message
	o, _ := c.t.(owner)
	for {
		b, err := c.t.Read()
		if err != nil {
			return err
		}
		own := o != nil && o.own()
		if err := m.Decode(b); err != nil || m.Kind == pluginwire.KindNone {
			c.ignored.Add(1)
			c.log.Debug("a message was ignored", "bytes", len(b), "error", err)
			continue
		}
		if m.Kind == pluginwire.KindResponse {
			c.route(&m.Response, own)
		} else {
			c.request(&m.Request, own)
		}
	}
}

func (c *Conn) route(r *pluginwire.Response, own bool) {
	c.mu.Lock()
	w := c.waiting[r.ID]
	if _, once := w.(*call); once {
		// Taken before it is told: whoever finds it gone waits for what comes, and whoever
		// finds it may use it again.
		delete(c.waiting, r.ID)
	}
	c.mu.Unlock()
	if w == nil {
		c.late.Add(1)
		return
	}
	if w.deliver(r, own) {
		c.forget(r.ID)
	}
}

// keep is data to keep.
func keep(data json.RawMessage, own bool) json.RawMessage {
	if own {
		return data[:len(data):len(data)]
	}
	return bytes.Clone(data)
}

// expect registers a waiter under a new number.
func (c *Conn) expect(w waiter) (int64, error) {
	c.calls.Add(1)
	id := c.seq.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return 0, c.err
	}
	c.waiting[id] = w
	return id, nil
}

// forget reports whether the waiter was still there: then nobody will call it again.
func (c *Conn) forget(id int64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.waiting[id]
	delete(c.waiting, id)
	return ok
}

// take waits for the turn to write: until ctx ends, expired fires or the connection
// ends.
func (c *Conn) take(ctx context.Context, expired <-chan time.Time) error {
	select {
	case c.turn <- struct{}{}:
	default:
		select {
		case c.turn <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-expired:
			return ErrTimeout
		case <-c.done:
			return c.Err()
		}
	}
	return nil
}

// send writes one message when it is its turn. Once begun, a write is not abandoned.
// Every error but that of a message that is too large means that nothing went out, or
// that the connection has ended. last is the action whose answer ends with it, or nil.
func (c *Conn) send(ctx context.Context, expired <-chan time.Time, msg []byte, last *Inbound) error {
	if len(msg) > pluginwire.MaxMessage {
		return pluginwire.ErrTooLarge
	}
	if err := c.take(ctx, expired); err != nil {
		return err
	}
	if last != nil {
		c.leave(last)
	}
	err := c.t.Write(msg)
	<-c.turn
	if err != nil {
		c.end(err, false)
		return c.Err()
	}
	return nil
}

// answer queues a message of the connection itself. With wait it pauses the reader
// while AckLane of them wait; others drop theirs then.
func (c *Conn) answer(msg []byte, wait bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for wait && len(c.answers) >= pluginwire.AckLane && c.err == nil {
		c.haveRoom.Wait()
	}
	if c.err != nil || len(c.answers) >= 2*pluginwire.AckLane {
		return
	}
	c.answers = append(c.answers, msg)
	if !c.writing {
		c.writing = true
		c.wg.Go(c.writeAnswers)
	}
}

func (c *Conn) writeAnswers() {
	c.mu.Lock()
	for len(c.answers) > 0 && c.err == nil {
		batch := c.answers
		c.answers = nil
		c.mu.Unlock()
		for _, msg := range batch {
			if c.send(context.Background(), nil, msg, nil) != nil {
				break
			}
		}
		c.mu.Lock()
		c.haveRoom.Broadcast()
	}
	c.writing = false
	c.mu.Unlock()
}

// encode makes the data of a message: an object.
func encode(v any) (json.RawMessage, error) {
	var raw json.RawMessage
	switch v := v.(type) {
	case nil:
		return nil, nil
	case json.RawMessage:
		raw = v
	default:
		var err error
		if raw, err = json.Marshal(v); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Internal, "the data of an action cannot be encoded: %v", err)
		}
	}
	for _, b := range raw {
		switch b {
		case ' ', '\t', '\n', '\r':
			continue
		case '{':
			return raw, nil
		}
		break
	}
	if len(raw) == 0 {
		return nil, nil
	}
	return nil, errdefs.New(errdefs.Internal, "the data of an action is not an object")
}

// guard turns a panic of a handler into an error.
func guard(log *slog.Logger, action string, err *error) {
	if p := recover(); p != nil {
		log.Error("a handler panicked", "action", action, "panic", p, "stack", string(debug.Stack()))
		*err = errdefs.New(errdefs.Internal, "the handler of %s failed", action)
	}
}
