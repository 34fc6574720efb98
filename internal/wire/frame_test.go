package wire

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func drawHeader(t *rapid.T) Header {
	return Header{
		Kind:   rapid.SampledFrom([]Kind{KindStdout, KindStderr, KindGap, KindStatus}).Draw(t, "kind"),
		Length: rapid.IntRange(0, MaxPayload).Draw(t, "length"),
		Cursor: rapid.Int64Range(0, api.MaxOffset).Draw(t, "cursor"),
		Offset: rapid.Int64Range(0, api.MaxOffset).Draw(t, "offset"),
		Sum:    rapid.Uint32().Draw(t, "sum"),
	}
}

func TestHeaderRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		h := drawHeader(t)
		b := AppendHeader([]byte("before"), h)
		if len(b) != 6+HeaderSize {
			t.Fatalf("%d bytes", len(b))
		}
		got, err := ParseHeader(append(b[6:], "after"...))
		if err != nil || got != h {
			t.Fatalf("%+v became %+v: %v", h, got, err)
		}
	})
}

// TestHeaderDamage: no header with one byte changed is taken for a header.
func TestHeaderDamage(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		b := AppendHeader(nil, drawHeader(t))
		b[rapid.IntRange(0, HeaderSize-1).Draw(t, "at")] ^= rapid.ByteRange(1, 255).Draw(t, "flip")
		if h, err := ParseHeader(b); !errdefs.Is(err, errdefs.Invalid) {
			t.Fatalf("a damaged header became %+v: %v", h, err)
		}
	})
}

func TestHeaderRefuses(t *testing.T) {
	t.Parallel()
	for name, h := range map[string]Header{
		"kind":   {Kind: 3},
		"length": {Kind: KindStdout, Length: MaxPayload + 1},
		"cursor": {Kind: KindStdout, Cursor: api.MaxOffset + 1},
		"offset": {Kind: KindStdout, Offset: -1},
	} {
		if _, err := ParseHeader(AppendHeader(nil, h)); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ParseHeader(make([]byte, HeaderSize-1)); !errdefs.Is(err, errdefs.Invalid) {
		t.Error(err)
	}
}

func TestAddSum(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := rapid.SliceOf(rapid.Byte()).Draw(t, "a")
		b := rapid.SliceOf(rapid.Byte()).Draw(t, "b")
		if AddSum(AddSum(0, a), b) != Sum(append(bytes.Clone(a), b...)) {
			t.Fatal("the sum of the parts is not the sum of the whole")
		}
	})
	// The check value of CRC-32C for "123456789" (RFC 3720 uses this polynomial).
	if Sum([]byte("123456789")) != 0xE3069283 {
		t.Error("not CRC-32C")
	}
}

// FuzzParseHeader: any bytes give a header within its limits, which encodes to
// the same bytes, or an error.
func FuzzParseHeader(f *testing.F) {
	f.Add(AppendHeader(nil, Header{Kind: KindStdout, Length: 5, Cursor: 9, Offset: 4, Sum: 7}))
	f.Add(AppendHeader(nil, Header{Kind: KindStatus, Length: MaxPayload, Cursor: api.MaxOffset, Offset: api.MaxOffset}))
	f.Add([]byte{})
	f.Add(make([]byte, HeaderSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ParseHeader(b)
		if err != nil {
			if !errdefs.Is(err, errdefs.Invalid) {
				t.Fatal(err)
			}
			return
		}
		if h.Length < 0 || h.Length > MaxPayload || h.Cursor < 0 || h.Cursor > api.MaxOffset || h.Offset < 0 || h.Offset > api.MaxOffset {
			t.Fatalf("%+v", h)
		}
		if !bytes.Equal(AppendHeader(nil, h), b[:HeaderSize]) {
			t.Fatal("it encodes to other bytes")
		}
	})
}
