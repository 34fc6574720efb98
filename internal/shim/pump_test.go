package shim

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/spool"
	"github.com/stockade-run/stockade/internal/wire"
)

// record is an appender in memory.
type record struct {
	out, err bytes.Buffer
	fail     error
	block    chan struct{} // waits for it, or ctx
}

func (r *record) Append(ctx context.Context, k wire.Kind, p []byte) error {
	if r.block != nil {
		select {
		case <-r.block:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if r.fail != nil {
		return r.fail
	}
	if k == wire.KindStdout {
		r.out.Write(p)
	} else {
		r.err.Write(p)
	}
	return nil
}

func pipes(t *testing.T) (sources []source, w [2]int) {
	t.Helper()
	for i, k := range []wire.Kind{wire.KindStdout, wire.KindStderr} {
		var p [2]int
		check(t, unix.Pipe2(p[:], unix.O_CLOEXEC))
		sources = append(sources, source{fd: p[0], kind: k})
		w[i] = p[1]
	}
	return sources, w
}

func never(t *testing.T) func(string) {
	return func(detail string) { t.Errorf("failed: %s", detail) }
}

func TestPumpMovesBothStreams(t *testing.T) {
	t.Parallel()
	src, w := pipes(t)
	log := &record{}
	p, err := newPump(log, src, never(t))
	check(t, err)
	done := make(chan string)
	go func() { done <- p.run() }()
	_, _ = unix.Write(w[0], []byte("out"))
	unix.Close(w[0])
	_, _ = unix.Write(w[1], []byte("err"))
	<-p.caught()
	if log.err.String() != "err" { // caught up means that this is visible
		t.Errorf("caught up with %q", log.err.String())
	}
	unix.Close(w[1])
	if detail := <-done; detail != "" {
		t.Error(detail)
	}
	<-p.caught() // after the end it is caught up for ever
	if log.out.String() != "out" {
		t.Errorf("%q", log.out.String())
	}
}

// A log that broke is told once, and the child can go on to its end.
func TestPumpDropsWhatABrokenLogRefuses(t *testing.T) {
	t.Parallel()
	src, w := pipes(t)
	var told []string
	p, err := newPump(&record{fail: errdefs.Wrap(errors.New("x"), errdefs.Exhausted, "the disk is full")}, src, func(d string) { told = append(told, d) })
	check(t, err)
	done := make(chan string)
	go func() { done <- p.run() }()
	for range 100 { // far more than a pipe holds
		_, err := unix.Write(w[0], make([]byte, 64<<10))
		check(t, err)
	}
	unix.Close(w[0])
	unix.Close(w[1])
	if detail := <-done; detail != "" || len(told) != 1 || told[0] != "the disk is full" {
		t.Errorf("%q %q", detail, told)
	}
}

// Cut ends a pump whose pipes somebody else holds, and keeps what they held.
func TestPumpCut(t *testing.T) {
	t.Parallel()
	src, w := pipes(t)
	defer unix.Close(w[0])
	defer unix.Close(w[1])
	log := &record{}
	p, err := newPump(log, src, never(t))
	check(t, err)
	_, _ = unix.Write(w[0], []byte("held"))
	done := make(chan string)
	go func() { done <- p.run() }()
	p.cut()
	if detail := <-done; !strings.Contains(detail, "held its outputs open") {
		t.Errorf("%q", detail)
	}
	if log.out.String() != "held" {
		t.Errorf("%q", log.out.String())
	}
}

func TestPumpCutWhileTheLogWaits(t *testing.T) {
	t.Parallel()
	src, w := pipes(t)
	defer unix.Close(w[0])
	defer unix.Close(w[1])
	p, err := newPump(&record{block: make(chan struct{})}, src, never(t))
	check(t, err)
	_, _ = unix.Write(w[0], []byte("x"))
	done := make(chan string)
	go func() { done <- p.run() }()
	p.cut()
	if detail := <-done; detail == "" {
		t.Error("ended without a word")
	}
}

// flood writes to a pipe until that fails.
func flood(t *testing.T, fd int) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for b := make([]byte, 64<<10); ; {
			if _, err := unix.Write(fd, b); err != nil { // the last reader has gone
				return
			}
		}
	}()
	t.Cleanup(func() {
		<-ended
		unix.Close(fd)
	})
}

// The question whether everything was read is answered although somebody goes on
// writing to the terminal.
func TestPumpCatchesUpWithAFlood(t *testing.T) {
	t.Parallel()
	src, w := pipes(t)
	unix.Close(w[1])
	src[0].tty = true
	flood(t, w[0])
	p, err := newPump(discard{}, src, never(t))
	check(t, err)
	done := make(chan string)
	go func() { done <- p.run() }()
	select {
	case <-p.caught():
	case <-time.After(patience):
		t.Error("never caught up")
	}
	p.cut()
	<-done
}

type discard struct{}

func (discard) Append(context.Context, wire.Kind, []byte) error { return nil }

// After the end of a process the log takes what its pipes held, and not what
// somebody outside the container goes on to write.
func TestPumpLiftsTheCapForWhatThePipesHold(t *testing.T) {
	t.Parallel()
	src, w := pipes(t)
	const held = 60 << 10
	_, err := unix.Write(w[1], make([]byte, held))
	check(t, err)
	unix.Close(w[1])
	flood(t, w[0])
	log, err := spool.Create(spool.Config{Dir: t.TempDir(), Cap: spool.MinCap})
	check(t, err)
	p, err := newPump(log, src, never(t))
	check(t, err)
	log.Lift(p.holds())
	done := make(chan string)
	go func() { done <- p.run() }()
	stuck := time.After(patience)
	for changed := log.Changed(); !log.State().Blocked; changed = log.Changed() {
		select {
		case <-changed:
		case <-stuck:
			t.Fatal("the log grows without end")
		}
	}
	p.cut()
	if detail := <-done; !strings.Contains(detail, "held its outputs open") {
		t.Errorf("%q", detail)
	}
	if st := log.State(); st.Stderr != held || st.Next > spool.MinCap+1<<20 {
		t.Errorf("log %+v", st)
	}
	check(t, log.Finish())
}
