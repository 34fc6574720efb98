package pluginwire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

// Kind says what a message is.
type Kind int

// The kinds of message.
const (
	KindNone     Kind = iota // to be ignored: no envelope, or a response that is malformed
	KindRequest              // has an action
	KindResponse             // has a code, whatever else it has
)

// The words of chunk_status.
const (
	ChunkContinue = "continue"
	ChunkEnd      = "end"
)

// Request is one inbound request. Its raw parts are slices of what was decoded.
type Request struct {
	Seq         json.RawMessage // to be echoed as received; -1 if there was none that can be
	ID          int64           // the number in Seq
	Action      string
	Data        json.RawMessage // an object
	Context     json.RawMessage // nil: none. Decode it with [DecodeContext]
	FlowControl bool            // stream_flow_control: 1
	// Problem says what is wrong with the envelope, as the text of the error answer;
	// empty: nothing. With a problem, only Seq is to be used.
	Problem string
}

// Response is one response, in or out.
type Response struct {
	Seq         json.RawMessage
	ID          int64 // the number in Seq, of a decoded response
	Code        int   // 0 is success
	Message     string
	Data        json.RawMessage // an object; empty is sent as {}
	Chunk       string          // ChunkContinue, which empty means too, or ChunkEnd
	StreamIndex int             // 0: none
}

// Message is what one decoded message is. It may be used again for the next.
type Message struct {
	Kind     Kind
	Request  Request
	Response Response
}

// OutRequest is a request to be sent.
type OutRequest struct {
	Seq         int64
	Action      string
	Data        json.RawMessage // a checked JSON object; empty is sent as {}
	Context     Context         // the zero Context is left out
	FlowControl bool
}

var minusOne = json.RawMessage("-1")

// ErrTooLarge: a message has more bytes than MaxMessage.
var ErrTooLarge error = errdefs.New(errdefs.Exhausted, "the message is larger than %d bytes", MaxMessage)

// Decode reads one message into m. The whole of it is checked to be JSON as Python
// has it, so that its raw parts may be sent on. Of two members with one name the last
// counts. An error, ErrTooLarge or one of jsonscan, means that the bytes are to be
// ignored, and m is KindNone.
func (m *Message) Decode(b []byte) error {
	*m = Message{}
	if len(b) > MaxMessage {
		return ErrTooLarge
	}
	var seq, action, data, context, flow, code, message, chunk, index []byte
	o := jsonscan.Open(b, 0, true)
	for {
		quoted, value, _, ok := o.Next()
		if !ok {
			break
		}
		switch string(jsonscan.Name(quoted)) {
		case "seq_id":
			seq = value
		case "action":
			action = value
		case "data":
			data = value
		case "context":
			context = value
		case "stream_flow_control":
			flow = value
		case "code":
			code = value
		case "message":
			message = value
		case "chunk_status":
			chunk = value
		case "stream_index":
			index = value
		}
	}
	if o.Err() != nil {
		return o.Err()
	}
	switch {
	case code != nil:
		m.Response.decode(seq, code, message, data, chunk, index)
		if m.Response.Data != nil {
			m.Kind = KindResponse
		}
	case action != nil:
		m.Kind = KindRequest
		m.Request.decode(seq, action, data, context, flow)
	}
	return nil
}

func (r *Request) decode(seq, action, data, context, flow []byte) {
	var problems []string
	r.Seq = minusOne
	id, ok := laxInt(seq)
	if ok {
		r.ID, r.Seq = id, seq
	} else {
		if seq != nil && len(seq) <= 32 && isInteger(seq) {
			r.Seq = seq
		}
		problems = append(problems, required("seq_id", "an integer", seq))
	}
	if r.Action, ok = nameOf(action); !ok {
		problems = append(problems, required("action", "a string", action))
	}
	if len(data) == 0 || data[0] != '{' {
		problems = append(problems, required("data", "an object", data))
	}
	r.Data = data
	if !isNull(context) {
		if context[0] != '{' {
			problems = append(problems, required("context", "an object", context))
		}
		r.Context = context
	}
	if !isNull(flow) {
		if r.FlowControl = string(flow) == "1"; !r.FlowControl {
			problems = append(problems, "stream_flow_control: it must be 1")
		}
	}
	if problems != nil {
		r.Problem = ErrorMessage(ClassValidation, problemText(problems, "ActionRequest"))
	}
}

// decode leaves Data nil when the response is malformed.
func (r *Response) decode(seq, code, message, data, chunk, index []byte) {
	id, ok := laxInt(seq)
	if !ok {
		return
	}
	c, ok := laxInt(code)
	if !ok {
		return
	}
	text, ok := jsonscan.Unquote(message)
	if !ok {
		return
	}
	switch {
	case isNull(chunk), string(chunk) == `"continue"`:
		r.Chunk = ChunkContinue
	case string(chunk) == `"end"`:
		r.Chunk = ChunkEnd
	default:
		return
	}
	if !isNull(index) {
		n, ok := laxInt(index)
		if !ok || n < 1 || n > math.MaxInt32 {
			return
		}
		r.StreamIndex = int(n)
	}
	if len(data) == 0 || data[0] != '{' {
		return
	}
	r.Seq, r.ID, r.Message, r.Data = seq, id, text, data
	if c != 0 {
		r.Code = 1
	}
}

