package runprocess

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// payload is the data of an action: exactly the fields that the action knows. Of a
// field that is wrong the first is kept in err.
type payload struct {
	fields map[string]json.RawMessage
	err    error
}

// known are the fields of each action, beside run_id.
func known(action string) ([]string, bool) {
	switch action {
	case pluginwire.ActionOpenRunProcess:
		return []string{"request_id", "target_ref", "argv", "cwd", "env", "stdin", "pty", "limits"}, true
	case pluginwire.ActionWriteRunProcess:
		return []string{"handle", "offset", "data_base64", "eof"}, true
	case pluginwire.ActionReadRunProcess:
		return []string{"handle", "cursor", "max_bytes", "wait_ms"}, true
	case pluginwire.ActionGetRunProcess:
		return []string{"handle", "request_id"}, true
	case pluginwire.ActionCloseRunProcess:
		return []string{"handle", "request_id", "reason", "grace_ms"}, true
	}
	return nil, false
}

func decode(action string, raw json.RawMessage) (*payload, error) {
	names, ok := known(action)
	if !ok {
		return nil, pluginwire.UnknownAction(action)
	}
	p := &payload{}
	if json.Unmarshal(raw, &p.fields) != nil || p.fields == nil {
		return nil, invalid("the payload of %s is not an object", action)
	}
	for name := range p.fields {
		if name != "run_id" && !slices.Contains(names, name) {
			return nil, invalid("the payload of %s has the field %q, which it does not know", action, cut(name)).
				WithNext("it may have run_id, %s", strings.Join(names, ", "))
		}
	}
	return p, nil
}

func (p *payload) fail(format string, args ...any) {
	if p.err == nil {
		p.err = invalid(format, args...)
	}
}

// has reports whether a field is there and not null.
func (p *payload) has(name string) bool {
	v := bytes.TrimSpace(p.fields[name])
	return len(v) > 0 && string(v) != "null"
}

// take reads a field; def where it is not there or null.
func take[T any](p *payload, name, kind string, def T) T {
	if !p.has(name) {
		return def
	}
	out := def
	d := json.NewDecoder(bytes.NewReader(p.fields[name]))
	d.DisallowUnknownFields()
	if err := d.Decode(&out); err != nil {
		if what, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
			p.fail("%s has the field %s, which it does not know", name, cut(what))
		} else if t, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && t.Field != "" {
			p.fail("%s.%s is not %s", name, cut(t.Field), kindOf(t.Type.Kind().String()))
		} else {
			p.fail("%s is not %s", name, kind)
		}
		return def
	}
	return out
}

func kindOf(kind string) string {
	if strings.Contains(kind, "int") {
		return "a whole number within its range"
	}
	return "a " + kind
}

func (p *payload) text(name string, least, most int) string {
	if least > 0 && !p.has(name) {
		p.fail("%s is missing", name)
		return ""
	}
	s := take(p, name, "a text", "")
	if len(s) < least || len(s) > most {
		p.fail("%s has %d bytes, it may have %d to %d", name, len(s), least, most)
	}
	p.whole(name, s)
	return s
}

// whole refuses what stands in the place of bytes that are no Unicode text: what the
// process would get is not what was sent.
func (p *payload) whole(name string, texts ...string) {
	for _, s := range texts {
		if strings.ContainsRune(s, '\uFFFD') {
			p.fail("%s has a character that is not Unicode text", name)
		}
	}
}

func (p *payload) number(name string, def, least, most int64) int64 {
	n := take(p, name, "a whole number", def)
	if n < least || n > most {
		p.fail("%s is %d, it may be %d to %d", name, n, least, most)
	}
	return n
}

func (p *payload) truth(name string) bool { return take(p, name, "true or false", false) }

// data is base64, the way the SDK and RFC 4648 write it.
func (p *payload) data(name string) []byte {
	s := take(p, name, "base64 text", "")
	if len(s) > base64.StdEncoding.EncodedLen(MaxData) {
		p.fail("%s has more than %d bytes", name, MaxData)
		return nil
	}
	b, err := base64.StdEncoding.Strict().DecodeString(s)
	if err != nil || strings.ContainsAny(s, "\r\n") {
		p.fail("%s is not base64", name)
	}
	if len(b) > MaxData {
		p.fail("%s has %d bytes, the limit is %d", name, len(b), MaxData)
	}
	return b
}

// Lengths of names, in bytes; what they must be is the broker's to say.
const (
	maxName   = 256
	maxReason = 1024
	maxCursor = 64
)

func (p *payload) open() (req api.OpenRequest, target string) {
	req.RequestID = p.text("request_id", 1, maxName)
	target = p.text("target_ref", 0, maxName)
	req.Argv = take(p, "argv", "a list of texts", []string(nil))
	if len(req.Argv) == 0 {
		p.fail("argv is missing or empty")
	}
	p.whole("argv", req.Argv...)
	req.Cwd = p.text("cwd", 0, 4096)
	req.Env = take(p, "env", "an object of texts", map[string]string(nil))
	for k, v := range req.Env {
		p.whole("env", k, v)
	}
	req.Stdin = p.truth("stdin")
	req.PTY = take(p, "pty", "an object with rows and cols", (*api.Winsize)(nil))
	req.Limits = take(p, "limits", "an object", api.Limits{})
	return req, target
}

// name reads which process is meant: exactly one of the two ways to name it.
func (p *payload) name() Name {
	n := Name{Handle: p.text("handle", 0, maxName), RequestID: p.text("request_id", 0, maxName)}
	if (n.Handle == "") == (n.RequestID == "") {
		p.fail("exactly one of handle and request_id names a process")
	}
	return n
}

func (p *payload) read() Read {
	return Read{
		Cursor: p.text("cursor", 0, maxCursor),
		// More than the limits is no error: less comes, and the caller asks again.
		MaxBytes: min(p.number("max_bytes", defaultRead, 1, api.MaxOffset), MaxData),
		Wait:     min(time.Duration(min(p.number("wait_ms", 0, 0, api.MaxOffset), MaxWait.Milliseconds()))*time.Millisecond, MaxWait),
	}
}

func cut(s string) string {
	const most = 64
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
