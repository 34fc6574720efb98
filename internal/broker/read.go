package broker

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// defaultRead is what one read returns at most when it names nothing.
const defaultRead = 1 << 20

// endWait is how long the end of a log waits for the record of the end, so that
// a reader who sees EOF sees the exit beside it.
const endWait = 5 * time.Second

// closedWait is the same for a process that has closed its outputs and has not
// ended yet, as far as the host knows.
const closedWait = time.Second

// ReadQuery says which part of a log to read.
type ReadQuery struct {
	Cursor   string        // "" is the oldest kept byte
	MaxBytes int64         // 0 is 1 MiB; at most MaxRead
	Wait     time.Duration // for the first byte, at most MaxWait
	Ack      bool          // everything before Cursor was taken and may be dropped at the log's cap
}

// Read returns a piece of the log. It consumes nothing: the same cursor returns
// the same bytes while they are kept, and what is not kept is an exact gap (P2).
// Without output it waits, then returns no records. Errors: invalid (cursor),
// exhausted (too many readers), unavailable (the host is away; the log is kept).
func (b *Broker) Read(ctx context.Context, p authz.Principal, handle string, q ReadQuery) (api.ReadResponse, error) {
	if q.MaxBytes == 0 {
		q.MaxBytes = defaultRead
	}
	if q.MaxBytes < 1 || q.MaxBytes > MaxRead {
		return api.ReadResponse{}, errdefs.New(errdefs.Invalid, "max_bytes is %d, the limits are 1 and %d", q.MaxBytes, MaxRead).With("limit", decimal(MaxRead))
	}
	r, err := b.openLog(ctx, p, handle, logQuery{cursor: q.Cursor, max: q.MaxBytes, wait: q.Wait, ack: q.Ack})
	if err != nil {
		return api.ReadResponse{}, err
	}
	defer r.close()
	out := api.ReadResponse{Records: []api.Record{}}
	for {
		batch, err := r.next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil && len(out.Records) > 0:
			// What came before the fault is good; the next read meets it again.
			status, serr := r.status(ctx, wire.StatusFrame{Next: r.at, Oldest: r.oldest})
			if serr != nil {
				return api.ReadResponse{}, serr
			}
			status.Records, status.Gap = out.Records, out.Gap
			return status, nil
		case err != nil:
			return api.ReadResponse{}, err
		case batch.Gap != nil:
			if len(out.Records) > 0 {
				// One answer holds one gap, before its records: stop here.
				status, serr := r.status(ctx, wire.StatusFrame{Next: batch.Gap.From, Oldest: batch.Gap.To})
				if serr != nil {
					return api.ReadResponse{}, serr
				}
				status.Records, status.Gap = out.Records, out.Gap
				return status, nil
			}
			g := gapOf(handle, *batch.Gap)
			if out.Gap != nil { // gaps that touch are one
				g.From, g.Bytes = out.Gap.From, g.Bytes+out.Gap.Bytes
			}
			out.Gap = &g
		case batch.Status != nil:
			if problem := batch.Status.Error; problem != nil && len(out.Records) == 0 && out.Gap == nil {
				return api.ReadResponse{}, problem.Err()
			}
			status, serr := r.status(ctx, *batch.Status)
			if serr != nil {
				return api.ReadResponse{}, serr
			}
			status.Records, status.Gap = out.Records, out.Gap
			return status, nil
		default:
			for h, payload := range host.Frames(batch.Frames) {
				out.Records = append(out.Records, api.Record{
					Stream: streamName(h.Kind), Offset: h.Offset, Cursor: cursorAt(handle, h.Cursor),
					Data: append([]byte(nil), payload...),
				})
			}
		}
	}
}

func streamName(k wire.Kind) string {
	if k == wire.KindStderr {
		return "stderr"
	}
	return "stdout"
}

func gapOf(handle string, g wire.GapFrame) api.Gap {
	return api.Gap{From: cursorAt(handle, g.From), To: cursorAt(handle, g.To), Bytes: g.To - g.From}
}

// logQuery is what Read and Stream have in common.
type logQuery struct {
	cursor string
	max    int64
	wait   time.Duration
	follow bool
	ack    bool
	frames bool // frames are handed on as they are
}

