package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

const (
	ctxA = `{"instance_uuid":"i","workspace_uuid":"a","placement_generation":1}`
	ctxB = `{"instance_uuid":"i","workspace_uuid":"b","placement_generation":1}`
)

func asked(seq int, action, data, context string) string {
	if context != "" {
		context = `,"context":` + context
	}
	return fmt.Sprintf(`{"seq_id":%d,"action":%q,"data":%s%s}`, seq, action, data, context)
}

func cancels(seq, target int, context string) string {
	return asked(seq, "__cancel_action", fmt.Sprintf(`{"seq_id":%d}`, target), context)
}

// hold is a handler that waits for its context to end, or for release.
type hold struct {
	release chan struct{}
	ended   chan error // causes of the contexts
}

func newHold() *hold { return &hold{make(chan struct{}), make(chan error, 1000)} }

func (h *hold) handle(ctx context.Context, in *Inbound) (any, error) {
	if in.Action == "quick" {
		return nil, nil
	}
	select {
	case <-h.release:
		return json.RawMessage(`{"held":true}`), nil
	case <-ctx.Done():
		h.ended <- context.Cause(ctx)
		return nil, ctx.Err()
	}
}

func TestAnswers(t *testing.T) {
	t.Parallel()
	s := scripted(t, Config{Handle: func(ctx context.Context, in *Inbound) (any, error) {
		switch in.Action {
		case "echo":
			return in.Data, nil
		case "nothing":
			return nil, nil
		case "struct":
			return struct{ A string }{"<é>"}, nil
		case "list":
			return []int{1}, nil
		case "panics":
			panic("secret")
		case "fails":
			return nil, errors.New("secret path")
		case "refuses":
			return nil, errdefs.New(errdefs.Invalid, "the name is empty").WithNext("give one")
		case "denies":
			return nil, errdefs.New(errdefs.Denied, "not yours")
		case "key":
			return nil, pluginwire.MissingKey("author")
		case "forwards":
			return nil, fmt.Errorf("on the way: %w", &PeerError{Message: "LookupError: x", Data: json.RawMessage(`{"error":{"code":"c"}}`)})
		case "large":
			return object(pluginwire.MaxMessage), nil
		case "long":
			return nil, errdefs.New(errdefs.Invalid, "%s", strings.Repeat("é", 5000))
		}
		return nil, pluginwire.UnknownAction(in.Action)
	}})
	defer s.end()
	for _, c := range []struct{ send, want string }{
		{`{"seq_id":"5","action":"echo","data":{"x":NaN,"y":"\ud800","z":[1, 2]}}`, ok(`"5"`, `{"x":NaN,"y":"\ud800","z":[1, 2]}`)},
		{asked(1, "nothing", `{}`, ""), ok("1", "{}")},
		{asked(2, "struct", `{}`, ""), ok("2", `{"A":"\u003cé\u003e"}`)},
		{asked(3, "list", `{}`, ""), bad("3", "RuntimeError: the data of an action is not an object")},
		{asked(4, "panics", `{}`, ""), bad("4", "RuntimeError: the handler of panics failed")},
		{asked(5, "fails", `{}`, ""), bad("5", "RuntimeError: the action failed inside the runtime; its log says why")},
		{asked(6, "refuses", `{}`, ""), bad("6", "ValueError: the name is empty; give one")},
		{asked(7, "denies", `{}`, ""), bad("7", "PermissionError: not yours")},
		{asked(8, "key", `{}`, ""), bad("8", "KeyError: 'author'")},
		{asked(9, "forwards", `{}`, ""), `{"seq_id":9,"code":1,"message":"LookupError: x","data":{"error":{"code":"c"}},"chunk_status":"continue"}`},
		{asked(10, "large", `{}`, ""), bad("10", "RuntimeError: the message is larger than 16777216 bytes")},
		{asked(11, "long", `{}`, ""), bad("11", "ValueError: "+strings.Repeat("é", 4096)+"… [truncated]")[:2000]},
		{asked(12, "no_such", `{}`, ""), bad("12", "ValueError: Action no_such not found")},
		{`{"action":"echo","data":{}}`, bad("-1", "ValidationError: 1 validation error for ActionRequest: seq_id: the field is required")},
		{`{"seq_id":13,"action":"echo","data":[],"context":7}`, bad("13", "ValidationError: 2 validation errors for ActionRequest: data: it must be an object; context: it must be an object")},
		{`{"seq_id":14,"action":"echo","data":{},"context":{"instance_uuid":"i","workspace_uuid":"w","x":1}}`, bad("14", "ValidationError: 1 validation error for ActionContext: x: it is not permitted here")},
	} {
		s.send(c.send)
		s.want(c.want)
	}
	// A code makes it a response, whatever else it is; garbage is not answered.
	if _, err := s.raw.Write([]byte(`{"seq_id":15,"action":"echo","data":{},"code":0}` + "\n[]\n{}\nnonsense\n{\"a\":}\n")); err != nil {
		t.Fatal(err)
	}
	s.send(asked(16, "nothing", `{}`, ""))
	s.want(ok("16", "{}"))
	if n := s.conn.Counters(); n.Waiting != 0 || n.Ignored == 0 {
		t.Errorf("counters %+v", n)
	}
}

