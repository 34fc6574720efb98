package relayclient

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

func frames(t *testing.T, o *outbox) string {
	t.Helper()
	var all []string
	for {
		f, over, ok := o.try()
		if !ok {
			return strings.Join(all, " ")
		}
		s := string(f)
		if over != nil {
			s += "(" + over.id + ")"
		}
		all = append(all, s)
	}
}

func TestOutboxOrder(t *testing.T) {
	t.Parallel()
	o := newOutbox(1 << 10)
	a, b, c := newLane(&job{id: "a"}), newLane(&job{id: "b"}), newLane(&job{id: "c"})
	add := func(l *lane, names ...string) {
		for _, n := range names {
			if err := o.event(bg, l, []byte(n)); err != nil {
				t.Fatal(err)
			}
		}
	}
	add(a, "a1", "a2", "a3", "a4")
	add(b, "b1", "b2")
	add(c, "c1", "c2")
	given := &toolCall{[]byte("given up")}
	for _, c := range []*toolCall{given, {[]byte("call")}} {
		if err := o.call(c); err != nil {
			t.Fatal(err)
		}
	}
	o.withdraw(given)
	o.withdraw(given)
	o.finish(b, []byte("b3"), []byte("bF")) // behind its events
	o.drop(c)                               // cancelled while it runs
	o.finish(c, []byte("c3"), []byte("cF"))
	if got, want := frames(t, o), "cF(c) call a1 b1 a2 b2 a3 b3 a4 bF(b)"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	// Cancelled when it was over, with events that wait.
	add(a, "a5", "a6")
	o.finish(a, nil, []byte("aF"))
	o.drop(a)
	o.drop(a)
	if got, want := frames(t, o), "aF(a)"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if err := o.event(bg, a, []byte("late")); err != errCancelled {
		t.Errorf("an event after the end: %v", err)
	}
	o.close()
	if err := o.call(nil); err != errLost {
		t.Error(err)
	}
	if err := o.event(bg, newLane(&job{}), nil); err != errLost {
		t.Error(err)
	}
}

// Who has no room waits, and is let go by room, by the hub's wish, by the end.
func TestOutboxWaits(t *testing.T) {
	t.Parallel()
	for name, free := range map[string]func(o *outbox, l *lane, stop context.CancelCauseFunc){
		"room":   func(o *outbox, _ *lane, _ context.CancelCauseFunc) { o.try() },
		"cancel": func(o *outbox, l *lane, _ context.CancelCauseFunc) { o.drop(l) },
		"stop":   func(_ *outbox, _ *lane, stop context.CancelCauseFunc) { stop(errStopping) },
		"lost":   func(o *outbox, _ *lane, _ context.CancelCauseFunc) { o.close() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutbox(10)
				l := newLane(&job{id: "j"})
				ctx, stop := context.WithCancelCause(bg)
				defer stop(nil)
				if err := o.event(ctx, l, make([]byte, 100)); err != nil { // one always goes in
					t.Fatal(err)
				}
				done := make(chan error, 1)
				go func() { done <- o.event(ctx, l, []byte("x")) }()
				synctest.Wait()
				select {
				case err := <-done:
					t.Fatalf("it does not wait: %v", err)
				default:
				}
				free(o, l, stop)
				want := map[string]error{"cancel": errCancelled, "stop": errStopping, "lost": errLost}[name]
				if err := <-done; err != want {
					t.Errorf("%v, want %v", err, want)
				}
			})
		})
	}
}

// Every job's turn comes, whatever the others have.
func TestOutboxIsFair(t *testing.T) {
	t.Parallel()
	o := newOutbox(1 << 20)
	for j := range 5 {
		l := newLane(&job{})
		for range 100 * (j + 1) {
			if err := o.event(bg, l, fmt.Appendf(nil, "%d", j)); err != nil {
				t.Fatal(err)
			}
		}
	}
	counts := map[string]int{}
	for range 500 {
		f, _, _ := o.try()
		counts[string(f)]++
	}
	for j, n := range counts {
		if n != 100 {
			t.Errorf("job %s had %d of 500", j, n)
		}
	}
}

// A job whose end is not confirmed queues no acknowledgement, which on the wire only
// a race with the close would show.
func TestUnconfirmedIsNeverQueued(t *testing.T) {
	t.Parallel()
	c, err := newClient(Config{URL: "ws://h", DaemonID: "d",
		Runner: runnerFunc(func(context.Context, string, json.RawMessage, func(json.RawMessage) error, MCP) error {
			return &UnconfirmedError{Why: "fixture"}
		})})
	if err != nil {
		t.Fatal(err)
	}
	var cause error
	s := &session{client: c, out: newOutbox(1 << 10), live: map[string]*job{}, pending: map[string]chan json.RawMessage{},
		fail: func(err error) { cause = err }}
	if err := s.start(start("j", "{}")); err != nil {
		t.Fatal(err)
	}
	s.jobs.Wait()
	if got := frames(t, s.out); got != "" || s.unconfirmed() == nil || cause == nil {
		t.Errorf("queued %q, halted %v, cause %v", got, s.unconfirmed(), cause)
	}
	// Nor is another job taken.
	if err := s.start(start("k", "{}")); err != nil || len(s.live) != 1 {
		t.Errorf("%v, %d jobs", err, len(s.live))
	}
}

// Calls that are given up do not wait for a hub that does not read: their bodies are
// large, and an agent may give up as often as it likes.
func TestGivenUpCallsDoNotWait(t *testing.T) {
	t.Parallel()
	s := &session{out: newOutbox(1), pending: map[string]chan json.RawMessage{}} // without a writer
	for range 100 {
		if _, err := s.call(bg, "j", json.RawMessage(`{"id":1}`), time.Microsecond); err != errTimeout {
			t.Fatal(err)
		}
	}
	if n, m := len(s.out.calls), len(s.pending); n+m > 0 {
		t.Errorf("%d calls wait to be sent, %d for an answer", n, m)
	}
}

// What waits in the kernel is as bounded as the limits say. The kernel doubles what
// it is told (socket(7)).
func TestLittleWaitsInTheKernel(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const bytes = 32 << 10
	conn, err := dialer(bytes)(bg, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var got int
	if cerr := raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	if got != 2*bytes {
		t.Errorf("the kernel keeps %d bytes, want twice %d", got, bytes)
	}
}
