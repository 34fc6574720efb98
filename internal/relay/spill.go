package relay

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// tailBytes is how much is gathered before it is written to the file.
const tailBytes = 128 << 10

// spill keeps events in a file without a name, so that nothing is left when the
// hub dies. Each is a length and its bytes. What was read is given back to the disk
// at once where the file system can make holes. The queue's lock guards it.
type spill struct {
	dir   string
	max   int64         // unread bytes of this job; < 1: no spill
	total *atomic.Int64 // unread bytes of the hub
	limit int64         // bound of total

	file   *os.File
	from   int64  // first unread byte in the file
	to     int64  // end of the file
	tail   []byte // after it, not written yet
	dead   bool   // closed or broken
	holes  bool   // the file system can make them
	extra  []byte // the last event, kept although the spill is full
	counts int64  // what of total is ours
}

func (s *spill) used() bool { return s.to > s.from || len(s.tail) > 0 || s.extra != nil }

func (s *spill) inMemory() int64 { return int64(len(s.tail) + len(s.extra)) }

func (s *spill) onDisk() int64 { return s.to - s.from }

// write takes an event; false: there is no room, or the disk failed as err says.
func (s *spill) write(event []byte) (bool, error) {
	n := int64(len(event)) + 4
	if s.dead || s.to-s.from+int64(len(s.tail))+n > s.max {
		return false, nil
	}
	if s.file != nil && !s.holes && s.to+int64(len(s.tail))+n > s.max {
		return false, nil // what was read still takes its room
	}
	if s.total.Add(n) > s.limit {
		s.total.Add(-n)
		return false, nil
	}
	s.counts += n
	s.tail = append(binary.LittleEndian.AppendUint32(s.tail, uint32(len(event))), event...)
	if len(s.tail) < tailBytes {
		return true, nil
	}
	return s.flush()
}

func (s *spill) flush() (bool, error) {
	if s.file == nil {
		f, err := unnamed(s.dir)
		if err != nil {
			return s.broken(err)
		}
		s.file, s.holes = f, true
	}
	if _, err := s.file.WriteAt(s.tail, s.to); err != nil {
		return s.broken(err)
	}
	s.to += int64(len(s.tail))
	s.tail = s.tail[:0]
	return true, nil
}

// broken keeps what is in memory readable and takes nothing more.
func (s *spill) broken(err error) (bool, error) {
	s.dead = true
	return true, err
}

// force keeps one more event whatever the bounds say.
func (s *spill) force(event []byte) { s.extra = event }

// part is a part of a spill that is being read.
type part struct {
	file  *os.File
	from  int64
	n     int64
	ready []byte // instead of a part of the file
	extra []byte
}

// next picks what is oldest, about that many bytes.
func (s *spill) next(bytes int64) *part {
	bytes = max(bytes, tailBytes)
	if s.to > s.from {
		return &part{file: s.file, from: s.from, n: min(bytes, s.to-s.from)}
	}
	p := &part{ready: s.tail, extra: s.extra}
	s.counts -= int64(len(s.tail))
	s.total.Add(-int64(len(s.tail)))
	s.tail, s.extra = nil, nil
	return p
}

// load reads the part and cuts it into whole events. It sets n to what they take.
func (p *part) load() (*block, error) {
	raw := p.ready
	if p.file != nil {
		raw = make([]byte, p.n)
		if _, err := io.ReadFull(io.NewSectionReader(p.file, p.from, p.n), raw); err != nil {
			return nil, err
		}
		// One event may be larger than a part.
		if need := int64(binary.LittleEndian.Uint32(raw)) + 4; need > p.n {
			more := make([]byte, need)
			copy(more, raw)
			if _, err := io.ReadFull(io.NewSectionReader(p.file, p.from+p.n, need-p.n), more[p.n:]); err != nil {
				return nil, err
			}
			raw = more
		}
	}
	b := &block{}
	at, to := 0, 0
	for at+4 <= len(raw) {
		n := int(binary.LittleEndian.Uint32(raw[at:]))
		if at+4+n > len(raw) {
			break
		}
		copy(raw[to:], raw[at+4:at+4+n])
		at, to = at+4+n, to+n
		b.ends = append(b.ends, to)
	}
	b.buf = raw[:to:to]
	if p.extra != nil {
		b.add(p.extra)
	}
	p.n = int64(at)
	return b, nil
}

// consumed gives back what load cut.
func (s *spill) consumed(p *part) {
	if p.file == nil || s.file != p.file {
		return
	}
	s.from += p.n
	s.counts -= p.n
	s.total.Add(-p.n)
	switch {
	case s.from == s.to:
		s.from, s.to = 0, 0
		if s.file.Truncate(0) != nil {
			s.dead = true
		}
	case s.holes:
		const mode = unix.FALLOC_FL_KEEP_SIZE | unix.FALLOC_FL_PUNCH_HOLE
		if unix.Fallocate(int(s.file.Fd()), mode, 0, s.from) != nil {
			s.holes = false
		}
	}
}

func (s *spill) close() {
	s.dead = true
	s.total.Add(-s.counts)
	s.counts, s.from, s.to, s.tail, s.extra = 0, 0, 0, nil, nil
	if s.file != nil {
		s.file.Close()
		s.file = nil
	}
}

// unnamed makes a file in dir that has no name, or loses it at once.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == nil {
		return os.NewFile(uintptr(fd), dir+"/spill"), nil
	}
	f, err2 := os.CreateTemp(dir, "spill-*")
	if err2 != nil {
		return nil, errors.Join(err, err2)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