func TestLanes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		s := scripted(t, Config{Handle: h.handle, Reserved: func(a string) bool { return a == "vip" }})
		for i := range pluginwire.MaxInflight {
			s.send(asked(i, "hold", `{}`, ""))
		}
		for i := range pluginwire.ReservedLane {
			s.send(asked(1000+i, "vip", `{}`, ""))
		}
		s.send(asked(2000, "hold", `{}`, ""), asked(2001, "quick", `{}`, ""), asked(2002, "vip", `{}`, ""))
		s.want(bad("2000", "RuntimeError: connection is busy (max 128 concurrent actions)"),
			bad("2001", "RuntimeError: connection is busy (max 128 concurrent actions)"),
			bad("2002", "RuntimeError: connection is busy (max 4 concurrent actions)"))
		// The reserved lane is full too, and a cancel passes all the same.
		s.send(cancels(2003, 0, ""))
		s.want(ok("2003", `{"cancelled":true}`))
		synctest.Wait()
		if n := s.conn.Counters(); n.InFlight != pluginwire.MaxInflight+pluginwire.ReservedLane-1 || n.Busy != 3 {
			t.Errorf("counters %+v", n)
		}
		// Calls of our own pass all the same.
		go func() { _, _ = s.conn.Call(t.Context(), "out", nil, CallOptions{}) }()
		s.want(`{"seq_id":101,"action":"out","data":{}}`)
		s.send(ok("101", "{}"))
		close(h.release)
		for range pluginwire.MaxInflight + pluginwire.ReservedLane - 1 {
			<-s.seen
		}
		s.send(asked(3000, "quick", `{}`, ""))
		s.want(ok("3000", "{}"))
		s.end()
	})
}

// eager is a transport whose peer has its next request ready: it comes before the write
// of an answer has returned.
type eager struct {
	in    chan []byte
	again chan struct{} // the reader has come back: it is through with what it had
	on    func(answer string)
	done  chan struct{}
}

func (e *eager) Read() ([]byte, error) {
	e.again <- struct{}{}
	select {
	case m := <-e.in:
		return m, nil
	case <-e.done:
		return nil, io.EOF
	}
}

func (e *eager) Write(msg []byte) error {
	e.on(string(msg))
	return nil
}

func (e *eager) Close() error { return nil }

func (e *eager) feed(msg string) {
	e.in <- []byte(msg)
	<-e.again
}