// logReader reads one log for one caller. It is for one goroutine.
type logReader struct {
	b      *Broker
	rec    store.Process
	o      *owner // nil when the process has ended for good
	q      logQuery
	at     int64 // position after everything handed on
	oldest int64 // as far as it is known
	first  bool  // nothing was handed on yet
	skip   bool  // the caller asked for the oldest kept byte: a gap before it is none
	max    int64 // bytes that may still be handed on
	body   io.ReadCloser
	frames *host.FrameReader
	made   *host.Batch // an answer made here, without the host
	ended  bool
	slot   func()
}

// openLog checks everything that can be checked before the first byte.
func (b *Broker) openLog(ctx context.Context, p authz.Principal, handle string, q logQuery) (*logReader, error) {
	if q.wait < 0 || q.wait > MaxWait {
		return nil, errdefs.New(errdefs.Invalid, "a wait of %s is not possible, the limit is %s", q.wait, MaxWait).With("limit", decimal(MaxWait.Milliseconds()))
	}
	if q.ack {
		if err := authz.Check(p, authz.ProcessAck); err != nil {
			return nil, err
		}
	}
	rec, o, err := b.find(ctx, p, authz.ProcessOutput, handle)
	if err != nil {
		return nil, err
	}
	at, oldest, err := parseCursor(handle, q.cursor)
	if err != nil {
		return nil, err
	}
	slot, err := b.readers.enter(handle, b.cfg.Limits.Readers)
	if err != nil {
		return nil, err
	}
	r := &logReader{b: b, rec: rec, o: o, q: q, at: at, first: true, skip: oldest, max: q.max, slot: slot}
	if q.ack && !oldest {
		if err := b.ack(ctx, rec, at); err != nil {
			r.close()
			return nil, err
		}
	}
	return r, nil
}

func (r *logReader) close() {
	if r.body != nil {
		_ = r.body.Close()
		r.body = nil
	}
	if r.slot != nil {
		r.slot()
		r.slot = nil
	}
}

// next returns the next batch; the last is a status, then io.EOF.
func (r *logReader) next(ctx context.Context) (host.Batch, error) {
	if r.ended {
		return host.Batch{}, io.EOF
	}
	for {
		if r.frames == nil && r.made == nil {
			if err := r.ask(ctx); err != nil {
				return host.Batch{}, err
			}
		}
		if r.made != nil {
			batch := *r.made
			r.made = nil
			r.ended = batch.Status != nil
			return batch, nil
		}
		batch, err := r.frames.Next()
		if err != nil {
			return host.Batch{}, err
		}
		r.at = r.frames.Cursor()
		if batch.Gap != nil {
			r.oldest = batch.Gap.To
			if skip := r.skip && r.first; skip {
				r.first = false
				continue
			}
		}
		r.first = false
		if batch.Status != nil {
			r.ended, r.oldest = true, batch.Status.Oldest
		}
		return batch, nil
	}
}

// known is where the log ends, as far as its host can say it now.
func (r *logReader) known(ctx context.Context) int64 {
	if r.o != nil {
		r.o.correct(ctx)
		if v := r.o.view.Load(); v != nil && v.err == nil {
			return v.rec.Log.Next
		}
	}
	return r.rec.Log.Next
}

// again lets next ask anew, without waiting, from where the last answer ended.
func (r *logReader) again() {
	if r.body != nil {
		_ = r.body.Close()
	}
	r.body, r.frames, r.ended, r.q.wait = nil, nil, false, 0
}

// ask begins an answer: from the host that keeps the log, or made here when no
// host has anything to say.
func (r *logReader) ask(ctx context.Context) error {
	if r.o != nil && !lifeOf(r.rec).Acked() {
		if err := r.started(ctx); err != nil || r.made != nil {
			return err
		}
	}
	if r.rec.State == api.StateNeverStarted || r.rec.LogGone {
		return r.gone()
	}
	if r.at > r.rec.Log.Next && r.o == nil && r.rec.Cleanup == api.CleanupQuiescent && r.rec.Log.EOF {
		return beyond(r.rec)
	}
	l, err := r.b.linkTo(r.rec)
	if err != nil {
		return err
	}
	body, err := l.client.Log(ctx, r.rec.Handle, host.LogQuery{Cursor: r.at, MaxBytes: r.max, Wait: r.q.wait, Follow: r.q.follow})
	if err != nil {
		if errors.Is(err, host.ErrAnswered) && errdefs.Is(err, errdefs.NotFound) && r.o == nil {
			return r.gone() // the host that kept it keeps it no more
		}
		return err
	}
	r.body, r.frames = body, host.NewFrameReader(body, r.at)
	if r.q.frames {
		r.frames.PassOn()
	}
	return nil
}

