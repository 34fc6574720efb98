package shim

import (
	"bytes"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// childInput attaches an input to a pipe and collects what the child would read.
func childInput(t interface{ Fatal(...any) }, in *input) (wait func() []byte) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	r, w := os.NewFile(uintptr(p[0]), "r"), os.NewFile(uintptr(p[1]), "w")
	var wg sync.WaitGroup
	var got []byte
	wg.Go(func() { in.attach(w) })
	wg.Go(func() {
		got, _ = io.ReadAll(r)
		r.Close()
	})
	return func() []byte {
		wg.Wait()
		return got
	}
}

// Whatever is written where and how often, the child reads each byte once, in
// order, and refusals change nothing.
func TestInputModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		data := make([]byte, 300_000)
		for i := range data {
			data[i] = byte(i * 7 >> 3)
		}
		in := newInput(true, false)
		attachAfter := rapid.IntRange(0, 5).Draw(t, "attach after")
		var wait func() []byte
		accepted, eof := int64(0), false
		for i := range rapid.IntRange(1, 30).Draw(t, "writes") {
			if i == attachAfter {
				wait = childInput(t, in)
			}
			offset := max(-1, accepted+rapid.Int64Range(-50_000, 3).Draw(t, "shift"))
			n := rapid.Int64Range(0, 60_000).Draw(t, "length")
			last := rapid.IntRange(0, 9).Draw(t, "eof") == 0
			from := max(offset, 0)
			end := min(from+n, int64(len(data)))
			st, err := in.write(offset, data[min(from, end):end], last)
			switch {
			case offset < 0:
				if !errdefs.Is(err, errdefs.Invalid) {
					t.Fatalf("negative: %v", err)
				}
			case offset > accepted, last && end < accepted, eof && end > accepted:
				if !errdefs.Is(err, errdefs.Conflict) {
					t.Fatalf("write %d to %d (eof %v) after %d (eof %v): %v", offset, end, last, accepted, eof, err)
				}
			case err != nil:
				t.Fatalf("write %d to %d (eof %v) after %d (eof %v): %v", offset, end, last, accepted, eof, err)
			default:
				accepted, eof = max(accepted, end), eof || last
			}
			if st.Accepted != accepted || st.EOF != eof {
				t.Fatalf("state %+v, want %d %v", st, accepted, eof)
			}
		}
		if wait == nil {
			wait = childInput(t, in)
		}
		if _, err := in.write(accepted, nil, true); err != nil {
			t.Fatal(err)
		}
		if got := wait(); !bytes.Equal(got, data[:accepted]) {
			t.Fatalf("the child read %d bytes, %d were accepted", len(got), accepted)
		}
	})
}

func TestInputWindow(t *testing.T) {
	t.Parallel()
	in := newInput(true, false)
	st, err := in.write(0, make([]byte, StdinWindow+5), true)
	if err != nil || st.Accepted != StdinWindow || st.Window != 0 || st.EOF {
		t.Fatalf("%+v %v", st, err)
	}
	_, err = in.write(StdinWindow, []byte("x"), false)
	e, ok := err.(*errdefs.Error)
	if !ok || e.Code != errdefs.Exhausted || e.Detail["accepted"] != "1048576" || e.Detail["window_bytes"] != "0" {
		t.Fatalf("%+v", err)
	}
	if st, err := in.write(StdinWindow, nil, true); err != nil || !st.EOF { // the end needs no room
		t.Fatalf("%+v %v", st, err)
	}
	if got := childInput(t, in)(); len(got) != StdinWindow {
		t.Errorf("%d bytes read", len(got))
	}
}

// Small writes cost little more memory than they carry.
func TestInputCoalesces(t *testing.T) {
	t.Parallel()
	in := newInput(true, false)
	for i := range int64(10_000) {
		if _, err := in.write(i, []byte{byte(i)}, false); err != nil {
			t.Fatal(err)
		}
	}
	room := 0
	for _, b := range in.queue {
		room += cap(b)
	}
	if room > 3*10_000 {
		t.Errorf("%d bytes of memory for 10000 of input", room)
	}
}

func TestInputAfterTheEnd(t *testing.T) {
	t.Parallel()
	in := newInput(true, false)
	_, err := in.write(0, []byte("abc"), false)
	check(t, err)
	in.end()
	if st, err := in.write(0, []byte("abc"), false); err != nil || st.Accepted != 3 || st.Window != 0 {
		t.Errorf("repetition: %+v %v", st, err)
	}
	for _, eof := range []bool{false, true} {
		_, err := in.write(3, []byte("d"), eof)
		wantCode(t, err, errdefs.Conflict)
	}
	_, err = in.write(3, nil, true)
	wantCode(t, err, errdefs.Conflict)
	var p [2]int
	check(t, unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	defer unix.Close(p[0])
	in.attach(os.NewFile(uintptr(p[1]), "w")) // returns at once
}

// A child that never reads does not hold the end up.
func TestInputEndWhileBlocked(t *testing.T) {
	t.Parallel()
	in := newInput(true, false)
	var p [2]int
	check(t, unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	defer unix.Close(p[0])
	done := make(chan struct{})
	go func() { in.attach(os.NewFile(uintptr(p[1]), "w")); close(done) }()
	_, err := in.write(0, make([]byte, StdinWindow), false)
	check(t, err)
	in.end()
	<-done
}

func TestInputWithoutAReader(t *testing.T) {
	t.Parallel()
	in := newInput(true, false)
	var p [2]int
	check(t, unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	unix.Close(p[0])
	done := make(chan struct{})
	go func() { in.attach(os.NewFile(uintptr(p[1]), "w")); close(done) }()
	var err error
	for at := int64(0); err == nil; at++ { // the first ones may go into the window
		_, err = in.write(at, []byte("x"), false)
	}
	wantCode(t, err, errdefs.Conflict)
	if !strings.Contains(err.Error(), "closed its input at offset 0") {
		t.Error(err)
	}
	_, err = in.write(in.state().Accepted, nil, true) // nothing is lost by an end
	check(t, err)
	<-done
	if st := newInput(false, false).state(); st != (api.StdinState{EOF: true}) {
		t.Errorf("no input: %+v", st)
	}
}
