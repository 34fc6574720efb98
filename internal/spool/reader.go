package spool

import (
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// NoLimit is the limit for a read of a log that nobody writes any more and whose
// end is not known otherwise.
const NoLimit = api.MaxOffset

// Reader reads one log from its files. It belongs to one goroutine; as many
// readers as wanted, in any process, may read one log, also while it is written
// and its oldest segments are deleted. It remembers where it stopped, so reading
// on from there costs nothing but the bytes themselves.
type Reader struct {
	dir  string
	file *os.File // the segment of the place, nil for none
	base int64
	at   place
	scan []byte // for looking at frames that are not returned
}

// place is a frame in the open segment: where it begins in the file, and its
// cursor. checked is the length of its payload if its checksum was found right,
// else 0.
type place struct {
	position int64
	cursor   int64
	checked  int
}

// scanBytes is how much is read at once while looking for a frame.
const scanBytes = 64 << 10

// Open makes a reader of the log in a directory. The log may still be empty.
func Open(dir string) (*Reader, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, readFailure(err, "its directory")
	}
	if !info.IsDir() {
		return nil, errdefs.New(errdefs.NotFound, "there is no log there: not a directory")
	}
	return &Reader{dir: dir}, nil
}

// Close gives the reader's file back.
func (r *Reader) Close() error {
	r.forget()
	r.scan = nil
	return nil
}

func (r *Reader) forget() {
	if r.file != nil {
		_ = r.file.Close()
		r.file = nil
	}
	r.at = place{}
}

// BufSize is a capacity for Read's buf that lets any read of max bytes use it
// without allocating: payload, headers of ordinary frames, and one frame more.
func BufSize(max int) int { return max + max/8 + 2*wire.HeaderSize }

// Read returns frames, exactly as on the wire, from cursor on: at most max bytes
// of payload, at least one if there is any before limit, and less than max where
// that saves work. next is the cursor to read on from. The first frame is cut
// anew when cursor is inside a record, the last when limit or max are.
//
// limit is the cursor up to which the log is known to be complete, the writer's
// Next; what is behind it is not looked at. Up to it everything must be there:
// what is missing or damaged is an errdefs.Indeterminate error that names
// segment and position, after the frames before it were returned by a call of
// their own. With [NoLimit] the log's end is where its files end; anything
// incomplete there is damage.
//
// If cursor is older than what is kept, gap is the exact range that is gone and
// the frames begin after it. A cursor beyond limit is errdefs.Invalid.
//
// frames is in buf's storage if that is large enough ([BufSize]).
func (r *Reader) Read(cursor int64, max int, limit int64, buf []byte) (frames []byte, next int64, gap *wire.GapFrame, err error) {
	if max < 1 {
		return nil, cursor, nil, errdefs.New(errdefs.Internal, "a read of %d bytes", max)
	}
	if cursor < 0 || cursor > limit {
		return nil, cursor, nil, errdefs.New(errdefs.Invalid, "cursor %d is outside the log, which ends at %d", cursor, limit)
	}
	if cursor == limit && limit != NoLimit {
		return nil, cursor, nil, nil
	}
	from := cursor
	cursor, err = r.locate(cursor, limit)
	if cursor > from {
		gap = &wire.GapFrame{From: from, To: cursor}
	}
	if err != nil || r.file == nil || cursor >= limit {
		return nil, cursor, gap, err
	}
	if size := BufSize(max); cap(buf) < size {
		buf = make([]byte, size)
	} else {
		buf = buf[:size]
	}
	frames, next, err = r.take(cursor, max, limit, buf)
	return frames, next, gap, err
}

// locateTries bounds how often locate looks again because a segment was deleted
// under it. Each time the writer has written at least a whole segment meanwhile.
const locateTries = 64