// started waits until the host keeps the process, or answers that nothing is
// there yet.
func (r *logReader) started(ctx context.Context) error {
	wait := r.q.wait
	if r.q.follow {
		wait = 24 * time.Hour // as long as the caller stays
	}
	bounded, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	v, err := r.o.wait(bounded, func(v *view) bool { return lifeOf(v.rec).Acked() })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if v == nil || v.err != nil {
		return err
	}
	if r.rec = v.rec; v.final() {
		r.o = nil
	}
	if err != nil {
		if r.at > 0 {
			return beyond(r.rec)
		}
		r.made = &host.Batch{Status: &wire.StatusFrame{Next: r.at, Oldest: r.at}}
	}
	return nil
}

// gone answers for a log that is not kept any more: one exact gap to its end.
func (r *logReader) gone() error {
	end := r.rec.Log.Next
	if r.at > end {
		return beyond(r.rec)
	}
	if r.at < end && !r.skip {
		r.made = &host.Batch{Gap: &wire.GapFrame{From: r.at, To: end}}
		r.at, r.oldest = end, end
		return nil
	}
	r.at, r.oldest = end, end
	r.made = &host.Batch{Status: &wire.StatusFrame{Next: end, Oldest: end, EOF: true, Phase: wire.PhaseEnded}}
	return nil
}

func beyond(rec store.Process) error {
	return errdefs.New(errdefs.Invalid, "the cursor is beyond the end of the log").
		WithNext("read from %s", cursorAt(rec.Handle, rec.Log.Next))
}

// status is the end of an answer as callers see it. The exit is taken from the
// ledger alone (P3); where the host says that all is over and the ledger does not
// know yet, it is waited for a moment.
func (r *logReader) status(ctx context.Context, s wire.StatusFrame) (api.ReadResponse, error) {
	rec := r.rec
	if r.o != nil {
		v := r.o.view.Load()
		if s.EOF && v.err == nil && v.rec.Exit == nil && !v.final() {
			wait := endWait
			if s.Phase == wire.PhaseEnded {
				r.o.post(func(in *inbox) { in.ask = true })
			} else {
				// Its outputs are closed: it is ending, or lives on without them.
				if wait = closedWait; !r.q.follow {
					wait = min(wait, r.q.wait)
				}
			}
			bounded, cancel := context.WithTimeout(ctx, wait)
			v, _ = r.o.wait(bounded, func(v *view) bool { return v.rec.Exit != nil })
			cancel()
		}
		if v.err == nil {
			rec = v.rec
		}
	}
	return api.ReadResponse{
		Records: []api.Record{}, Next: cursorAt(rec.Handle, s.Next), Oldest: cursorAt(rec.Handle, s.Oldest),
		EOF: s.EOF, State: rec.State, Exit: rec.Exit,
	}, nil
}

// readers counts who reads which log.
type readers struct {
	mu    sync.Mutex
	by    map[string]int
	total int
}

// enter takes a slot, which the caller gives back once, or says that all are taken.
func (r *readers) enter(handle string, limit int) (func(), error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by == nil {
		r.by = map[string]int{}
	}
	if r.by[handle] >= limit {
		return nil, errdefs.New(errdefs.Exhausted, "%d calls read the log of %s already, which is the limit", limit, handle).
			WithNext("end one of them").With("limit", decimal(int64(limit)))
	}
	r.by[handle]++
	r.total++
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.total--
		if r.by[handle]--; r.by[handle] == 0 {
			delete(r.by, handle)
		}
	}, nil
}

func (r *readers) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.total
}
