package relay

import (
	"context"
	"encoding/json"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// link is one incarnation of one daemon: one connection. Its reader goroutine owns
// it; what others touch is said at each field.
type link struct {
	hub       *Hub
	ws        *websocket.Conn
	wire      *wireConn
	target    *target // set once, in admit
	socket    uint64
	remote    string
	metadata  json.RawMessage
	connected time.Time
	out       outbox
	seen      atomic.Int64 // last sign of life, Unix nanoseconds
	asked     atomic.Bool  // a ping is on its way
	stalled   atomic.Bool  // the reader waits for a consumer: silence proves nothing

	mu   sync.Mutex
	jobs map[string]*Job // dispatched to this link and not settled; nil when idle
	more chan struct{}   // made while the reader waits; closed when a job is added
	late map[string]bool // jobs whose end was not confirmed
}

// messagePool lends buffers for one message. A link holds one from a message's
// first byte to the end of its handling.
var messagePool = sync.Pool{New: func() any { b := make([]byte, 0, 32<<10); return &b }}

// keepBuffer is the largest buffer given back to messagePool.
const keepBuffer = 1 << 20

// read takes frames until the connection ends.
func (l *link) read() error {
	var f relaywire.Frame
	ctx := context.Background() // the connection is ended by closing it
	since := 0
	var way chan struct{} // made when it is needed: an idle link has none
	for {
		_, r, err := l.ws.Reader(ctx)
		if err != nil {
			return err
		}
		buf := messagePool.Get().(*[]byte)
		limit := l.hub.lim.ReadLimit()
		if *buf, err = readAll(r, (*buf)[:0], limit); err != nil {
			return err
		}
		l.seen.Store(time.Now().UnixNano())
		if int64(len(*buf)) > limit {
			l.tooLarge(*buf)
			if _, err := io.Copy(io.Discard, r); err != nil {
				return err
			}
		} else if f.Decode(*buf, 0) == nil { // what is no frame is ignored, as the protocol has it
			l.handle(&f)
		}
		f.Event, f.Payload, f.Metadata = nil, nil, nil
		if since += len(*buf); since >= turn {
			since = 0
			if way == nil {
				way = make(chan struct{}, 1)
			}
			l.hub.poll.giveWay(way)
		}
		if cap(*buf) <= keepBuffer {
			messagePool.Put(buf)
		}
	}
}

// turn is how many bytes a reader handles before it lets others run. The scheduler
// by itself lets one connection and its consumer have 10 ms, some megabytes.
const turn = 64 << 10

// readAll reads a message to its end, or until it has more than limit bytes of it.
func readAll(r io.Reader, b []byte, limit int64) ([]byte, error) {
	for int64(len(b)) <= limit {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if err == io.EOF {
			return b, nil
		}
		if err != nil {
			return b, err
		}
	}
	return b, nil
}

// excess is how many times the limit a message may have and still be read past. One
// that is larger costs its daemon the connection.
const excess = 4

// tooLarge acts on the beginning of a message beyond the limit. Only the job it is
// about suffers, not the others on the connection.
func (l *link) tooLarge(prefix []byte) {
	f := relaywire.Peek(prefix)
	limit := l.hub.lim.MessageBytes
	l.hub.log.Warn("relay: a message beyond the limit", "daemon", l.target.id, "type", string(f.Type), "job", f.JobID, "limit", limit)
	j := l.job(f.JobID)
	switch {
	case j == nil:
	case f.Type == relaywire.Event:
		j.ask(relaywire.CodeEventTooLarge, "one of its events is larger than "+strconv.FormatInt(limit, 10)+" bytes")
		j.queue.finish(nil)
	case f.Type == relaywire.MCPRequest && f.RequestID != "":
		j.tools.refuse(f.RequestID, nil, "")
	}
}

// handle acts on one frame. It does not wait for a tool, for the disk or for another
// connection; for the consumer of a job it waits only while that job is alone here.
func (l *link) handle(f *relaywire.Frame) {
	switch f.Type {
	case relaywire.Event:
		if j := l.job(f.JobID); j != nil && relaywire.IsObject(f.Event) {
			l.deliver(j, f.Event)
		}
	case relaywire.Finished:
		l.finished(f.JobID)
	case relaywire.MCPRequest:
		if j := l.job(f.JobID); j != nil && f.RequestID != "" && len(f.Payload) > 0 {
			j.tools.call(f.RequestID, f.Payload)
		}
	case relaywire.Ping:
		l.out.put(relaywire.Frame{Type: relaywire.Pong}, true)
	}
}

func (l *link) job(id string) *Job {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.jobs[id]
}

func (l *link) add(j *Job) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.jobs == nil {
		l.jobs = map[string]*Job{}
	}
	l.jobs[j.id] = j
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
}

func (l *link) remove(id string, end End) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.jobs, id)
	if len(l.jobs) == 0 {
		l.jobs = nil
	}
	if end == EndUnacknowledged {
		if l.late == nil {
			l.late = map[string]bool{}
		}
		l.late[id] = true
	}
}

// grace is how long a reader waits for the consumer of the only job of a daemon
// before it begins to spill: a consumer that is a little behind needs no disk.
const grace = 5 * time.Millisecond

