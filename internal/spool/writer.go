package spool

import (
	"context"
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Writer appends to a log. All methods may be called from any goroutine.
type Writer struct {
	cfg        Config
	maxPayload int

	// turn holds one token: who has it owns the files and the fields below.
	turn     chan struct{}
	fd       int // the last segment, -1 before the first append
	base     int64
	size     int64 // bytes in the last segment
	frames   int   // frames in the last segment
	used     int64 // bytes in all segments
	whole    []segment
	header   [wire.HeaderSize]byte
	iov      [2][]byte
	finished bool

	// mu guards what State shows and what Ack changes. The owner of the turn is
	// the only one who changes state.
	mu      sync.Mutex
	state   api.LogState
	failure error
	acked   int64
	coming  int64         // payload of the frame that is being written
	lifted  int64         // bytes that the log may have beyond its cap
	changed chan struct{} // nil until somebody asked
	room    chan struct{} // one token: acked or lifted changed
}

// segment is a segment that is complete: cursors base up to end.
type segment struct{ base, end, size int64 }

// Create begins a log in a directory that holds none: a second writer over the
// same files could hand out the same cursor twice.
func Create(cfg Config) (*Writer, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, diskError(err, "the log's directory cannot be made")
	}
	bases, err := listSegments(cfg.Dir)
	if err != nil {
		return nil, diskError(err, "the log's directory cannot be read")
	}
	if len(bases) > 0 {
		return nil, errdefs.New(errdefs.Conflict, "the directory already holds a log (%s)", segmentName(bases[0])).WithNext("a log is written by one shim, once")
	}
	w := &Writer{cfg: cfg, fd: -1, turn: make(chan struct{}, 1), room: make(chan struct{}, 1)}
	w.maxPayload = int(min(wire.MaxPayload, cfg.SegmentBytes-wire.HeaderSize))
	w.turn <- struct{}{}
	return w, nil
}

// Append adds bytes of one stream, cut into frames of at most [wire.MaxPayload]
// bytes, each written with one system call and visible to readers before Append
// returns. Order between concurrent calls is the order in which they get their turn.
//
// At the cap it deletes whole oldest segments under drop_oldest; under block it
// deletes those that were acknowledged, and else waits for [Writer.Ack] or ctx.
// When ctx ends, its error is returned and the bytes up to State().Next are kept.
//
// A disk that is full (exhausted) or broken (unavailable) ends the log: the
// partial frame is cut away, State().Failure says why, and every later Append
// returns the same error. After Finish it is a conflict.
func (w *Writer) Append(ctx context.Context, k wire.Kind, p []byte) error {
	if k != wire.KindStdout && k != wire.KindStderr {
		return errdefs.New(errdefs.Internal, "a frame of kind %d cannot be kept in a log", k)
	}
	select {
	case <-w.turn:
	default:
		select {
		case <-w.turn:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	defer func() { w.turn <- struct{}{} }()
	if w.finished {
		return errdefs.New(errdefs.Conflict, "the log is finished")
	}
	if w.failure != nil {
		return w.failure
	}
	for len(p) > 0 {
		n, err := w.makeRoom(ctx, min(len(p), w.maxPayload))
		if err != nil {
			return err
		}
		if err := w.writeFrame(k, p[:n]); err != nil {
			return w.fail(err)
		}
		p = p[n:]
	}
	return nil
}

// enough is the payload for which a frame is written although more was asked
// for: the last room before the cap is used, but not for slivers.
const enough = 4 << 10

// makeRoom returns how many of n bytes may be written as one frame now, after
// deleting or waiting as the overflow policy says.
func (w *Writer) makeRoom(ctx context.Context, n int) (int, error) {
	for {
		w.mu.Lock()
		acked, lifted, last := w.acked, w.lifted, w.state.Next
		w.mu.Unlock()
		free := w.cfg.Cap + lifted - w.used - wire.HeaderSize
		if free >= int64(n) {
			return n, nil
		}
		if w.cfg.Overflow == api.OverflowDropOldest {
			acked = last
		}
		if len(w.whole) > 0 && w.whole[0].end <= acked {
			if err := w.dropOldest(); err != nil {
				return 0, w.fail(err)
			}
			continue
		}
		if free >= int64(min(n, enough)) {
			return int(free), nil
		}
		w.setBlocked(true)
		select {
		case <-w.room:
		case <-ctx.Done():
			w.setBlocked(false)
			return 0, context.Cause(ctx)
		}
		w.setBlocked(false)
	}
}

// dropOldest deletes the oldest whole segment. Readers that have it open go on.
func (w *Writer) dropOldest() error {
	s := w.whole[0]
	if err := unix.Unlink(segmentPath(w.cfg.Dir, s.base)); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	w.whole = w.whole[1:]
	w.used -= s.size
	w.mu.Lock()
	w.state.Oldest = s.end
	w.notify()
	w.mu.Unlock()
	return nil
}

// writeFrame appends one frame, in a new segment if it does not fit the last.
func (w *Writer) writeFrame(k wire.Kind, p []byte) error {
	w.mu.Lock()
	next, offset := w.state.Next, w.state.Stdout
	if k == wire.KindStderr {
		offset = w.state.Stderr
	}
	w.coming = int64(len(p))
	w.mu.Unlock()
	if next+int64(len(p)) > api.MaxOffset {
		return errdefs.New(errdefs.Exhausted, "the log has reached position 2^53, the largest that can be named")
	}
	length := int64(wire.HeaderSize + len(p))
	if w.fd < 0 || w.size+length > w.cfg.SegmentBytes || w.frames >= maxSegmentFrames {
		if err := w.roll(next); err != nil {
			return err
		}
	}
	wire.AppendHeader(w.header[:0], wire.Header{Kind: k, Length: len(p), Cursor: next, Offset: offset, Sum: wire.Sum(p)})
	if err := writeAll(w.fd, &w.iov, w.header[:], p); err != nil {
		// What was written of the frame goes, so that the log ends at a frame. If
		// that fails too, readers still stop at State().Next.
		_ = unix.Ftruncate(w.fd, w.size)
		_, _ = unix.Seek(w.fd, w.size, unix.SEEK_SET)
		return err
	}
	w.frames++
	w.size += length
	w.used += length
	w.mu.Lock()
	w.coming = 0
	w.state.Next += int64(len(p))
	if k == wire.KindStderr {
		w.state.Stderr += int64(len(p))
	} else {
		w.state.Stdout += int64(len(p))
	}
	w.notify()
	w.mu.Unlock()
	return nil
}

// roll closes the last segment and begins one at cursor next.
func (w *Writer) roll(next int64) error {
	fd, err := unix.Open(segmentPath(w.cfg.Dir, next), unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	if w.fd >= 0 {
		_ = unix.Close(w.fd) // nothing is synced, so nothing is learned from it
		w.whole = append(w.whole, segment{base: w.base, end: next, size: w.size})
	}
	w.fd, w.base, w.size, w.frames = fd, next, 0, 0
	return nil
}

// writeAll writes header and payload with one writev, and what a short write
// left over with more.
func writeAll(fd int, iov *[2][]byte, header, p []byte) error {
	defer func() { *iov = [2][]byte{} }()
	for len(header)+len(p) > 0 {
		iov[0], iov[1] = header, p
		bufs := iov[:]
		if len(header) == 0 {
			bufs = iov[1:]
		}
		n, err := unix.Writev(fd, bufs)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case n <= 0:
			return unix.EIO // a regular file that takes nothing and says nothing
		}
		cut := min(n, len(header))
		header, p = header[cut:], p[n-cut:]
	}
	return nil
}

// fail makes the error of the disk the log's last word.
func (w *Writer) fail(err error) error {
	if w.failure == nil {
		w.failure = diskError(err, "the log cannot be written")
		w.mu.Lock()
		w.coming = 0
		w.state.Failure = w.failure.Error()
		w.notify()
		w.mu.Unlock()
	}
	return w.failure
}

// diskError gives the disk's answer a code and a next step.
func diskError(err error, what string) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e
	}
	switch {
	case errors.Is(err, unix.ENOSPC):
		return errdefs.Wrap(err, errdefs.Exhausted, "%s: the disk is full", what).WithNext("free space on the host's file system")
	case errors.Is(err, unix.EDQUOT):
		return errdefs.Wrap(err, errdefs.Exhausted, "%s: the disk quota is used up", what).WithNext("raise the quota or free space")
	case errors.Is(err, unix.EFBIG):
		return errdefs.Wrap(err, errdefs.Exhausted, "%s: the limit on the size of a file is reached", what).WithNext("raise the host program's RLIMIT_FSIZE")
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "%s: %v", what, err).WithNext("look at the host's disk and kernel log")
}

