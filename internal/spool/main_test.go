package spool

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

// helperEnv makes the test binary another process of a test: a writer.
const helperEnv = "STOCKADE_SPOOL_TEST_WRITER"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		os.Exit(writerMain())
	}
	need.Main(m)
}

// content is the output at a cursor: any two positions differ in a way that a
// shifted or repeated byte shows.
func content(cursor int64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		c := uint64(cursor) + uint64(i)
		b[i] = byte(c*131 + (c>>8)*17 + (c >> 16))
	}
	return b
}

func newWriter(t testing.TB, cfg Config) *Writer {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	w, err := Create(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Finish() })
	return w
}

func newReader(t testing.TB, dir string) *Reader {
	t.Helper()
	r, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return r
}

func appendAll(t testing.TB, w *Writer, k wire.Kind, p []byte) {
	t.Helper()
	if err := w.Append(context.Background(), k, p); err != nil {
		t.Fatal(err)
	}
}

// record is a decoded frame.
type record struct {
	wire.Header
	data []byte
}

// decode takes frames apart, checking every checksum and that each begins where
// the one before ended.
func decode(frames []byte, cursor int64) ([]record, int64, error) {
	var records []record
	for len(frames) > 0 {
		h, err := wire.ParseHeader(frames)
		if err != nil {
			return records, cursor, err
		}
		if h.Cursor != cursor || h.Length == 0 || len(frames) < wire.HeaderSize+h.Length {
			return records, cursor, fmt.Errorf("frame %+v at cursor %d with %d bytes left", h, cursor, len(frames))
		}
		data := frames[wire.HeaderSize : wire.HeaderSize+h.Length]
		if wire.Sum(data) != h.Sum {
			return records, cursor, fmt.Errorf("frame %+v: wrong checksum", h)
		}
		records = append(records, record{h, bytes.Clone(data)})
		frames = frames[wire.HeaderSize+h.Length:]
		cursor += int64(h.Length)
	}
	return records, cursor, nil
}

// readAll reads from cursor to limit in steps of max and returns the bytes.
func readAll(r *Reader, cursor int64, max int, limit int64) ([]byte, []wire.GapFrame, error) {
	var out []byte
	var gaps []wire.GapFrame
	var buf []byte
	for cursor < limit {
		frames, next, gap, err := r.Read(cursor, max, limit, buf)
		if gap != nil {
			gaps = append(gaps, *gap)
			cursor = gap.To
		}
		if err != nil {
			return out, gaps, err
		}
		records, end, err := decode(frames, cursor)
		if err != nil {
			return out, gaps, err
		}
		if end != next || next == cursor && gap == nil {
			return out, gaps, fmt.Errorf("frames end at %d, next is %d, from %d", end, next, cursor)
		}
		if n := next - cursor; n > int64(max) {
			return out, gaps, fmt.Errorf("%d bytes were read, the limit was %d", n, max)
		}
		for _, rec := range records {
			out = append(out, rec.data...)
		}
		cursor = next
		buf = frames[:0]
	}
	return out, gaps, nil
}

// writerMain is the other process of the tests: it writes a log in Args[1] of
// Args[2] bytes in frames of random sizes, reports the end after each on
// standard output (8 bytes), takes acknowledged cursors (8 bytes each) from
// standard input, and ends with the digest of everything.
func writerMain() int {
	var total, limit int64
	var overflow string
	var seed uint64
	if _, err := fmt.Sscan(os.Getenv(helperEnv), &total, &limit, &overflow, &seed); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	w, err := Create(Config{Dir: os.Args[len(os.Args)-1], Cap: limit, Overflow: overflowOf(overflow)})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	go func() {
		var b [8]byte
		for {
			if _, err := io.ReadFull(os.Stdin, b[:]); err != nil {
				return
			}
			if err := w.Ack(int64(binary.LittleEndian.Uint64(b[:]))); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(3)
			}
		}
	}()
	go func() {
		var last int64 = -1
		for {
			changed := w.Changed()
			s := w.State()
			if s.Next != last {
				last = s.Next
				if _, err := os.Stdout.Write(binary.LittleEndian.AppendUint64(nil, uint64(last))); err != nil {
					return
				}
			}
			<-changed
		}
	}()
	rng := rand.New(rand.NewPCG(seed, 1))
	digest := sha256.New()
	for cursor := int64(0); cursor < total; {
		n := 1 + rng.IntN(300)
		if rng.IntN(4) == 0 {
			n = 1 + rng.IntN(200_000)
		}
		n = int(min(int64(n), total-cursor))
		k := wire.KindStdout
		if rng.IntN(3) == 0 {
			k = wire.KindStderr
		}
		p := content(cursor, n)
		digest.Write(p)
		if err := w.Append(context.Background(), k, p); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 4
		}
		cursor += int64(n)
	}
	if err := w.Finish(); err != nil {
		return 5
	}
	if w.State().Next != total {
		return 6
	}
	_, _ = io.Copy(io.Discard, os.Stdin) // until the readers are done
	fmt.Fprintf(os.Stderr, "%x", digest.Sum(nil))
	return 0
}
