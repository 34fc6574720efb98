package lbhost

import (
	"bytes"
	"encoding/binary"
	"io"
	"testing"

	"pgregory.net/rapid"
)

// writes records what was written at once.
type writes struct {
	io.Reader
	got [][]byte
}

func (w *writes) Write(b []byte) (int, error) {
	w.got = append(w.got, bytes.Clone(b))
	return len(b), nil
}

func (w *writes) Close() error { return nil }

// frame is a frame of RFC 6455 with a payload of n bytes.
func frame(n int, masked bool) []byte {
	b := []byte{0x81, 0}
	switch {
	case n < 126:
		b[1] = byte(n)
	case n < 1<<16:
		b[1] = 126
		b = binary.BigEndian.AppendUint16(b, uint16(n))
	default:
		b[1] = 127
		b = binary.BigEndian.AppendUint64(b, uint64(n))
	}
	if masked {
		b[1] |= 0x80
		b = append(b, 1, 2, 3, 4)
	}
	return append(b, make([]byte, n)...)
}

// TestFramesGoOutWhole: however frames are cut, each write below ends where a frame
// ends, nothing is lost, and nothing is left when the last frame is complete.
func TestFramesGoOutWhole(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		below := &writes{}
		w := &frameWriter{ReadWriteCloser: below}
		var all []byte
		ends := map[int]bool{}
		sizes := rapid.SliceOfN(rapid.OneOf(rapid.IntRange(0, 200), rapid.IntRange(4000, 5000), rapid.IntRange(65530, 65600)), 1, 5).Draw(t, "sizes")
		for _, n := range sizes {
			all = append(all, frame(n, rapid.Bool().Draw(t, "masked"))...)
			ends[len(all)] = true
		}
		for rest := all; len(rest) > 0; {
			n := min(rapid.SampledFrom([]int{1, 3, 4096, 1 << 20}).Draw(t, "part"), len(rest))
			if n < 4 && len(rest) > 64 && n < len(rest) {
				n = min(n*64, len(rest))
			}
			if _, err := w.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		at := 0
		for _, b := range below.got {
			if at += len(b); !ends[at] {
				t.Fatalf("a write ends at byte %d, within a frame", at)
			}
		}
		if got := bytes.Join(below.got, nil); !bytes.Equal(got, all) {
			t.Fatalf("%d of %d bytes went out", len(got), len(all))
		}
	})
}
