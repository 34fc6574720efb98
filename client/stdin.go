package client

import (
	"context"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// writePiece is the most one write carries: a quarter of the window, so that the
// child has something to read while the next one travels.
const writePiece = 256 << 10

// Stdin writes the input of a process. Write blocks while the child does not
// read; Close writes the end of the input. It may be used from many goroutines,
// whose writes do not mix.
type Stdin struct {
	write func(ctx context.Context, offset int64, data []byte, eof bool) (StdinState, error)
	piece int
	ctx   context.Context //nolint:containedctx // io.Writer has no room for one

	mu     sync.Mutex
	offset int64
	closed bool
}

// Stdin returns a writer that goes on where the input was when the process was
// opened (the start, for a new one). The context ends its waiting.
func (p *Process) Stdin(ctx context.Context) *Stdin { return p.StdinAt(ctx, p.info.Stdin.Accepted) }

// StdinAt returns a writer that starts at an offset. A caller that repeats its
// whole input after a crash starts at 0: what was accepted already is skipped.
func (p *Process) StdinAt(ctx context.Context, offset int64) *Stdin {
	return &Stdin{write: p.Write, piece: p.piece(), ctx: ctx, offset: offset}
}

// piece is how much one write carries.
func (p *Process) piece() int {
	if n := p.info.IO.MaxWriteBytes; n > 0 {
		return int(min(n, writePiece))
	}
	return writePiece
}

// Offset is the number of input bytes before the next one.
func (s *Stdin) Offset() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.offset
}

// Write writes all of b, or says with an error how much of it was accepted.
func (s *Stdin) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, errdefs.New(Conflict, "the input was closed at offset %d", s.offset)
	}
	done := 0
	for done < len(b) {
		n, _, err := s.push(b[done:min(len(b), done+s.piece)], false)
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// Close writes the end of the input. Closing again does nothing.
func (s *Stdin) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	for {
		_, st, err := s.push(nil, true)
		if err != nil {
			return err
		}
		if st.EOF {
			s.closed = true
			return nil
		}
	}
}

// push writes once, waiting while there is no room. The caller holds mu.
func (s *Stdin) push(b []byte, eof bool) (int, StdinState, error) {
	delay := 2 * time.Millisecond
	for {
		st, err := s.write(s.ctx, s.offset, b, eof)
		if err == nil {
			n := int(min(max(st.Accepted-s.offset, 0), int64(len(b))))
			s.offset += int64(n)
			if n > 0 || len(b) == 0 {
				return n, st, nil
			}
		} else if !IsCode(err, Exhausted) {
			return 0, st, err
		}
		if !sleep(s.ctx, delay) {
			return 0, st, errdefs.Wrap(context.Cause(s.ctx), Unavailable, "writing the input was given up at offset %d", s.offset)
		}
		delay = min(delay*2, 250*time.Millisecond)
	}
}
