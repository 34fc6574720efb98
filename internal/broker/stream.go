package broker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/wire"
)

// Pauses of a followed log whose host has gone away, and how long it is waited
// for before the answer ends.
const (
	followPause = 100 * time.Millisecond
	followWait  = time.Minute
)

// StreamQuery says which part of a log to stream.
type StreamQuery struct {
	Cursor string        // "" is the oldest kept byte
	Follow bool          // go on until the end of the log
	Wait   time.Duration // as in ReadQuery, when not following
	Ack    bool          // as in ReadQuery
}

// LogStream is a log as frames. It is for one goroutine and must be closed.
type LogStream struct {
	ctx    context.Context
	r      *logReader
	end    int64 // not followed: where the log ended when it was opened
	asked  int64 // not followed: where the last question to the host began
	note   []byte
	any    bool      // output was handed on
	away   time.Time // since when the host has been away
	failed error
}

// Stream opens a log as frames. Headers and order are checked here; the host has
// checked the payloads against the disk, and who reads them in the end checks them
// again, by the checksums in the headers. A followed log goes on through a restart
// of its host program; one that is not followed goes at least to where the log
// ended when it was opened, however long it is.
func (b *Broker) Stream(ctx context.Context, p authz.Principal, handle string, q StreamQuery) (*LogStream, error) {
	lq := logQuery{cursor: q.Cursor, wait: q.Wait, follow: q.Follow, ack: q.Ack, frames: true}
	if q.Follow {
		lq.wait = 0
	} else {
		lq.max = host.MaxLogBytes
	}
	r, err := b.openLog(ctx, p, handle, lq)
	if err != nil {
		return nil, err
	}
	s := &LogStream{ctx: ctx, r: r, asked: r.at}
	if !q.Follow {
		s.end = r.known(ctx)
	}
	// The first question is asked here, so that its error is an answer and not a
	// broken stream. A followed start is waited for in Next.
	if r.o == nil || lifeOf(r.rec).Acked() {
		if err := r.ask(ctx); err != nil {
			r.close()
			return nil, err
		}
	}
	return s, nil
}

// Next returns whole frames, one after the other, valid until the next call:
// stdout and stderr frames as the host sent them; a gap frame whose payload is
// wire.GapFrame as JSON; and last a status frame whose payload is
// api.ReadResponse without records. Then io.EOF. A status without EOF says where
// to go on reading; of a log that is damaged there, the next read has the error.
func (s *LogStream) Next() ([]byte, error) {
	if s.failed != nil {
		return nil, s.failed
	}
	b, err := s.batch()
	s.failed = err
	return b, err
}

func (s *LogStream) batch() ([]byte, error) {
	for {
		batch, err := s.r.next(s.ctx)
		switch {
		case s.ctx.Err() != nil:
			return nil, s.ctx.Err()
		case err != nil && !errors.Is(err, io.EOF):
			again, err := s.broken(err)
			if err != nil {
				return nil, err
			}
			if again {
				continue
			}
			return s.last(wire.StatusFrame{Next: s.r.at, Oldest: s.r.oldest})
		case err != nil:
			return nil, err
		case batch.Gap != nil:
			s.away = time.Time{}
			return s.frame(wire.KindGap, batch.Gap.From, *batch.Gap)
		case batch.Status != nil:
			if problem := batch.Status.Error; problem != nil && !s.any {
				return nil, problem.Err() // there is no way on from here
			}
			if s.more(*batch.Status) {
				continue
			}
			return s.last(*batch.Status)
		}
		s.away, s.any = time.Time{}, true
		return batch.Frames, nil
	}
}

// broken says whether to ask again after a fault: a host program that restarts
// is waited for. An error of the log itself is returned.
func (s *LogStream) broken(err error) (bool, error) {
	if !errdefs.Is(err, errdefs.Unavailable) {
		return false, err
	}
	if !s.r.q.follow {
		return false, nil // the status says where to go on
	}
	at := time.Now()
	if s.away.IsZero() {
		s.away = at
	}
	if at.Sub(s.away) > followWait {
		return false, nil
	}
	if s.r.body != nil {
		_ = s.r.body.Close()
	}
	s.r.body, s.r.frames = nil, nil
	if o := s.r.o; o != nil {
		if v := o.view.Load(); v != nil && v.err == nil {
			s.r.rec = v.rec
			if v.final() {
				s.r.o = nil
			}
		}
	}
	pause := time.NewTimer(followPause)
	defer pause.Stop()
	select {
	case <-pause.C:
		return true, nil
	case <-s.ctx.Done():
		return false, s.ctx.Err()
	}
}

// more reports whether the host is to be asked again, because one answer of it
// carries only so much. An answer that brought nothing is the last.
func (s *LogStream) more(status wire.StatusFrame) bool {
	if s.r.q.follow || status.EOF || status.Error != nil || s.r.at >= s.end || s.r.at <= s.asked {
		return false
	}
	s.asked = s.r.at
	s.r.again()
	return true
}

func (s *LogStream) last(status wire.StatusFrame) ([]byte, error) {
	out, err := s.r.status(s.ctx, status)
	if err != nil {
		return nil, err
	}
	s.r.ended = true
	return s.frame(wire.KindStatus, status.Next, out)
}

func (s *LogStream) frame(k wire.Kind, cursor int64, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "a frame could not be encoded")
	}
	s.note = wire.AppendHeader(s.note[:0], wire.Header{Kind: k, Length: len(payload), Cursor: cursor, Sum: wire.Sum(payload)})
	s.note = append(s.note, payload...)
	return s.note, nil
}

// Close gives back everything; the log stays.
func (s *LogStream) Close() error {
	s.r.close()
	return nil
}
