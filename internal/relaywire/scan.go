package relaywire

import (
	"encoding/binary"
	"unicode/utf8"
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
		// A value begins here, save for space.
		s.space()
		if s.i >= len(s.b) {
			return false
		}
		switch c := s.b[s.i]; {
		case c == '"':
			if !s.text() {
				return false
			}
		case c == '{' || c == '[':
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
		case c == '-' || c >= '0' && c <= '9':
			if !s.number() {
				return false
			}
		case c == 't':
			if !s.word("true") {
				return false
			}
		case c == 'f':
			if !s.word("false") {
				return false
			}
		case c == 'n':
			if !s.word("null") {
				return false
			}
		default:
			return false
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
	digits := func() bool {
		at := i
		for i < len(b) && b[i] >= '0' && b[i] <= '9' {
			i++
		}
		return i > at
	}
	if b[i] == '-' {
		i++
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

// plain has a high bit set where a byte of x is not ASCII, a control character, a
// quote or a backslash. It may claim too much above such a byte, never too little.
func plain(x uint64) uint64 {
	quote := x ^ ones*'"'
	slash := x ^ ones*'\\'
	return (x | (x - ones*0x20) | (quote - ones) | (slash - ones)) & highs
}

// text scans a string that begins at i. Most bytes of a large event are in
// strings, so it looks at eight at a time.
func (s *scanner) text() bool {
	b, i := s.b, s.i
	if i >= len(b) || b[i] != '"' {
		return false
	}
	i++
	for {
		for i+8 <= len(b) && plain(binary.LittleEndian.Uint64(b[i:])) == 0 {
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
				if i+6 > len(b) || hexDigit[b[i+2]] == 0 || hexDigit[b[i+3]] == 0 || hexDigit[b[i+4]] == 0 || hexDigit[b[i+5]] == 0 {
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
