package spool

import (
	"bytes"
	"context"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// TestModel does random things to a log and to a model of it in memory, and
// compares what readers get. A model of a log is all its bytes, each with its
// stream; the log may forget the oldest, and must say so exactly.
func TestModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "spool")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		overflow := rapid.SampledFrom([]api.Overflow{api.OverflowBlock, api.OverflowDropOldest}).Draw(t, "overflow")
		w, err := Create(Config{Dir: dir, Cap: MinCap, SegmentBytes: rapid.Int64Range(600, 16<<10).Draw(t, "segment"), Overflow: overflow})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Finish()
		m := &model{w: w, overflow: overflow, dir: dir}
		for i := range m.readers {
			if m.readers[i], err = Open(dir); err != nil {
				t.Fatal(err)
			}
			defer m.readers[i].Close()
		}
		t.Repeat(map[string]func(*rapid.T){
			"append": m.append,
			"ack":    m.ack,
			"read":   m.read,
			"":       m.check,
		})
	})
}

type model struct {
	w        *Writer
	dir      string
	overflow api.Overflow
	readers  [3]*Reader
	bytes    []byte
	kinds    []wire.Kind
	offsets  []int64
	streams  [256]int64
	acked    int64
}

func (m *model) append(t *rapid.T) {
	n := rapid.OneOf(rapid.IntRange(1, 200), rapid.IntRange(1, 20_000)).Draw(t, "n")
	k := rapid.SampledFrom([]wire.Kind{wire.KindStdout, wire.KindStderr}).Draw(t, "kind")
	p := content(int64(len(m.bytes)), n)
	// A context that has ended: at the cap, block gives up at once and keeps a part.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	before := m.w.State()
	err := m.w.Append(ctx, k, p)
	after := m.w.State()
	kept := int(after.Next - before.Next)
	if err == nil && kept != n || err != nil && (err != context.Canceled || kept >= n || m.overflow == api.OverflowDropOldest) {
		t.Fatalf("%d of %d bytes were kept: %v", kept, n, err)
	}
	if err != nil && before.Next == m.acked && before.Oldest == before.Next {
		t.Fatal("it blocked although everything was acknowledged")
	}
	for _, b := range p[:kept] {
		m.bytes = append(m.bytes, b)
		m.kinds = append(m.kinds, k)
		m.offsets = append(m.offsets, m.streams[k])
		m.streams[k]++
	}
}

func (m *model) ack(t *rapid.T) {
	cursor := rapid.Int64Range(0, int64(len(m.bytes))).Draw(t, "cursor")
	if err := m.w.Ack(cursor); err != nil {
		t.Fatal(err)
	}
	m.acked = max(m.acked, cursor)
}

func (m *model) read(t *rapid.T) {
	r := m.readers[rapid.IntRange(0, len(m.readers)-1).Draw(t, "reader")]
	end := int64(len(m.bytes))
	cursor := rapid.Int64Range(0, end).Draw(t, "cursor")
	limit := rapid.Int64Range(cursor, end).Draw(t, "limit")
	max := rapid.OneOf(rapid.IntRange(1, 50), rapid.IntRange(1, 40_000)).Draw(t, "max")
	buf := make([]byte, 0, rapid.IntRange(0, 60_000).Draw(t, "buf"))
	for range rapid.IntRange(1, 5).Draw(t, "reads") {
		cursor = m.readOnce(t, r, cursor, max, limit, buf)
		if cursor >= limit {
			return
		}
	}
}

func (m *model) readOnce(t *rapid.T, r *Reader, cursor int64, max int, limit int64, buf []byte) int64 {
	frames, next, gap, err := r.Read(cursor, max, limit, buf)
	if err != nil {
		t.Fatalf("read from %d to %d: %v", cursor, limit, err)
	}
	if gap != nil {
		// It may be shorter than what is gone (an open segment is still read),
		// never longer, and only of what the policy may drop.
		if gap.From != cursor || gap.To <= cursor || gap.To > m.w.State().Oldest || m.overflow == api.OverflowBlock && gap.To > m.acked {
			t.Fatalf("gap %+v at %d, state %+v, acked %d", gap, cursor, m.w.State(), m.acked)
		}
		cursor = gap.To
		if cursor >= limit {
			if len(frames) > 0 || next != cursor {
				t.Fatalf("frames beyond the limit")
			}
			return cursor
		}
	}
	records, end, err := decode(frames, cursor)
	if err != nil || end != next || next > limit || next-cursor > int64(max) || next == cursor && cursor < limit {
		t.Fatalf("read from %d: next %d, frames end at %d, limit %d, max %d: %v", cursor, next, end, limit, max, err)
	}
	for _, rec := range records {
		for i, b := range rec.data {
			at := rec.Cursor + int64(i)
			if m.bytes[at] != b || m.kinds[at] != rec.Kind || m.offsets[at] != rec.Offset+int64(i) {
				t.Fatalf("wrong byte at %d", at)
			}
		}
	}
	return next
}

func (m *model) check(t *rapid.T) {
	s := m.w.State()
	if s.Next != int64(len(m.bytes)) || s.Stdout != m.streams[wire.KindStdout] || s.Stderr != m.streams[wire.KindStderr] || s.Failure != "" || s.Blocked {
		t.Fatalf("state %+v, want %d bytes, %d and %d", s, len(m.bytes), m.streams[wire.KindStdout], m.streams[wire.KindStderr])
	}
	if m.overflow == api.OverflowBlock && s.Oldest > m.acked {
		t.Fatalf("dropped up to %d, acknowledged were %d", s.Oldest, m.acked)
	}
	bases, err := listSegments(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	var size int64
	for _, b := range bases {
		info, err := os.Stat(segmentPath(m.dir, b))
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	if size != m.w.used || size > MinCap {
		t.Fatalf("%d bytes on disk, %d accounted, cap %d", size, m.w.used, MinCap)
	}
	if len(bases) > 0 && bases[0] != s.Oldest {
		t.Fatalf("the oldest segment is %d, the state says %d", bases[0], s.Oldest)
	}
	got, _, err := readAll(m.readers[0], s.Oldest, 1<<20, s.Next)
	if err != nil || !bytes.Equal(got, m.bytes[s.Oldest:]) {
		t.Fatalf("what is kept reads wrong: %v", err)
	}
}
