package pluginwire

import (
	"encoding/binary"
	"encoding/json"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// What can be wrong with the bytes of a message.
var (
	// ErrSyntax: not JSON as Python reads and writes it: RFC 8259 in UTF-8, plus NaN,
	// Infinity and -Infinity; half a surrogate pair may stand as an escape.
	ErrSyntax error = errdefs.New(errdefs.Invalid, "the message is not JSON in UTF-8")
	// ErrTooDeep: arrays and objects nested deeper than MaxDepth.
	ErrTooDeep error = errdefs.New(errdefs.Exhausted, "the message nests deeper than %d levels", MaxDepth)
	// ErrTooLarge: more bytes than MaxMessage.
	ErrTooLarge error = errdefs.New(errdefs.Exhausted, "the message is larger than %d bytes", MaxMessage)
	// ErrNotObject: JSON, but no object where one must be.
	ErrNotObject error = errdefs.New(errdefs.Invalid, "the value is not an object")
)

// scanner walks over JSON and checks it, without building anything.
type scanner struct {
	b     []byte
	i     int
	outer int // levels around what value scans
	deep  bool
}

func (s *scanner) failure() error {
	if s.deep {
		return ErrTooDeep
	}
	return ErrSyntax
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return
		}
	}
}

// end reports whether only space is left.
func (s *scanner) end() bool {
	s.space()
	return s.i == len(s.b)
}

// value scans one value that begins at i, however deep, with a constant stack.
func (s *scanner) value() bool {
	var object [MaxDepth / 64]uint64 // bit set: the level is an object
	depth := 0
	for {
		s.space()
		if s.i >= len(s.b) {
			return false
		}
		switch c := s.b[s.i]; c {
		case '"':
			if !s.text() {
				return false
			}
		case '{', '[':
			if depth+s.outer >= MaxDepth {
				s.deep = true
				return false
			}
			s.i++
			bit := uint64(1) << (depth % 64)
			if c == '{' {
				object[depth/64] |= bit
			} else {
				object[depth/64] &^= bit
			}
			depth++
			s.space()
			if s.i >= len(s.b) {
				return false
			}
			if s.b[s.i] == c+2 { // '}' and ']' stand two after '{' and '['
				s.i++
				depth--
				break
			}
			if c == '{' && !s.key() {
				return false
			}
			continue
		case 't':
			if !s.word("true") {
				return false
			}
		case 'f':
			if !s.word("false") {
				return false
			}
		case 'n':
			if !s.word("null") {
				return false
			}
		case 'N':
			if !s.word("NaN") {
				return false
			}
		case 'I':
			if !s.word("Infinity") {
				return false
			}
		default:
			if !s.number() {
				return false
			}
		}
		// A value ended here: close levels until another value must follow.
		for {
			if depth == 0 {
				return true
			}
			s.space()
			if s.i >= len(s.b) {
				return false
			}
			c := s.b[s.i]
			s.i++
			inObject := object[(depth-1)/64]&(1<<((depth-1)%64)) != 0
			if c == ',' {
				if inObject {
					s.space()
					if !s.key() {
						return false
					}
				}
				break
			}
			if inObject && c == '}' || !inObject && c == ']' {
				depth--
				continue
			}
			return false
		}
	}
}

// key scans a member's name and its colon.
func (s *scanner) key() bool {
	if !s.text() {
		return false
	}
	s.space()
	if s.i >= len(s.b) || s.b[s.i] != ':' {
		return false
	}
	s.i++
	return true
}

func (s *scanner) word(w string) bool {
	if len(s.b)-s.i < len(w) || string(s.b[s.i:s.i+len(w)]) != w {
		return false
	}
	s.i += len(w)
	return true
}

