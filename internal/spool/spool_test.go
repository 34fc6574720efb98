package spool

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

func overflowOf(s string) api.Overflow { return api.Overflow(s) }

func wantCode(t *testing.T, err error, code errdefs.Code) {
	t.Helper()
	if !errdefs.Is(err, code) {
		t.Fatalf("error %v has code %q, want %q", err, errdefs.CodeOf(err), code)
	}
}

func TestAppendAndRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	appendAll(t, w, wire.KindStdout, []byte("hello "))
	appendAll(t, w, wire.KindStderr, []byte("oops"))
	appendAll(t, w, wire.KindStdout, nil)
	appendAll(t, w, wire.KindStdout, []byte("world"))
	if got, want := w.State(), (api.LogState{Next: 15, Stdout: 11, Stderr: 4}); got != want {
		t.Fatalf("state %+v, want %+v", got, want)
	}
	r := newReader(t, dir)
	frames, next, gap, err := r.Read(0, 100, 15, nil)
	if err != nil || gap != nil || next != 15 {
		t.Fatal(next, gap, err)
	}
	records, _, err := decode(frames, 0)
	if err != nil || len(records) != 3 {
		t.Fatal(records, err)
	}
	if r := records[2]; r.Kind != wire.KindStdout || r.Offset != 6 || r.Cursor != 10 || string(r.data) != "world" {
		t.Fatalf("%+v", r)
	}
	// From inside a record, and not beyond the limit.
	frames, next, _, err = r.Read(8, 100, 12, frames)
	if err != nil || next != 12 {
		t.Fatal(next, err)
	}
	records, _, err = decode(frames, 8)
	if err != nil || len(records) != 2 || string(records[0].data) != "ps" || records[0].Offset != 2 || string(records[1].data) != "wo" {
		t.Fatalf("%+v %v", records, err)
	}
	// At the end there is nothing, beyond it is an error.
	if frames, next, gap, err := r.Read(15, 100, 15, nil); len(frames) > 0 || next != 15 || gap != nil || err != nil {
		t.Fatal(frames, next, gap, err)
	}
	_, _, _, err = r.Read(16, 100, 15, nil)
	wantCode(t, err, errdefs.Invalid)
	_, _, _, err = r.Read(-1, 100, 15, nil)
	wantCode(t, err, errdefs.Invalid)
	_, _, _, err = r.Read(99, 100, NoLimit, nil)
	wantCode(t, err, errdefs.Invalid)
	_, _, _, err = r.Read(0, 0, 15, nil)
	wantCode(t, err, errdefs.Internal)
}

func TestEveryCutOfEveryRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir, Cap: MinCap, SegmentBytes: 100})
	var total int64
	for i := range 40 {
		p := content(total, 1+i%7)
		k := wire.KindStdout
		if i%3 == 1 {
			k = wire.KindStderr
		}
		appendAll(t, w, k, p)
		total += int64(len(p))
	}
	want := content(0, int(total))
	r := newReader(t, dir)
	for from := int64(0); from <= total; from++ {
		for max := 1; max < 12; max++ {
			got, gaps, err := readAll(r, from, max, total)
			if err != nil || len(gaps) > 0 || !bytes.Equal(got, want[from:]) {
				t.Fatalf("from %d by %d: %v %v", from, max, gaps, err)
			}
		}
		got, _, err := readAll(r, 0, 5, from)
		if err != nil || !bytes.Equal(got, want[:from]) {
			t.Fatalf("to %d: %v", from, err)
		}
	}
}

func TestLargeAppendIsCut(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	p := content(0, 3*wire.MaxPayload+5)
	appendAll(t, w, wire.KindStdout, p)
	r := newReader(t, dir)
	for _, max := range []int{1000, 64 << 10, wire.MaxPayload, 8 << 20} {
		got, _, err := readAll(r, 0, max, int64(len(p)))
		if err != nil || !bytes.Equal(got, p) {
			t.Fatalf("by %d: %d bytes, %v", max, len(got), err)
		}
	}
}

func TestReadUsesTheBuffer(t *testing.T) { // not parallel: it counts allocations
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	for range 64 {
		appendAll(t, w, wire.KindStdout, content(0, 32<<10))
	}
	r := newReader(t, dir)
	next := w.State().Next
	buf := make([]byte, BufSize(256<<10))
	at := int64(0)
	allocs := testing.AllocsPerRun(5, func() {
		frames, n, _, err := r.Read(at, 256<<10, next, buf)
		if err != nil || len(frames) == 0 || &frames[0] != &buf[0] {
			t.Errorf("%d bytes, %v", len(frames), err)
		}
		if n-at != 256<<10 {
			t.Errorf("a read of 256 KiB gave %d", n-at)
		}
		at = n
	})
	if allocs > 0 {
		t.Errorf("%v allocations in a read", allocs)
	}
}

