package rpc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Transport carries whole messages. One goroutine reads, one at a time writes, and
// anyone may close, which ends both.
type Transport interface {
	// Read returns the next message, valid until the next Read; io.EOF at the end.
	Read() ([]byte, error)
	// Write sends one message of at most pluginwire.MaxMessage bytes. It fails when the
	// peer takes nothing for StallTime, and then the transport is of no more use.
	Write(msg []byte) error
	// Close ends the connection. It may be called again.
	Close() error
}

// owner is a Transport that may give its last message away: then it is the reader's to
// keep.
type owner interface{ own() bool }

const (
	smallBuffer = 4 << 10   // of an idle stdio reader
	largeBuffer = 64 << 10  // of a busy one
	writeBlock  = 128 << 10 // of a chunked message at once
	keepBuffer  = 256 << 10 // what the pool keeps
	giveAway    = 16 << 10  // a message of a socket that is not read into its own buffer
	calmReads   = 32        // small reads in a row after which a reader is idle again
)

// buffers lends buffers for messages on their way out.
var buffers = sync.Pool{New: func() any { return new(make([]byte, 0, smallBuffer)) }}

func lend() *[]byte { return buffers.Get().(*[]byte) }

// giveBack keeps no large buffers.
func giveBack(b *[]byte) {
	if cap(*b) <= keepBuffer {
		*b = (*b)[:0]
		buffers.Put(b)
	}
}

type stdio struct {
	r     io.Reader
	w     io.Writer
	close func() error
	once  sync.Once
	err   error // of close

	// The rest of the reading side belongs to the reader.
	de         pluginwire.Dechunker
	buf        []byte
	start, end int
	skip       bool // the rest of a line that is none of ours
	calm       int
	eof        error

	// The writing side belongs to the writer.
	watch *time.Timer
}

// Stdio is the stdio framing over a pair of pipes. r is read in one goroutine, w is
// written by one at a time; close must make both return, and may be nil.
func Stdio(r io.Reader, w io.Writer, close func() error) Transport {
	return &stdio{r: r, w: w, close: close}
}

func (s *stdio) Read() ([]byte, error) {
	for {
		line, err := s.line()
		if err != nil {
			return nil, err
		}
		if msg, err := s.de.Line(line); msg != nil || err != nil {
			return msg, err
		}
	}
}

func (s *stdio) own() bool { return s.de.Own() }

// line returns the next line, valid until the next call.
func (s *stdio) line() ([]byte, error) {
	seen := 0
	for {
		if at := bytes.IndexByte(s.buf[s.start+seen:s.end], '\n'); at >= 0 {
			line := s.buf[s.start : s.start+seen+at]
			s.start += seen + at + 1
			seen = 0
			if s.skip {
				s.skip = false
				continue
			}
			return line, nil
		}
		if s.eof != nil {
			line := s.buf[s.start:s.end]
			if s.start = s.end; len(line) > 0 && !s.skip && errors.Is(s.eof, io.EOF) {
				return line, nil
			}
			return nil, s.eof
		}
		seen = s.end - s.start
		if err := s.room(); err != nil {
			return nil, err
		}
		if s.skip {
			s.start, s.end, seen = 0, 0, 0
		}
		n, err := s.r.Read(s.buf[s.end:])
		if s.end += n; n > smallBuffer/2 {
			s.calm = 0
		}
		if err != nil {
			s.eof = err
		}
	}
}

// room makes room for the next read behind what is there.
func (s *stdio) room() error {
	have := s.buf[s.start:s.end]
	switch {
	case len(have) == 0 && (s.buf == nil || len(s.buf) > smallBuffer && s.calm >= calmReads):
		s.buf = make([]byte, smallBuffer)
	case len(have) == len(s.buf):
		// A line that fills the buffer. What is no message is thrown away as it comes.
		if head := bytes.TrimLeft(have, " \t\r\v\f"); len(head) == 0 || head[0] != '{' {
			s.skip = true
			break
		}
		if len(s.buf) > pluginwire.MaxMessage {
			return pluginwire.ErrTooLarge
		}
		grown := make([]byte, max(largeBuffer, 2*len(s.buf)))
		copy(grown, have)
		s.buf = grown
	default:
		copy(s.buf, have)
	}
	s.calm++
	s.start, s.end = 0, len(have)
	return nil
}

