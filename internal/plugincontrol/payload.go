package plugincontrol

import (
	"bytes"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// object is a JSON object as it came. Its fields are found and replaced in the
// bytes: what is not asked for is never decoded, so that what Python writes and Go
// would not read (NaN, lone surrogates) passes through.
type object struct{ raw json.RawMessage }

// Values that are often written.
var (
	null  = json.RawMessage("null")
	empty = json.RawMessage("{}")
	list  = json.RawMessage("[]")
)

// readObject returns a JSON object; the name is for the error.
func readObject(raw json.RawMessage, name string) (object, error) {
	raw = bytes.TrimLeft(raw, " \t\r\n")
	if len(raw) == 0 || raw[0] != '{' {
		return object{}, errdefs.New(errdefs.Invalid, "%s is not an object", name)
	}
	return object{raw}, nil
}

// payload returns the data of a request.
func payload(in *rpc.Inbound) (object, error) { return readObject(in.Data, "data") }

// get returns a field as it came, nil if it is not there.
func (o object) get(key string) json.RawMessage { return pluginwire.Field(o.raw, key) }

// has reports whether a field is there and not null.
func (o object) has(key string) bool {
	v := o.get(key)
	return len(v) > 0 && v[0] != 'n'
}

// or returns a field as it came, def if it is not there or null.
func (o object) or(key string, def json.RawMessage) json.RawMessage {
	if v := o.get(key); len(v) > 0 && v[0] != 'n' {
		return v
	}
	return def
}

// must returns a field that has to be there; null counts as there.
func (o object) must(key string) (json.RawMessage, error) {
	v := o.get(key)
	if len(v) == 0 {
		return nil, pluginwire.MissingKey(key)
	}
	return v, nil
}

// text returns a string that has to be there.
func (o object) text(key string) (string, error) {
	if _, err := o.must(key); err != nil {
		return "", err
	}
	s, ok := pluginwire.StringField(o.raw, key)
	if !ok {
		return "", errdefs.New(errdefs.Invalid, "%s is not a string", key)
	}
	return s, nil
}

// textOr returns a string, or def where it is missing, null or something else.
func (o object) textOr(key, def string) string {
	if s, ok := pluginwire.StringField(o.raw, key); ok {
		return s
	}
	return def
}

// truth reports whether a field is true.
func (o object) truth(key string) bool { return string(o.get(key)) == "true" }

// object returns a field that has to be an object.
func (o object) object(key string) (object, error) {
	v, err := o.must(key)
	if err != nil {
		return object{}, err
	}
	return readObject(v, key)
}

// within returns a field that is an object, and an empty one where it is not.
func (o object) within(key string) object {
	in, err := readObject(o.get(key), key)
	if err != nil {
		return object{empty}
	}
	return in
}

// with returns the object with fields added or replaced.
func (o object) with(set ...pluginwire.Member) (object, error) {
	raw, err := pluginwire.Edit(o.raw, nil, set...)
	return object{raw}, err
}

// without returns the object without some fields.
func (o object) without(keys ...string) (object, error) {
	raw, err := pluginwire.Edit(o.raw, func(name []byte) bool {
		for _, k := range keys {
			if string(name) == k {
				return true
			}
		}
		return false
	})
	return object{raw}, err
}

// include returns include_plugins as a filter; missing or null admits every plugin.
func (o object) include() (filter, error) {
	if !o.has("include_plugins") {
		return nil, nil
	}
	var ids []string
	if json.Unmarshal(o.get("include_plugins"), &ids) != nil {
		return nil, errdefs.New(errdefs.Invalid, "include_plugins is not a list of author/name")
	}
	f := make(filter, len(ids))
	for _, id := range ids {
		f[id] = true
	}
	return f, nil
}

// field is one field of an answer.
func field(name string, value json.RawMessage) pluginwire.Member {
	return pluginwire.Member{Name: name, Value: value}
}

// build makes an object of fields.
func build(fields ...pluginwire.Member) json.RawMessage {
	n := 2
	for _, f := range fields {
		n += len(f.Name) + len(f.Value) + 4
	}
	b := append(make([]byte, 0, n), '{')
	for i, f := range fields {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(jsonscan.AppendString(b, f.Name), ':')
		b = append(b, f.Value...)
	}
	return append(b, '}')
}

// array makes a list of values.
func array(values []json.RawMessage) json.RawMessage {
	n := 2
	for _, v := range values {
		n += len(v) + 1
	}
	b := append(make([]byte, 0, n), '[')
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, v...)
	}
	return append(b, ']')
}

// encode returns a value of ours as JSON.
func encode(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		return null // only strings, numbers and lists of them come here
	}
	return b
}

// quote returns a string as JSON.
func quote(s string) json.RawMessage { return jsonscan.AppendString(nil, s) }

// scope returns the fields by which payloads say whose they are, from the trusted
// context. A value of the object that says something else is refused: nothing a
// payload says is an authority, and a contradiction must not run in either scope.
func (o object) scope(c pluginwire.Context, name string) ([]pluginwire.Member, error) {
	set := []pluginwire.Member{
		field("instance_uuid", quote(c.InstanceUUID)),
		field("workspace_uuid", quote(c.WorkspaceUUID)),
		field("placement_generation", encode(c.PlacementGeneration)),
	}
	for _, m := range set {
		if o.has(m.Name) && !sameJSON(o.get(m.Name), m.Value) {
			return nil, errdefs.New(errdefs.Invalid, "Execution scope mismatch for %s.%s: it does not match the context of the request", name, m.Name)
		}
	}
	return set, nil
}

// sameJSON compares two values, however they are written.
func sameJSON(a, b json.RawMessage) bool {
	if bytes.Equal(a, b) {
		return true
	}
	x, err := canonical(a)
	if err != nil {
		return false
	}
	y, err := canonical(b)
	return err == nil && bytes.Equal(x, y)
}

func canonical(raw json.RawMessage) ([]byte, error) {
	var v any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	return json.Marshal(v) // sorts keys
}
