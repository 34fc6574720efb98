package relaywire

import (
	"encoding/json"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// What can be wrong with the bytes of a message.
var (
	// ErrSyntax: not JSON as RFC 8259 has it, in UTF-8. NaN and Infinity, which
	// Python writes and reads, are not JSON.
	ErrSyntax error = errdefs.New(errdefs.Invalid, "the message is not JSON in UTF-8")
	// ErrNotFrame: JSON, but not an object with a string "type".
	ErrNotFrame error = errdefs.New(errdefs.Invalid, "the message is JSON, but not an object with a type")
	// ErrTooLarge: more bytes than the limit.
	ErrTooLarge error = errdefs.New(errdefs.Exhausted, "the message is larger than the limit")
	// ErrTooDeep: arrays and objects nested deeper than MaxDepth.
	ErrTooDeep error = errdefs.New(errdefs.Exhausted, "the message nests deeper than 512 levels")
)

// Decode reads one message of at most limit bytes (0: any). The whole of it is
// checked to be JSON; of two fields with the same name the last counts, as in
// Python. The errors are the four above.
func Decode(data []byte, limit int64) (Frame, error) {
	var f Frame
	err := f.Decode(data, limit)
	return f, err
}

// Decode is the package's Decode into a frame that is used again: a job id equal
// to the last one is not allocated anew. After an error the frame is empty.
func (f *Frame) Decode(data []byte, limit int64) error {
	last := f.JobID
	*f = Frame{}
	if limit > 0 && int64(len(data)) > limit {
		return ErrTooLarge
	}
	s := scanner{b: data}
	s.space()
	if s.i >= len(s.b) {
		return ErrSyntax
	}
	if s.b[s.i] != '{' {
		if !s.value() || !s.end() {
			return s.failure()
		}
		return ErrNotFrame
	}
	s.i++
	s.outer = 1
	for first := true; ; first = false {
		s.space()
		if s.i < len(s.b) && s.b[s.i] == '}' && first {
			s.i++
			break
		}
		key := s.i
		if !s.text() {
			return f.fail(&s)
		}
		name := s.b[key:s.i]
		s.space()
		if s.i >= len(s.b) || s.b[s.i] != ':' {
			return f.fail(&s)
		}
		s.i++
		s.space()
		at := s.i
		if !s.value() {
			return f.fail(&s)
		}
		f.set(name, s.b[at:s.i], last)
		s.space()
		if s.i >= len(s.b) {
			return f.fail(&s)
		}
		c := s.b[s.i]
		s.i++
		if c == '}' {
			break
		}
		if c != ',' {
			return f.fail(&s)
		}
	}
	if !s.end() {
		return f.fail(&s)
	}
	if f.Type == "" {
		*f = Frame{}
		return ErrNotFrame
	}
	return nil
}

func (f *Frame) fail(s *scanner) error {
	*f = Frame{}
	return s.failure()
}

// set takes one field. name is still quoted.
func (f *Frame) set(name, raw []byte, last string) {
	switch string(name) {
	case `"type"`:
		f.Type = typeOf(raw)
	case `"job_id"`:
		if n := len(raw); n == len(last)+2 && n > 2 && string(raw[1:n-1]) == last {
			f.JobID = last
		} else {
			f.JobID = bounded(raw)
		}
	case `"request_id"`:
		f.RequestID = bounded(raw)
	case `"event"`:
		f.Event = raw
	case `"payload"`:
		f.Payload = raw
	case `"daemon_id"`:
		f.DaemonID, _ = unquote(raw)
	case `"protocol"`:
		f.Protocol, _ = unquote(raw)
	case `"token"`:
		f.Token, _ = unquote(raw)
	case `"metadata"`:
		f.Metadata = raw
	default:
		// A name may be written with escapes. Rare, so it pays for itself here.
		if plain, ok := unquote(name); ok && len(plain) != len(name)-2 {
			switch plain {
			case "type", "job_id", "request_id", "event", "payload", "daemon_id", "protocol", "token", "metadata":
				f.set([]byte(`"`+plain+`"`), raw, last)
			}
		}
	}
}

// typeOf maps the known types to their constants without allocating.
func typeOf(raw []byte) Type {
	switch string(raw) {
	case `"run.event"`:
		return Event
	case `"run.finished"`:
		return Finished
	case `"mcp.request"`:
		return MCPRequest
	case `"mcp.response"`:
		return MCPResponse
	case `"daemon.ping"`:
		return Ping
	}
	s := bounded(raw)
	return Type(s)
}

// bounded unquotes an id; one that is longer than any we gave is no id.
func bounded(raw []byte) string {
	if len(raw) > 6*MaxIDBytes+2 {
		return ""
	}
	s, ok := unquote(raw)
	if !ok || len(s) > MaxIDBytes {
		return ""
	}
	return s
}

// unquote returns the text of a valid JSON string. It refuses other values, and
// strings with half a surrogate pair, which are no text.
func unquote(raw []byte) (string, bool) {
	n := len(raw)
	if n < 2 || raw[0] != '"' {
		return "", false
	}
	plain := true
	for i := 1; i < n-1; i++ {
		if raw[i] == '\\' {
			plain = false
			if raw[i+1] == 'u' {
				r := hex4(raw[i+2:])
				switch {
				case r >= 0xD800 && r < 0xDC00:
					if i+11 >= n || raw[i+6] != '\\' || raw[i+7] != 'u' {
						return "", false
					}
					if low := hex4(raw[i+8:]); low < 0xDC00 || low > 0xDFFF {
						return "", false
					}
					i += 11
				case r >= 0xDC00 && r <= 0xDFFF:
					return "", false
				default:
					i += 5
				}
				continue
			}
			i++
		}
	}
	if plain {
		return string(raw[1 : n-1]), true
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return "", false
	}
	return s, true
}

func hex4(b []byte) rune {
	var r rune
	for _, c := range b[:4] {
		r = r<<4 | rune(hexDigit[c]-1)
	}
	return r
}

// hexDigit holds 1 + the value of a hexadecimal digit, 0 for other bytes.
var hexDigit = func() (t [256]uint8) {
	for i := range uint8(10) {
		t['0'+i] = i + 1
	}
	for i := range uint8(6) {
		t['a'+i], t['A'+i] = i+11, i+11
	}
	return t
}()

// Peek reads what it can of a message of which only the beginning is there: the
// fields that stand, whole, before the cut. It is for messages that are too large, to
// tell whom they were about; what it finds was not checked to be in a JSON message.
func Peek(prefix []byte) Frame {
	var f Frame
	s := scanner{b: prefix, outer: 1}
	s.space()
	for sep := byte('{'); s.i < len(s.b) && s.b[s.i] == sep; sep = ',' {
		s.i++
		s.space()
		key := s.i
		if !s.text() {
			break
		}
		name := s.b[key:s.i]
		s.space()
		if s.i >= len(s.b) || s.b[s.i] != ':' {
			break
		}
		s.i++
		s.space()
		at := s.i
		if !s.value() {
			break
		}
		f.set(name, s.b[at:s.i], "")
		s.space()
	}
	return f
}

// DecodePayload checks that data is one JSON value and returns it without the space
// around it.
func DecodePayload(data []byte) (json.RawMessage, error) {
	s := scanner{b: data, outer: 1}
	s.space()
	at := s.i
	if !s.value() {
		return nil, s.failure()
	}
	to := s.i
	if !s.end() {
		return nil, ErrSyntax
	}
	return data[at:to], nil
}
