package api

import (
	"bytes"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestAttachMessagesRoundTrip(t *testing.T) {
	t.Parallel()
	for _, m := range []AttachMessage{
		{Kind: AttachStdin, Position: 7, Data: []byte("x")},
		{Kind: AttachStdin, Position: MaxOffset, Data: bytes.Repeat([]byte("y"), 1<<20)},
		{Kind: AttachEOF, Position: 1 << 40},
		{Kind: AttachResize, Size: Winsize{Rows: 1, Cols: 4096}},
		{Kind: AttachAck, Position: 0},
		{Kind: AttachSignal, Signal: "SIGINT"},
	} {
		got, err := ParseAttach(AppendAttach(nil, m))
		if err != nil {
			t.Fatalf("kind %d: %v", m.Kind, err)
		}
		if got.Kind != m.Kind || got.Position != m.Position || !bytes.Equal(got.Data, m.Data) || got.Size != m.Size || got.Signal != m.Signal {
			t.Errorf("kind %d came back as another message", m.Kind)
		}
	}
}

func TestAttachRefusesWhatIsNotAMessage(t *testing.T) {
	t.Parallel()
	for name, b := range map[string][]byte{
		"empty":           {},
		"unknown kind":    {9, 1, 2},
		"kind zero":       {0},
		"stdin no data":   {1, 0, 0, 0, 0, 0, 0, 0, 0},
		"stdin short":     {1, 0},
		"eof with data":   {2, 0, 0, 0, 0, 0, 0, 0, 0, 1},
		"negative":        {2, 255, 255, 255, 255, 255, 255, 255, 255},
		"beyond 2^53":     {4, 1, 0, 0, 0, 0, 0, 32, 0},
		"no rows":         {3, 0, 0, 80, 0},
		"too many cols":   {3, 24, 0, 255, 255},
		"not a signal":    []byte("\x05KILL"),
		"long signal":     []byte("\x05SIGAAAAAAAAAAAAAAAAAAAAA"),
		"over the limit":  append([]byte{1}, make([]byte, MaxAttachMessage)...),
		"resize too long": {3, 24, 0, 80, 0, 0},
	} {
		if _, err := ParseAttach(b); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v, want invalid", name, err)
		}
	}
}

func FuzzParseAttach(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 0, 'a'})
	f.Add([]byte{3, 24, 0, 80, 0})
	f.Add([]byte("\x05SIGINT"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseAttach(b)
		if err != nil {
			if !errdefs.Is(err, errdefs.Invalid) {
				t.Fatalf("refused with %v, want invalid", err)
			}
			return
		}
		if again := AppendAttach(nil, m); !bytes.Equal(again, b) {
			t.Fatalf("%x is read as what is written %x", b, again)
		}
	})
}