// TestLaneIsFreeWithTheAnswer: a peer that keeps every lane busy asks again as soon as it
// has an answer, and is never told that there is no room.
func TestLaneIsFreeWithTheAnswer(t *testing.T) {
	t.Parallel()
	for _, vip := range []bool{false, true} {
		h := newHold()
		e := &eager{in: make(chan []byte), again: make(chan struct{}, 1), done: make(chan struct{})}
		left := 50
		var answers []string
		over := make(chan struct{})
		quick, lane := "quick", pluginwire.MaxInflight
		if vip {
			quick, lane = "vip", pluginwire.ReservedLane
		}
		e.on = func(answer string) {
			answers = append(answers, answer)
			switch left--; {
			case left > 0:
				e.feed(asked(1000+left, quick, `{}`, ""))
			case left == 0:
				close(over)
			}
		}
		c := New(e, Config{InflightBytes: len(`{}`) * pluginwire.MaxInflight, Reserved: func(a string) bool { return strings.HasPrefix(a, "vip") },
			Handle: func(ctx context.Context, in *Inbound) (any, error) {
				if in.Action == "vip" {
					return nil, nil
				}
				return h.handle(ctx, in)
			}})
		run := make(chan error, 1)
		go func() { run <- c.Run(context.Background()) }()
		<-e.again
		for i := range lane - 1 {
			e.feed(asked(i, quick+"-hold", `{}`, ""))
		}
		e.feed(asked(1000, quick, `{}`, ""))
		<-over
		for _, a := range answers {
			if !strings.Contains(a, `"code":0`) {
				t.Fatalf("%s: %s", quick, a)
			}
		}
		close(e.done)
		close(h.release)
		if err := <-run; err != nil {
			t.Error(err)
		}
	}
}

// TestManyCancels: whoever gives up everything at once is heard to the last.
func TestManyCancels(t *testing.T) {
	t.Parallel()
	h := newHold()
	s := scripted(t, Config{Handle: h.handle})
	defer s.end()
	var asks, all string
	for i := range pluginwire.MaxInflight {
		asks += asked(i, "hold", `{}`, "") + "\n"
		all += cancels(1000+i, i, "") + "\n"
	}
	for _, lines := range []string{asks, all} {
		if _, err := s.raw.Write([]byte(lines)); err != nil {
			t.Fatal(err)
		}
	}
	for range pluginwire.MaxInflight {
		if m := <-s.seen; !strings.Contains(m, `{"cancelled":true}`) {
			t.Fatal(m)
		}
	}
}

// A peer that asks and never reads pauses its own reader, and then loses the
// connection; what is kept of it is bounded.
func TestStuckPeer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, b := pipe()
		h := newHold()
		c := New(a, Config{Handle: h.handle})
		run := make(chan error, 1)
		go func() { run <- c.Run(context.Background()) }()
		sent := make(chan int, 1)
		go func() {
			n := 0
			for ; ; n++ {
				if b.Write([]byte(asked(n, "hold", `{}`, ""))) != nil {
					break
				}
			}
			sent <- n
		}()
		time.Sleep(StallTime - time.Second)
		if n := c.Counters(); n.InFlight > pluginwire.MaxInflight {
			t.Errorf("counters %+v", n)
		}
		err := <-run
		if err == nil || !errors.Is(c.Err(), ErrClosed) || !strings.Contains(c.Err().Error(), "took nothing") {
			t.Errorf("Run: %v; Err: %v", err, c.Err())
		}
		b.Close()
		if n := <-sent; n > pluginwire.MaxInflight+3*pluginwire.AckLane {
			t.Errorf("%d requests were taken from a peer that reads nothing", n)
		}
	})
}

