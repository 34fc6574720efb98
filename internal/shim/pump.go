package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

const (
	// pumpBuffer is the size of one read. Measured: more than 256 KiB brings
	// nothing, it falls out of the processor's second-level cache.
	pumpBuffer = 256 << 10
	// pumpIdleMillis is after how long without output the buffer's pages go back.
	pumpIdleMillis = 200
	// gatherNanos is how long output that flows is left to gather. A pipe of pipeBytes
	// takes longer to fill, at up to 4 GiB/s.
	gatherNanos = 200_000
	// lastSweeps bounds what is still read after a cut: whole pipes, but not for
	// ever what an outsider writes.
	lastSweeps = 2 * pipeBytes / pumpBuffer
	// pipeBytes is the size asked for the child's pipes; the limit of an
	// unprivileged user in /proc/sys/fs/pipe-max-size is the same.
	pipeBytes = 1 << 20
	// terminalBytes is more than a terminal holds: some 8 KiB that were not looked at
	// yet, and 4 KiB that can be read (tty_buffer_set_limit and N_TTY_BUF_SIZE of the
	// kernel's pseudo terminals).
	terminalBytes = 64 << 10
)

// appender is what the pump needs of the spool's writer.
type appender interface {
	Append(ctx context.Context, k wire.Kind, p []byte) error
}

// source is one output of the child: the read end of a pipe, or a terminal.
type source struct {
	fd   int
	kind wire.Kind
	tty  bool
	done bool
}

// pump moves the child's output into the log, by one goroutine for all sources
// so that one buffer is enough. The buffer is mapped, not allocated, so that its
// memory can be given back while the child is silent.
type pump struct {
	log     appender
	sources []source
	wake    int // eventfd: look at cut and caughtUp again
	buf     []byte

	mu       sync.Mutex
	cutShort bool
	last     int           // sweeps since
	caughtUp chan struct{} // closed when the sources held nothing more, after it was asked for
	ctx      context.Context
	cancel   context.CancelFunc
	failed   func(detail string)
}

var errCut = errors.New("cut")

// newPump makes a pump over descriptors it owns from now on. failed is called
// once, when the log cannot keep what came; from then on output is read and
// dropped, so that the child can still end in its own way.
func newPump(log appender, sources []source, failed func(detail string)) (*pump, error) {
	p := &pump{log: log, sources: sources, failed: failed, wake: -1}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for _, s := range sources {
		if err := unix.SetNonblock(s.fd, true); err != nil {
			p.release()
			return nil, os.NewSyscallError("set non-blocking", err)
		}
	}
	var err error
	if p.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		p.release()
		return nil, os.NewSyscallError("eventfd", err)
	}
	p.buf, err = unix.Mmap(-1, 0, pumpBuffer, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		p.release()
		return nil, os.NewSyscallError("mmap", err)
	}
	return p, nil
}

func (p *pump) release() {
	p.cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.sources {
		_ = unix.Close(s.fd)
	}
	if p.wake >= 0 {
		_ = unix.Close(p.wake)
		p.wake = -1
	}
	if p.caughtUp != nil {
		close(p.caughtUp)
		p.caughtUp = nil
	}
	if p.buf != nil {
		_ = unix.Munmap(p.buf)
		p.buf = nil
	}
}

func (p *pump) poke() {
	if p.wake >= 0 {
		_, _ = unix.Write(p.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// cut makes run end although something still holds the pipes.
func (p *pump) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutShort = true
	p.cancel()
	p.poke()
}

// holds is how many bytes of log, frame headers included, may come of what the
// sources and this pump can hold at this moment.
func (p *pump) holds() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wake < 0 { // it has ended
		return 0
	}
	n := int64(2 * len(p.buf)) // what it is just appending, and headers
	for _, s := range p.sources {
		if s.tty {
			n += terminalBytes * (1 + wire.HeaderSize) // a slow writer makes a frame of each byte
			continue
		}
		size, err := unix.FcntlInt(uintptr(s.fd), unix.F_GETPIPE_SZ, 0) // the child may have changed it
		if err != nil {
			size = pipeBytes
		}
		n += int64(size)
	}
	return n
}

// caught returns a channel that is closed as soon as the pump has read
// everything its sources hold, which on a terminal is at most terminalBytes: who
// goes on writing to it cannot keep it open.
func (p *pump) caught() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.caughtUp == nil {
		p.caughtUp = make(chan struct{})
		if p.wake < 0 { // it has ended
			close(p.caughtUp)
			ch := p.caughtUp
			p.caughtUp = nil
			return ch
		}
		p.poke()
	}
	return p.caughtUp
}

