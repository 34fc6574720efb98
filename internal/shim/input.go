package shim

import (
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// StdinWindow is how many bytes of input a shim holds for a child that does not
// read.
const StdinWindow = 1 << 20

// inputChunk is the most one write system call carries and one buffer holds.
const inputChunk = 64 << 10

// input is the child's standard input, addressed by offset (P2): every byte is
// accepted once, whatever is repeated. Accepted means that it is in this window;
// from there one goroutine writes it to the pipe or terminal.
type input struct {
	tty bool

	mu       sync.Mutex
	none     bool // the child has no input
	accepted int64
	written  int64 // handed to the kernel
	eof      bool
	closed   bool // the child closed its end: nobody will read what is written
	ended    bool // the process ended
	queue    [][]byte
	more     chan struct{} // one token: the queue, eof or ended changed
	file     *os.File      // nil until the child has started, and after its end
}

func newInput(has, tty bool) *input {
	return &input{tty: tty, none: !has, more: make(chan struct{}, 1)}
}

// state returns how far the input goes.
func (in *input) state() api.StdinState {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.stateLocked()
}

func (in *input) stateLocked() api.StdinState {
	st := api.StdinState{Accepted: in.accepted, EOF: in.eof || in.none}
	if !in.none && !in.eof && !in.ended && !in.closed {
		st.Window = StdinWindow - (in.accepted - in.written)
	}
	return st
}

// write accepts bytes at an offset; see the package's contract in [Client.WriteStdin].
func (in *input) write(offset int64, data []byte, eof bool) (api.StdinState, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	end := offset + int64(len(data))
	switch {
	case offset < 0:
		return in.stateLocked(), errdefs.New(errdefs.Invalid, "the input offset %d is negative", offset)
	case offset > api.MaxOffset || end > api.MaxOffset:
		return in.stateLocked(), errdefs.New(errdefs.Invalid, "the input offset %d is beyond 2^53, the largest that can be named", offset)
	case in.none:
		return in.stateLocked(), errdefs.New(errdefs.Conflict, "the process has no input").WithNext("open it with stdin")
	case offset > in.accepted:
		return in.stateLocked(), in.told(errdefs.New(errdefs.Conflict, "the input at offset %d cannot be accepted: the next byte is %d", offset, in.accepted).
			WithNext("write on from offset %d", in.accepted))
	case eof && end < in.accepted:
		return in.stateLocked(), in.told(errdefs.New(errdefs.Conflict, "the input cannot end at offset %d: %d bytes were accepted already", end, in.accepted))
	}
	if end > in.accepted {
		data = data[in.accepted-offset:]
	} else {
		data = nil // a repetition
	}
	if len(data) == 0 && (!eof || in.eof) {
		return in.stateLocked(), nil
	}
	switch {
	case in.eof:
		return in.stateLocked(), in.told(errdefs.New(errdefs.Conflict, "the input ended at offset %d", in.accepted))
	case in.ended:
		return in.stateLocked(), in.told(errdefs.New(errdefs.Conflict, "the process has ended; %d bytes of input were accepted", in.accepted))
	}
	in.noticeClosed()
	if in.closed && len(data) > 0 {
		return in.stateLocked(), in.told(errdefs.New(errdefs.Conflict, "the child closed its input at offset %d", in.written))
	}
	free := StdinWindow - (in.accepted - in.written)
	if len(data) > 0 && free == 0 {
		e := errdefs.New(errdefs.Exhausted, "the child does not read: %d bytes of input wait for it, the limit is %d", in.accepted-in.written, StdinWindow).
			WithNext("write on from offset %d when there is room", in.accepted)
		return in.stateLocked(), in.told(e)
	}
	if int64(len(data)) > free {
		data, eof = data[:free], false
	}
	in.enqueue(data)
	in.accepted += int64(len(data))
	in.eof = eof
	in.wake()
	return in.stateLocked(), nil
}

// told adds the facts a caller needs to go on.
func (in *input) told(e *errdefs.Error) *errdefs.Error {
	st := in.stateLocked()
	return e.With("accepted", fmt.Sprint(st.Accepted)).With("window_bytes", fmt.Sprint(st.Window))
}

// enqueue copies data into the window, filling up the last buffer first, so that
// many small writes do not cost more memory than they carry.
func (in *input) enqueue(data []byte) {
	for len(data) > 0 {
		if n := len(in.queue); n > 0 {
			last := in.queue[n-1]
			if room := min(cap(last)-len(last), len(data)); room > 0 {
				in.queue[n-1] = append(last, data[:room]...)
				data = data[room:]
				continue
			}
		}
		in.queue = append(in.queue, make([]byte, 0, min(max(len(data), 4<<10), inputChunk)))
	}
}

func (in *input) wake() {
	select {
	case in.more <- struct{}{}:
	default:
	}
}

// noticeClosed looks whether a pipe has lost its reader.
func (in *input) noticeClosed() {
	if in.closed || in.tty || in.file == nil {
		return
	}
	raw, err := in.file.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		if n, err := unix.Poll(fds, 0); err == nil && n > 0 && fds[0].Revents&unix.POLLERR != 0 {
			in.closed = true
		}
	})
}

// attach gives the input its pipe or terminal, non-blocking, and runs the
// writer until the end of the input or of the process. It owns f.
func (in *input) attach(f *os.File) {
	in.mu.Lock()
	if in.ended {
		in.mu.Unlock()
		f.Close()
		return
	}
	in.file = f
	in.mu.Unlock()
	in.run(f)
	in.mu.Lock()
	in.file, in.queue = nil, nil
	in.mu.Unlock()
	f.Close()
}

func (in *input) run(f *os.File) {
	lineOpen := false
	for {
		in.mu.Lock()
		var chunk []byte
		if len(in.queue) > 0 {
			chunk, in.queue = in.queue[0], in.queue[1:]
		} else {
			in.queue = nil
		}
		finish := chunk == nil && in.eof
		stop := in.ended || in.closed
		in.mu.Unlock()
		switch {
		case stop:
			return
		case finish:
			if in.tty {
				in.endOfFile(f, lineOpen)
			}
			return
		case chunk == nil:
			<-in.more
			continue
		}
		n, err := f.Write(chunk)
		in.mu.Lock()
		in.written += int64(n)
		if err != nil { // EPIPE; EIO of a terminal; or end() hurried it
			in.closed = true
		}
		in.mu.Unlock()
		if n > 0 {
			last := chunk[n-1]
			lineOpen = last != '\n' && last != '\r'
		}
	}
}

// endOfFile types the terminal's end-of-file character, which means something
// only in canonical mode: at the start of a line once, else once more, because
// the first then only hands over the line so far.
func (in *input) endOfFile(f *os.File, lineOpen bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	var t *unix.Termios
	cerr := raw.Control(func(fd uintptr) { t, err = unix.IoctlGetTermios(int(fd), unix.TCGETS) })
	if cerr != nil || err != nil || t.Lflag&unix.ICANON == 0 {
		return
	}
	eof := []byte{t.Cc[unix.VEOF]}
	if lineOpen {
		eof = append(eof, eof[0])
	}
	_, _ = f.Write(eof)
}

// end says that the process ended: nothing new is accepted, the writer stops.
func (in *input) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.ended, in.queue = true, nil
	if in.file != nil {
		_ = in.file.SetWriteDeadline(time.Unix(1, 0))
	}
	in.wake()
}