func TestCancel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		s := scripted(t, Config{Handle: h.handle})
		s.send(asked(1, "hold", `{}`, ctxA), asked(2, "hold", `{}`, ctxB), asked(3, "hold", `{}`, ""))
		synctest.Wait()
		for _, c := range []struct {
			send string
			done bool
		}{
			{cancels(10, 1, ctxB), false}, {cancels(11, 1, ""), false}, {cancels(12, 77, ctxA), false},
			{cancels(13, 13, ctxA), false}, {cancels(14, 1, ctxA), true}, {cancels(15, 1, ctxA), false}, {cancels(16, 3, ""), true},
		} {
			s.send(c.send)
			s.want(ok(c.send[10:12], fmt.Sprintf(`{"cancelled":%v}`, c.done)))
			synctest.Wait()
		}
		if err := <-h.ended; !errors.Is(err, ErrCancelled) {
			t.Errorf("the cause is %v", err)
		}
		for _, data := range []string{`{}`, `{"seq_id":"1"}`} {
			s.send(asked(20, "__cancel_action", data, ""))
			if m := <-s.seen; !strings.Contains(m, `"code":1`) {
				t.Errorf("cancel %s: %s", data, m)
			}
		}
		close(h.release)
		s.want(ok("2", `{"held":true}`)) // and nothing of 1 and 3
		synctest.Wait()
		s.silent()
		s.end()
	})
}

// A cancel that comes before the context of its target is known waits for it.
func TestCancelIsHeld(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		admit := make(chan error)
		effective := pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: "b", PlacementGeneration: 1}
		s := scripted(t, Config{Handle: h.handle, Admit: func(in *Inbound) error {
			if in.Action != "hold" {
				return nil
			}
			err := <-admit
			in.Context = effective
			return err
		}})
		// Admitted under another context than it came with: only that one may cancel it.
		s.send(asked(1, "hold", `{}`, ctxA), cancels(2, 1, ctxA), cancels(3, 1, ctxB))
		synctest.Wait()
		s.silent()
		admit <- nil
		synctest.Wait()
		got := map[string]bool{<-s.seen: true, <-s.seen: true}
		if !got[ok("2", `{"cancelled":false}`)] || !got[ok("3", `{"cancelled":true}`)] {
			t.Errorf("%v", got)
		}
		// Refused: nothing to cancel, and the refusal is answered.
		s.send(asked(4, "hold", `{}`, ctxA), cancels(5, 4, ctxB))
		synctest.Wait()
		admit <- errdefs.New(errdefs.Fenced, "stale")
		synctest.Wait()
		got = map[string]bool{<-s.seen: true, <-s.seen: true}
		if !got[bad("4", "PermissionError: stale")] || !got[ok("5", `{"cancelled":false}`)] {
			t.Errorf("%v", got)
		}
		// A held cancel ends with the connection.
		s.send(asked(6, "hold", `{}`, ctxA), cancels(7, 6, ctxB))
		synctest.Wait()
		s.conn.Close(nil)
		close(admit)
		close(h.release)
		s.end()
	})
}

func TestCancelMatching(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		s := scripted(t, Config{Handle: h.handle})
		for i, on := range []string{ctxA, ctxB, ctxA, ""} {
			s.send(asked(i, "hold", `{}`, on))
		}
		synctest.Wait()
		a, err := pluginwire.DecodeContext([]byte(ctxA))
		if err != nil {
			t.Fatal(err)
		}
		if n := s.conn.CancelMatching(a); n != 2 || len(h.ended) != 2 || s.conn.Counters().InFlight != 2 {
			t.Errorf("%d cancelled, %d ended", n, len(h.ended))
		}
		if n := s.conn.CancelMatching(a); n != 0 {
			t.Errorf("%d cancelled again", n)
		}
		if n := s.conn.CancelInbound(); n != 2 {
			t.Errorf("%d cancelled", n)
		}
		synctest.Wait()
		s.silent()
		s.send(asked(9, "quick", `{}`, ""))
		s.want(ok("9", "{}"))
		s.end()
	})
}