// deliver gives an event to its job. When the job's memory is full: for a moment the
// reader waits, then the event goes to the disk. When that is full as well, the
// daemon itself is made to wait, by not reading from it, as long as the job is alone
// on the connection; a job that is not alone, and one whose consumer does not read
// for the stall time, is ended.
func (l *link) deliver(j *Job, event []byte) {
	for _, try := range []struct {
		disk bool
		wait time.Duration
	}{{false, grace}, {true, l.hub.lim.StallTimeout}} {
		deadline := time.Now().Add(try.wait)
		for {
			got, err := j.queue.put(event, try.disk)
			if err != nil {
				l.hub.log.Error("relay: events cannot be kept on disk", "job", j.id, "error", err)
			}
			if got != full {
				return
			}
			if !l.await(j, time.Until(deadline)) {
				break
			}
		}
	}
	j.ask(relaywire.CodeOverflow, "its consumer does not read: the bound of unread events is reached")
	j.queue.finish(nil)
}

// await waits until the job's queue may have room again; false: do not wait longer,
// because the time is over or another job needs the connection.
func (l *link) await(j *Job, d time.Duration) bool {
	if d <= 0 {
		return false
	}
	l.mu.Lock()
	if len(l.jobs) > 1 {
		l.mu.Unlock()
		return false
	}
	if l.more == nil {
		l.more = make(chan struct{})
	}
	more := l.more
	l.mu.Unlock()
	l.stalled.Store(true)
	j.waiting.Store(true)
	defer func() {
		j.waiting.Store(false)
		l.stalled.Store(false)
		l.seen.Store(time.Now().UnixNano())
	}()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-j.queue.space:
		return true
	case <-more:
	case <-timer.C:
	}
	return false
}

// finished takes the acknowledgement of a job.
func (l *link) finished(id string) {
	h := l.hub
	h.mu.Lock()
	h.apply(l.target, FenceEvent{Kind: Finished, Socket: l.socket, Job: id})
	h.mu.Unlock() // the job's owner does the disk work
	l.mu.Lock()
	late := l.late[id]
	delete(l.late, id)
	l.mu.Unlock()
	if late {
		h.lateFinish(l.target, id)
	}
}

// pinged is called by the WebSocket library: the peer asked for a pong.
func (l *link) pinged(context.Context, []byte) bool {
	l.seen.Store(time.Now().UnixNano())
	return true
}

// lost ends a connection that cannot be written to. The reader then ends by itself.
func (l *link) lost(err error) {
	l.hub.log.Warn("relay: the connection of a daemon failed", "daemon", l.target.id, "error", err)
	l.wire.Close()
}

// end is the end of the link: what it had is fenced at once.
func (l *link) end(err error) {
	h := l.hub
	l.out.close()
	h.mu.Lock()
	t := l.target
	t.link = nil
	t.use()
	h.apply(t, FenceEvent{Kind: Disconnected, Socket: l.socket})
	fenced := t.step.Fenced
	h.mu.Unlock()
	l.ws.CloseNow()
	h.diskWork(t) // evidence, or away with a spare marker
	h.unuse(t)
	h.log.Info("relay: daemon disconnected", "daemon", t.id, "incarnation", l.socket, "fenced", fenced, "error", err)
}

// diskWork is settleDisk for those who can only tell the log: what must not fail
// was written before the job was dispatched.
func (h *Hub) diskWork(t *target) {
	if err := h.settleDisk(t); err != nil {
		h.mu.Lock()
		id := t.id
		h.mu.Unlock()
		h.log.Error("relay: the record of a daemon cannot be kept", "daemon", id, "key", t.key, "error", err)
	}
}

// pings is how many daemons are asked at once. A daemon that does not answer keeps
// its place for the pong time-out.
const pings = 256

// pinger asks daemons that were silent for a sign of life, and ends the connection
// of those that give none.
func (h *Hub) pinger() {
	tick := time.NewTicker(max(h.lim.PingInterval/16, time.Millisecond))
	defer tick.Stop()
	places := make(chan struct{}, pings)
	for {
		var now time.Time
		select {
		case <-h.quit:
			return
		case now = <-tick.C:
		}
		h.mu.Lock()
		var silent []*link
		for _, t := range h.targets {
			if l := t.link; l != nil && !l.asked.Load() && !l.stalled.Load() &&
				now.Sub(time.Unix(0, l.seen.Load())) >= h.lim.PingInterval {
				silent = append(silent, l)
			}
		}
		h.mu.Unlock()
		for _, l := range silent {
			select {
			case places <- struct{}{}:
			case <-h.quit:
				return
			}
			l.asked.Store(true)
			h.spawn(func() {
				l.ask()
				<-places
			})
		}
	}
}

// ask pings once. A daemon that is being sent a large payload, or whose reader waits
// for a consumer, is not judged.
func (l *link) ask() {
	defer l.asked.Store(false)
	before := l.seen.Load()
	ctx, cancel := context.WithTimeout(context.Background(), l.hub.lim.PongTimeout)
	defer cancel()
	err := l.ws.Ping(ctx)
	if err == nil {
		l.seen.Store(time.Now().UnixNano())
		return
	}
	if l.seen.Load() == before && !l.stalled.Load() && !l.out.sending() {
		l.lost(err)
	}
}
