package broker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/wire"
)

func text(rs []api.Record) string {
	var b strings.Builder
	for _, r := range rs {
		b.Write(r.Data)
	}
	return b.String()
}

func TestReadConsumesNothing(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.output(p.Handle, wire.KindStdout, "hello ")
		r.host.output(p.Handle, wire.KindStderr, "oops ")
		r.host.output(p.Handle, wire.KindStdout, "world")
		for range 2 {
			got, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
			r.ok(err)
			if text(got.Records) != "hello oops world" || got.Next != cursorAt(p.Handle, 16) || got.EOF || got.State != api.StateRunning {
				r.t.Fatalf("got %+v", got)
			}
			if x := got.Records[2]; x.Stream != "stdout" || x.Offset != 6 || x.Cursor != cursorAt(p.Handle, 11) {
				r.t.Fatalf("got %+v", x)
			}
		}
		got, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Cursor: cursorAt(p.Handle, 3), MaxBytes: 5})
		r.ok(err)
		if text(got.Records) != "lo oo" || got.Next != cursorAt(p.Handle, 8) {
			r.t.Fatalf("got %+v", got)
		}
		r.host.exit(p.Handle, 0)
		// The end of the output brings the exit with it.
		got, err = r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Cursor: got.Next})
		r.ok(err)
		if text(got.Records) != "ps world" || !got.EOF || got.Exit == nil || *got.Exit.Code != 0 {
			r.t.Fatalf("got %+v", got)
		}
		r.restart()
		r.up()
		got, err = r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
		r.ok(err)
		if text(got.Records) != "hello oops world" || !got.EOF || got.State != api.StateClosed {
			r.t.Fatalf("after the end: %+v", got)
		}
	})
}

func TestReadTellsGaps(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.output(p.Handle, wire.KindStdout, "0123456789")
		r.host.drop(p.Handle, 4)
		got, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Cursor: cursorAt(p.Handle, 1)})
		r.ok(err)
		if got.Gap == nil || got.Gap.From != cursorAt(p.Handle, 1) || got.Gap.To != cursorAt(p.Handle, 4) || got.Gap.Bytes != 3 || text(got.Records) != "456789" {
			r.t.Fatalf("got %+v", got)
		}
		// Whoever asks for the oldest kept byte misses nothing.
		got, err = r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
		r.ok(err)
		if got.Gap != nil || text(got.Records) != "456789" || got.Oldest != cursorAt(p.Handle, 4) {
			r.t.Fatalf("got %+v", got)
		}
	})
}

func TestReadWaits(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{Readers: 2}, func(r *rig) {
		p := r.open("one")
		begun := time.Now()
		got, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Wait: 10 * time.Second})
		r.ok(err)
		if took := time.Since(begun); took != 10*time.Second || len(got.Records) != 0 || got.EOF {
			r.t.Fatalf("after %v: %+v", took, got)
		}
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				got, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Wait: 30 * time.Second})
				if err != nil || text(got.Records) != "now" {
					r.t.Errorf("got %+v, %v", got, err)
				}
			})
		}
		r.eventually("both read", func() bool { return r.b.Stats().Streams == 2 })
		_, err = r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
		r.code(err, errdefs.Exhausted)
		r.host.output(p.Handle, wire.KindStdout, "now")
		wg.Wait()
		ctx, cancel := context.WithCancel(r.ctx)
		wg.Go(func() {
			_, err := r.b.Read(ctx, r.run, p.Handle, ReadQuery{Cursor: cursorAt(p.Handle, 3), Wait: 30 * time.Second})
			if err == nil {
				r.t.Error("a cancelled read succeeded")
			}
		})
		r.eventually("it reads", func() bool { return r.b.Stats().Streams == 1 })
		cancel()
		wg.Wait()
		if n := r.b.Stats().Streams; n != 0 {
			r.t.Errorf("%d readers are left", n)
		}
	})
}