func TestDropOldest(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir, Cap: MinCap, Overflow: api.OverflowDropOldest})
	r := newReader(t, dir)
	appendAll(t, w, wire.KindStdout, content(0, 5000))
	// This reader has the first segment open and keeps it.
	if _, next, _, err := r.Read(0, 100, 5000, nil); err != nil || next != 100 {
		t.Fatal(next, err)
	}
	for range 40 {
		s := w.State()
		appendAll(t, w, wire.KindStdout, content(s.Next, 5000))
		if size := dirSize(t, dir); size > MinCap {
			t.Fatalf("%d bytes on disk, the cap is %d", size, MinCap)
		}
	}
	s := w.State()
	if s.Oldest == 0 || s.Next-s.Oldest < MinCap/2 || s.Blocked || s.Failure != "" {
		t.Fatalf("state %+v", s)
	}
	got, gaps, err := readAll(r, 100, 700, s.Next)
	if err != nil || len(gaps) != 1 || gaps[0].To != s.Oldest {
		t.Fatalf("gaps %v, oldest %d: %v", gaps, s.Oldest, err)
	}
	kept := append(content(100, int(gaps[0].From-100)), content(s.Oldest, int(s.Next-s.Oldest))...)
	if !bytes.Equal(got, kept) || gaps[0].From <= 5000 {
		t.Fatalf("%d bytes around gap %v, want %d", len(got), gaps, len(kept))
	}
	// A new reader sees the whole gap at once.
	_, gaps, err = readAll(newReader(t, dir), 0, 1<<20, s.Next)
	if err != nil || len(gaps) != 1 || gaps[0] != (wire.GapFrame{From: 0, To: s.Oldest}) {
		t.Fatal(gaps, err)
	}
	// A reader that was told a limit which has gone meanwhile learns that.
	frames, next, gap, err := newReader(t, dir).Read(10, 100, 20, nil)
	if err != nil || len(frames) > 0 || gap == nil || *gap != (wire.GapFrame{From: 10, To: s.Oldest}) || next != s.Oldest {
		t.Fatal(frames, next, gap, err)
	}
}

func dirSize(t *testing.T, dir string) (size int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		size += info.Size()
	}
	return size
}

func TestBlock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		w := newWriter(t, Config{Dir: dir, Cap: MinCap})
		done := make(chan error, 1)
		go func() { done <- w.Append(context.Background(), wire.KindStdout, content(0, 100_000)) }()
		synctest.Wait()
		s := w.State()
		if !s.Blocked || s.Next < MinCap*9/10 || dirSize(t, dir) > MinCap {
			t.Fatalf("state %+v", s)
		}
		// Less than the first segment: no room yet.
		if err := w.Ack(10); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if w.State().Next != s.Next || w.State().Oldest != 0 {
			t.Fatal("bytes were dropped that nobody acknowledged")
		}
		changed := w.Changed()
		for w.State().Next < 100_000 {
			if err := w.Ack(w.State().Next); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		<-changed
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if s := w.State(); s.Blocked || s.Oldest == 0 || dirSize(t, dir) > MinCap {
			t.Fatalf("state %+v", s)
		}
		wantCode(t, w.Ack(100_001), errdefs.Invalid)
		wantCode(t, w.Ack(-1), errdefs.Invalid)
		if err := w.Ack(0); err != nil {
			t.Fatal(err)
		}
	})
}

func TestBlockedAppendEndsWithContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWriter(t, Config{Dir: t.TempDir(), Cap: MinCap})
		cause := errors.New("the end")
		ctx, cancel := context.WithCancelCause(context.Background())
		done := make(chan error, 2)
		for range 2 { // one waits for room, the other for its turn
			go func() { done <- w.Append(ctx, wire.KindStdout, content(0, 100_000)) }()
		}
		synctest.Wait()
		cancel(cause)
		for range 2 {
			if err := <-done; !errors.Is(err, cause) {
				t.Fatal(err)
			}
		}
		if s := w.State(); s.Blocked || s.Failure != "" {
			t.Fatalf("state %+v", s)
		}
	})
}

func TestLiftAndFinish(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		w := newWriter(t, Config{Dir: dir, Cap: MinCap})
		done := make(chan error, 1)
		go func() { done <- w.Append(context.Background(), wire.KindStdout, content(0, 200_000)) }()
		synctest.Wait()
		w.Lift(50_000) // not enough yet
		synctest.Wait()
		if s := w.State(); !s.Blocked || s.Next <= MinCap || s.Next > MinCap+50_000 {
			t.Fatalf("state %+v", s)
		}
		w.Lift(100_000)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
		if err := w.Finish(); err != nil {
			t.Fatal(err)
		}
		if s := w.State(); !s.EOF || s.Next != 200_000 || s.Oldest != 0 || s.Blocked {
			t.Fatalf("state %+v", s)
		}
		wantCode(t, w.Append(context.Background(), wire.KindStdout, []byte("x")), errdefs.Conflict)
		got, _, err := readAll(newReader(t, dir), 0, 1<<20, 200_000)
		if err != nil || !bytes.Equal(got, content(0, 200_000)) {
			t.Fatal(len(got), err)
		}
	})
}

