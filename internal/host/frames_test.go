package host

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// output appends an output frame.
func output(b []byte, kind wire.Kind, cursor, offset int64, payload string) []byte {
	p := []byte(payload)
	b = wire.AppendHeader(b, wire.Header{Kind: kind, Length: len(p), Cursor: cursor, Offset: offset, Sum: wire.Sum(p)})
	return append(b, p...)
}

func notes(t testing.TB, b []byte, kind wire.Kind, cursor int64, v any) []byte {
	t.Helper()
	b, err := appendNote(b, kind, cursor, v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// drain reads everything and returns the output by stream, and the error at the end.
func drain(r *FrameReader) (streams [3][]byte, gaps []wire.GapFrame, status *wire.StatusFrame, err error) {
	for {
		b, err := r.Next()
		if err != nil {
			return streams, gaps, status, err
		}
		for h, p := range Frames(b.Frames) {
			streams[h.Kind] = append(streams[h.Kind], p...)
		}
		if b.Gap != nil {
			gaps = append(gaps, *b.Gap)
		}
		if b.Status != nil {
			status = b.Status
		}
	}
}

func TestFrameReaderReadsAnAnswer(t *testing.T) {
	t.Parallel()
	b := notes(t, nil, wire.KindGap, 0, wire.GapFrame{From: 0, To: 10})
	b = output(b, wire.KindStdout, 10, 4, "abc")
	b = output(b, wire.KindStderr, 13, 6, "de")
	b = output(b, wire.KindStdout, 15, 7, "f")
	b = notes(t, b, wire.KindStatus, 16, wire.StatusFrame{Next: 16, Oldest: 10, EOF: true})
	for name, src := range map[string]io.Reader{
		"whole":      bytes.NewReader(b),
		"byte-wise":  iotest.OneByteReader(bytes.NewReader(b)),
		"data + EOF": iotest.DataErrReader(bytes.NewReader(b)),
	} {
		streams, gaps, status, err := drain(NewFrameReader(src, 0))
		if !errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
		if string(streams[1]) != "abcf" || string(streams[2]) != "de" || len(gaps) != 1 || gaps[0].To != 10 || status == nil || !status.EOF {
			t.Errorf("%s: %q %v %v", name, streams, gaps, status)
		}
	}
}

func TestFrameReaderRefusesWhatBreaksTheRules(t *testing.T) {
	t.Parallel()
	good := output(nil, wire.KindStdout, 0, 0, "abc")
	damaged := bytes.Clone(good)
	damaged[len(damaged)-1] ^= 1
	header := bytes.Clone(good)
	header[9] ^= 1
	cases := map[string]struct {
		in   []byte
		want errdefs.Code
	}{
		"nothing":               {nil, errdefs.Unavailable},
		"half a header":         {good[:10], errdefs.Unavailable},
		"half a frame":          {good[:34], errdefs.Unavailable},
		"no status":             {good, errdefs.Unavailable},
		"payload damaged":       {damaged, errdefs.Internal},
		"header damaged":        {header, errdefs.Internal},
		"a byte lost":           {output(bytes.Clone(good), wire.KindStdout, 4, 4, "x"), errdefs.Internal},
		"a byte doubled":        {output(bytes.Clone(good), wire.KindStdout, 2, 2, "x"), errdefs.Internal},
		"stream offset jumps":   {output(bytes.Clone(good), wire.KindStdout, 3, 2, "x"), errdefs.Internal},
		"offset beyond cursor":  {output(nil, wire.KindStdout, 0, 1, "x"), errdefs.Internal},
		"empty frame":           {output(nil, wire.KindStdout, 0, 0, ""), errdefs.Internal},
		"gap elsewhere":         {notes(t, nil, wire.KindGap, 1, wire.GapFrame{From: 1, To: 2}), errdefs.Internal},
		"gap backwards":         {notes(t, nil, wire.KindGap, 0, wire.GapFrame{From: 0, To: -1}), errdefs.Internal},
		"gap of nothing":        {notes(t, nil, wire.KindGap, 0, wire.GapFrame{}), errdefs.Internal},
		"status elsewhere":      {notes(t, nil, wire.KindStatus, 5, wire.StatusFrame{Next: 5}), errdefs.Internal},
		"status is not JSON":    {append(wire.AppendHeader(nil, wire.Header{Kind: wire.KindStatus, Length: 1, Sum: wire.Sum([]byte("x"))}), 'x'), errdefs.Internal},
		"status with bad sum":   {append(wire.AppendHeader(nil, wire.Header{Kind: wire.KindStatus, Length: 2, Sum: 1}), '{', '}'), errdefs.Internal},
		"a note without bounds": {append(wire.AppendHeader(nil, wire.Header{Kind: wire.KindGap, Length: maxNote + 1}), make([]byte, maxNote+1)...), errdefs.Internal},
	}
	for name, c := range cases {
		r := NewFrameReader(bytes.NewReader(c.in), 0)
		_, _, status, err := drain(r)
		if !errdefs.Is(err, c.want) || status != nil {
			t.Errorf("%s: error %v (%s), status %v; want %s", name, err, errdefs.CodeOf(err), status, c.want)
		}
		if _, again := r.Next(); again == nil || again.Error() != err.Error() {
			t.Errorf("%s: the error does not repeat: %v", name, again)
		}
	}
}

func TestFrameReaderGivesOutWhatCameBeforeTheDamage(t *testing.T) {
	t.Parallel()
	b := output(nil, wire.KindStdout, 0, 0, "abc")
	b = output(b, wire.KindStdout, 9, 9, "x")
	r := NewFrameReader(bytes.NewReader(b), 0)
	streams, _, _, err := drain(r)
	if string(streams[1]) != "abc" || !errdefs.Is(err, errdefs.Internal) || r.Cursor() != 3 {
		t.Errorf("got %q, cursor %d, error %v", streams[1], r.Cursor(), err)
	}
}

// A reader that passes frames on leaves damaged output to the next, and that alone.
func TestFrameReaderPassesOn(t *testing.T) {
	t.Parallel()
	damaged := output(nil, wire.KindStdout, 0, 0, "abc")
	damaged[wire.HeaderSize] ^= 1
	read := func(in []byte) ([]byte, error) {
		r := NewFrameReader(bytes.NewReader(in), 0)
		r.PassOn()
		b, err := r.Next()
		if err != nil {
			return nil, err
		}
		if _, err = r.Next(); errdefs.Is(err, errdefs.Unavailable) {
			err = nil // the end of what there is
		}
		return b.Frames, err
	}
	if got, err := read(damaged); err != nil || !bytes.Equal(got, damaged) {
		t.Errorf("%q, %v", got, err)
	}
	badNote := notes(t, bytes.Clone(damaged), wire.KindStatus, 3, wire.StatusFrame{Next: 3})
	badNote[len(badNote)-1] ^= 1
	for name, in := range map[string][]byte{
		"order":  output(bytes.Clone(damaged), wire.KindStdout, 2, 2, "x"),
		"offset": output(bytes.Clone(damaged), wire.KindStdout, 3, 2, "x"),
		"note":   badNote,
	} {
		if got, err := read(in); !errdefs.Is(err, errdefs.Internal) || !bytes.Equal(got, damaged) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	header := bytes.Clone(damaged)
	header[9] ^= 1
	if _, err := read(header); !errdefs.Is(err, errdefs.Internal) {
		t.Errorf("header: %v", err)
	}
}

// Whatever is cut wherever, a reader that reads on from its cursor gets every
// byte once.
func TestFrameReaderLosesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		pieces := rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 1, 40), 1, 20).Draw(t, "pieces")
		kinds := rapid.SliceOfN(rapid.SampledFrom([]wire.Kind{wire.KindStdout, wire.KindStderr}), len(pieces), len(pieces)).Draw(t, "kinds")
		var b []byte
		var cursor int64
		var offsets [3]int64
		var want [3][]byte
		for i, p := range pieces {
			b = output(b, kinds[i], cursor, offsets[kinds[i]], string(p))
			want[kinds[i]] = append(want[kinds[i]], p...)
			cursor += int64(len(p))
			offsets[kinds[i]] += int64(len(p))
		}
		cut := rapid.IntRange(0, len(b)).Draw(t, "cut")
		r := NewFrameReader(iotest.HalfReader(bytes.NewReader(b[:cut])), 0)
		got, _, _, err := drain(r)
		if !errdefs.Is(err, errdefs.Unavailable) {
			t.Fatalf("cut at %d: %v", cut, err)
		}
		n := int64(len(got[1]) + len(got[2]))
		if r.Cursor() != n {
			t.Fatalf("cursor %d after %d bytes", r.Cursor(), n)
		}
		for k := range got {
			if !bytes.HasPrefix(want[k], got[k]) {
				t.Fatalf("stream %d: %q is no prefix of %q", k, got[k], want[k])
			}
		}
	})
}

