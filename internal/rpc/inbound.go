package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Inbound is one action that the peer asked for. Its fields belong to Admit and then
// to the Handler.
type Inbound struct {
	Action  string
	Data    json.RawMessage    // a valid JSON object, its own copy; nil of a __cancel_action
	Conn    *Conn              // that it came on
	Value   any                // Admit may leave something for the Handler
	Context pluginwire.Context // as it came; Admit may set the effective one
	// HasContext reports whether the request carried a context.
	HasContext bool
	// WantsStream reports whether the caller offered flow control: it reads a stream.
	WantsStream bool

	id     int64
	seq    json.RawMessage
	lane   lane
	target int64              // of a __cancel_action
	size   int                // of Data, as it counts
	came   pluginwire.Context // Context as it came
	ctx    context.Context
	cancel context.CancelCauseFunc
	stream bool // answered with frames and an end

	// Of the connection's lock.
	known    bool          // Context is the effective one
	over     bool          // cancelled: nothing more is sent
	answered bool          // the answer is being written: too late to cancel
	left     bool          // its lane is free, and nobody finds it
	ended    chan struct{} // made when somebody waits for the end
	knows    chan struct{} // made when somebody waits for the context

	flow flow
}

type lane int

const (
	laneNormal lane = iota
	laneReserved
	laneCancel // its actions hold no data
	lanes
)

// flow is the sending side of one flow-controlled stream.
type flow struct {
	mu    sync.Mutex
	sent  int
	acked int
	moved chan struct{} // an acknowledgement came; made with the first frame that waits
}

// request takes one request from the reader.
func (c *Conn) request(r *pluginwire.Request, owned bool) {
	c.requests.Add(1)
	if r.Problem != "" {
		c.refuse(r.Seq, r.Problem)
		return
	}
	on, err := c.contextOf(r.Context)
	if err != nil {
		c.refuse(r.Seq, pluginwire.FromError(err))
		return
	}
	if r.Action == pluginwire.ActionStreamAck {
		c.acknowledged(r, on)
		return
	}
	in := &Inbound{Action: r.Action, Conn: c, Context: on, HasContext: !on.IsZero(), WantsStream: r.FlowControl, id: r.ID, came: on}
	limit := pluginwire.MaxInflight
	switch {
	case r.Action == pluginwire.ActionCancelAction:
		in.lane, limit = laneCancel, pluginwire.CancelLane
		if in.target, err = pluginwire.IntField(r.Data, "seq_id"); err != nil {
			c.refuse(r.Seq, pluginwire.FromError(err))
			return
		}
	case c.cfg.Reserved != nil && c.cfg.Reserved(r.Action):
		in.lane, limit = laneReserved, pluginwire.ReservedLane
	}
	switch {
	case in.lane == laneCancel:
		in.seq = keep(r.Seq, false) // what it says was read
	case owned:
		in.Data, in.seq = keep(r.Data, true), keep(r.Seq, true)
	default:
		own := make([]byte, 0, len(r.Data)+len(r.Seq))
		own = append(append(own, r.Data...), r.Seq...)
		in.Data, in.seq = own[:len(r.Data):len(r.Data)], own[len(r.Data):]
	}
	in.ctx, in.cancel = context.WithCancelCause(c.root)

	c.mu.Lock()
	switch {
	case c.err != nil:
		c.mu.Unlock()
		in.cancel(ErrCancelled)
		return
	case c.running[in.lane] >= limit:
		c.refuseBusy(in, fmt.Sprintf("connection is busy (max %d concurrent actions)", limit))
		return
	case in.lane == laneNormal && c.held > 0 && c.held+len(in.Data) > c.cfg.InflightBytes:
		c.refuseBusy(in, fmt.Sprintf("connection is busy (max %d bytes of concurrent actions)", c.cfg.InflightBytes))
		return
	case !c.cfg.Budget.move(c.held, c.held+len(in.Data), in.lane != laneNormal):
		c.refuseBusy(in, fmt.Sprintf("the runtime is busy (max %d bytes of concurrent actions of all connections)", c.cfg.Budget.max))
		return
	}
	c.running[in.lane]++
	c.held += len(in.Data)
	in.size = len(in.Data)
	c.inbound[in] = struct{}{}
	c.bySeq[in.id] = in
	c.wg.Go(in.run)
	c.mu.Unlock()
}

