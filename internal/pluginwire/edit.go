package pluginwire

import (
	"encoding/json"
	"math"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

// untrusted reports whether a payload's key claims a scope or an identity that only
// the envelope or the registration may give.
func untrusted(name []byte) bool {
	switch string(name) {
	case "context", "action_context", "instance_uuid", "workspace_uuid", "placement_generation", "execution_generation",
		"installation_uuid", "runtime_revision", "artifact_digest", "caller_plugin_identity":
		return true
	}
	return false
}

// Scrub deletes from a plugin's payload the keys that claim a scope or an identity.
func Scrub(data map[string]json.RawMessage) {
	for name := range data {
		if untrusted([]byte(name)) {
			delete(data, name)
		}
	}
}

// Member is one name and its JSON value.
type Member struct {
	Name  string
	Value json.RawMessage
}

// Edit copies the JSON object data without the members that drop names, with set
// added at its end; what is kept is copied byte by byte and never encoded anew. A nil
// drop drops nothing; a member of data that set names is dropped too. When nothing
// changes, data itself is returned. Errors: not an object.
func Edit(data json.RawMessage, drop func(name []byte) bool, set ...Member) (json.RawMessage, error) {
	var out []byte
	kept, changed := 0, len(set) > 0
	from := -1 // of a run of kept members that is not copied yet
	to := 0
	flush := func() {
		if from < 0 {
			return
		}
		if out == nil {
			n := len(data) + 2
			for _, m := range set {
				n += len(m.Name) + len(m.Value) + 4
			}
			out = append(make([]byte, 0, n), '{')
		} else {
			out = append(out, ',')
		}
		out = append(out, data[from:to]...)
		from = -1
	}
	o := jsonscan.Open(data, 0, true)
	for {
		quoted, _, at, ok := o.Next()
		if !ok {
			break
		}
		name := jsonscan.Name(quoted)
		gone := drop != nil && drop(name)
		for i := range set {
			gone = gone || string(name) == set[i].Name
		}
		if gone {
			changed = true
			flush()
			continue
		}
		kept++
		if from < 0 {
			from = at
		}
		to = o.I
	}
	if o.Err() != nil {
		return nil, o.Err()
	}
	if !changed {
		return data, nil
	}
	flush()
	if out == nil {
		out = append(out, '{')
	}
	for _, m := range set {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(jsonscan.AppendString(out, m.Name), ':')
		out = append(out, m.Value...)
	}
	return append(out, '}'), nil
}

// ForHost is a plugin's payload as it goes on to LangBot: without what claims a scope
// or an identity, with the identity ("author/name") that the registration proved, and
// with more. Errors: not an object.
func ForHost(data json.RawMessage, identity string, more ...Member) (json.RawMessage, error) {
	set := append(make([]Member, 0, 4), more...)
	set = append(set, Member{"caller_plugin_identity", jsonscan.AppendString(nil, identity)})
	return Edit(data, untrusted, set...)
}

// Members calls do with the name and the value of every member of a JSON object, in
// their order; both are parts of data where they can be. Errors: not an object.
func Members(data json.RawMessage, do func(name []byte, value json.RawMessage)) error {
	o := jsonscan.Open(data, 0, true)
	for {
		quoted, value, _, ok := o.Next()
		if !ok {
			return o.Err()
		}
		do(jsonscan.Name(quoted), value)
	}
}

// Field returns a member of a JSON object, nil if there is none or data is not an
// object. Of two with one name it is the last.
func Field(data json.RawMessage, name string) json.RawMessage {
	var found json.RawMessage
	if Members(data, func(member []byte, value json.RawMessage) {
		if string(member) == name {
			found = value
		}
	}) != nil {
		return nil
	}
	return found
}

// StringField returns a member that is a string; false if it is not there or is
// something else.
func StringField(data json.RawMessage, name string) (string, bool) {
	return jsonscan.Unquote(Field(data, name))
}

// PayloadTimeout is the time that a payload's timeout field asks for, in seconds, at
// most [MaxTimeout]; def when it has none that makes sense.
func PayloadTimeout(data json.RawMessage, def time.Duration) time.Duration {
	raw := Field(data, "timeout")
	if len(raw) == 0 || raw[0] != '-' && raw[0]-'0' > 9 {
		return def
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || math.IsNaN(f) || f <= 0 {
		return def
	}
	if f >= MaxTimeout.Seconds() {
		return MaxTimeout
	}
	return max(time.Duration(f*float64(time.Second)), time.Millisecond)
}

// IntField returns a member that is an integer (strictly: no text, no fraction, no
// truth value). Errors are of the class KeyError when it is not there, else ValueError.
func IntField(data json.RawMessage, name string) (int64, error) {
	raw := Field(data, name)
	if raw == nil {
		return 0, MissingKey(name)
	}
	n, ok := strictInt(raw)
	if !ok {
		return 0, errdefs.New(errdefs.Invalid, "%s must be an integer", name)
	}
	return n, nil
}
