package jsonscan

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestPythonsWords(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"NaN", "Infinity", "-Infinity", `[1,NaN]`, `{"a":-Infinity}`} {
		for _, python := range []bool{false, true} {
			s := Scanner{B: []byte(text), Python: python}
			if got := s.Value() && s.End(); got != python {
				t.Errorf("%s with Python %v: %v", text, python, got)
			}
		}
	}
	for _, text := range []string{"nan", "NaNs", "Infinit", "+Infinity", "-NaN", "-Inf"} {
		if s := (Scanner{B: []byte(text), Python: true}); s.Value() && s.End() {
			t.Errorf("%s is taken", text)
		}
	}
}

func TestDepth(t *testing.T) {
	t.Parallel()
	deep := func(n int) []byte { return []byte(strings.Repeat("[", n) + strings.Repeat("]", n)) }
	for _, c := range []struct {
		outer, levels int
		want          error
	}{{0, MaxDepth, nil}, {0, MaxDepth + 1, ErrTooDeep}, {1, MaxDepth - 1, nil}, {1, MaxDepth, ErrTooDeep}} {
		s := Scanner{B: deep(c.levels), Outer: c.outer}
		if ok := s.Value() && s.End(); ok != (c.want == nil) || !ok && !errors.Is(s.Err(), c.want) {
			t.Errorf("%d levels in %d: %v, %v", c.levels, c.outer, ok, s.Err())
		}
	}
	if o := Open([]byte("{}"), MaxDepth, false); !errors.Is(o.Err(), ErrTooDeep) {
		t.Errorf("%v", o.Err())
	}
}

func TestStringsComeBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.String().Draw(t, "text")
		b := AppendString(nil, text)
		if got, ok := Unquote(b); !ok || got != text || LoneSurrogate(b) || string(Name(b)) != text {
			t.Fatalf("%q became %s and %q", text, b, got)
		}
	})
	for raw, lone := range map[string]bool{`"\ud83d\ude00"`: false, `"\ud83d"`: true, `"\ude00"`: true, `"\ud83d\u0041"`: true, `"\\ud83d"`: false} {
		if got := LoneSurrogate([]byte(raw)); got != lone {
			t.Errorf("%s: %v", raw, got)
		}
	}
}

// FuzzScan holds the scanner to encoding/json, and a walk over members to a map of them.
func FuzzScan(f *testing.F) {
	for _, s := range []string{`{"a":1,"b":[{}],"\u0061":"\ud800"}`, `{"a":-0.5e-7,}`, "[]", " ", "{", "{,}", `{"a" 1}`, "\"\xff\"", strings.Repeat("[", 600)} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := Scanner{B: b}
		ok := s.Value() && s.End()
		if !ok && errors.Is(s.Err(), ErrTooDeep) {
			return
		}
		if ok != (json.Valid(b) && utf8.Valid(b)) {
			t.Fatalf("encoding/json disagrees with %v", ok)
		}
		found := map[string]json.RawMessage{}
		o := Open(b, 0, false)
		for {
			name, value, at, more := o.Next()
			if !more {
				break
			}
			if !bytes.HasPrefix(b[at:], name) {
				t.Fatalf("%s does not begin at %d", name, at)
			}
			found[string(Name(name))] = value
		}
		if (o.Err() == nil || errors.Is(o.Err(), ErrNotObject)) != ok {
			t.Fatalf("the walk says %v", o.Err())
		}
		var want map[string]json.RawMessage
		if o.Err() != nil || json.Unmarshal(b, &want) != nil {
			return
		}
		if len(want) != len(found) {
			t.Fatalf("%d members, want %d", len(found), len(want))
		}
		for name, value := range want {
			if !bytes.Equal(found[name], value) {
				t.Fatalf("%q is %s, want %s", name, found[name], value)
			}
		}
	})
}
