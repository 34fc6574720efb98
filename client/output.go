package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// The streams of a chunk.
const (
	Stdout = "stdout"
	Stderr = "stderr"
)

// ackEvery is how many received bytes are acknowledged at once, at most; with a
// small log it is a quarter of the log, so that the oldest quarter of a full log
// that was received is always free to go. Headers count, as they do in the log.
// leastSpool is the smallest log there is.
const (
	ackEvery   = 16 << 20
	leastSpool = 1 << 20
)

// Chunk is a piece of output, or a gap.
type Chunk struct {
	Stream string // Stdout or Stderr
	Offset int64  // of the first byte in its stream
	Cursor string // of the first byte
	Next   string // of the byte after the last
	Data   []byte // valid until the next call of Next
	// Gap is set instead of the fields above when output is no longer kept. Next
	// is where it ends.
	Gap *Gap
}

// OutputOptions says what output to read.
type OutputOptions struct {
	// Cursor is where to begin; empty is the oldest byte that is kept.
	Cursor string
	// NoFollow ends at what there is now, instead of at the end of the log.
	NoFollow bool
	// Ack acknowledges what was received: a chunk once Next is called again. With
	// overflow block this is what lets a child go on whose log is full.
	Ack bool
	// OnGap is told of each gap by Copy. nil makes a gap an error of Copy.
	OnGap func(Gap)
}

// Output reads the output of a process, reconnecting at its cursor when the
// connection breaks, so that each kept byte comes exactly once. It is for one
// goroutine.
type Output struct {
	ctx context.Context //nolint:containedctx // it is an iteration, which ends with it
	p   *Process
	opt OutputOptions

	pos      int64 // position of the next byte; -1: not known yet
	body     io.ReadCloser
	r        *bufio.Reader
	buf      []byte
	status   api.StreamStatus
	patience *patience
	acked    int64
	owed     int64 // bytes of the log returned since, headers included
	ackAt    time.Time
	ackStep  int64
	err      error
}

// Output begins to read. Nothing is asked before the first Next. Close it unless
// Next has returned an error.
func (p *Process) Output(ctx context.Context, opt OutputOptions) *Output {
	o := &Output{ctx: ctx, p: p, opt: opt, pos: -1}
	o.spool(p.info.Limits.SpoolBytes)
	if opt.Cursor != "" {
		n, err := p.position(opt.Cursor)
		if err != nil {
			o.err = err
			return o
		}
		o.pos, o.acked = n, n
	}
	return o
}

// spool fits the acknowledging to the size of the log.
func (o *Output) spool(n int64) {
	if n <= 0 {
		n = leastSpool
	}
	o.ackStep = min(ackEvery, n/4)
}

// position reads a cursor of this process.
func (p *Process) position(cursor string) (int64, error) {
	tail, digits, ok := strings.Cut(cursor, ".")
	n, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil || n < 0 || n > MaxOffset || tail != p.tail() {
		return 0, errdefs.New(Invalid, "%q is not a cursor of process %s", cursor, p.handle)
	}
	return n, nil
}

func (p *Process) tail() string { return p.handle[max(0, len(p.handle)-6):] }

func (p *Process) cursor(position int64) string {
	return p.tail() + "." + strconv.FormatInt(position, 10)
}

// Cursor is where reading will go on: everything before it was returned.
func (o *Output) Cursor() string {
	if o.pos < 0 {
		return o.opt.Cursor
	}
	return o.p.cursor(o.pos)
}

// Exit is how the process ended, if that was known when the output ended.
func (o *Output) Exit() *Exit { return o.status.Exit }

// Close ends reading.
func (o *Output) Close() error {
	if o.body != nil {
		_ = o.body.Close()
		o.body = nil
	}
	if o.err == nil {
		o.err = errdefs.New(Conflict, "the output was closed")
	}
	return nil
}

// All returns the chunks as an iteration, which ends at the end of the output or
// after an error.
func (o *Output) All() iter.Seq2[Chunk, error] {
	return func(yield func(Chunk, error) bool) {
		defer o.Close()
		for {
			c, err := o.Next()
			if errors.Is(err, io.EOF) {
				return
			}
			if !yield(c, err) || err != nil {
				return
			}
		}
	}
}

