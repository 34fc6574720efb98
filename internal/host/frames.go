package host

import (
	"encoding/json"
	"errors"
	"io"
	"iter"
	"sync"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// maxNote bounds the JSON payload of a gap or status frame.
const maxNote = 64 << 10

// A FrameReader waits with a small buffer, because most logs say little and many
// are attached at once. When a frame does not fit it takes a large one, which
// holds the largest frame and lets several be handed on together.
const (
	smallFrames = 1 << 10
	largeFrames = wire.MaxPayload + wire.HeaderSize
)

// newFrameBuffers is a pool of *[largeFrames]byte for the readers of one client.
func newFrameBuffers() *sync.Pool {
	return &sync.Pool{New: func() any { return new([largeFrames]byte) }}
}

// pooled is a source that lends large buffers: what Client.Log returns.
type pooled interface{ frameBuffers() *sync.Pool }

// Batch is what one call of [FrameReader.Next] found: exactly one of Frames, Gap
// and Status is set.
type Batch struct {
	// Frames are whole stdout and stderr frames as on the wire, one after the
	// other. They are valid until the next call; walk them with [Frames].
	Frames []byte
	// Gap says that output is no longer kept; what follows begins at Gap.To.
	Gap *wire.GapFrame
	// Status is the end of the answer.
	Status *wire.StatusFrame
}

// FrameReader reads the frames of one answer of a host that is not trusted: it
// hands on a frame only if its checksums hold, but see [FrameReader.PassOn], and
// it continues exactly where the frame before ended, so no byte can be lost,
// doubled or reordered unnoticed. It is for one goroutine.
type FrameReader struct {
	src        io.Reader
	pool       *sync.Pool // of large buffers; nil: one is made and kept
	small      []byte
	large      *[largeFrames]byte
	buf        []byte // small or large
	start, end int    // unread bytes of buf
	next       int64  // cursor the next frame must have
	offsets    [3]int64
	status     bool // the status frame was seen
	passes     bool // the checksums of output are checked by who is given the frames
	err        error
}

// NewFrameReader reads frames from src, the answer to a query with this cursor.
func NewFrameReader(src io.Reader, cursor int64) *FrameReader {
	r := &FrameReader{src: src, next: cursor}
	if p, ok := src.(pooled); ok {
		r.pool = p.frameBuffers()
	}
	r.forgetOffsets()
	return r
}

// PassOn leaves the checksums of output to whoever is given the frames in the
// end: they stand in the headers. Headers, places and notes are checked as ever.
func (r *FrameReader) PassOn() { r.passes = true }

// Cursor is the position after everything returned so far.
func (r *FrameReader) Cursor() int64 { return r.next }

// Next returns the next batch. After the status it returns io.EOF. An answer
// that breaks off is unavailable: read on from Cursor with a new query. A frame
// that breaks the rules is internal, with what is wrong; nothing of it is
// returned. Errors repeat.
func (r *FrameReader) Next() (Batch, error) {
	if r.err != nil {
		return Batch{}, r.err
	}
	b, err := r.batch()
	if err != nil {
		r.err = err
		return Batch{}, err
	}
	return b, nil
}

func (r *FrameReader) batch() (Batch, error) {
	if r.status {
		return Batch{}, io.EOF
	}
	h, payload, err := r.frame()
	if err != nil {
		return Batch{}, err
	}
	switch h.Kind {
	case wire.KindGap:
		return r.gap(h, payload)
	case wire.KindStatus:
		return r.finish(h, payload)
	}
	// Hand on with it the output frames that are already here.
	first := r.start - wire.HeaderSize - h.Length
	for {
		if err := r.output(h, payload); err != nil {
			// The frames before the bad one are good: give them out, then the error.
			if good := r.start - wire.HeaderSize - h.Length; good > first {
				r.err = err
				return Batch{Frames: r.buf[first:good]}, nil
			}
			return Batch{}, err
		}
		if r.end-r.start < wire.HeaderSize {
			break
		}
		ahead, err := wire.ParseHeader(r.buf[r.start:r.end])
		if err != nil || ahead.Kind == wire.KindGap || ahead.Kind == wire.KindStatus ||
			r.end-r.start < wire.HeaderSize+ahead.Length {
			break // the next call deals with it
		}
		h = ahead
		payload = r.take(h)
	}
	return Batch{Frames: r.buf[first:r.start]}, nil
}

// frame waits for one whole frame and takes it.
func (r *FrameReader) frame() (wire.Header, []byte, error) {
	if err := r.fill(wire.HeaderSize); err != nil {
		return wire.Header{}, nil, err
	}
	h, err := wire.ParseHeader(r.buf[r.start:r.end])
	if err != nil {
		return wire.Header{}, nil, garbled(err)
	}
	if err := r.fill(wire.HeaderSize + h.Length); err != nil {
		return wire.Header{}, nil, err
	}
	return h, r.take(h), nil
}

func (r *FrameReader) take(h wire.Header) []byte {
	from := r.start + wire.HeaderSize
	r.start = from + h.Length
	return r.buf[from:r.start:r.start]
}

// fill makes at least n unread bytes available.
func (r *FrameReader) fill(n int) error {
	if r.end-r.start >= n {
		return nil
	}
	if r.start == r.end {
		r.shrink()
	}
	if r.start > 0 {
		copy(r.buf, r.buf[r.start:r.end])
		r.end, r.start = r.end-r.start, 0
	}
	if n > len(r.buf) {
		r.grow()
	}
	for idle := 0; r.end < n; {
		m, err := r.src.Read(r.buf[r.end:])
		r.end += m
		if r.end >= n {
			break
		}
		if err == nil && m == 0 {
			if idle++; idle > 100 {
				err = io.ErrNoProgress
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return errdefs.Wrap(err, errdefs.Unavailable, "the log broke off at cursor %d", r.next).
				WithNext("read on from there")
		}
	}
	return nil
}

// shrink goes back to the small buffer, when nothing is unread.
func (r *FrameReader) shrink() {
	r.start, r.end = 0, 0
	if r.small == nil {
		r.small = make([]byte, smallFrames)
		r.buf = r.small
	}
	if r.large != nil && r.pool != nil {
		r.pool.Put(r.large)
		r.large, r.buf = nil, r.small
	}
}

// grow takes what is unread along to a large buffer.
func (r *FrameReader) grow() {
	if r.pool != nil {
		r.large = r.pool.Get().(*[largeFrames]byte)
	} else {
		r.large = new([largeFrames]byte)
	}
	copy(r.large[:], r.buf[:r.end])
	r.buf = r.large[:]
}

// output checks an output frame against what came before it.
func (r *FrameReader) output(h wire.Header, payload []byte) error {
	switch {
	case h.Length == 0:
		return garbled(errdefs.New(errdefs.Invalid, "an output frame is empty"))
	case h.Cursor != r.next:
		return garbled(errdefs.New(errdefs.Invalid, "a frame stands at cursor %d, expected %d", h.Cursor, r.next))
	case r.offsets[h.Kind] >= 0 && h.Offset != r.offsets[h.Kind]:
		return garbled(errdefs.New(errdefs.Invalid, "a frame stands at offset %d of its stream, expected %d", h.Offset, r.offsets[h.Kind]))
	case h.Offset > h.Cursor:
		return garbled(errdefs.New(errdefs.Invalid, "a frame's offset %d is beyond its cursor %d", h.Offset, h.Cursor))
	case !r.passes && wire.Sum(payload) != h.Sum:
		return garbled(errdefs.New(errdefs.Invalid, "the frame at cursor %d is damaged: wrong checksum", h.Cursor))
	}
	r.next = h.Cursor + int64(h.Length)
	r.offsets[h.Kind] = h.Offset + int64(h.Length)
	return nil
}

func (r *FrameReader) gap(h wire.Header, payload []byte) (Batch, error) {
	var g wire.GapFrame
	if err := note(h, payload, &g); err != nil {
		return Batch{}, err
	}
	if g.From != r.next || g.To <= g.From || g.To > api.MaxOffset {
		return Batch{}, garbled(errdefs.New(errdefs.Invalid, "a gap from %d to %d stands at cursor %d", g.From, g.To, r.next))
	}
	r.next = g.To
	r.forgetOffsets()
	return Batch{Gap: &g}, nil
}

func (r *FrameReader) finish(h wire.Header, payload []byte) (Batch, error) {
	var s wire.StatusFrame
	if err := note(h, payload, &s); err != nil {
		return Batch{}, err
	}
	if s.Next != r.next || s.Oldest < 0 || s.Oldest > api.MaxOffset {
		return Batch{}, garbled(errdefs.New(errdefs.Invalid, "the status names cursor %d, expected %d", s.Next, r.next))
	}
	r.status = true
	return Batch{Status: &s}, nil
}

// forgetOffsets: where a stream stands after a gap only its next frame says.
func (r *FrameReader) forgetOffsets() { r.offsets = [3]int64{-1, -1, -1} }

// note decodes the JSON payload of a gap or status frame.
func note(h wire.Header, payload []byte, out any) error {
	if h.Length > maxNote {
		return garbled(errdefs.New(errdefs.Invalid, "a note of %d bytes, the limit is %d", h.Length, maxNote))
	}
	if wire.Sum(payload) != h.Sum {
		return garbled(errdefs.New(errdefs.Invalid, "a note is damaged: wrong checksum"))
	}
	if err := json.Unmarshal(payload, out); err != nil {
		return garbled(err)
	}
	return nil
}

func garbled(err error) error {
	return errdefs.Wrap(err, errdefs.Internal, "the host program sent a log that breaks the rules: %s", err.Error()).
		WithNext("check that its version matches the server's")
}

// Frames walks over frames that a FrameReader handed on.
func Frames(b []byte) iter.Seq2[wire.Header, []byte] {
	return func(yield func(wire.Header, []byte) bool) {
		for len(b) >= wire.HeaderSize {
			h, err := wire.ParseHeader(b)
			if err != nil || len(b) < wire.HeaderSize+h.Length {
				return
			}
			if !yield(h, b[wire.HeaderSize:wire.HeaderSize+h.Length]) {
				return
			}
			b = b[wire.HeaderSize+h.Length:]
		}
	}
}

// appendNote appends a frame with a JSON payload.
func appendNote(b []byte, kind wire.Kind, cursor int64, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return b, err
	}
	b = wire.AppendHeader(b, wire.Header{Kind: kind, Length: len(payload), Cursor: cursor, Sum: wire.Sum(payload)})
	return append(b, payload...), nil
}