// locate moves to the frame that holds cursor and returns cursor, or the oldest
// kept one if that is younger. Without any segment, and at the end of the log
// when no limit is known, r.file is nil or the place is at the file's end.
func (r *Reader) locate(cursor, limit int64) (int64, error) {
	if r.file != nil && cursor >= r.at.cursor {
		// Reading on: the frame is in the open segment, or mostly in the next.
		found, err := r.seek(cursor)
		if !found && err == nil {
			if found, err = r.openNext(); found && err == nil {
				found, err = r.seek(cursor)
			}
		}
		if found && err == nil {
			return cursor, nil
		}
		// Not there, or damage that may not concern cursor: look from the start.
	}
	for range locateTries {
		bases, err := listSegments(r.dir)
		if err != nil {
			return cursor, readFailure(err, "its directory")
		}
		i := len(bases) - 1
		for i > 0 && bases[i] > cursor {
			i--
		}
		if len(bases) == 0 {
			r.forget()
			if limit == NoLimit && cursor == 0 {
				return cursor, nil
			}
			return cursor, damage(cursor, 0, cursor, "no segment is there, the log should go on to cursor %d", limit)
		}
		if limit != NoLimit && bases[i] > limit {
			// Everything up to the limit the caller knew was deleted meanwhile.
			r.forget()
			return bases[i], nil
		}
		// The place is kept if it is on the way: who waits at the log's end must
		// not walk through the segment each time.
		if r.file == nil || r.base != bases[i] || r.at.cursor > cursor {
			ok, err := r.openSegment(bases[i])
			if err != nil {
				return cursor, err
			}
			if !ok {
				continue
			}
		}
		cursor = max(cursor, bases[i])
		found, err := r.seek(cursor)
		if err != nil || found {
			return cursor, err
		}
		switch {
		case i+1 < len(bases):
			return cursor, damage(r.base, r.at.position, r.at.cursor, "the segment ends here, the next one begins at cursor %d", bases[i+1])
		case limit != NoLimit && r.at.cursor < limit:
			// Segments may have begun, or gone, since the list was made.
			if now, err := listSegments(r.dir); err == nil && !slices.Equal(now, bases) {
				continue
			}
			return cursor, damage(r.base, r.at.position, r.at.cursor, "the log ends here, it should go on to cursor %d", limit)
		case cursor > r.at.cursor:
			return cursor, errdefs.New(errdefs.Invalid, "cursor %d is outside the log, which ends at %d", cursor, r.at.cursor)
		}
		return cursor, nil
	}
	return cursor, errdefs.New(errdefs.Unavailable, "the log is overwritten faster than it can be read").WithNext("read again; a larger spool or the overflow policy %q lets readers keep up", api.OverflowBlock)
}

// openSegment opens the segment that begins at base and moves to its first
// frame. It returns false when there is none.
func (r *Reader) openSegment(base int64) (bool, error) {
	if r.file != nil && r.base == base {
		r.at = place{cursor: base}
		return true, nil
	}
	f, err := os.Open(segmentPath(r.dir, base))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, readFailure(err, segmentName(base))
	}
	r.forget()
	r.file, r.base, r.at = f, base, place{cursor: base}
	return true, nil
}

// openNext opens the segment that follows the open one, which the place has
// reached the end of. An empty segment has none: the next has its name.
func (r *Reader) openNext() (bool, error) {
	if r.at.cursor == r.base {
		return false, nil
	}
	return r.openSegment(r.at.cursor)
}

// seek moves forward to the frame that holds cursor, looking at headers only. It
// returns false, with the place at the segment's end, if the segment ends first.
func (r *Reader) seek(cursor int64) (bool, error) {
	if r.at.checked > 0 && cursor < r.at.cursor+int64(r.at.checked) {
		return true, nil
	}
	if r.scan == nil {
		r.scan = make([]byte, scanBytes)
	}
	var window []byte // bytes of the file from r.at.position on
	for {
		if len(window) < wire.HeaderSize {
			// The frame in question is mostly the wanted one, then a header is
			// enough; reading a block is for the walk over many.
			size := wire.HeaderSize
			if r.at.cursor < cursor {
				size = scanBytes
			}
			n, err := readAt(r.file, r.scan[:size], r.at.position)
			if err != nil {
				return false, readFailure(err, segmentName(r.base))
			}
			if n == 0 {
				return false, nil
			}
			window = r.scan[:n]
			if n < wire.HeaderSize {
				return false, damage(r.base, r.at.position, r.at.cursor, "the frame is incomplete: %d of %d header bytes", n, wire.HeaderSize)
			}
		}
		h, err := r.header(window)
		if err != nil {
			return false, err
		}
		if cursor < h.Cursor+int64(h.Length) {
			return true, nil
		}
		length := wire.HeaderSize + h.Length
		r.at = place{position: r.at.position + int64(length), cursor: h.Cursor + int64(h.Length)}
		window = window[min(length, len(window)):]
	}
}

// header decodes the header at the place and checks that it belongs there.
func (r *Reader) header(b []byte) (wire.Header, error) {
	h, err := wire.ParseHeader(b)
	switch {
	case err != nil:
		return h, damage(r.base, r.at.position, r.at.cursor, "%v", err)
	case h.Kind != wire.KindStdout && h.Kind != wire.KindStderr || h.Length == 0:
		return h, damage(r.base, r.at.position, r.at.cursor, "a frame of kind %d and %d bytes does not belong in a log", h.Kind, h.Length)
	case h.Cursor != r.at.cursor || h.Offset > h.Cursor:
		return h, damage(r.base, r.at.position, r.at.cursor, "the frame says it is at cursor %d, offset %d", h.Cursor, h.Offset)
	}
	return h, nil
}

