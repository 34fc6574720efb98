package relaywire

import (
	"encoding/json"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

// What can be wrong with a message that is JSON.
var (
	// ErrNotFrame: it is not an object with a string "type".
	ErrNotFrame error = errdefs.New(errdefs.Invalid, "the message is JSON, but not an object with a type")
	// ErrTooLarge: more bytes than the limit.
	ErrTooLarge error = errdefs.New(errdefs.Exhausted, "the message is larger than the limit")
)

// Decode reads one message of at most limit bytes (0: any). The whole of it is
// checked to be JSON, of which NaN and Infinity, as Python writes them, are no part;
// of two fields with the same name the last counts, as in Python. The errors are
// ErrTooLarge, ErrNotFrame, jsonscan.ErrSyntax and jsonscan.ErrTooDeep.
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
	// jsonscan.Object would do, and take a tenth longer for the frames of a few bytes
	// that most events are.
	s := jsonscan.Scanner{B: data}
	s.Space()
	if s.I >= len(s.B) {
		return jsonscan.ErrSyntax
	}
	if s.B[s.I] != '{' {
		if !s.Value() || !s.End() {
			return s.Err()
		}
		return ErrNotFrame
	}
	s.I++
	s.Outer = 1
	for first := true; ; first = false {
		s.Space()
		if s.I < len(s.B) && s.B[s.I] == '}' && first {
			s.I++
			break
		}
		key := s.I
		if !s.Text() {
			return f.fail(&s)
		}
		name := s.B[key:s.I]
		s.Space()
		if s.I >= len(s.B) || s.B[s.I] != ':' {
			return f.fail(&s)
		}
		s.I++
		s.Space()
		at := s.I
		if !s.Value() {
			return f.fail(&s)
		}
		f.set(name, s.B[at:s.I], last)
		s.Space()
		if s.I >= len(s.B) {
			return f.fail(&s)
		}
		c := s.B[s.I]
		s.I++
		if c == '}' {
			break
		}
		if c != ',' {
			return f.fail(&s)
		}
	}
	if !s.End() {
		return f.fail(&s)
	}
	if f.Type == "" {
		*f = Frame{}
		return ErrNotFrame
	}
	return nil
}

func (f *Frame) fail(s *jsonscan.Scanner) error {
	*f = Frame{}
	return s.Err()
}

// set takes one field; name is still quoted.
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
		if plain := jsonscan.Name(name); len(plain) != len(name)-2 {
			switch string(plain) {
			case "type", "job_id", "request_id", "event", "payload", "daemon_id", "protocol", "token", "metadata":
				f.set([]byte(`"`+string(plain)+`"`), raw, last)
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

// unquote returns the text of a JSON string. It refuses other values, and strings with
// half a surrogate pair, which are no text.
func unquote(raw []byte) (string, bool) {
	if jsonscan.LoneSurrogate(raw) {
		return "", false
	}
	return jsonscan.Unquote(raw)
}

// Peek reads what it can of a message of which only the beginning is there: the
// fields that stand, whole, before the cut. It is for messages that are too large, to
// tell whom they were about; what it finds was not checked to be in a JSON message.
func Peek(prefix []byte) Frame {
	var f Frame
	for o := jsonscan.Open(prefix, 0, false); ; {
		name, raw, _, ok := o.Next()
		if !ok {
			return f
		}
		f.set(name, raw, "")
	}
}

// DecodePayload checks that data is one JSON value and returns it without the space
// around it.
func DecodePayload(data []byte) (json.RawMessage, error) {
	s := jsonscan.Scanner{B: data, Outer: 1}
	s.Space()
	at := s.I
	if !s.Value() {
		return nil, s.Err()
	}
	to := s.I
	if !s.End() {
		return nil, jsonscan.ErrSyntax
	}
	return data[at:to], nil
}
