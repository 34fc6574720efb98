package spool

import (
	"errors"
	"io"
	"os"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// readAt fills b from a position on and returns how much there was; the end of
// the file is not an error.
func readAt(f *os.File, b []byte, position int64) (int, error) {
	n, err := f.ReadAt(b, position)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// Bounds returns the first kept cursor and the end of the log, from its files
// alone: for a log whose shim is dead. See [Reader.Recover] for the error.
func (r *Reader) Bounds() (oldest, next int64, err error) {
	s, err := r.Recover()
	return s.Oldest, s.Next, err
}

// Recover works out the state of a log that nobody writes any more, from its
// files. If the last segment is damaged or ends in the middle of a frame, as it
// may after a power cut or a killed shim, the error is errdefs.Indeterminate and
// the state is right up to the damage: Next is the end of what can be read.
func (r *Reader) Recover() (api.LogState, error) {
	for range locateTries {
		s, again, err := r.recover()
		if !again {
			s.EOF = true
			return s, err
		}
	}
	return api.LogState{}, readFailure(os.ErrNotExist, "its segments are being deleted")
}

func (r *Reader) recover() (s api.LogState, again bool, err error) {
	bases, err := listSegments(r.dir)
	if err != nil {
		return s, false, readFailure(err, "its directory")
	}
	if len(bases) == 0 {
		return s, false, nil
	}
	s.Oldest, s.Next = bases[0], bases[0]
	// A segment without a frame says only where it begins: then the one before
	// it says how far each stream went.
	for i := len(bases) - 1; i >= 0; i-- {
		ok, err := r.openSegment(bases[i])
		if err != nil {
			return s, false, err
		}
		if !ok {
			return s, true, nil
		}
		last, some, err := r.last()
		if i == len(bases)-1 {
			s.Next = r.at.cursor
		} else if err == nil && r.at.cursor != bases[i+1] {
			err = damage(r.base, r.at.position, r.at.cursor, "the segment ends here, the next one begins at cursor %d", bases[i+1])
		}
		if some {
			s.Stdout = last.Offset + int64(last.Length)
			s.Stderr = last.Cursor - last.Offset
			if last.Kind == wire.KindStderr {
				s.Stdout, s.Stderr = s.Stderr, s.Stdout
			}
		}
		if some || err != nil {
			return s, false, err
		}
	}
	return s, false, nil
}

// last walks to the end of the open segment and returns its last whole frame.
// The place is left behind it. Payloads are checked: the end of a log is where
// damage is likely.
func (r *Reader) last() (last wire.Header, some bool, err error) {
	buf := make([]byte, scanBytes)
	head := buf[:wire.HeaderSize]
	for {
		n, err := readAt(r.file, head, r.at.position)
		if err != nil {
			return last, some, readFailure(err, segmentName(r.base))
		}
		if n == 0 {
			return last, some, nil
		}
		if n < len(head) {
			return last, some, damage(r.base, r.at.position, r.at.cursor, "the frame is incomplete: %d of %d header bytes", n, wire.HeaderSize)
		}
		h, err := r.header(head)
		if err != nil {
			return last, some, err
		}
		if err := r.verify(h, buf); err != nil {
			return last, some, err
		}
		last, some = h, true
		r.at = place{position: r.at.position + wire.HeaderSize + int64(h.Length), cursor: h.Cursor + int64(h.Length)}
	}
}