func TestCursors(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p, q := r.open("one"), r.open("two")
		for _, c := range []string{"x", ".", p.Handle + ".0", cursorAt(q.Handle, 0), cursorAt(p.Handle, -1), cursorAt(p.Handle, 0) + "0", cursorAt(p.Handle, api.MaxOffset) + "0", cursorAt(p.Handle, 1)} {
			_, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Cursor: c})
			if !errdefs.Is(err, errdefs.Invalid) {
				r.t.Errorf("cursor %q: %v", c, err)
			}
		}
		for _, q := range []ReadQuery{{MaxBytes: -1}, {MaxBytes: MaxRead + 1}, {Wait: -1}, {Wait: MaxWait + 1}} {
			_, err := r.b.Read(r.ctx, r.run, p.Handle, q)
			r.code(err, errdefs.Invalid)
		}
		_, err := r.b.Read(r.ctx, r.admin, p.Handle, ReadQuery{Ack: true})
		r.code(err, errdefs.Denied)
	})
}

func TestReadOfAForgottenLog(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{LogRetention: time.Hour}, func(r *rig) {
		p := r.open("one")
		r.host.output(p.Handle, wire.KindStdout, "0123456789")
		r.host.exit(p.Handle, 0)
		r.becomes(p.Handle, api.StateClosed)
		time.Sleep(2 * time.Hour)
		r.eventually("the log is forgotten", func() bool { return r.host.count("forget") == 1 })
		got, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Cursor: cursorAt(p.Handle, 2)})
		r.ok(err)
		if got.Gap == nil || got.Gap.Bytes != 8 || got.Next != cursorAt(p.Handle, 10) || !got.EOF || *got.Exit.Code != 0 {
			r.t.Fatalf("got %+v", got)
		}
		got, err = r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
		r.ok(err)
		if got.Gap != nil || !got.EOF || got.Next != cursorAt(p.Handle, 10) {
			r.t.Fatalf("got %+v", got)
		}
		_, err = r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Cursor: cursorAt(p.Handle, 11)})
		r.code(err, errdefs.Invalid)
	})
}

func TestReadWhileTheHostIsAway(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.stop()
		r.eventually("down", func() bool { return r.b.targets["local"].here() == nil })
		_, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{})
		r.code(err, errdefs.Unavailable)
		if got := r.get(p.Handle); got.State != api.StateRunning {
			r.t.Errorf("the record says %s", got.State)
		}
		_, err = r.b.Write(r.ctx, r.run, p.Handle, 0, []byte("x"), false)
		r.code(err, errdefs.Unavailable)
		r.host.start()
	})
}

// drain reads a stream to its end and checks its frames as a client would.
func drain(t testing.TB, s *LogStream) (string, api.ReadResponse) {
	t.Helper()
	var out strings.Builder
	var last api.ReadResponse
	for {
		b, err := s.Next()
		if errors.Is(err, io.EOF) {
			return out.String(), last
		}
		if err != nil {
			t.Fatal(err)
		}
		for h, payload := range host.Frames(b) {
			switch h.Kind {
			case wire.KindStatus:
				if err := json.Unmarshal(payload, &last); err != nil {
					t.Fatal(err)
				}
			case wire.KindGap:
				out.WriteString("<gap>")
			default:
				if wire.Sum(payload) != h.Sum {
					t.Fatal("wrong checksum")
				}
				out.Write(payload)
			}
		}
	}
}

func TestStreamFollowsThroughARestartOfTheHost(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.output(p.Handle, wire.KindStdout, "before ")
		s, err := r.b.Stream(r.ctx, r.run, p.Handle, StreamQuery{Follow: true})
		r.ok(err)
		defer s.Close()
		var got string
		var last api.ReadResponse
		var wg sync.WaitGroup
		wg.Go(func() { got, last = drain(r.t, s) })
		r.eventually("it reads", func() bool { return r.host.count("log") == 1 })
		r.host.stop()
		time.Sleep(5 * time.Second)
		r.host.output(p.Handle, wire.KindStderr, "during ")
		r.host.start()
		time.Sleep(10 * time.Second)
		r.host.output(p.Handle, wire.KindStdout, "after")
		r.host.exit(p.Handle, 7)
		wg.Wait()
		if got != "before during after" || !last.EOF || last.Exit == nil || *last.Exit.Code != 7 || last.Next != cursorAt(p.Handle, 19) {
			r.t.Fatalf("got %q, %+v", got, last)
		}
	})
}