// lender is a source with a pool, as Client.Log returns one.
type lender struct {
	io.Reader
	pool *sync.Pool
}

func (l lender) frameBuffers() *sync.Pool { return l.pool }

// A reader that waits holds no large buffer, whatever it has read before.
func TestFrameReaderWaitsInASmallBuffer(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 300_000)
	var b []byte
	for i := range int64(8) {
		b = output(b, wire.KindStdout, i*300_001, i*300_001, big)
		b = output(b, wire.KindStdout, i*300_001+300_000, i*300_001+300_000, "y")
	}
	pr, pw := io.Pipe()
	r := NewFrameReader(lender{pr, newFrameBuffers()}, 0)
	go func() {
		_, _ = pw.Write(b)
		pw.CloseWithError(io.ErrUnexpectedEOF)
	}()
	n := 0
	for {
		batch, err := r.Next()
		if err != nil {
			break
		}
		for _, p := range Frames(batch.Frames) {
			n += len(p)
			if p[0] != 'x' && p[0] != 'y' || p[len(p)-1] != p[0] {
				t.Fatal("wrong bytes")
			}
		}
	}
	if n != 8*300_001 {
		t.Errorf("%d bytes", n)
	}
	if r.large != nil || len(r.buf) != smallFrames {
		t.Errorf("it waited with %d bytes", len(r.buf))
	}
}