// Ack says that every byte before cursor may be deleted when room is needed. A
// cursor before the last one is ignored, one beyond Next is invalid. A reader that
// looks behind Next may have the frame that is being written: that counts.
func (w *Writer) Ack(cursor int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if cursor < 0 || cursor > w.state.Next+w.coming {
		return errdefs.New(errdefs.Invalid, "cursor %d cannot be acknowledged, the log ends at %d", cursor, w.state.Next)
	}
	if cursor > w.acked {
		w.acked = cursor
		w.giveRoom()
	}
	return nil
}

// Lift lets the log grow by so many bytes more past its cap, headers included,
// and wakes an Append that waits. It is for the end of a process: what is left in
// its pipes is bounded, and nobody may be reading.
func (w *Writer) Lift(bytes int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lifted += bytes
	w.giveRoom()
}

func (w *Writer) giveRoom() {
	select {
	case w.room <- struct{}{}:
	default:
	}
}

// State returns how far the log goes. It is cheap.
func (w *Writer) State() api.LogState {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

// Changed returns a channel that is closed at the next change of the state. To
// miss nothing, take the channel first and then look at the state.
func (w *Writer) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changed == nil {
		w.changed = make(chan struct{})
	}
	return w.changed
}

// notify wakes whoever waits for a change. The caller holds mu.
func (w *Writer) notify() {
	if w.changed != nil {
		close(w.changed)
		w.changed = nil
	}
}

func (w *Writer) setBlocked(blocked bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.state.Blocked != blocked {
		w.state.Blocked = blocked
		w.notify()
	}
}

// Finish marks the end of the output and closes the file. It waits for an Append
// that is under way; Lift or end that one's ctx first. A second call does nothing.
// It returns the failure that ended the log early, if one did.
func (w *Writer) Finish() error {
	<-w.turn
	defer func() { w.turn <- struct{}{} }()
	if w.finished {
		return w.failure
	}
	w.finished = true
	if w.fd >= 0 {
		_ = unix.Close(w.fd)
		w.fd = -1
	}
	w.mu.Lock()
	w.state.EOF = true
	w.notify()
	w.mu.Unlock()
	return w.failure
}