// Next returns the next chunk, or io.EOF at the end of the output.
func (o *Output) Next() (Chunk, error) {
	if o.err != nil {
		return Chunk{}, o.err
	}
	for {
		o.ack(false)
		c, err := o.frame()
		if err == nil {
			o.patience = nil // progress: the next break begins anew
			return c, nil
		}
		if o.body != nil {
			_ = o.body.Close()
			o.body = nil
		}
		if errors.Is(err, errReconnect) {
			if o.patience == nil {
				o.patience = o.p.c.patience()
			}
			if o.patience.wait(o.ctx) {
				continue
			}
			err = o.given(err)
		}
		o.ack(true)
		o.err = err
		return Chunk{}, err
	}
}

// errReconnect marks what a new connection may mend.
var errReconnect = errors.New("reconnect")

func (o *Output) given(err error) error {
	if cause := context.Cause(o.ctx); cause != nil {
		return errdefs.Wrap(cause, Unavailable, "reading the output was given up at cursor %s: %v", o.Cursor(), cause)
	}
	return errdefs.Wrap(err, Unavailable, "the output broke off at cursor %s and the server does not answer", o.Cursor()).
		WithNext("read on from that cursor")
}

func (o *Output) connect() error {
	if o.opt.Ack && o.r == nil && o.p.info.Handle == "" {
		info, err := o.p.Get(o.ctx)
		if err != nil {
			return err
		}
		o.spool(info.Limits.SpoolBytes)
	}
	q := url.Values{}
	if c := o.Cursor(); c != "" {
		q.Set("cursor", c)
	}
	if !o.opt.NoFollow {
		q.Set("follow", "true")
	}
	resp, err := o.p.c.send(o.ctx, call{method: http.MethodGet, path: o.p.path("/log"), query: q, accept: wire.FramesType, safe: true})
	if err != nil {
		return err
	}
	o.body = resp.Body
	if o.r == nil {
		o.r = bufio.NewReaderSize(resp.Body, 64<<10)
	} else {
		o.r.Reset(resp.Body)
	}
	return nil
}

// frame reads one frame of output or gap, connecting if need be.
func (o *Output) frame() (Chunk, error) {
	if o.body == nil {
		if err := o.connect(); err != nil {
			return Chunk{}, err
		}
	}
	for {
		h, payload, err := o.read()
		if err != nil {
			return Chunk{}, err
		}
		switch h.Kind {
		case wire.KindGap:
			return o.gap(payload)
		case wire.KindStatus:
			return Chunk{}, o.end(payload)
		}
		if o.pos >= 0 && h.Cursor != o.pos {
			return Chunk{}, errdefs.New(Internal, "the server went from cursor %s to %s without naming a gap", o.p.cursor(o.pos), o.p.cursor(h.Cursor))
		}
		if h.Length == 0 {
			continue
		}
		o.first(h.Cursor)
		o.pos = h.Cursor + int64(h.Length)
		o.owed += wire.HeaderSize + int64(h.Length)
		name := Stdout
		if h.Kind == wire.KindStderr {
			name = Stderr
		}
		return Chunk{Stream: name, Offset: h.Offset, Cursor: o.p.cursor(h.Cursor), Next: o.p.cursor(o.pos), Data: payload}, nil
	}
}

// first notes where the output began, when that was left to the server.
func (o *Output) first(position int64) {
	if o.pos < 0 {
		o.acked = position
	}
}

func (o *Output) read() (wire.Header, []byte, error) {
	head, err := o.r.Peek(wire.HeaderSize)
	if err != nil {
		return wire.Header{}, nil, o.broken(err)
	}
	h, err := wire.ParseHeader(head)
	if err != nil {
		return wire.Header{}, nil, errdefs.Wrap(err, Internal, "what the server sent is not output: %v", err)
	}
	_, _ = o.r.Discard(wire.HeaderSize)
	if cap(o.buf) < h.Length {
		o.buf = make([]byte, max(h.Length, 64<<10))
	}
	payload := o.buf[:h.Length]
	if _, err := io.ReadFull(o.r, payload); err != nil {
		return wire.Header{}, nil, o.broken(err)
	}
	if wire.Sum(payload) != h.Sum {
		return wire.Header{}, nil, errdefs.New(Internal, "output at cursor %s arrived damaged", o.p.cursor(h.Cursor))
	}
	return h, payload, nil
}