// refuseBusy answers a request for which there is no room. It takes the lock and
// gives it up.
func (c *Conn) refuseBusy(in *Inbound, text string) {
	c.mu.Unlock()
	in.cancel(ErrCancelled)
	c.busy.Add(1)
	c.refuse(in.seq, pluginwire.ErrorMessage(pluginwire.ClassRuntime, text))
}

// refuse answers a request that is not run.
func (c *Conn) refuse(seq json.RawMessage, text string) {
	c.answer(pluginwire.AppendResponse(nil, &pluginwire.Response{Seq: seq, Code: 1, Message: text}), true)
}

// contextOf decodes a context, or finds it decoded.
func (c *Conn) contextOf(raw []byte) (pluginwire.Context, error) {
	if len(raw) == 0 {
		return pluginwire.Context{}, nil
	}
	if on, ok := c.contexts[string(raw)]; ok {
		return on, nil
	}
	on, err := pluginwire.DecodeContext(raw)
	if err == nil && len(raw) <= 4*pluginwire.MaxID {
		if len(c.contexts) >= maxContexts {
			clear(c.contexts)
		}
		c.contexts[string(raw)] = on
	}
	return on, err
}

func (in *Inbound) run() {
	c := in.Conn
	data, err := in.handle()
	c.finish(in, data, err)
	c.leave(in)
	in.cancel(ErrCancelled)
}

// leave gives up what an action holds of the connection. That is before its answer goes
// out, for a peer that has it may ask the next at once; and not before the answer's turn
// has come, so that a peer that reads nothing has no more than its lanes.
func (c *Conn) leave(in *Inbound) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if in.left {
		return
	}
	in.left = true
	c.running[in.lane]--
	c.cfg.Budget.move(c.held, c.held-in.size, true)
	c.held -= in.size
	delete(c.inbound, in)
	if c.bySeq[in.id] == in {
		delete(c.bySeq, in.id)
	}
	in.known = true
	for _, ch := range []chan struct{}{in.ended, in.knows} {
		if ch != nil {
			close(ch)
		}
	}
	in.ended, in.knows = nil, nil
}

// handle runs the action and returns the data of its answer.
func (in *Inbound) handle() (data json.RawMessage, err error) {
	c := in.Conn
	defer guard(c.log, in.Action, &err)
	if c.cfg.Admit != nil {
		if err := c.cfg.Admit(in); err != nil {
			return nil, err
		}
	}
	c.mu.Lock()
	in.known = true
	if in.knows != nil {
		close(in.knows)
		in.knows = nil
	}
	c.mu.Unlock()
	if in.Action == pluginwire.ActionCancelAction {
		return c.cancelAction(in)
	}
	if in.ctx.Err() != nil {
		return nil, context.Cause(in.ctx)
	}
	if c.cfg.Handle == nil {
		return nil, pluginwire.UnknownAction(in.Action)
	}
	v, err := c.cfg.Handle(in.ctx, in)
	if err != nil {
		return nil, err
	}
	return encode(v)
}

// finish answers an action that has ended, unless it was cancelled.
func (c *Conn) finish(in *Inbound, data json.RawMessage, err error) {
	c.mu.Lock()
	if in.over || c.err != nil {
		c.mu.Unlock()
		return
	}
	in.answered = true
	c.mu.Unlock()
	r := pluginwire.Response{Seq: in.seq, Data: data}
	switch {
	case err != nil:
		c.describe(&r, in, err)
	case in.stream:
		r.Data, r.Chunk = nil, pluginwire.ChunkEnd
	case in.WantsStream:
		// The caller reads a stream: give it the one answer as its only frame.
		if data != nil {
			if c.sendFrame(in.ctx, in, data) != nil {
				return
			}
		}
		r.Data, r.Chunk = nil, pluginwire.ChunkEnd
	}
	if err := c.reply(in.ctx, &r, in); err != nil && errors.Is(err, pluginwire.ErrTooLarge) {
		c.log.Warn("an answer was too large", "action", in.Action, "bytes", len(r.Data))
		_ = c.reply(in.ctx, &pluginwire.Response{Seq: in.seq, Code: 1, Message: pluginwire.FromError(err)}, in)
	}
}