func TestChangedMissesNothing(t *testing.T) {
	t.Parallel()
	w := newWriter(t, Config{})
	const total = 2000
	go func() {
		for range total {
			_ = w.Append(context.Background(), wire.KindStdout, []byte("x"))
		}
		_ = w.Finish()
	}()
	deadline := time.After(time.Minute)
	for {
		changed := w.Changed()
		if s := w.State(); s.EOF {
			if s.Next != total {
				t.Fatalf("state %+v", s)
			}
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatal("a change was missed")
		}
	}
}

func TestCreateRefuses(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	appendAll(t, w, wire.KindStdout, []byte("x"))
	_, err := Create(Config{Dir: dir})
	wantCode(t, err, errdefs.Conflict)
	_, err = Create(Config{})
	wantCode(t, err, errdefs.Internal)
	_, err = Create(Config{Dir: dir, Cap: -1})
	wantCode(t, err, errdefs.Invalid)
	_, err = Create(Config{Dir: dir, Overflow: "later"})
	wantCode(t, err, errdefs.Invalid)
	wantCode(t, w.Append(context.Background(), wire.KindGap, []byte("x")), errdefs.Internal)
	_, err = Open(filepath.Join(dir, "absent"))
	wantCode(t, err, errdefs.NotFound)
}

func TestRecover(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := newReader(t, dir)
	if s, err := r.Recover(); err != nil || s != (api.LogState{EOF: true}) {
		t.Fatalf("an empty log: %+v %v", s, err)
	}
	w := newWriter(t, Config{Dir: dir, Cap: MinCap, SegmentBytes: 8 << 10, Overflow: api.OverflowDropOldest})
	for i := range 60 {
		k := wire.KindStdout
		if i%4 == 0 {
			k = wire.KindStderr
		}
		appendAll(t, w, k, content(w.State().Next, 2000+i))
		want := w.State()
		want.EOF = true
		if got, err := r.Recover(); err != nil || got != want {
			t.Fatalf("recovered %+v %v, want %+v", got, err, want)
		}
	}
	want := w.State()
	oldest, next, err := r.Bounds()
	if err != nil || oldest != want.Oldest || next != want.Next {
		t.Fatal(oldest, next, err)
	}
	// A segment that was begun and holds nothing.
	if err := os.WriteFile(segmentPath(dir, next), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	want.EOF = true
	if got, err := r.Recover(); err != nil || got != want {
		t.Fatalf("recovered %+v %v, want %+v", got, err, want)
	}
	got, gaps, err := readAll(r, 0, 1000, next)
	if err != nil || len(gaps) != 1 || !bytes.Equal(got, content(oldest, int(next-oldest))) {
		t.Fatal(gaps, err)
	}
	// Files that are not segments mean nothing.
	for _, name := range []string{"x.seg", "00000000000000000000.tmp", "-0000000000000000001.seg", strings.Repeat("9", 20) + ".seg"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := r.Recover(); err != nil || got != want {
		t.Fatalf("recovered %+v %v", got, err)
	}
}

// TestTinyRecordsMakeShortSegments: beginning in the middle stays cheap.
func TestTinyRecordsMakeShortSegments(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir})
	total := int64(2*maxSegmentFrames + 5)
	for i := range total {
		appendAll(t, w, wire.KindStdout, content(i, 1))
	}
	bases, err := listSegments(dir)
	if err != nil || len(bases) != 3 || bases[1] != maxSegmentFrames {
		t.Fatal(bases, err)
	}
	got, _, err := readAll(newReader(t, dir), 0, 100_000, total)
	if err != nil || !bytes.Equal(got, content(0, int(total))) {
		t.Fatal(err)
	}
}

// TestWaitingAtTheEnd: a reader that does not know the limit asks for more at
// the end, sees what is appended, and does not walk through the segment again.
func TestWaitingAtTheEnd(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir, SegmentBytes: 400})
	r := newReader(t, dir)
	cursor := int64(0)
	for range 60 {
		for range 2 {
			frames, next, gap, err := r.Read(cursor, 1000, NoLimit, nil)
			if len(frames) > 0 || next != cursor || gap != nil || err != nil {
				t.Fatal(len(frames), next, gap, err)
			}
			if cursor > 0 && r.at.cursor != cursor {
				t.Fatalf("the place is at %d, the end at %d", r.at.cursor, cursor)
			}
		}
		appendAll(t, w, wire.KindStdout, content(cursor, 50))
		frames, next, gap, err := r.Read(cursor, 1000, NoLimit, nil)
		if len(frames) != 50+wire.HeaderSize || next != cursor+50 || gap != nil || err != nil {
			t.Fatal(len(frames), next, gap, err)
		}
		cursor = next
	}
}