// TestCancelMatchingWaitsForAdmit: what was being admitted when its context lost its
// right does not run on.
func TestCancelMatchingWaitsForAdmit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		admit := make(chan error)
		s := scripted(t, Config{Handle: h.handle, Admit: func(*Inbound) error { return <-admit }})
		s.send(asked(1, "hold", `{}`, ctxA), asked(2, "hold", `{}`, ctxA))
		a, err := pluginwire.DecodeContext([]byte(ctxA))
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		cancelled := make(chan int, 1)
		go func() { cancelled <- s.conn.CancelMatching(a) }()
		synctest.Wait()
		admit <- nil
		admit <- errdefs.New(errdefs.Fenced, "stale")
		if n := <-cancelled; n != 1 || len(h.ended) != 1 {
			t.Errorf("%d cancelled, %d ended", n, len(h.ended))
		}
		if m := <-s.seen; !strings.Contains(m, "PermissionError: stale") {
			t.Error(m)
		}
		synctest.Wait()
		s.silent()
		s.end()
	})
}

func TestCloseAndInbound(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		s := scripted(t, Config{Handle: h.handle})
		s.send(asked(1, "hold", `{}`, ""))
		synctest.Wait()
		s.t2.Close()
		<-s.conn.Done()
		synctest.Wait()
		if len(h.ended) != 1 {
			t.Error("the action was not cancelled")
		}
		close(h.release)
		s.end()
	})
	// The end of Run's context cancels, too.
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		a, b := pipe()
		c := New(a, Config{Handle: h.handle})
		ctx, stop := context.WithCancelCause(context.Background())
		run := make(chan error, 1)
		go func() { run <- c.Run(ctx) }()
		if err := b.Write([]byte(asked(1, "hold", `{}`, ""))); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		why := errdefs.New(errdefs.Unavailable, "shutting down")
		stop(why)
		if err := <-run; err != nil {
			t.Errorf("Run: %v", err)
		}
		if !errors.Is(c.Err(), ErrClosed) || !errors.Is(c.Err(), why) || len(h.ended) != 1 {
			t.Errorf("Err: %v", c.Err())
		}
		b.Close()
	})
}

func TestInflightBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		s := scripted(t, Config{Handle: h.handle, InflightBytes: 1000})
		s.send(asked(1, "hold", string(object(5000)), "")) // alone: any size
		s.send(asked(2, "hold", string(object(20)), ""))
		s.want(bad("2", "RuntimeError: connection is busy (max 1000 bytes of concurrent actions)"))
		close(h.release)
		s.want(ok("1", `{"held":true}`))
		s.send(asked(3, "hold", string(object(20)), ""))
		s.want(ok("3", `{"held":true}`))
		s.end()
	})
}

// TestBudget: connections that share a budget cannot hold more than it together, one
// of ordinary size is served all the same, and what ended is given back.
func TestBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := newHold()
		b := NewBudget(3 * FreeShare)
		cfg := Config{Handle: h.handle, Budget: b}
		greedy, other := scripted(t, cfg), scripted(t, cfg)
		greedy.send(asked(1, "hold", string(object(3*FreeShare)), ""))
		synctest.Wait()
		if used := b.Used(); used < 2*FreeShare || used > 3*FreeShare {
			t.Fatalf("%d bytes are drawn", used)
		}
		other.send(asked(1, "hold", string(object(3*FreeShare)), ""))
		other.want(bad("1", fmt.Sprintf("RuntimeError: the runtime is busy (max %d bytes of concurrent actions of all connections)", 3*FreeShare)))
		other.send(asked(2, "hold", string(object(FreeShare/2)), ""))
		close(h.release)
		other.want(ok("2", `{"held":true}`))
		greedy.want(ok("1", `{"held":true}`))
		if used := b.Used(); used != 0 {
			t.Errorf("%d bytes are still drawn", used)
		}
		other.send(asked(3, "hold", string(object(3*FreeShare)), ""))
		other.want(ok("3", `{"held":true}`))
		greedy.end()
		other.end()
	})
}