// describe makes r the answer of an error.
func (c *Conn) describe(r *pluginwire.Response, in *Inbound, err error) {
	r.Code, r.Data = 1, nil
	if p, ok := errors.AsType[*PeerError](err); ok {
		r.Message, r.Data = pluginwire.CutText(p.Message), p.Data
		return
	}
	if errdefs.CodeOf(err) == errdefs.Internal {
		c.log.Error("an action failed", "action", in.Action, "error", err)
	}
	r.Message = pluginwire.FromError(err)
}

// reply writes one response when it is its turn. last is the action that it is the last
// of, nil if more follows.
func (c *Conn) reply(ctx context.Context, r *pluginwire.Response, last *Inbound) error {
	buf := lend()
	defer func() { giveBack(buf) }()
	*buf = pluginwire.AppendResponse((*buf)[:0], r)
	return c.send(ctx, nil, *buf, last)
}

// BeginStream says that the answer is a stream, even if no frame comes.
func (in *Inbound) BeginStream() { in.stream = true }

// Send sends one frame of a stream. With flow control it waits until the caller has
// processed enough of those before, at most AckPatience. One goroutine of the handler
// may send. Errors: that the action was cancelled; one that wraps ErrClosed;
// Exhausted when the frame is too large, and then the handler should return that error.
func (in *Inbound) Send(ctx context.Context, data any) error {
	in.stream = true
	raw, err := encode(data)
	if err != nil {
		return err
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := context.Cause(in.ctx); err != nil {
		return err
	}
	return in.Conn.sendFrame(ctx, in, raw)
}

func (c *Conn) sendFrame(ctx context.Context, in *Inbound, raw json.RawMessage) error {
	r := pluginwire.Response{Seq: in.seq, Data: raw}
	if !in.WantsStream {
		return c.reply(ctx, &r, nil)
	}
	buf := lend()
	defer func() { giveBack(buf) }()
	in.flow.mu.Lock()
	r.StreamIndex = in.flow.sent + 1
	in.flow.mu.Unlock()
	*buf = pluginwire.AppendResponse((*buf)[:0], &r)
	if len(*buf) > pluginwire.MaxStreamFrame {
		return errdefs.New(errdefs.Exhausted, "a frame of the stream of %s has %d bytes, the limit is %d", in.Action, len(*buf), pluginwire.MaxStreamFrame)
	}
	if err := in.window(ctx); err != nil {
		return err
	}
	return c.send(ctx, nil, *buf, nil)
}

// window waits until one more frame may be unacknowledged, and counts it.
func (in *Inbound) window(ctx context.Context) error {
	f := &in.flow
	var patience *time.Timer
	var expired <-chan time.Time
	for {
		f.mu.Lock()
		if f.sent-f.acked < pluginwire.FlowWindow {
			f.sent++
			f.mu.Unlock()
			if patience != nil {
				patience.Stop()
			}
			return nil
		}
		if f.moved == nil {
			f.moved = make(chan struct{}, 1)
		}
		moved := f.moved
		f.mu.Unlock()
		if patience == nil {
			patience = time.NewTimer(AckPatience)
			expired = patience.C
		}
		select {
		case <-moved:
		case <-ctx.Done():
			patience.Stop()
			return context.Cause(ctx)
		case <-in.ctx.Done():
			patience.Stop()
			return context.Cause(in.ctx)
		case <-in.Conn.done:
			patience.Stop()
			return in.Conn.Err()
		case <-expired:
			return streamError("the caller of %s has not acknowledged a frame for %s", in.Action, AckPatience)
		}
	}
}

// acknowledged takes a __stream_ack from the reader. It is answered without a
// goroutine: an acknowledgement may not wait, and may only speak about a stream of its
// own context.
func (c *Conn) acknowledged(r *pluginwire.Request, on pluginwire.Context) {
	id, index, err := ackOf(r.Data)
	if err != nil {
		c.refuse(r.Seq, pluginwire.FromError(err))
		return
	}
	c.mu.Lock()
	in := c.bySeq[id]
	ok := in != nil && in.WantsStream && (on == in.came || in.known && on == in.Context)
	c.mu.Unlock()
	if ok {
		f := &in.flow
		f.mu.Lock()
		if index < int64(f.acked) || index > int64(f.sent) {
			err = errdefs.New(errdefs.Invalid, "index %d is not between %d and %d", index, f.acked, f.sent)
		} else {
			f.acked = int(index)
		}
		moved := f.moved
		f.mu.Unlock()
		if err != nil {
			c.refuse(r.Seq, pluginwire.FromError(err))
			return
		}
		if moved != nil {
			select {
			case moved <- struct{}{}:
			default:
			}
		}
	}
	data := `{"accepted":false}`
	if ok {
		data = `{"accepted":true}`
	}
	c.answer(pluginwire.AppendResponse(nil, &pluginwire.Response{Seq: r.Seq, Data: json.RawMessage(data)}), true)
}

func ackOf(data json.RawMessage) (id, index int64, err error) {
	for _, field := range []struct {
		name string
		to   *int64
	}{{"seq_id", &id}, {"index", &index}} {
		n, err := pluginwire.IntField(data, field.name)
		if err != nil {
			return 0, 0, err
		}
		*field.to = n
	}
	return id, index, nil
}

// cancelAction runs a __cancel_action that was admitted. It waits until the context of
// the action it names is known.
func (c *Conn) cancelAction(in *Inbound) (json.RawMessage, error) {
	done := false
	c.mu.Lock()
	target := c.bySeq[in.target]
	if target != nil && !target.known && target != in {
		knows := target.knowsLocked()
		c.mu.Unlock()
		select {
		case <-knows:
		case <-in.ctx.Done():
			return nil, context.Cause(in.ctx)
		}
		c.mu.Lock()
	}
	if _, there := c.inbound[target]; there && target != in && target.Context == in.Context {
		done = c.cancelLocked(target)
	}
	c.mu.Unlock()
	if done {
		return json.RawMessage(`{"cancelled":true}`), nil
	}
	return json.RawMessage(`{"cancelled":false}`), nil
}

// knowsLocked is closed when the action's context is known, or it has ended.
func (in *Inbound) knowsLocked() <-chan struct{} {
	if in.knows == nil {
		in.knows = make(chan struct{})
	}
	return in.knows
}

// cancelLocked cancels one action, unless its answer is on its way.
func (c *Conn) cancelLocked(in *Inbound) bool {
	if in.over || in.answered {
		return false
	}
	in.over = true
	c.cancelled.Add(1)
	in.cancel(ErrCancelled)
	return true
}

// CancelInbound cancels every inbound action in flight and returns how many those
// were. It does not wait: they send nothing from now on.
func (c *Conn) CancelInbound() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for in := range c.inbound {
		if c.cancelLocked(in) {
			n++
		}
	}
	return n
}

// CancelMatching cancels the inbound actions in flight whose effective context is on,
// waits until they have ended and returns how many those were. What Admit is being asked
// about is waited for: it may have been admitted, and be none of those that run yet. A
// handler must not call it for its own context, nor hold what Admit waits for.
func (c *Conn) CancelMatching(on pluginwire.Context) int {
	var ends []chan struct{}
	var asked []<-chan struct{}
	n := 0
	c.mu.Lock()
	for in := range c.inbound {
		if !in.known {
			asked = append(asked, in.knowsLocked())
		}
	}
	c.mu.Unlock()
	for _, knows := range asked {
		<-knows
	}
	c.mu.Lock()
	for in := range c.inbound {
		if !in.known || in.Context != on {
			continue
		}
		if c.cancelLocked(in) {
			n++
		}
		if in.ended == nil {
			in.ended = make(chan struct{})
		}
		ends = append(ends, in.ended)
	}
	c.mu.Unlock()
	for _, end := range ends {
		<-end
	}
	return n
}
