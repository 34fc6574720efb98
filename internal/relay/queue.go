package relay

import (
	"context"
	"encoding/json"
	"sync"
	"sync/atomic"
)

// accept says what became of an event given to a queue.
type accept uint8

const (
	taken   accept = iota
	dropped        // nobody will read any more
	full           // neither memory nor disk has room now
)

// blockBytes is the size of the pieces of memory a queue is made of. A larger event
// has a piece of its own.
const blockBytes = 64 << 10

// block is a piece of a queue: events one after the other.
type block struct {
	buf  []byte
	ends []int
}

var blockPool = sync.Pool{New: func() any { return &block{buf: make([]byte, 0, blockBytes)} }}

func newBlock(event int) *block {
	if event > blockBytes {
		return &block{buf: make([]byte, 0, event)}
	}
	return blockPool.Get().(*block)
}

func (b *block) add(event []byte) {
	b.buf = append(b.buf, event...)
	b.ends = append(b.ends, len(b.buf))
}

// free gives the block back. Nobody may look at its events any more.
func (b *block) free() {
	if cap(b.buf) == blockBytes {
		b.buf, b.ends = b.buf[:0], b.ends[:0]
		blockPool.Put(b)
	}
}

// batch is what a consumer took: events in order.
type batch struct {
	blocks []*block
	events []json.RawMessage
}

func (b *batch) list() {
	b.events = b.events[:0]
	for _, k := range b.blocks {
		at := 0
		for _, end := range k.ends {
			b.events = append(b.events, k.buf[at:end:end])
			at = end
		}
	}
}

// free gives the memory of the events back.
func (b *batch) free() {
	clear(b.events)
	b.events = b.events[:0]
	for _, k := range b.blocks {
		k.free()
	}
	clear(b.blocks)
	b.blocks = b.blocks[:0]
}

// queue holds the events of one job that were not read yet: in memory up to a
// bound, then on disk up to another. The connection's reader puts, one consumer at
// a time takes.
//
// Order: memory first, then the spill. Once something is spilled, everything goes
// there until the consumer has read it all.
type queue struct {
	memory int64 // bound of bytes in memory
	disk   *spill

	mu       sync.Mutex
	blocks   []*block
	bytes    int64 // in blocks
	done     bool  // no more events will come
	gone     bool  // nobody reads: drop
	waiting  bool  // the consumer waits on readable
	pressed  bool  // the reader waits on space
	events   atomic.Int64
	readable chan struct{} // one slot
	space    chan struct{} // one slot: something was taken, or the queue is gone

	consumer sync.Mutex // one consumer at a time
}

func newQueue(memory int64, disk *spill) *queue {
	return &queue{memory: memory, disk: disk, readable: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

// put takes a copy of the event. useDisk false asks for memory only: full then
// means that the memory is used up. After full, space tells when to try again.
func (q *queue) put(event []byte, useDisk bool) (accept, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone || q.done {
		return dropped, nil
	}
	if !q.disk.used() && (q.bytes == 0 || q.bytes+int64(len(event)) <= q.memory) {
		q.append(event)
	} else {
		if !useDisk && !q.disk.used() {
			q.pressed = true
			return full, nil
		}
		ok, err := q.disk.write(event)
		if !ok {
			q.pressed = true
			return full, err
		}
		if err != nil {
			q.wake()
			return taken, err
		}
	}
	q.events.Add(1)
	q.wake()
	return taken, nil
}

func (q *queue) append(event []byte) {
	n := len(q.blocks)
	if n == 0 || len(q.blocks[n-1].buf)+len(event) > cap(q.blocks[n-1].buf) {
		q.blocks = append(q.blocks, newBlock(len(event)))
		n++
	}
	q.blocks[n-1].add(event)
	q.bytes += int64(len(event))
}

func (q *queue) wake() {
	if q.waiting {
		q.waiting = false
		signal(q.readable)
	}
}

func (q *queue) release() {
	if q.pressed {
		q.pressed = false
		signal(q.space)
	}
}

// take fills b with the events that are there, at least one; none and no error mean
// the end. b must have been freed, or be left to the garbage collector by the caller.
func (q *queue) take(ctx context.Context, b *batch) error {
	q.consumer.Lock()
	defer q.consumer.Unlock()
	for {
		q.mu.Lock()
		if len(q.blocks) > 0 {
			b.blocks, q.blocks = q.blocks, b.blocks[:0]
			q.bytes = 0
			q.release()
			q.mu.Unlock()
			b.list()
			return nil
		}
		if q.gone {
			q.mu.Unlock()
			return nil
		}
		if q.disk.used() {
			// Only this goroutine moves the reading end of the spill, so the file is
			// read without the lock and the connection's reader goes on.
			part := q.disk.next(q.memory)
			q.mu.Unlock()
			one, err := part.load()
			q.mu.Lock()
			gone := q.gone
			if err == nil && !gone {
				q.disk.consumed(part)
				q.release()
			}
			q.mu.Unlock()
			if gone {
				return nil
			}
			if err != nil {
				return err
			}
			b.blocks = append(b.blocks[:0], one)
			b.list()
			return nil
		}
		if q.done {
			q.mu.Unlock()
			return nil
		}
		q.waiting = true
		q.mu.Unlock()
		select {
		case <-q.readable:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// finish says that no more events come, after one last one if it is not nil.
func (q *queue) finish(last []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if last != nil && !q.gone && !q.done {
		if q.disk.used() {
			q.disk.force(last)
		} else {
			q.append(last)
		}
	}
	q.done = true
	q.wake()
	q.release()
}

// drop frees everything; nobody reads any more.
func (q *queue) drop() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gone = true
	for _, b := range q.blocks {
		b.free()
	}
	q.blocks, q.bytes = nil, 0
	q.disk.close()
	q.wake()
	q.release()
}

func (q *queue) sizes() (memory, disk int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.bytes + q.disk.inMemory(), q.disk.onDisk()
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
