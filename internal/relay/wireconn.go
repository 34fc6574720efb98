package relay

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

// wireBuffer is what one read from a socket may bring.
const wireBuffer = 64 << 10

// idleBuffer is the size of the buffers a connection keeps while it is idle. A
// socket that has bytes lends itself a wireBuffer until they are used up, so ten
// thousand silent daemons do not hold ten thousand read buffers.
const idleBuffer = 512

var wirePool = sync.Pool{New: func() any { return new([wireBuffer]byte) }}

// wireConn is a daemon's connection with borrowed read buffers, and with a deadline
// for the progress of each write.
type wireConn struct {
	net.Conn
	raw   syscall.RawConn // nil: not a plain socket
	stall time.Duration

	// The rest belongs to the one goroutine that reads.
	first []byte // read by net/http before it gave the connection away
	block *[wireBuffer]byte
	left  []byte // of block
	n     int
	err   error
	fill  func(fd uintptr) bool
}

func newWireConn(nc net.Conn, first []byte, stall time.Duration) *wireConn {
	w := &wireConn{Conn: nc, first: first, stall: stall}
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			w.raw, w.fill = raw, w.tryRead
		}
	}
	return w
}

// tryRead reads what is there into a borrowed block. It reports false, holding no
// block, when the socket must be waited for.
func (w *wireConn) tryRead(fd uintptr) bool {
	block := wirePool.Get().(*[wireBuffer]byte)
	for {
		w.n, w.err = syscall.Read(int(fd), block[:])
		if w.err != syscall.EINTR {
			break
		}
	}
	if w.n > 0 {
		w.block = block
		return true
	}
	wirePool.Put(block)
	return w.err != syscall.EAGAIN
}

// Read is net.Conn's. Only one goroutine may read.
func (w *wireConn) Read(p []byte) (int, error) {
	if len(w.first) > 0 {
		n := copy(p, w.first)
		if w.first = w.first[n:]; len(w.first) == 0 {
			w.first = nil
		}
		return n, nil
	}
	if len(w.left) == 0 {
		if w.raw == nil || len(p) >= wireBuffer {
			return w.Conn.Read(p)
		}
		if err := w.raw.Read(w.fill); err != nil {
			return 0, err
		}
		if w.block == nil {
			if w.err == nil {
				return 0, io.EOF
			}
			return 0, w.err
		}
		w.left = w.block[:w.n]
	}
	n := copy(p, w.left)
	if w.left = w.left[n:]; len(w.left) == 0 {
		wirePool.Put(w.block)
		w.block, w.left = nil, nil
	}
	return n, nil
}

// Write is net.Conn's. A peer that takes nothing for the stall time is lost.
func (w *wireConn) Write(p []byte) (int, error) {
	if err := w.Conn.SetWriteDeadline(time.Now().Add(w.stall)); err != nil {
		return 0, err
	}
	return w.Conn.Write(p)
}

// lender gives the WebSocket library the connection with our buffers.
type lender struct {
	http.ResponseWriter
	stall time.Duration
	bytes int // for the kernel to keep unread; < 0: as it likes
	wire  *wireConn
}

// Hijack implements http.Hijacker.
func (l *lender) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	nc, rw, err := http.NewResponseController(l.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	// net/http may have a deadline of its own on it.
	if err := nc.SetDeadline(time.Time{}); err != nil {
		nc.Close()
		return nil, nil, err
	}
	if s, ok := nc.(interface{ SetReadBuffer(int) error }); ok && l.bytes > 0 {
		_ = s.SetReadBuffer(l.bytes) // a wish: without it only latency suffers
	}
	// The server's own words before the hijack, and what the client sent early.
	if err := rw.Writer.Flush(); err != nil {
		nc.Close()
		return nil, nil, err
	}
	var first []byte
	if n := rw.Reader.Buffered(); n > 0 {
		if first, err = rw.Reader.Peek(n); err != nil {
			nc.Close()
			return nil, nil, err
		}
		first = append([]byte(nil), first...)
	}
	l.wire = newWireConn(nc, first, l.stall)
	size := idleBuffer
	if l.wire.raw == nil {
		size = 8 * idleBuffer
	}
	return l.wire, bufio.NewReadWriter(bufio.NewReaderSize(l.wire, size), bufio.NewWriterSize(l.wire, idleBuffer)), nil
}