// take reads frames from the place on into buf, checks them, and cuts the ends.
// The place holds a frame with cursor in it, or is at the end of a segment.
func (r *Reader) take(cursor int64, max int, limit int64, buf []byte) ([]byte, int64, error) {
	start, end := 0, 0 // what buf[start:end] holds is ready to return
	left := max
	for left > 0 && cursor < limit && len(buf)-end > wire.HeaderSize {
		n, err := readAt(r.file, buf[end:], r.at.position)
		if err != nil {
			return buf[start:end], cursor, r.after(end > start, readFailure(err, segmentName(r.base)))
		}
		if n == 0 { // the segment's end: go on in the next one, if it has begun
			ok, err := r.openNext()
			if err != nil || !ok {
				return buf[start:end], cursor, r.after(end > start, err)
			}
			continue
		}
		got := buf[end : end+n]
		for len(got) > 0 && left > 0 && cursor < limit {
			if len(got) < wire.HeaderSize {
				if end+n == len(buf) && end > start {
					return buf[start:end], cursor, nil // buf is full
				}
				return buf[start:end], cursor, r.after(end > start, damage(r.base, r.at.position, r.at.cursor, "the frame is incomplete: %d of %d header bytes", len(got), wire.HeaderSize))
			}
			h, err := r.header(got)
			if err != nil {
				return buf[start:end], cursor, r.after(end > start, err)
			}
			skip := int(cursor - h.Cursor)
			want := min(int64(h.Length-skip), limit-cursor)
			if int64(left) < want && end > start {
				return buf[start:end], cursor, nil // the next read gets it whole
			}
			want = min(want, int64(left))
			length := wire.HeaderSize + h.Length
			if length > len(got) { // more than was read: alone, or in the next read
				if end > start {
					return buf[start:end], cursor, nil
				}
				return r.takeLarge(h, skip, int(want), cursor, buf)
			}
			payload := got[wire.HeaderSize:length]
			if wire.Sum(payload) != h.Sum {
				return buf[start:end], cursor, r.after(end > start, damage(r.base, r.at.position, r.at.cursor, "the checksum of the frame's %d bytes is wrong", h.Length))
			}
			if int(want) < h.Length { // cut in place: the header moves up to the payload
				r.at.checked = h.Length
				cut := end + skip
				if skip > 0 { // only the first frame begins inside a record
					start = cut
				}
				reheader(buf[cut:], h, skip, payload[skip:skip+int(want)])
				end = cut + wire.HeaderSize + int(want)
				cursor += want
				left -= int(want)
				if skip+int(want) < h.Length {
					return buf[start:end], cursor, nil
				}
			} else {
				end += length
				cursor += want
				left -= int(want)
			}
			r.at = place{position: r.at.position + int64(length), cursor: h.Cursor + int64(h.Length)}
			got = got[length:]
		}
	}
	return buf[start:end], cursor, nil
}

// after holds an error back when frames before it are returned: the next call
// meets it again.
func (r *Reader) after(some bool, err error) error {
	if some {
		return nil
	}
	return err
}

// takeLarge returns a cut of one frame that does not fit in buf as a whole. Its
// checksum is checked over all of it, once while the place stays in it.
func (r *Reader) takeLarge(h wire.Header, skip, want int, cursor int64, buf []byte) ([]byte, int64, error) {
	if r.at.checked != h.Length {
		if err := r.verify(h, buf); err != nil {
			return nil, cursor, err
		}
		r.at.checked = h.Length
	}
	begin := r.at.position + wire.HeaderSize
	payload := buf[wire.HeaderSize : wire.HeaderSize+want]
	n, err := readAt(r.file, payload, begin+int64(skip))
	if err != nil {
		return nil, cursor, readFailure(err, segmentName(r.base))
	}
	if n < want {
		return nil, cursor, damage(r.base, r.at.position, r.at.cursor, "the frame became shorter while it was read")
	}
	reheader(buf, h, skip, payload)
	cursor += int64(want)
	if skip+want == h.Length {
		r.at = place{position: begin + int64(h.Length), cursor: cursor}
	}
	return buf[:wire.HeaderSize+want], cursor, nil
}

// verify checks the checksum of the frame at the place, whose header is h, using
// buf for its bytes.
func (r *Reader) verify(h wire.Header, buf []byte) error {
	sum := uint32(0)
	for done := 0; done < h.Length; {
		part := buf[:min(len(buf), h.Length-done)]
		n, err := readAt(r.file, part, r.at.position+wire.HeaderSize+int64(done))
		if err != nil {
			return readFailure(err, segmentName(r.base))
		}
		if n < len(part) {
			return damage(r.base, r.at.position, r.at.cursor, "the frame is incomplete: %d of %d bytes", done+n, h.Length)
		}
		sum = wire.AddSum(sum, part)
		done += n
	}
	if sum != h.Sum {
		return damage(r.base, r.at.position, r.at.cursor, "the checksum of the frame's %d bytes is wrong", h.Length)
	}
	return nil
}

// reheader writes at the start of b the header of the piece of a frame that
// begins skip bytes into it. The piece stands right behind it.
func reheader(b []byte, h wire.Header, skip int, piece []byte) {
	wire.AppendHeader(b[:0], wire.Header{Kind: h.Kind, Length: len(piece), Cursor: h.Cursor + int64(skip), Offset: h.Offset + int64(skip), Sum: wire.Sum(piece)})
}