func (s *scanner) number() bool {
	b, i := s.b, s.i
	if b[i] == '-' {
		i++
		if i < len(b) && b[i] == 'I' {
			s.i = i
			return s.word("Infinity")
		}
	}
	digits := func() bool {
		at := i
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
		return i > at
	}
	if i < len(b) && b[i] == '0' {
		i++
	} else if !digits() {
		return false
	}
	if i < len(b) && b[i] == '.' {
		i++
		if !digits() {
			return false
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		if !digits() {
			return false
		}
	}
	s.i = i
	return true
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// special has a high bit set where a byte of x is not ASCII, a control character, a
// quote or a backslash. It may claim too much above such a byte, never too little.
func special(x uint64) uint64 {
	quote := x ^ ones*'"'
	slash := x ^ ones*'\\'
	return (x | (x - ones*0x20) | (quote - ones) | (slash - ones)) & highs
}

// text scans a string that begins at i. Most bytes of a large message are in
// strings, so it looks at eight at a time.
func (s *scanner) text() bool {
	b, i := s.b, s.i
	if i >= len(b) || b[i] != '"' {
		return false
	}
	i++
	for {
		for i+8 <= len(b) && special(binary.LittleEndian.Uint64(b[i:])) == 0 {
			i += 8
		}
		if i >= len(b) {
			return false
		}
		switch c := b[i]; {
		case c == '"':
			s.i = i + 1
			return true
		case c < 0x20:
			return false
		case c == '\\':
			if i+1 >= len(b) {
				return false
			}
			switch b[i+1] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i += 2
			case 'u':
				if i+6 > len(b) || !isHex(b[i+2]) || !isHex(b[i+3]) || !isHex(b[i+4]) || !isHex(b[i+5]) {
					return false
				}
				i += 6
			default:
				return false
			}
		case c < utf8.RuneSelf:
			i++
		default:
			r, n := utf8.DecodeRune(b[i:])
			if r == utf8.RuneError && n == 1 {
				return false
			}
			i += n
		}
	}
}

func isHex(c byte) bool {
	return c-'0' < 10 || c|0x20 >= 'a' && c|0x20 <= 'f'
}

// object walks over the members of one JSON object. Names are still quoted.
type object struct {
	scanner
	started bool
	err     error
}

// open begins the walk over b, which must hold an object and nothing else.
func open(b []byte, outer int) object {
	o := object{scanner: scanner{b: b, outer: outer}}
	o.space()
	if o.i >= len(b) || b[o.i] != '{' {
		if o.i >= len(b) || !o.value() || !o.end() {
			o.err = o.failure()
		} else {
			o.err = ErrNotObject
		}
		return o
	}
	if outer >= MaxDepth {
		o.err = ErrTooDeep
	}
	o.outer++
	o.i++
	return o
}

// next returns the next member, or false at the end or at an error, which err holds.
// name and value are parts of b; at is where the name begins.
func (o *object) next() (name, value []byte, at int, ok bool) {
	if o.err != nil {
		return nil, nil, 0, false
	}
	o.space()
	if o.i >= len(o.b) {
		return nil, nil, 0, o.fail()
	}
	switch c := o.b[o.i]; {
	case c == '}':
		o.i++
		if !o.end() {
			o.err = ErrSyntax
		}
		return nil, nil, 0, false
	case !o.started:
		o.started = true
	case c == ',':
		o.i++
		o.space()
	default:
		return nil, nil, 0, o.fail()
	}
	at = o.i
	if !o.text() {
		return nil, nil, 0, o.fail()
	}
	name = o.b[at:o.i]
	o.space()
	if o.i >= len(o.b) || o.b[o.i] != ':' {
		return nil, nil, 0, o.fail()
	}
	o.i++
	o.space()
	from := o.i
	if !o.value() {
		return nil, nil, 0, o.fail()
	}
	return name, o.b[from:o.i], at, true
}

func (o *object) fail() bool {
	o.err = o.failure()
	return false
}

// plainName returns a member's name without quotes; escapes are resolved.
func plainName(quoted []byte) []byte {
	inner := quoted[1 : len(quoted)-1]
	for _, c := range inner {
		if c == '\\' {
			s, _ := unquote(quoted)
			return []byte(s)
		}
	}
	return inner
}

// unquote returns the text of a checked JSON value that is a string; half a surrogate
// pair becomes U+FFFD, and whole tells that there was none.
func unquote(raw []byte) (text string, ok bool) {
	n := len(raw)
	if n < 2 || raw[0] != '"' {
		return "", false
	}
	for _, c := range raw {
		if c == '\\' {
			var s string
			if json.Unmarshal(raw, &s) != nil {
				return "", false
			}
			return s, true
		}
	}
	return string(raw[1 : n-1]), true
}

// loneSurrogate reports whether a checked JSON string has an escape that is half a
// surrogate pair: it is no text.
func loneSurrogate(raw []byte) bool {
	for i := 1; i < len(raw)-1; i++ {
		if raw[i] != '\\' {
			continue
		}
		if raw[i+1] != 'u' {
			i++
			continue
		}
		switch r := hex4(raw[i+2:]); {
		case r >= 0xD800 && r < 0xDC00:
			if i+11 >= len(raw) || raw[i+6] != '\\' || raw[i+7] != 'u' {
				return true
			}
			if low := hex4(raw[i+8:]); low < 0xDC00 || low > 0xDFFF {
				return true
			}
			i += 11
		case r >= 0xDC00 && r <= 0xDFFF:
			return true
		default:
			i += 5
		}
	}
	return false
}

// hex4 reads four checked hexadecimal digits.
func hex4(b []byte) rune {
	var r rune
	for _, c := range b[:4] {
		if c <= '9' {
			c -= '0'
		} else {
			c = c | 0x20 - 'a' + 10
		}
		r = r<<4 | rune(c)
	}
	return r
}

// AppendString writes s as a JSON string. Bytes that are not UTF-8 become U+FFFD.
func AppendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= 0x20 && c < utf8.RuneSelf && c != '"' && c != '\\' {
			i++
			continue
		}
		if c >= utf8.RuneSelf {
			r, n := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && n == 1 {
				dst = append(append(dst, s[from:i]...), "\uFFFD"...)
				from = i + n
			}
			i += n
			continue
		}
		dst = append(dst, s[from:i]...)
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, '\\', 'n')
		default:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
		i++
		from = i
	}
	return append(append(dst, s[from:]...), '"')
}
