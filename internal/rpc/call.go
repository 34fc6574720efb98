package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// call waits for one response. It is used again.
type call struct {
	action string
	answer chan result // one
	timer  *time.Timer
}

type result struct {
	data json.RawMessage
	err  error
}

// freeCalls is how many idle calls a connection keeps.
const freeCalls = 8

// newCall lends a call; it is not shared among connections, so that none of its parts
// leaves the bubble of a test.
func (c *Conn) newCall(action string) *call {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.free); n > 0 {
		k := c.free[n-1]
		c.free = c.free[:n-1]
		k.action = action
		return k
	}
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &call{action: action, answer: make(chan result, 1), timer: t}
}

func (c *Conn) freeCall(k *call) {
	k.timer.Stop()
	k.action = ""
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.free) < freeCalls {
		c.free = append(c.free, k)
	}
}

func (k *call) deliver(r *pluginwire.Response, own bool) bool {
	data := keep(r.Data, own)
	if r.Code != 0 {
		k.answer <- result{nil, &PeerError{Action: k.action, Message: r.Message, Data: data}}
	} else {
		k.answer <- result{data, nil}
	}
	return true
}

func (k *call) fail(err error) { k.answer <- result{nil, err} }

// Call sends a request and waits for its one answer. data is as a [Handler] returns
// it. Errors: a *PeerError; one that wraps ErrTimeout or ErrClosed; the cause of ctx;
// Exhausted for a message that is too large, which was not sent.
func (c *Conn) Call(ctx context.Context, action string, data any, o CallOptions) (json.RawMessage, error) {
	raw, err := encode(data)
	if err != nil {
		return nil, err
	}
	k := c.newCall(action)
	defer c.freeCall(k)
	var expired <-chan time.Time
	if after := o.timeout(); after > 0 {
		k.timer.Reset(after)
		expired = k.timer.C
	}
	id, err := c.expect(k)
	if err != nil {
		return nil, err
	}
	sent := false
	if err = c.sendRequest(ctx, expired, &pluginwire.OutRequest{Seq: id, Action: action, Data: raw, Context: o.Context}); err == nil {
		sent = true
		select {
		case r := <-k.answer:
			return r.data, r.err
		case <-expired:
			err = ErrTimeout
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if !c.forget(id) {
		// Somebody has the call in hand: what comes is there at once.
		r := <-k.answer
		return r.data, r.err
	}
	if sent && o.CancelPeer {
		c.cancelPeer(id, o.Context)
	}
	if errors.Is(err, ErrTimeout) {
		c.timeouts.Add(1)
		err = timeoutError(action, o.timeout())
	}
	return nil, err
}

func (c *Conn) sendRequest(ctx context.Context, expired <-chan time.Time, r *pluginwire.OutRequest) error {
	buf := lend()
	defer func() { giveBack(buf) }()
	*buf = pluginwire.AppendRequest((*buf)[:0], r)
	return c.send(ctx, expired, *buf, nil)
}

// cancelPeer tells the peer that nobody waits for id any more. Nobody waits for the
// answer either, and older peers do not know the action.
func (c *Conn) cancelPeer(id int64, on pluginwire.Context) {
	data := strconv.AppendInt([]byte(`{"seq_id":`), id, 10)
	c.answer(pluginwire.AppendRequest(nil, &pluginwire.OutRequest{
		Seq: c.seq.Add(1), Action: pluginwire.ActionCancelAction, Data: append(data, '}'), Context: on,
	}), false)
}