func (o *Output) broken(err error) error {
	if o.ctx.Err() != nil {
		return o.given(err)
	}
	return errors.Join(errReconnect, err)
}

func (o *Output) gap(payload []byte) (Chunk, error) {
	var g wire.GapFrame
	if err := json.Unmarshal(payload, &g); err != nil || g.From < 0 || g.To < g.From || (o.pos >= 0 && g.From != o.pos) {
		return Chunk{}, errdefs.New(Internal, "the server named a gap that cannot be")
	}
	o.pos, o.acked = g.To, max(o.acked, g.To)
	return Chunk{Next: o.p.cursor(g.To), Gap: &Gap{From: o.p.cursor(g.From), To: o.p.cursor(g.To), Bytes: g.To - g.From}}, nil
}

// end says what follows a status frame.
func (o *Output) end(payload []byte) error {
	var st api.StreamStatus
	if err := json.Unmarshal(payload, &st); err != nil {
		return errdefs.Wrap(err, Internal, "the status of the output cannot be read: %v", err)
	}
	if st.Error != nil {
		err := st.Error.Err()
		if IsCode(err, Unavailable) && o.ctx.Err() == nil {
			return errors.Join(errReconnect, err)
		}
		return err
	}
	o.status = st
	if o.pos < 0 && st.Next != "" { // an empty log
		if n, err := o.p.position(st.Next); err == nil {
			o.first(n)
			o.pos = n
		}
	}
	switch {
	case st.EOF:
		return io.EOF
	case !o.opt.NoFollow:
		return errReconnect
	case o.pos < 0:
		return io.EOF
	}
	// The answer may have ended early, before a damaged piece of the log or a host
	// that is away. Asking again tells.
	if _, err := o.p.Read(o.ctx, ReadOptions{Cursor: o.Cursor(), MaxBytes: 1}); err != nil {
		return err
	}
	return io.EOF
}

// ack acknowledges what was returned, if that is wanted and worth it: a step is
// full, or there is nothing to read at once.
func (o *Output) ack(last bool) {
	if !o.opt.Ack || o.pos <= o.acked {
		return
	}
	idle := o.r != nil && o.r.Buffered() == 0 && time.Since(o.ackAt) > 200*time.Millisecond
	if o.owed < o.ackStep && !idle && !last {
		return
	}
	ctx := o.ctx
	if last {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(o.ctx), 2*time.Second)
		defer cancel()
	}
	// Not acknowledging is never wrong, only late: the next one covers it.
	if o.p.Ack(ctx, o.p.cursor(o.pos)) == nil {
		o.acked, o.owed = o.pos, 0
	}
	o.ackAt = time.Now()
}

// Copied is what Copy did.
type Copied struct {
	Cursor         string // everything before it was written or was in a gap
	Stdout, Stderr int64  // bytes
	Gaps           []Gap
	Exit           *Exit // if known at the end of the output
}

// Copy writes output to two writers, one of which may be nil to skip it, until
// the output ends.
func (p *Process) Copy(ctx context.Context, stdout, stderr io.Writer, opt OutputOptions) (Copied, error) {
	o := p.Output(ctx, opt)
	defer o.Close()
	done := Copied{Cursor: opt.Cursor}
	for {
		c, err := o.Next()
		if errors.Is(err, io.EOF) {
			done.Cursor, done.Exit = o.Cursor(), o.Exit()
			return done, nil
		}
		if err != nil {
			return done, err
		}
		if c.Gap != nil {
			done.Gaps = append(done.Gaps, *c.Gap)
			if opt.OnGap == nil {
				return done, errdefs.New(Conflict, "%d bytes of output from cursor %s on are no longer kept", c.Gap.Bytes, c.Gap.From).
					WithNext("read on from cursor %s", c.Gap.To)
			}
			opt.OnGap(*c.Gap)
			done.Cursor = c.Next
			continue
		}
		w, n := stdout, &done.Stdout
		if c.Stream == Stderr {
			w, n = stderr, &done.Stderr
		}
		if w != nil {
			if _, err := w.Write(c.Data); err != nil {
				return done, errdefs.Wrap(err, Unavailable, "output cannot be written: %v", err)
			}
		}
		*n += int64(len(c.Data))
		done.Cursor = c.Next
	}
}
