package relay

import (
	"context"
	"sync"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// fragment is the most that is written as one WebSocket frame. A larger message is
// cut, so that a pong can go between two pieces of a payload that takes long: the
// library gives up on a connection whose ping it cannot answer within 5 s.
const fragment = 64 << 10

// outbox sends frames to one daemon in two lanes. What is urgent overtakes what
// waits, never what is being written. There is a writer goroutine only while there
// is something to write: an idle daemon costs no stack.
type outbox struct {
	ws    *websocket.Conn
	max   int64
	spawn func(func())    // starts the writer, joined by the hub
	fail  func(err error) // a write failed: the connection is lost

	mu      sync.Mutex
	closed  bool
	writing bool
	busy    bool // a message is on its way just now
	urgent  []relaywire.Frame
	normal  []relaywire.Frame
	bytes   int64 // in normal
	pong    bool  // one waits already; a daemon that only asks gets one at a time
}

// frameBytes is what a frame that waits counts beside its payload, so that a daemon that
// does not read cannot be owed more frames without one than the bound has room for.
const frameBytes = 512

// cost is what a frame counts.
func cost(f relaywire.Frame) int64 { return int64(len(f.Payload)) + frameBytes }

// put queues a frame; false: it would go over the bound, or the outbox is closed.
func (o *outbox) put(f relaywire.Frame, urgent bool) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return false
	}
	if urgent {
		if f.Type == relaywire.Pong {
			if o.pong {
				return true
			}
			o.pong = true
		}
		o.urgent = append(o.urgent, f)
	} else {
		n := cost(f)
		if o.bytes > 0 && o.bytes+n > o.max {
			return false
		}
		o.bytes += n
		o.normal = append(o.normal, f)
	}
	if !o.writing {
		o.writing = true
		o.spawn(o.write)
	}
	return true
}

// withdraw takes back the run.start of a job, if it is still waiting.
func (o *outbox) withdraw(job string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, f := range o.normal {
		if f.Type == relaywire.Start && f.JobID == job {
			o.bytes -= cost(f)
			o.normal = append(o.normal[:i:i], o.normal[i+1:]...)
			return true
		}
	}
	return false
}

// sending reports whether a message is on its way.
func (o *outbox) sending() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.busy
}

func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.urgent, o.normal, o.bytes = nil, nil, 0
}

func (o *outbox) take() (f relaywire.Frame, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.busy = false
	switch {
	case o.closed:
	case len(o.urgent) > 0:
		f, ok = o.urgent[0], true
		if f.Type == relaywire.Pong {
			o.pong = false
		}
		if o.urgent = o.urgent[1:]; len(o.urgent) == 0 {
			o.urgent = nil
		}
	case len(o.normal) > 0:
		f, ok = o.normal[0], true
		o.bytes -= cost(f)
		if o.normal = o.normal[1:]; len(o.normal) == 0 {
			o.normal = nil
		}
	}
	o.writing, o.busy = ok, ok
	return f, ok
}

// write is the writer goroutine.
func (o *outbox) write() {
	var buf []byte
	for {
		f, ok := o.take()
		if !ok {
			return
		}
		buf = relaywire.Append(buf[:0], &f)
		if err := o.send(buf); err != nil {
			o.close()
			o.fail(err)
			return
		}
		if cap(buf) > fragment {
			buf = nil
		}
	}
}

// send writes one message. Its bound is the connection's own stall time per write,
// so the context has none.
func (o *outbox) send(p []byte) error {
	ctx := context.Background()
	if len(p) <= fragment {
		return o.ws.Write(ctx, websocket.MessageText, p)
	}
	w, err := o.ws.Writer(ctx, websocket.MessageText)
	if err != nil {
		return err
	}
	for len(p) > 0 {
		n := min(len(p), fragment)
		if _, err := w.Write(p[:n]); err != nil {
			return err
		}
		p = p[n:]
	}
	return w.Close()
}