// run moves output until every source is at its end. The detail says why output
// may be missing, if so.
func (p *pump) run() (detail string) {
	defer p.release()
	flows := false // a sweep since the last wait moved something
	since := 0     // bytes moved since somebody asks
	for {
		p.mu.Lock()
		asked := p.caughtUp // before the sweep: what is read after the question counts
		p.mu.Unlock()
		n, moved, open, err := p.sweep()
		if err != nil {
			if errors.Is(err, errCut) {
				return "something outside the container held its outputs open after its end"
			}
			return err.Error()
		}
		if !open {
			return ""
		}
		if asked == nil {
			since = 0
		} else if since += n; !moved || since >= terminalBytes && p.sources[0].tty {
			p.mu.Lock()
			close(p.caughtUp)
			p.caughtUp = nil
			p.mu.Unlock()
			since = 0
		}
		if moved {
			flows = true
			continue
		}
		if flows {
			flows = false
			p.gather()
			continue
		}
		if err := p.sleep(); err != nil {
			return err.Error()
		}
	}
}

// gather leaves the pipes alone for a moment. Who waits for output that flows is
// woken by its first page, and would keep that page as a frame of its own. Output
// after a silence is not delayed.
func (p *pump) gather() {
	fds := []unix.PollFd{{Fd: int32(p.wake), Events: unix.POLLIN}}
	_, _ = unix.Ppoll(fds, &unix.Timespec{Nsec: gatherNanos}, nil)
}

// sweep reads each source once. n is how many bytes came.
func (p *pump) sweep() (n int, moved, open bool, err error) {
	for i := range p.sources {
		s := &p.sources[i]
		if s.done {
			continue
		}
		k, err := unix.Read(s.fd, p.buf)
		switch {
		case k > 0:
			moved, open = true, true
			n += k
			if err := p.keep(s.kind, p.buf[:k]); err != nil {
				return n, moved, open, err
			}
		case err == unix.EINTR:
			moved, open = true, true
		case err == unix.EAGAIN:
			open = true
		case err == nil, s.tty && err == unix.EIO: // a terminal that nobody has open any more
			s.done = true
		default:
			return n, moved, open, fmt.Errorf("reading the child's output: %w", err)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cutShort && open {
		if p.last++; !moved || p.last > lastSweeps {
			return n, moved, open, errCut
		}
	}
	return n, moved, open, nil
}

// keep appends to the log, or drops what a broken log cannot take.
func (p *pump) keep(k wire.Kind, b []byte) error {
	if p.log == nil {
		return nil
	}
	err := p.log.Append(p.ctx, k, b)
	if err == nil {
		return nil
	}
	if p.ctx.Err() != nil {
		return errCut
	}
	p.log = nil
	detail := err.Error()
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		detail = e.Message
	}
	p.failed(detail)
	return nil
}

// sleep waits until a source or the wake descriptor has something. After a
// silence the buffer's pages are given back.
func (p *pump) sleep() error {
	fds := make([]unix.PollFd, 1, 3)
	fds[0] = unix.PollFd{Fd: int32(p.wake), Events: unix.POLLIN}
	for _, s := range p.sources {
		if !s.done {
			fds = append(fds, unix.PollFd{Fd: int32(s.fd), Events: unix.POLLIN})
		}
	}
	timeout := pumpIdleMillis
	for {
		n, err := unix.Poll(fds, timeout)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return os.NewSyscallError("poll", err)
		case n == 0:
			if err := unix.Madvise(p.buf, unix.MADV_DONTNEED); err != nil && err != syscall.EINVAL {
				return os.NewSyscallError("madvise", err)
			}
			timeout = -1
		default:
			if fds[0].Revents != 0 {
				var b [8]byte
				_, _ = unix.Read(p.wake, b[:])
			}
			return nil
		}
	}
}