func FuzzFrameReader(f *testing.F) {
	f.Add([]byte{}, int64(0))
	f.Add(output(output(nil, wire.KindStdout, 0, 0, "abc"), wire.KindStderr, 3, 0, "de"), int64(0))
	f.Add(notes(f, output(notes(f, nil, wire.KindGap, 3, wire.GapFrame{From: 3, To: 7}), wire.KindStdout, 7, 2, "x"), wire.KindStatus, 8, wire.StatusFrame{Next: 8}), int64(3))
	f.Fuzz(func(t *testing.T, in []byte, cursor int64) {
		if cursor < 0 || cursor > 1<<53 {
			return
		}
		r := NewFrameReader(bytes.NewReader(in), cursor)
		next := cursor
		for {
			b, err := r.Next()
			if err != nil {
				break
			}
			for h, p := range Frames(b.Frames) {
				if h.Cursor != next || len(p) != h.Length || h.Length == 0 {
					t.Fatalf("a frame at %d of %d bytes, expected at %d", h.Cursor, len(p), next)
				}
				next += int64(h.Length)
			}
			if b.Gap != nil {
				next = b.Gap.To
			}
			if r.Cursor() < next {
				t.Fatalf("cursor %d, %d was returned", r.Cursor(), next)
			}
		}
	})
}