func (s *stdio) Write(msg []byte) error {
	c, err := pluginwire.NewChunker(msg)
	if err != nil {
		return err
	}
	out := lend()
	defer func() { giveBack(out) }()
	if len(msg) > pluginwire.StdioInline {
		*out = slices.Grow(*out, min(2*len(msg), writeBlock+pluginwire.StdioLine))
	}
	for more := true; more; {
		*out, more = c.Append((*out)[:0], writeBlock)
		if s.watch == nil {
			s.watch = time.AfterFunc(StallTime, func() { s.Close() })
		} else {
			s.watch.Reset(StallTime)
		}
		_, err := s.w.Write(*out)
		if !s.watch.Stop() {
			return errStalled
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errStalled = errors.New("the peer took nothing for " + StallTime.String())

func (s *stdio) Close() error {
	s.once.Do(func() {
		if s.close != nil {
			s.err = s.close()
		}
	})
	return s.err
}

type socket struct {
	c     *websocket.Conn
	buf   []byte      // the reader's
	watch *time.Timer // the writer's
	once  sync.Once
	err   error
}

// WebSocket is the WebSocket framing: one message of the protocol is one message of
// the socket, in fragments of at most 64 KiB. Text and binary are read alike.
func WebSocket(c *websocket.Conn) Transport {
	c.SetReadLimit(pluginwire.MaxMessage)
	return &socket{c: c}
}

func (s *socket) Read() ([]byte, error) {
	_, r, err := s.c.Reader(context.Background())
	if err != nil {
		return nil, ending(err)
	}
	if s.own() || s.buf == nil {
		// The pieces of a file come one after another, all of one size; its end is looked
		// for behind them.
		last := min(len(s.buf), largeBuffer)
		s.buf = make([]byte, 0, max(512, last+last/64))
	}
	s.buf = s.buf[:0]
	for {
		if len(s.buf) == cap(s.buf) {
			s.buf = append(s.buf, 0)[:len(s.buf)]
		}
		n, err := r.Read(s.buf[len(s.buf):cap(s.buf)])
		s.buf = s.buf[:len(s.buf)+n]
		if err == io.EOF {
			return s.buf, nil
		}
		if err != nil {
			return nil, ending(err)
		}
	}
}

func (s *socket) own() bool { return len(s.buf) > giveAway }

// ending makes io.EOF of an orderly end.
func ending(err error) error {
	switch websocket.CloseStatus(err) {
	case websocket.StatusNormalClosure, websocket.StatusGoingAway, websocket.StatusNoStatusRcvd:
		return io.EOF
	}
	return err
}

func (s *socket) Write(msg []byte) error {
	if len(msg) > pluginwire.MaxMessage {
		return pluginwire.ErrTooLarge
	}
	// A context that ends costs five allocations with every message.
	if s.watch == nil {
		s.watch = time.AfterFunc(StallTime, func() { _ = s.c.CloseNow() })
	} else {
		s.watch.Reset(StallTime)
	}
	err := s.write(context.Background(), msg)
	if !s.watch.Stop() {
		return errStalled
	}
	return err
}

func (s *socket) write(ctx context.Context, msg []byte) error {
	if len(msg) <= pluginwire.WSFragment {
		return s.c.Write(ctx, websocket.MessageText, msg)
	}
	w, err := s.c.Writer(ctx, websocket.MessageText)
	if err != nil {
		return err
	}
	for len(msg) > 0 {
		to := min(pluginwire.WSFragment, len(msg))
		for to < len(msg) && !utf8.RuneStart(msg[to]) {
			to--
		}
		s.watch.Reset(StallTime)
		if _, err := w.Write(msg[:to]); err != nil {
			return err
		}
		msg = msg[to:]
	}
	return w.Close()
}

// farewell is how long a peer may take for its half of the closing handshake.
const farewell = time.Second

func (s *socket) Close() error {
	s.once.Do(func() {
		hurry := time.AfterFunc(farewell, func() { _ = s.c.CloseNow() })
		defer hurry.Stop()
		s.err = s.c.Close(websocket.StatusNormalClosure, "")
	})
	return s.err
}

func (s *socket) ping(ctx context.Context) error { return s.c.Ping(ctx) }
