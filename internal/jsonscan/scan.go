// Package jsonscan checks JSON and finds its parts, building nothing: what the two
// wire protocols do with every message before they pass its parts on as they came.
package jsonscan

import (
	"encoding/binary"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// MaxDepth is how deep arrays and objects may nest. It is ours: a Python peer's
// decoder fails near 1000 and takes its connection with it.
const MaxDepth = 512

// What can be wrong with the bytes of a message.
var (
	// ErrSyntax: not JSON as RFC 8259 has it, in UTF-8 (half a surrogate pair may
	// stand as an escape), plus Python's words if they are asked for.
	ErrSyntax error = errdefs.New(errdefs.Invalid, "the message is not JSON in UTF-8")
	// ErrTooDeep: arrays and objects nested deeper than MaxDepth.
	ErrTooDeep error = errdefs.New(errdefs.Exhausted, "the message nests deeper than %d levels", MaxDepth)
	// ErrNotObject: JSON, but no object where one must be.
	ErrNotObject error = errdefs.New(errdefs.Invalid, "the value is not an object")
)

// Scanner walks over JSON and checks it. Its stack and its memory are constant,
// however long and deep the bytes are. After a method returned false, only Err is to
// be called.
type Scanner struct {
	B      []byte // what is scanned; never written to
	I      int    // where the next method begins, in bytes
	Outer  int    // levels around what Value scans, which count toward MaxDepth
	Python bool   // Value takes NaN, Infinity and -Infinity, which Python writes and reads
	deep   bool
}

// Err is why a method returned false: ErrTooDeep or ErrSyntax.
func (s *Scanner) Err() error {
	if s.deep {
		return ErrTooDeep
	}
	return ErrSyntax
}

// Space passes over the space that JSON allows between its parts.
func (s *Scanner) Space() {
	for s.I < len(s.B) {
		switch s.B[s.I] {
		case ' ', '\t', '\n', '\r':
			s.I++
		default:
			return
		}
	}
}

// End passes over space and reports whether nothing else is left.
func (s *Scanner) End() bool {
	s.Space()
	return s.I == len(s.B)
}

// Value passes over one value and the space before it.
func (s *Scanner) Value() bool {
	var object [MaxDepth / 64]uint64 // bit set: the level is an object
	depth := 0
	for {
		s.Space()
		if s.I >= len(s.B) {
			return false
		}
		switch c := s.B[s.I]; c {
		case '"':
			if !s.Text() {
				return false
			}
		case '{', '[':
			if depth+s.Outer >= MaxDepth {
				s.deep = true
				return false
			}
			s.I++
			bit := uint64(1) << (depth % 64)
			if c == '{' {
				object[depth/64] |= bit
			} else {
				object[depth/64] &^= bit
			}
			depth++
			s.Space()
			if s.I >= len(s.B) {
				return false
			}
			if s.B[s.I] == c+2 { // '}' and ']' stand two after '{' and '['
				s.I++
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
			if !s.Python || !s.word("NaN") {
				return false
			}
		case 'I':
			if !s.Python || !s.word("Infinity") {
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
			s.Space()
			if s.I >= len(s.B) {
				return false
			}
			c := s.B[s.I]
			s.I++
			inObject := object[(depth-1)/64]&(1<<((depth-1)%64)) != 0
			if c == ',' {
				if inObject {
					s.Space()
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
func (s *Scanner) key() bool {
	if !s.Text() {
		return false
	}
	s.Space()
	if s.I >= len(s.B) || s.B[s.I] != ':' {
		return false
	}
	s.I++
	return true
}

func (s *Scanner) word(w string) bool {
	if len(s.B)-s.I < len(w) || string(s.B[s.I:s.I+len(w)]) != w {
		return false
	}
	s.I += len(w)
	return true
}

func (s *Scanner) number() bool {
	b, i := s.B, s.I
	if b[i] == '-' {
		i++
		if s.Python && i < len(b) && b[i] == 'I' {
			s.I = i
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
	s.I = i
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

// Text passes over a string, which must begin here. Most bytes of a large message are
// in strings, so it looks at eight at a time.
func (s *Scanner) Text() bool {
	b, i := s.B, s.I
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
			s.I = i + 1
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
