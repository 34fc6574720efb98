package agent

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestKindOf(t *testing.T) {
	t.Parallel()
	for payload, want := range map[string]Kind{
		`{"prompt_text":"x","config":{}}`:                                               ACP,
		`{"input_text":"x"}`:                                                            ACP,
		`{"config":{"provider":"codex"}}`:                                               ACP,
		`{"prompt":"x","session_id":"","resume":false,"config":{}}`:                     Claude,
		`{"prompt":"x","config":{"dangerously_skip_permissions":true}}`:                 Claude,
		`{"prompt":"x","session_id":"","run_id":"r","approval_grant":null,"config":{}}`: Codex,
		`{"prompt":"x","config":{"sandbox_mode":"read-only"}}`:                          Codex,
		`{"kind":"claude-code","prompt":"x","run_id":"r"}`:                              Claude,
		`{"kind":"acp"}`: ACP, `{"kind":"codex"}`: Codex,
		`{}`: "", `[]`: "", `{"kind":"other"}`: "", `{"prompt":"x"}`: "", `{"config":1}`: "", `nonsense`: "",
	} {
		got, err := KindOf(json.RawMessage(payload))
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v, want %q", payload, got, err, want)
		}
	}
}

func TestSplit(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][]string{
		"": nil, "  ": nil, "a b\tc\n": {"a", "b", "c"}, `'a b' "c d"`: {"a b", "c d"}, `a\ b`: {"a b"}, `''`: {""}, `a""b`: {"ab"},
		`"a\"b\\c\d"`: {`a"b\c\d`}, `'a\b'`: {`a\b`}, "a\\\nb": {"ab"}, `$HOME *;|&`: {"$HOME", "*;|&"}, `"$x"`: {"$x"},
	} {
		if got, err := Split(line); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %q, %v, want %q", line, got, err, want)
		}
	}
	for _, line := range []string{`'a`, `"a`, `a\`, `"a\`} {
		if got, err := Split(line); err == nil {
			t.Errorf("%q: %q", line, got)
		}
	}
}

// FuzzSplit: words that were quoted come back as they were.
func FuzzSplit(f *testing.F) {
	f.Add("a b", "c'd")
	f.Fuzz(func(t *testing.T, a, b string) {
		_, _ = Split(a)
		quote := func(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
		got, err := Split(quote(a) + " \t" + quote(b))
		if err != nil || !slices.Equal(got, []string{a, b}) {
			t.Errorf("%q %q: %q, %v", a, b, got, err)
		}
	})
}

func TestPayloadValues(t *testing.T) {
	t.Parallel()
	var v struct {
		Words   Words
		Env     Env
		Timeout Seconds
		Text    Seconds
		On, Off On
		Null    On
		Servers []Server
	}
	err := Decode("x", json.RawMessage(`{"Words":"a 'b c'","Env":{"A":"x","N":1.5,"B":true,"Z":null},"Timeout":1.5,"Text":"2",
		"On":true,"Off":false,"Null":null,"Servers":[{"name":"s","url":"u"}]}`), &v)
	if err != nil || !slices.Equal(v.Words, Words{"a", "b c"}) || v.Env["A"] != "x" || v.Env["N"] != "1.5" || v.Env["B"] != "true" || v.Env["Z"] != "" ||
		v.Timeout.Or(0) != 1500*time.Millisecond || v.Text.Or(0) != 2*time.Second || v.On.Off || !v.Off.Off || v.Null.Off || v.Servers[0].Name != "s" {
		t.Errorf("%+v, %v", v, err)
	}
	for _, bad := range []string{`{"Words":1}`, `{"Words":"'"}`, `{"Env":{"A":[]}}`, `{"Env":[]}`, `{"Timeout":"soon"}`, `{"Timeout":{}}`, `{"On":"yes"}`, `{"Servers":[{"url":"u"}]}`, `[`} {
		if err := Decode("x", json.RawMessage(bad), &v); err == nil {
			t.Errorf("%s is taken", bad)
		} else if f, ok := err.(*Failure); !ok || f.Code != "x.config_invalid" {
			t.Errorf("%s: %v", bad, err)
		}
	}
	var s Seconds
	if json.Unmarshal([]byte("-5"), &s) != nil || s.Or(time.Minute) != time.Minute {
		t.Error("a negative time is none")
	}
	if json.Unmarshal([]byte("1e300"), &s) != nil || s.Or(0) != maxSeconds*time.Second {
		t.Error("a time has a bound")
	}
}

// A long answer costs its length and not its square.
func TestDeltasAreBounded(t *testing.T) {
	t.Parallel()
	var text Text
	total := 0
	piece := strings.Repeat("x", 1000)
	for range 20_000 {
		total += len(text.Delta(piece))
	}
	if total > 64<<20 {
		t.Errorf("20 MB of text made %d bytes of events", total)
	}
	if n := len(text.String()); n != MaxText {
		t.Errorf("%d bytes are kept", n)
	}
}