// nameOf reads an action's name; those of the tables are not allocated.
func nameOf(raw []byte) (string, bool) {
	if n := len(raw); n >= 2 && n <= MaxID && raw[0] == '"' {
		if name, ok := known[string(raw[1:n-1])]; ok {
			return name, true
		}
	}
	if len(raw) > 6*MaxID {
		return "", false
	}
	return jsonscan.Unquote(raw)
}

func isNull(raw []byte) bool { return len(raw) == 0 || raw[0] == 'n' }

// isInteger reports whether a checked value is an integer as Python's decoder makes
// one: digits and a sign.
func isInteger(raw []byte) bool {
	if len(raw) > 0 && raw[0] == '-' {
		raw = raw[1:]
	}
	for _, c := range raw {
		if c-'0' > 9 {
			return false
		}
	}
	return len(raw) > 0
}

// strictInt reads an integer that is neither a text, a truth value nor a fraction.
func strictInt(raw []byte) (int64, bool) {
	if !isInteger(raw) || len(raw) > 20 {
		return 0, false
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return n, err == nil
}

// laxInt reads what the peers' lenient integers take: an integer, a fraction that has
// none, a text of either, a truth value.
func laxInt(raw []byte) (int64, bool) {
	if n, ok := strictInt(raw); ok {
		return n, true
	}
	if len(raw) == 0 || len(raw) > 64 {
		return 0, false
	}
	switch raw[0] {
	case 't':
		return 1, true
	case 'f':
		return 0, true
	case '"':
		s, _ := jsonscan.Unquote(raw)
		s = strings.TrimPrefix(strings.TrimSpace(s), "+")
		if whole, fraction, cut := strings.Cut(s, "."); cut && fraction != "" && strings.Trim(fraction, "0") == "" {
			s = whole
		}
		n, err := strconv.ParseInt(s, 10, 64)
		return n, err == nil
	case 'n', 'N', 'I', '[', '{':
		return 0, false
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
		return 0, false
	}
	return int64(f), true
}

func required(name, what string, raw []byte) string {
	if raw == nil {
		return name + ": the field is required"
	}
	return name + ": it must be " + what
}

func problemText(problems []string, model string) string {
	s := "s"
	if len(problems) == 1 {
		s = ""
	}
	return fmt.Sprintf("%d validation error%s for %s: %s", len(problems), s, model, strings.Join(problems, "; "))
}

// enough is room for an envelope around its data, mostly.
const enough = 600

// AppendRequest writes a request to dst as one JSON object.
func AppendRequest(dst []byte, r *OutRequest) []byte {
	dst = slices.Grow(dst, len(r.Data)+enough)
	dst = append(dst, `{"seq_id":`...)
	dst = strconv.AppendInt(dst, r.Seq, 10)
	dst = append(dst, `,"action":`...)
	dst = jsonscan.AppendString(dst, r.Action)
	dst = appendData(dst, r.Data)
	if !r.Context.IsZero() {
		dst = append(dst, `,"context":`...)
		dst = r.Context.Append(dst)
	}
	if r.FlowControl {
		dst = append(dst, `,"stream_flow_control":1`...)
	}
	return append(dst, '}')
}

// AppendResponse writes a response to dst as one JSON object. Message is empty for
// "success" when Code is 0.
func AppendResponse(dst []byte, r *Response) []byte {
	dst = slices.Grow(dst, len(r.Data)+enough)
	dst = append(dst, `{"seq_id":`...)
	if len(r.Seq) > 0 {
		dst = append(dst, r.Seq...)
	} else {
		dst = append(dst, minusOne...)
	}
	if r.Code == 0 {
		dst = append(dst, `,"code":0,"message":`...)
	} else {
		dst = append(dst, `,"code":1,"message":`...)
	}
	if r.Message == "" && r.Code == 0 {
		dst = append(dst, `"success"`...)
	} else {
		dst = jsonscan.AppendString(dst, r.Message)
	}
	dst = appendData(dst, r.Data)
	if r.Chunk == ChunkEnd {
		dst = append(dst, `,"chunk_status":"end"`...)
	} else {
		dst = append(dst, `,"chunk_status":"continue"`...)
	}
	if r.StreamIndex > 0 {
		dst = append(dst, `,"stream_index":`...)
		dst = strconv.AppendInt(dst, int64(r.StreamIndex), 10)
	}
	return append(dst, '}')
}

func appendData(dst []byte, data json.RawMessage) []byte {
	dst = append(dst, `,"data":`...)
	if data = bytes.TrimSpace(data); len(data) == 0 {
		return append(dst, "{}"...)
	}
	return append(dst, data...)
}
