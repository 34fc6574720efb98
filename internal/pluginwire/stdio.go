package pluginwire

import (
	"bytes"
	"encoding/binary"
	"strconv"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

// What can be wrong on a stdio connection. Each ends it.
var (
	// ErrFragments: one message in more than MaxFragments lines.
	ErrFragments error = errdefs.New(errdefs.Exhausted, "a message came in more than %d lines", MaxFragments)
	// ErrChunk: the parts of a message do not fit together.
	ErrChunk error = errdefs.New(errdefs.Invalid, "the parts of a chunked message do not fit together")
)

// Chunker cuts one message into the lines of the stdio framing. The zero Chunker is
// done.
type Chunker struct {
	msg   []byte
	off   int
	state uint8 // 0 done, 1 a plain line, 2 to start, 3 data, 4 to end
}

// NewChunker begins with a message, which must be one valid JSON object and stay
// unchanged until the last line was taken. Errors: ErrTooLarge.
func NewChunker(msg []byte) (Chunker, error) {
	switch {
	case len(msg) > MaxMessage:
		return Chunker{}, ErrTooLarge
	case len(msg) <= StdioInline:
		return Chunker{msg: msg, state: 1}, nil
	}
	return Chunker{msg: msg, state: 2}, nil
}

// Append adds whole lines to dst until it holds at least limit bytes or the message is
// through, and reports whether more is to come. Every line is shorter than StdioLine.
func (c *Chunker) Append(dst []byte, limit int) (out []byte, more bool) {
	for c.state != 0 && len(dst) < limit {
		switch c.state {
		case 1:
			from := len(dst)
			dst = append(dst, c.msg...)
			oneLine(dst[from:])
			c.state = 0
		case 2:
			dst = append(dst, `{"type":"chunk_start","total_size":`...)
			dst = strconv.AppendInt(dst, int64(len(c.msg)), 10)
			dst = append(dst, '}')
			c.state = 3
		case 3:
			to := min(c.off+StdioInline, len(c.msg))
			for to < len(c.msg) && !utf8.RuneStart(c.msg[to]) {
				to--
			}
			dst = append(dst, `{"type":"chunk_data","data":"`...)
			dst = appendEscaped(dst, c.msg[c.off:to])
			dst = append(dst, `","offset":`...)
			dst = strconv.AppendInt(dst, int64(c.off), 10)
			dst = append(dst, '}')
			if c.off = to; to == len(c.msg) {
				c.state = 4
			}
		case 4:
			dst = append(dst, `{"type":"chunk_end"}`...)
			c.state = 0
		}
		dst = append(dst, '\n')
	}
	return dst, c.state != 0
}

// oneLine makes spaces of line ends. In valid JSON they stand between tokens only; left
// there, they would let a payload write lines of its own, and so messages.
func oneLine(b []byte) {
	for _, c := range [...]byte{'\n', '\r'} {
		for at := bytes.IndexByte(b, c); at >= 0; {
			b[at] = ' '
			next := bytes.IndexByte(b[at:], c)
			if next < 0 {
				break
			}
			at += next
		}
	}
}

// appendEscaped writes JSON text as the inside of a JSON string. It has no control
// characters but space between tokens.
func appendEscaped(dst, b []byte) []byte {
	from, i := 0, 0
	for {
		for i+8 <= len(b) && toEscape(binary.LittleEndian.Uint64(b[i:])) == 0 {
			i += 8
		}
		for i < len(b) && b[i] >= 0x20 && b[i] != '"' && b[i] != '\\' {
			i++
			if i+8 <= len(b) && toEscape(binary.LittleEndian.Uint64(b[i:])) == 0 {
				break
			}
		}
		if i < len(b) && b[i] >= 0x20 && b[i] != '"' && b[i] != '\\' {
			continue
		}
		dst = append(dst, b[from:i]...)
		if i >= len(b) {
			return dst
		}
		switch c := b[i]; c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, '\\', 'n')
		case '\r':
			dst = append(dst, '\\', 'r')
		case '\t':
			dst = append(dst, '\\', 't')
		default:
			const hex = "0123456789abcdef"
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
		i++
		from = i
	}
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// toEscape has a high bit set where a byte of x is a control character, a quote or a
// backslash. It may claim too much above such a byte, never too little.
func toEscape(x uint64) uint64 {
	quote := x ^ ones*'"'
	slash := x ^ ones*'\\'
	return ((x-ones*0x20)&^x | (quote-ones)&^quote | (slash-ones)&^slash) & highs
}

// Dechunker puts the lines of the stdio framing together again. The zero value is
// ready.
type Dechunker struct {
	buf   []byte
	total int
	lines int
	open  bool
	own   bool
}

// promised is how much of a promised size is believed before it comes.
const promised = 2 << 20

// Line takes one line, without or with its end, and returns a message when one is
// complete: a part of line, or the caller's own when [Dechunker.Own] says so. Nil with a
// nil error means that there is none yet, or that the line is none of the protocol's: a
// worker prints other things too. An error ends the connection: ErrTooLarge,
// ErrFragments or ErrChunk.
func (d *Dechunker) Line(line []byte) ([]byte, error) {
	d.own = false
	if d.open {
		return d.part(line)
	}
	line = bytes.TrimSpace(line)
	if len(line) < 2 || line[0] != '{' || line[len(line)-1] != '}' {
		return nil, nil
	}
	if len(line) > MaxMessage {
		return nil, ErrTooLarge
	}
	// Only a control line holds one of these words as the type; most lines hold none.
	if !bytes.Contains(line, []byte(`"chunk_`)) {
		return line, nil
	}
	typ, total, _, _, ok := control(line)
	if !ok {
		return line, nil
	}
	switch typ {
	case chunkStart:
		if total < 0 {
			return nil, ErrChunk
		}
		if total > MaxMessage {
			return nil, ErrTooLarge
		}
		d.open, d.total, d.lines, d.buf = true, int(total), 0, make([]byte, 0, min(total, promised))
		return nil, nil
	case chunkData, chunkEnd:
		return nil, nil // left over from nothing: dropped
	}
	return line, nil
}

// Idle reports whether no message is half received.
func (d *Dechunker) Idle() bool { return !d.open }

// Own reports whether the message that Line returned last is the caller's to keep.
func (d *Dechunker) Own() bool { return d.own }

func (d *Dechunker) part(line []byte) ([]byte, error) {
	if d.lines++; d.lines > MaxFragments {
		return nil, ErrFragments
	}
	line = bytes.TrimSpace(line)
	if len(line) < 2 || line[0] != '{' || line[len(line)-1] != '}' {
		return nil, nil
	}
	typ, _, data, offset, ok := control(line)
	if !ok {
		return nil, nil
	}
	switch typ {
	case chunkData:
		if offset != int64(len(d.buf)) {
			return nil, ErrChunk
		}
		if need := len(d.buf) + len(data); need > cap(d.buf) && cap(d.buf) < d.total {
			d.buf = append(make([]byte, 0, min(d.total, max(need, 2*cap(d.buf)))), d.buf...)
		}
		var good bool
		if d.buf, good = appendUnquoted(d.buf, data); !good || len(d.buf) > d.total {
			return nil, ErrChunk
		}
	case chunkEnd:
		d.open = false
		msg := d.buf
		if d.buf = nil; len(msg) != d.total {
			return nil, ErrChunk
		}
		d.own = true
		return msg, nil
	case chunkStart:
		return nil, ErrChunk
	}
	return nil, nil
}

type lineType uint8

const (
	chunkNone lineType = iota
	chunkStart
	chunkData
	chunkEnd
)

// control reads what a control line holds. Not ok: it is not JSON. A missing number is
// -1.
func control(line []byte) (typ lineType, total int64, data []byte, offset int64, ok bool) {
	total, offset = -1, -1
	o := jsonscan.Open(line, 0, true)
	for {
		quoted, value, _, more := o.Next()
		if !more {
			break
		}
		switch string(jsonscan.Name(quoted)) {
		case "type":
			switch string(value) {
			case `"chunk_start"`:
				typ = chunkStart
			case `"chunk_data"`:
				typ = chunkData
			case `"chunk_end"`:
				typ = chunkEnd
			default:
				typ = chunkNone
			}
		case "total_size":
			if n, good := strictInt(value); good {
				total = n
			}
		case "offset":
			if n, good := strictInt(value); good {
				offset = n
			}
		case "data":
			data = value
		}
	}
	return typ, total, data, offset, o.Err() == nil
}

// appendUnquoted adds the text of a checked JSON string to dst. It refuses other values
// and halves of surrogate pairs: a message is UTF-8.
func appendUnquoted(dst, raw []byte) ([]byte, bool) {
	if len(raw) < 2 || raw[0] != '"' {
		return dst, false
	}
	b := raw[1 : len(raw)-1]
	for {
		at := bytes.IndexByte(b, '\\')
		if at < 0 {
			return append(dst, b...), true
		}
		dst = append(dst, b[:at]...)
		b = b[at:]
		n := 2
		switch c := b[1]; c {
		case '"', '\\', '/':
			dst = append(dst, c)
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			n = 6
			r := jsonscan.Hex4(b[2:])
			if r >= 0xD800 && r <= 0xDFFF {
				if r >= 0xDC00 || len(b) < 12 || b[6] != '\\' || b[7] != 'u' {
					return dst, false
				}
				low := jsonscan.Hex4(b[8:])
				if low < 0xDC00 || low > 0xDFFF {
					return dst, false
				}
				r, n = (r-0xD800)<<10|(low-0xDC00)+0x10000, 12
			}
			dst = utf8.AppendRune(dst, r)
		}
		b = b[n:]
	}
}
