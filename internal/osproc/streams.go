package osproc

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func detached(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), d)
}

// stream is our end of a pipe that the tree writes to.
type stream struct {
	*os.File
	gone atomic.Bool
}

// finish says that the tree is proven gone. What is in the pipe then is all that there
// is: a process of somebody else may hold the other end, given to it over a socket, as
// ssh and tmux do with their masters, and is not waited for.
func (s *stream) finish() {
	s.gone.Store(true)
	_ = s.SetReadDeadline(time.Unix(1, 0)) // wakes who waits; an end that is closed needs none
}

// Read is File.Read, until finish; then it does not wait.
func (s *stream) Read(p []byte) (int, error) {
	for !s.gone.Load() {
		n, err := s.File.Read(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, err
	}
	n := 0
	if cerr := raw.Control(func(fd uintptr) { n, err = unix.Read(int(fd), p) }); cerr != nil {
		return 0, cerr
	}
	switch {
	case errors.Is(err, unix.EINTR):
		return 0, nil
	case errors.Is(err, unix.EAGAIN), err == nil && n == 0:
		return 0, io.EOF
	case err != nil:
		return 0, err
	}
	return n, nil
}

// lines reads lines within bounds. One goroutine reads; abort may come from
// another.
type lines struct {
	f       *stream
	r       *bufio.Reader
	long    []byte // a line that did not fit r
	maxLine int
	left    int64
	err     error
}

func newLines(f *os.File, maxLine int, maxOutput int64) *lines {
	s := &stream{File: f}
	return &lines{f: s, r: bufio.NewReaderSize(s, min(64<<10, max(maxLine, 16))), maxLine: maxLine, left: maxOutput}
}

func (l *lines) next() ([]byte, error) {
	if l.err != nil {
		return nil, l.err
	}
	line, err := l.read()
	if err != nil {
		l.err = err
		_ = l.f.Close() // who writes on gets told
	}
	return line, err
}

func (l *lines) read() ([]byte, error) {
	l.long = l.long[:0]
	if cap(l.long) > 1<<20 {
		l.long = nil // one long line is no reason to hold its memory for ever
	}
	for {
		part, err := l.r.ReadSlice('\n')
		if l.left -= int64(len(part)); l.left < 0 {
			return nil, errdefs.New(errdefs.Exhausted, "the agent's output is longer than the limit for all of it")
		}
		whole := err == nil
		if whole {
			part = part[:len(part)-1]
		}
		if len(l.long)+len(part) > l.maxLine {
			return nil, errdefs.New(errdefs.Exhausted, "a line of the agent's output is longer than the limit of %d bytes", l.maxLine)
		}
		if whole && len(l.long) == 0 {
			return part, nil
		}
		l.long = append(l.long, part...)
		switch {
		case whole:
			return l.long, nil
		case errors.Is(err, bufio.ErrBufferFull):
		case errors.Is(err, io.EOF) && len(l.long) > 0:
			return l.long, nil // the next read ends
		case errors.Is(err, os.ErrClosed):
			return nil, io.EOF
		default:
			return nil, err
		}
	}
}

func (l *lines) abort() { _ = l.f.Close() }

// input takes data without waiting, up to a bound, and one goroutine writes it.
type input struct {
	f    *os.File
	max  int
	wake chan struct{} // holds one token when there is something to do
	done chan struct{}

	mu      sync.Mutex
	pending []byte
	ended   bool
}

func newInput(f *os.File, maxPending int) *input {
	in := &input{f: f, max: maxPending, wake: make(chan struct{}, 1), done: make(chan struct{})}
	go in.pump()
	return in
}

func (in *input) write(data []byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.ended {
		return nil
	}
	if len(in.pending)+len(data) > in.max {
		return errdefs.New(errdefs.Exhausted, "the agent has not taken %d bytes of its input, the limit is %d", len(in.pending), in.max)
	}
	in.pending = append(in.pending, data...)
	in.poke()
	return nil
}

func (in *input) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ended = true
	in.poke()
}

// abort closes the pipe under a write that may wait for ever.
func (in *input) abort() {
	in.end()
	_ = in.f.Close()
	<-in.done
}

func (in *input) poke() {
	select {
	case in.wake <- struct{}{}:
	default:
	}
}

func (in *input) pump() {
	defer close(in.done)
	defer in.f.Close()
	for range in.wake {
		in.mu.Lock()
		data, ended := in.pending, in.ended
		in.pending = nil
		in.mu.Unlock()
		if len(data) > 0 {
			if _, err := in.f.Write(data); err != nil {
				in.end() // the agent closed its input: the rest is dropped
				return
			}
		}
		if ended {
			return
		}
	}
}

// tail keeps the end of a stream.
type tail struct {
	f    *stream
	max  int
	done chan struct{}

	mu  sync.Mutex
	buf []byte
	cut bool
}

func newTail(f *os.File, max int) *tail {
	t := &tail{f: &stream{File: f}, max: max, done: make(chan struct{})}
	go t.pump()
	return t
}

func (t *tail) pump() {
	defer close(t.done)
	defer t.f.Close()
	part := make([]byte, 8<<10)
	for {
		n, err := t.f.Read(part)
		t.mu.Lock()
		t.buf = append(t.buf, part[:n]...)
		if len(t.buf) > 2*t.max { // trimmed seldom, so that it costs little
			t.buf = append(t.buf[:0], t.buf[len(t.buf)-t.max:]...)
			t.cut = true
		}
		t.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// text returns the end. A first line that is not whole is left out: the half of a
// secret would not be known as one.
func (t *tail) text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b, cut := t.buf, t.cut
	if len(b) > t.max {
		b, cut = b[len(b)-t.max:], true
	}
	if cut {
		i := 0
		for i < len(b) && b[i] != '\n' {
			i++
		}
		b = b[min(i+1, len(b)):]
	}
	return string(b)
}

func (t *tail) abort() {
	_ = t.f.Close()
	<-t.done
}
