package jsonscan

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// Name returns a member's name of [Object.Next] without quotes; escapes are resolved.
func Name(quoted []byte) []byte {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return quoted[1 : len(quoted)-1]
	}
	s, _ := Unquote(quoted)
	return []byte(s)
}

// Unquote returns the text of a checked JSON value, false if it is not a string. Half a
// surrogate pair becomes U+FFFD; see [LoneSurrogate].
func Unquote(raw []byte) (string, bool) {
	n := len(raw)
	if n < 2 || raw[0] != '"' {
		return "", false
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : n-1]), true
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return "", false
	}
	return s, true
}

// LoneSurrogate reports whether a checked JSON string has an escape that is half a
// surrogate pair: it is no text.
func LoneSurrogate(raw []byte) bool {
	i := bytes.IndexByte(raw, '\\')
	if i < 0 {
		return false
	}
	for ; i < len(raw)-1; i++ {
		if raw[i] != '\\' {
			continue
		}
		if raw[i+1] != 'u' {
			i++
			continue
		}
		switch r := Hex4(raw[i+2:]); {
		case r >= 0xD800 && r < 0xDC00:
			if i+11 >= len(raw) || raw[i+6] != '\\' || raw[i+7] != 'u' {
				return true
			}
			if low := Hex4(raw[i+8:]); low < 0xDC00 || low > 0xDFFF {
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

// Hex4 reads the four digits of a \u escape that was checked.
func Hex4(b []byte) rune {
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

// AppendString writes s to dst as a JSON string. Bytes that are not UTF-8 become U+FFFD.
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
