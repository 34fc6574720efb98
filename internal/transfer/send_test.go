package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// callFunc is a peer.
type callFunc func(action string, data json.RawMessage, o rpc.CallOptions) error

func (f callFunc) Call(_ context.Context, action string, data any, o rpc.CallOptions) (json.RawMessage, error) {
	return json.RawMessage(`{}`), f(action, data.(json.RawMessage), o)
}

// connected is a connection whose other end receives files.
func connected(t testing.TB, h *Holder) *rpc.Conn {
	t.Helper()
	a, b := net.Pipe()
	near := rpc.New(rpc.Stdio(a, a, a.Close), rpc.Config{Name: "sender"})
	far := rpc.New(rpc.Stdio(b, b, b.Close), rpc.Config{Name: "receiver", Handle: func(_ context.Context, in *rpc.Inbound) (any, error) {
		if in.Action != pluginwire.ActionFileChunk {
			return nil, pluginwire.UnknownAction(in.Action)
		}
		return nil, h.Chunk(in.Data, in.Context)
	}})
	done := make(chan struct{}, 2)
	for _, c := range []*rpc.Conn{near, far} {
		go func() {
			c.Run(context.Background())
			done <- struct{}{}
		}()
	}
	t.Cleanup(func() {
		near.Close(nil)
		far.Close(nil)
		<-done
		<-done
	})
	return near
}

func TestSendOverAConnection(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir(), 100_000)
	h := s.Holder(nil)
	conn := connected(t, h)
	for _, size := range []int{0, 1, ChunkBytes - 1, ChunkBytes, ChunkBytes + 1, 100_000} {
		data := bytes.Repeat([]byte{1, 2, 3, 0, 255}, size/5+1)[:size]
		key, err := s.Send(t.Context(), conn, data, ".png", slotA)
		if err != nil || !isMinted(key) || !strings.HasSuffix(key, ".png") {
			t.Fatalf("%d bytes: %q, %v", size, key, err)
		}
		wantFile(t, s, key, slotA, string(data))
		wantCode(t, "slot B", second(s.Read(key, slotB)), errdefs.NotFound)
		must(t, s.Delete(key, slotA))
	}
	_, err := Send(t.Context(), conn, make([]byte, 100_001), "", slotA)
	var peer *rpc.PeerError
	if !errors.As(err, &peer) || !strings.Contains(peer.Message, "100000") {
		t.Errorf("more than the peer takes: %v", err)
	}
	if h.Held() != 0 {
		t.Errorf("the peer holds %d", h.Held())
	}
	must(t, h.Close())
}

// TestSendMessages holds what is on the wire to the published protocol.
func TestSendMessages(t *testing.T) {
	t.Parallel()
	var got []string
	key, err := SendFrom(t.Context(), callFunc(func(action string, data json.RawMessage, o rpc.CallOptions) error {
		var m struct {
			Key    string `json:"file_key"`
			Length int    `json:"file_length"`
			Text   []byte `json:"chunk_base64"`
			Index  *int   `json:"chunk_index"`
			Amount int    `json:"chunk_amount"`
			Size   int    `json:"chunk_size"`
		}
		dec := json.NewDecoder(bytes.NewReader(data))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&m); err != nil || action != "__file_chunk" || o.Context != slotA || m.Index == nil {
			t.Errorf("%v: %s %s %v", err, action, data, o.Context)
		}
		got = append(got, fmt.Sprint(m.Key, m.Length, len(m.Text), *m.Index, m.Amount, m.Size))
		return nil
	}), iotest.OneByteReader(strings.NewReader(strings.Repeat("x", ChunkBytes+5)+"more")), ChunkBytes+5, "", slotA)
	if want := []string{fmt.Sprint(key, 16389, 16384, 0, 2, 16384), fmt.Sprint(key, 16389, 5, 1, 2, 5)}; err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v\n got %v\nwant %v", err, got, want)
	}
}

func TestSendEndsAtTheFirstError(t *testing.T) {
	t.Parallel()
	lost, calls := errors.New("lost"), 0
	peer := callFunc(func(string, json.RawMessage, rpc.CallOptions) error {
		if calls++; calls == 2 {
			return lost
		}
		return nil
	})
	if key, err := Send(t.Context(), peer, make([]byte, 3*ChunkBytes), "", slotA); !errors.Is(err, lost) || calls != 2 || key != "" {
		t.Errorf("%q, %v after %d calls", key, err, calls)
	}
	calls = -100
	if _, err := SendFrom(t.Context(), peer, strings.NewReader("short"), 6, "", slotA); !errors.Is(err, io.ErrUnexpectedEOF) || calls != -100 {
		t.Errorf("a reader that ends early: %v", err)
	}
	if _, err := SendFrom(t.Context(), peer, strings.NewReader(strings.Repeat("x", ChunkBytes)), ChunkBytes+1, "", slotA); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a reader that ends at a chunk: %v", err)
	}
	if _, err := SendFrom(t.Context(), peer, iotest.ErrReader(lost), 1, "", slotA); !errors.Is(err, lost) {
		t.Errorf("a reader that fails: %v", err)
	}
	for _, err := range []error{second(SendFrom(t.Context(), peer, nil, -1, "", slotA)), second(Send(t.Context(), peer, nil, "a/b", slotA))} {
		wantCode(t, "what cannot be sent", err, errdefs.Invalid)
	}
}

// BenchmarkTransfer sends a megabyte over a connection of the protocol, in memory
// but for the receiver's disk, and reads and deletes it.
func BenchmarkTransfer(b *testing.B) {
	s := open(b, b.TempDir(), 0)
	h := s.Holder(nil)
	conn := connected(b, h)
	data := bytes.Repeat([]byte{1, 2, 3, 0, 255, 7, 9, 100}, 1<<17)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		key, err := Send(b.Context(), conn, data, "", slotA)
		if err != nil {
			b.Fatal(err)
		}
		if f, _, err := s.OpenFile(key, slotA); err != nil {
			b.Fatal(err)
		} else if n, err := io.Copy(io.Discard, f); n != int64(len(data)) || err != nil {
			b.Fatal(n, err)
		} else {
			f.Close()
		}
		if err := s.Delete(key, slotA); err != nil {
			b.Fatal(err)
		}
	}
	must(b, h.Close())
}

// BenchmarkChunk is the receiver's part of one full chunk.
func BenchmarkChunk(b *testing.B) {
	s := open(b, b.TempDir(), 0)
	h := s.Holder(nil)
	part := bytes.Repeat([]byte{1, 2, 3, 0, 255, 7, 9, 100}, ChunkBytes/8)
	const amount = 1 << 10
	var messages [amount]json.RawMessage
	for i := range messages {
		messages[i] = message("k", i, amount, part)
	}
	b.SetBytes(ChunkBytes)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%amount == 0 && i > 0 {
			must(b, s.Delete("k", slotA))
		}
		if err := h.Chunk(messages[i%amount], slotA); err != nil {
			b.Fatal(err)
		}
	}
	must(b, h.Close())
}

// BenchmarkSmallFile is the whole life of a file of one chunk at the receiver.
func BenchmarkSmallFile(b *testing.B) {
	s := open(b, b.TempDir(), 0)
	h := s.Holder(nil)
	m := message("k", 0, 1, make([]byte, 1000))
	for b.Loop() {
		if err := errors.Join(h.Chunk(m, slotA), second(s.Read("k", slotA)), s.Delete("k", slotA)); err != nil {
			b.Fatal(err)
		}
	}
	if e, err := os.ReadDir(s.dir); err != nil || len(e) != 1 {
		b.Errorf("left: %v, %v", e, err)
	}
}
