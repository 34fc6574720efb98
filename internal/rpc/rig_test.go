package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/jsonscan"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

// script is the far side of a connection, spoken by hand, line by line.
type script struct {
	t    *testing.T
	conn *Conn
	t2   Transport // of the far side
	raw  net.Conn  // below it
	seen chan string
	run  chan error
}

// pipe is a pair of stdio transports that hold no bytes in between.
func pipe() (a, b Transport) {
	x, y := net.Pipe()
	return Stdio(x, x, x.Close), Stdio(y, y, y.Close)
}

// scripted starts a Conn whose peer is the test. Messages of the Conn are read into
// seen at once.
func scripted(t *testing.T, cfg Config) *script {
	t.Helper()
	x, y := net.Pipe()
	a, b := Stdio(x, x, x.Close), Stdio(y, y, y.Close)
	if cfg.FirstSeq == 0 {
		cfg.FirstSeq = 100
	}
	s := &script{t: t, conn: New(a, cfg), t2: b, raw: y, seen: make(chan string, 10000), run: make(chan error, 1)}
	go func() { s.run <- s.conn.Run(context.Background()) }()
	go func() {
		defer close(s.seen)
		for {
			msg, err := b.Read()
			if err != nil {
				return
			}
			s.seen <- string(msg)
		}
	}()
	return s
}

func (s *script) send(msgs ...string) {
	s.t.Helper()
	for _, m := range msgs {
		if err := s.t2.Write([]byte(m)); err != nil {
			s.t.Fatalf("sending %s: %v", m, err)
		}
	}
}

// want checks the next message that the Conn sends.
func (s *script) want(msgs ...string) {
	s.t.Helper()
	for _, m := range msgs {
		got, ok := <-s.seen
		if !ok {
			s.t.Fatalf("the connection ended instead of sending %s", m)
		}
		if len(got) > 2000 {
			got = got[:2000]
		}
		if got != m {
			s.t.Fatalf("sent\n%s\nwant\n%s", got, m)
		}
	}
}

// silent checks that nothing was sent. Call it in a bubble after Wait.
func (s *script) silent() {
	s.t.Helper()
	select {
	case m, ok := <-s.seen:
		if ok {
			s.t.Fatalf("sent %s", m)
		}
	default:
	}
}

func (s *script) end() {
	s.t.Helper()
	s.conn.Close(nil)
	if err := <-s.run; err != nil {
		s.t.Errorf("Run: %v", err)
	}
	s.t2.Close()
	for range s.seen {
	}
}

func ok(seq, data string) string {
	return `{"seq_id":` + seq + `,"code":0,"message":"success","data":` + data + `,"chunk_status":"continue"}`
}

func bad(seq, text string) string {
	return `{"seq_id":` + seq + `,"code":1,"message":` + string(jsonscan.AppendString(nil, text)) + `,"data":{},"chunk_status":"continue"}`
}

func end(seq string) string {
	return `{"seq_id":` + seq + `,"code":0,"message":"success","data":{},"chunk_status":"end"}`
}

// both joins two Conns, as a peer of our own would be.
func both(t *testing.T, left, right Config) (l, r *Conn, stop func()) {
	t.Helper()
	a, b := pipe()
	return join(t, a, b, left, right)
}

func join(t testing.TB, a, b Transport, left, right Config) (l, r *Conn, stop func()) {
	l, r = New(a, left), New(b, right)
	var wg sync.WaitGroup
	for _, c := range []*Conn{l, r} {
		wg.Go(func() {
			if err := c.Run(context.Background()); err != nil && !errors.Is(err, io.ErrClosedPipe) {
				t.Errorf("Run: %v", err)
			}
		})
	}
	return l, r, func() {
		l.Close(nil)
		r.Close(nil)
		wg.Wait()
	}
}

func echo(_ context.Context, in *Inbound) (any, error) { return in.Data, nil }

func object(n int) json.RawMessage {
	return json.RawMessage(`{"text":"` + strings.Repeat("x", n-11) + `"}`)
}
