package dispatch

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestNoTools(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ call, want string }{
		"initialize":            {`{"jsonrpc":"2.0","id":"a","method":"initialize","params":{"protocolVersion":"2024-11-05"}}`, `"protocolVersion":"2024-11-05"`},
		"without a version":     {`{"jsonrpc":"2.0","id":0,"method":"initialize"}`, `"protocolVersion":"2025-06-18"`},
		"a version too long":    {`{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"` + strings.Repeat("9", 33) + `"}}`, `"protocolVersion":"2025-06-18"`},
		"ping":                  {`{"jsonrpc":"2.0","id":1,"method":"ping"}`, `"result":{}`},
		"tools":                 {`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`, `"tools":[]`},
		"resources":             {`{"jsonrpc":"2.0","id":1,"method":"resources/list"}`, `"resources":[]`},
		"a call":                {`{"jsonrpc":"2.0","id":-1,"method":"tools/call","params":{"name":"x"}}`, `{"jsonrpc":"2.0","id":-1,"error":{"code":-32601`},
		"a notification":        {`{"jsonrpc":"2.0","method":"notifications/initialized"}`, ``},
		"a batch":               {`[{"id":1,"method":"ping"},{"method":"x"},{"id":"b","method":"y"}]`, `"id":"b","error"`},
		"only notifications":    {`[{"method":"x"},{"method":"y"}]`, ``},
		"an empty batch":        {`[]`, `-32600`},
		"a batch of strangers":  {`[1,"a",null,[]]`, `-32600`},
		"null":                  {`null`, `-32600`},
		"a number":              {`7`, `-32600`},
		"an id that is none":    {`{"id":{"a":1},"method":"ping"}`, `-32600`},
		"a null id":             {`{"id":null,"method":"ping"}`, `-32600`},
		"a method that is none": {`{"id":1,"method":7}`, `-32600`},
	} {
		got, err := noTools{}.Call(t.Context(), json.RawMessage(tc.call))
		if err != nil || !strings.Contains(string(got), tc.want) || tc.want == "" && got != nil {
			t.Errorf("%s: %s, %v; want %s", name, got, err, tc.want)
		}
	}
	if _, err := (noTools{}).Call(t.Context(), json.RawMessage("["+strings.Repeat("1,", maxBatch)+"1]")); err == nil {
		t.Error("a batch without bound is taken")
	}
}

func FuzzNoTools(f *testing.F) {
	for _, s := range []string{`{"id":1,"method":"initialize","params":{}}`, `[{"id":1}]`, `{"id":"\ud800","method":"ping"}`, `{"id":1e999,"method":"ping"}`, `{"params":[]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if !json.Valid(b) || len(b) == 0 {
			t.Skip() // the hub has checked that
		}
		b = []byte(strings.TrimSpace(string(b)))
		got, err := noTools{}.Call(t.Context(), b)
		if err == nil && got != nil && !json.Valid(got) {
			t.Errorf("%q is answered by %q", b, got)
		}
	})
}
