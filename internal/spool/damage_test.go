package spool

import (
	"bytes"
	"context"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

// smallLog writes a log of several segments with a few frames each and returns
// its segments' first cursors and its end.
func smallLog(t testing.TB, dir string) ([]int64, int64) {
	t.Helper()
	w := newWriter(t, Config{Dir: dir, SegmentBytes: 130})
	for i := range 7 {
		k := wire.KindStdout
		if i%2 == 1 {
			k = wire.KindStderr
		}
		appendAll(t, w, k, content(w.State().Next, 5+i))
	}
	bases, err := listSegments(dir)
	if err != nil || len(bases) < 3 {
		t.Fatal(bases, err)
	}
	return bases, w.State().Next
}

// TestEveryDamagedByte flips every bit of interest in every byte, and cuts every
// segment at every length: what is read is the truth up to the damage, then an
// error that names the place. Nothing is skipped and nothing is the end.
func TestEveryDamagedByte(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bases, next := smallLog(t, dir)
	want := content(0, int(next))
	check := func(what string, i, at int, base int64) {
		t.Helper()
		for _, limit := range []int64{next, NoLimit} {
			for _, max := range []int{3, 1000} {
				r := newReader(t, dir)
				got, gaps, err := readAll(r, 0, max, limit)
				if !errdefs.Is(err, errdefs.Indeterminate) || len(gaps) > 0 || !bytes.HasPrefix(want, got) {
					t.Fatalf("%s %d of segment %d: read %d bytes of %d, gaps %v: %v", what, at, base, len(got), next, gaps, err)
				}
				if int64(len(got)) < base {
					t.Fatalf("%s %d of segment %d: only %d bytes were read", what, at, base, len(got))
				}
				// The segments after it can still be read, by the same reader.
				if i+1 < len(bases) {
					if got, _, err := readAll(r, bases[i+1], max, next); err != nil || !bytes.Equal(got, want[bases[i+1]:]) {
						t.Fatalf("%s %d of segment %d: the next segment: %v", what, at, base, err)
					}
				}
			}
		}
	}
	for i, base := range bases {
		file := segmentPath(dir, base)
		good, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for at := range good {
			for _, flip := range []byte{1, 0x80} {
				bad := bytes.Clone(good)
				bad[at] ^= flip
				overwrite(t, file, bad)
				check("flipped byte", i, at, base)
			}
		}
		for size := range good {
			overwrite(t, file, good[:size])
			if i == len(bases)-1 && cutAtFrame(good, size) {
				// A log that ends a frame early is whole to who does not know better.
				got, _, err := readAll(newReader(t, dir), 0, 1000, next)
				if !errdefs.Is(err, errdefs.Indeterminate) || !bytes.HasPrefix(want, got) {
					t.Fatalf("cut at %d: %v", size, err)
				}
				continue
			}
			check("cut at byte", i, size, base)
		}
		overwrite(t, file, good)
		if 0 < i {
			if err := os.Rename(file, file+".away"); err != nil {
				t.Fatal(err)
			}
			_, _, err := readAll(newReader(t, dir), 0, 1000, next)
			wantCode(t, err, errdefs.Indeterminate)
			if err := os.Rename(file+".away", file); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got, _, err := readAll(newReader(t, dir), 0, 1000, next); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("the repaired log: %v", err)
	}
	// All of it gone, although it should go on.
	for _, base := range bases {
		if err := os.Remove(segmentPath(dir, base)); err != nil {
			t.Fatal(err)
		}
	}
	_, _, err := readAll(newReader(t, dir), 0, 1000, next)
	wantCode(t, err, errdefs.Indeterminate)
}

func cutAtFrame(segment []byte, size int) bool {
	at := 0
	for at < size {
		h, err := wire.ParseHeader(segment[at:])
		if err != nil {
			return false
		}
		at += wire.HeaderSize + h.Length
	}
	return at == size
}

func overwrite(t testing.TB, file string, b []byte) {
	t.Helper()
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestSwappedFrame: a frame that is whole but belongs elsewhere is damage too.
func TestSwappedFrame(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bases, next := smallLog(t, dir)
	other, err := os.ReadFile(segmentPath(dir, bases[1]))
	if err != nil {
		t.Fatal(err)
	}
	overwrite(t, segmentPath(dir, bases[0]), other)
	_, _, err = readAll(newReader(t, dir), 0, 1000, next)
	wantCode(t, err, errdefs.Indeterminate)
	overwrite(t, segmentPath(dir, bases[0]), wire.AppendHeader(nil, wire.Header{Kind: wire.KindStatus, Sum: wire.Sum(nil)}))
	_, _, err = readAll(newReader(t, dir), 0, 1000, next)
	wantCode(t, err, errdefs.Indeterminate)
}

func TestRecoverDamagedTail(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bases, next := smallLog(t, dir)
	last := segmentPath(dir, bases[len(bases)-1])
	good, err := os.ReadFile(last)
	if err != nil {
		t.Fatal(err)
	}
	for size := 1; size < len(good); size++ {
		overwrite(t, last, good[:size])
		r := newReader(t, dir)
		s, err := r.Recover()
		if whole := cutAtFrame(good, size); whole != (err == nil) || err != nil && !errdefs.Is(err, errdefs.Indeterminate) {
			t.Fatalf("cut at %d: %v", size, err)
		}
		// Up to the damage the log is whole.
		if s.Next >= next || s.Oldest != 0 || s.Stdout+s.Stderr != s.Next && err == nil {
			t.Fatalf("cut at %d: %+v", size, s)
		}
		if got, _, err := readAll(r, 0, 1000, s.Next); err != nil || !bytes.Equal(got, content(0, int(s.Next))) {
			t.Fatalf("cut at %d: reading to %d: %v", size, s.Next, err)
		}
	}
}

// TestDiskFull fills a small file system of its own.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	mount := t.TempDir()
	need.Disk(t, mount, "size=256k")
	dir := mount + "/log"
	w, err := Create(Config{Dir: dir, SegmentBytes: 96 << 10})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	for err == nil {
		err = w.Append(ctx, wire.KindStdout, content(w.State().Next, 30_000))
	}
	wantCode(t, err, errdefs.Exhausted)
	s := w.State()
	if s.Failure == "" || s.Next < 100_000 || s.Next%30_000 != 0 || s.EOF || s.Blocked {
		t.Fatalf("state %+v", s)
	}
	// The failure stays, also when there is room again.
	if err := os.Remove(segmentPath(dir, 0)); err != nil {
		t.Fatal(err)
	}
	wantCode(t, w.Append(ctx, wire.KindStderr, []byte("x")), errdefs.Exhausted)
	wantCode(t, w.Finish(), errdefs.Exhausted)
	if after := w.State(); after.Next != s.Next || !after.EOF {
		t.Fatalf("state %+v", after)
	}
	// What was kept is whole: no partial frame is left.
	r := newReader(t, dir)
	got, err := r.Recover()
	if err != nil || got.Next != s.Next {
		t.Fatalf("recovered %+v %v, want %+v", got, err, s)
	}
	kept, _, err := readAll(r, got.Oldest, 1<<20, s.Next)
	if err != nil || !bytes.Equal(kept, content(got.Oldest, int(s.Next-got.Oldest))) {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestFailureWakesWaiters: who waits for a change learns that the log has failed.
func TestFailureWakesWaiters(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := newWriter(t, Config{Dir: dir, Overflow: api.OverflowDropOldest})
	appendAll(t, w, wire.KindStdout, []byte("x"))
	changed := w.Changed()
	_ = unix.Close(w.fd) // the disk is gone, as it were
	w.fd, _ = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	wantCode(t, w.Append(context.Background(), wire.KindStdout, []byte("y")), errdefs.Unavailable)
	<-changed
	if s := w.State(); s.Failure == "" || s.Next != 1 {
		t.Fatalf("state %+v", s)
	}
}

// FuzzSegment reads any bytes as a segment: never a panic, never a frame that is
// not whole, and always an end.
func FuzzSegment(f *testing.F) {
	dir := f.TempDir()
	bases, _ := smallLog(f, dir)
	for _, base := range bases {
		good, err := os.ReadFile(segmentPath(dir, base))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(good, int64(3), 7)
		f.Add(good[:len(good)-1], int64(0), 100)
	}
	f.Add([]byte{}, int64(0), 1)
	f.Fuzz(func(t *testing.T, segment []byte, cursor int64, max int) {
		if max < 1 || max > 1<<20 {
			return
		}
		dir := t.TempDir()
		overwrite(t, segmentPath(dir, 0), segment)
		r, err := Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if _, err := r.Recover(); err != nil && !errdefs.Is(err, errdefs.Indeterminate) {
			t.Fatal(err)
		}
		for range len(segment) + 2 {
			frames, next, _, err := r.Read(cursor, max, NoLimit, nil)
			if err != nil {
				if !errdefs.Is(err, errdefs.Indeterminate) && !errdefs.Is(err, errdefs.Invalid) {
					t.Fatal(err)
				}
				return
			}
			records, end, err := decode(frames, cursor)
			if err != nil || end != next {
				t.Fatalf("%d records, %d, %d: %v", len(records), end, next, err)
			}
			if next == cursor {
				return
			}
			cursor = next
		}
		t.Fatal("it does not end")
	})
}