func TestStreamWithoutFollow(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.host.output(p.Handle, wire.KindStdout, "0123456789")
		r.host.drop(p.Handle, 4)
		s, err := r.b.Stream(r.ctx, r.run, p.Handle, StreamQuery{Cursor: cursorAt(p.Handle, 0)})
		r.ok(err)
		got, last := drain(r.t, s)
		r.ok(s.Close())
		if got != "<gap>456789" || last.EOF || last.Next != cursorAt(p.Handle, 10) {
			r.t.Fatalf("got %q, %+v", got, last)
		}
		if n := r.b.Stats().Streams; n != 0 {
			r.t.Errorf("%d readers are left", n)
		}
	})
}

// One answer of a host carries only so much; a stream that is not followed still
// brings the whole log, of a live process and of one that has ended.
func TestStreamWithoutFollowBringsEverything(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		r.host.set(func() { r.host.answer = 3 })
		p := r.open("one")
		r.host.output(p.Handle, wire.KindStdout, "0123456789")
		whole := func(eof bool) {
			s, err := r.b.Stream(r.ctx, r.run, p.Handle, StreamQuery{})
			r.ok(err)
			defer s.Close()
			if got, last := drain(r.t, s); got != "0123456789" || last.EOF != eof || last.Next != cursorAt(p.Handle, 10) {
				r.t.Fatalf("got %q, %+v", got, last)
			}
		}
		whole(false)
		r.host.exit(p.Handle, 0)
		r.becomes(p.Handle, api.StateClosed)
		whole(true)
	})
}

// A log can be followed from the moment of its open, before anything started.
func TestFollowBeforeTheStart(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{OpenWait: time.Second}, func(r *rig) {
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "start" {
					return busy
				}
				return none
			}
		})
		_, err := r.b.Open(r.ctx, r.run, request("one", "true"))
		r.code(err, errdefs.Indeterminate)
		p, err := r.b.GetByRequest(r.ctx, r.run, "one")
		r.ok(err)
		if p.State != api.StateUnknown && p.State != api.StateStarting {
			r.t.Fatalf("state %s", p.State)
		}
		empty, err := r.b.Read(r.ctx, r.run, p.Handle, ReadQuery{Wait: time.Second})
		r.ok(err)
		if len(empty.Records) != 0 || empty.EOF {
			r.t.Fatalf("got %+v", empty)
		}
		s, err := r.b.Stream(r.ctx, r.run, p.Handle, StreamQuery{Follow: true})
		r.ok(err)
		defer s.Close()
		var got string
		var wg sync.WaitGroup
		wg.Go(func() { got, _ = drain(r.t, s) })
		r.host.set(func() { r.host.fault = nil })
		r.becomes(p.Handle, api.StateRunning)
		r.host.output(p.Handle, wire.KindStdout, "at last")
		r.host.exit(p.Handle, 0)
		wg.Wait()
		if got != "at last" {
			r.t.Fatalf("got %q", got)
		}
		if n := r.host.ran(p.Handle); n != 1 {
			r.t.Errorf("executed %d times", n)
		}
	})
}

func TestReadOfWhatNeverStarted(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		c, err := r.b.CloseByRequest(r.ctx, r.run, api.CloseByRequest{RequestID: "one"})
		r.ok(err)
		got, err := r.b.Read(r.ctx, r.run, c.Process.Handle, ReadQuery{Wait: time.Second})
		r.ok(err)
		if !got.EOF || got.Exit != nil || got.State != api.StateNeverStarted {
			r.t.Fatalf("got %+v", got)
		}
		s, err := r.b.Stream(r.ctx, r.run, c.Process.Handle, StreamQuery{Follow: true})
		r.ok(err)
		if out, last := drain(r.t, s); out != "" || !last.EOF {
			r.t.Fatalf("got %q, %+v", out, last)
		}
		r.ok(s.Close())
	})
}
