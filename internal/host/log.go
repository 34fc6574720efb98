package host

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/spool"
	"github.com/stockade-run/stockade/internal/wire"
)

// Bounds of one log request.
const (
	// MaxLogWait is the longest a log request waits for the first byte.
	MaxLogWait = 30 * time.Second
	// MaxLogBytes is the most output one answer carries when not following.
	MaxLogBytes = 64 << 20

	defaultLogBytes = 1 << 20
	// logChunk is how much output is read and sent at once: one frame of the
	// largest size.
	logChunk = wire.MaxPayload
)

func newBuffers() *sync.Pool {
	return &sync.Pool{New: func() any {
		b := make([]byte, spool.BufSize(logChunk))
		return &b
	}}
}

// logRequest is one reader of one log. A slow one stalls only its own goroutine.
type logRequest struct {
	s      *server
	r      *request
	p      *proc
	cursor int64
	left   int64 // output that may still be sent
	follow bool
	until  time.Time // when waiting for a first byte ends

	reader *spool.Reader
	ahead  bool // the files may hold more than the shim last told
}

func (s *server) readLog(ctx context.Context, r *request) error {
	q := &logRequest{s: s, r: r}
	var err error
	if q.p, err = s.reg.find(r.PathValue("proc")); err != nil {
		return err
	}
	if q.cursor, err = r.number("cursor", 0, 0, api.MaxOffset); err != nil {
		return err
	}
	wait, err := r.number("wait_ms", 0, 0, MaxLogWait.Milliseconds())
	if err != nil {
		return err
	}
	if q.follow, err = r.flag("follow"); err != nil {
		return err
	}
	most := int64(MaxLogBytes)
	def := int64(defaultLogBytes)
	if q.follow {
		most, def = api.MaxOffset, api.MaxOffset
	}
	if q.left, err = r.number("max_bytes", def, 1, most); err != nil {
		return err
	}
	q.until = time.Now().Add(time.Duration(wait) * time.Millisecond)
	if err := q.check(ctx); err != nil {
		return err
	}
	defer q.close()
	r.w.Header().Set("Content-Type", wire.FramesType)
	return q.send(ctx)
}

// check refuses a cursor beyond the log's end.
func (q *logRequest) check(ctx context.Context) error {
	if q.cursor <= q.p.state().Log.Next {
		return nil
	}
	st := q.p.refresh(ctx)
	if q.cursor <= st.Log.Next {
		return nil
	}
	// A reader may have been given output that the shim had not counted yet, and
	// after a restart the shim may not have been heard at all: the files decide.
	end := st.Log.Next
	if r, err := spool.Open(filepath.Join(q.p.dir, spoolDir)); err == nil {
		_, next, err := r.Bounds()
		_ = r.Close()
		if err == nil && q.cursor <= next {
			return nil
		}
		end = max(end, next)
	}
	return errdefs.New(errdefs.Invalid, "cursor %d is beyond the log, which ends at %d", q.cursor, end)
}

func (q *logRequest) close() {
	if q.reader != nil {
		_ = q.reader.Close()
	}
}

// send sends output until there is no more to send, then the status.
func (q *logRequest) send(ctx context.Context) error {
	q.ahead = true
	some := false
	st := q.p.state()
	for ; q.left > 0; st = q.p.state() {
		if q.cursor < st.Log.Next || q.ahead && st.Phase != wire.PhaseEnded {
			sent, err := q.chunk(st)
			if errors.Is(err, errLeft) {
				return nil
			}
			if err != nil {
				return q.status(st, err)
			}
			if sent {
				some = true
				continue
			}
			if q.cursor < st.Log.Next {
				// A gap was sent, or segments moved on under us.
				if pause(ctx, time.Millisecond); ctx.Err() != nil {
					break
				}
				continue
			}
		}
		if q.over(st) || some && !q.follow {
			break
		}
		if err := q.await(ctx); err != nil {
			break
		}
		q.ahead = true // the files may have got ahead of the state again
	}
	return q.status(st, context.Cause(ctx))
}

// over says that nothing will be added.
func (q *logRequest) over(st wire.ProcState) bool {
	return (st.Log.EOF || st.Phase == wire.PhaseEnded) && q.cursor >= st.Log.Next
}

// await waits for more output, bounded by the request's wait if it does not follow.
func (q *logRequest) await(ctx context.Context) error {
	if q.follow {
		if err := q.flush(); err != nil {
			return err
		}
		_, err := q.p.awaitLog(ctx, q.cursor)
		return err
	}
	ctx, cancel := context.WithDeadline(ctx, q.until)
	defer cancel()
	_, err := q.p.awaitLog(ctx, q.cursor)
	return err
}

var errLeft = errors.New("the reader left")

// chunk reads and sends one piece. Up to what the shim said, everything must be
// there. Beyond, the files are tried all the same, because a frame whose
// checksums hold is whole; that saves asking the shim while output flows, and
// whatever is not whole yet is left for later.
func (q *logRequest) chunk(st wire.ProcState) (bool, error) {
	if q.reader == nil {
		r, err := spool.Open(filepath.Join(q.p.dir, spoolDir))
		if errdefs.Is(err, errdefs.NotFound) && q.cursor >= st.Log.Next {
			q.ahead = false
			return false, nil // the shim has not begun it
		}
		if err != nil {
			return false, err
		}
		q.reader = r
	}
	buf := q.s.buffers.Get().(*[]byte)
	defer q.s.buffers.Put(buf)
	most := int(min(q.left, logChunk))
	limit := st.Log.Next
	guess := q.cursor >= limit
	if guess {
		limit = spool.NoLimit
	}
	frames, next, gap, err := q.reader.Read(q.cursor, most, limit, *buf)
	if guess && (err != nil || len(frames) == 0) {
		q.ahead = false
		return false, nil
	}
	if gap != nil {
		note, nerr := appendNote(nil, wire.KindGap, gap.From, gap)
		if nerr == nil {
			_, nerr = q.r.w.Write(note)
		}
		if nerr != nil {
			return false, errLeft
		}
		q.cursor = gap.To
	}
	if len(frames) > 0 {
		if _, werr := q.r.w.Write(frames); werr != nil {
			return false, errLeft
		}
		q.left -= next - q.cursor
		q.cursor = next
	}
	return len(frames) > 0, err
}

func (q *logRequest) flush() error { return q.r.control.Flush() }

// status sends the last frame.
func (q *logRequest) status(st wire.ProcState, err error) error {
	f := wire.StatusFrame{
		Next: q.cursor, Oldest: st.Log.Oldest, EOF: q.over(st), Phase: st.Phase, Exit: st.Exit,
	}
	if err != nil {
		if _, ok := errors.AsType[*errdefs.Error](err); !ok {
			return nil // the reader left
		}
		p := api.ProblemOf(err, q.p.id)
		f.Error, f.EOF = &p, false
	}
	note, merr := appendNote(nil, wire.KindStatus, q.cursor, f)
	if merr != nil {
		return errdefs.Wrap(merr, errdefs.Internal, "a status could not be encoded")
	}
	_, _ = q.r.w.Write(note)
	return nil
}
