package runprocess

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// TestShapes: the answers have the names that stockade-runner reads, and nothing of
// the broker's that is the operator's.
func TestShapes(t *testing.T) {
	t.Parallel()
	at := time.Unix(1e9, 0).UTC()
	p := processOf(api.Process{Handle: "h", RequestID: "q", Workspace: "secret", Box: "secret", Target: "secret", Run: "secret", State: "exited", Cursor: "c.1",
		IO: api.IOLimits{MaxWriteBytes: 1, MaxReadBytes: 4 << 20, MaxWaitMillis: 30000, StdinWindow: 5}, CreatedAt: at})
	closed := closedOf(api.CloseResponse{Fence: &api.Fence{ID: "f", Handle: "h", Reason: "r", CreatedAt: at, Target: "secret", Evidence: map[string]string{"host": "secret"}}})
	out := outputOf(api.ReadResponse{Records: []api.Record{{Stream: "stdout", Offset: 1, Cursor: "c", Data: []byte("x")}}, Next: "n", Oldest: "o",
		Gap: &api.Gap{From: "a", To: "b", Bytes: 2}, EOF: true})
	for _, c := range []struct {
		v    any
		want []string
	}{
		{p, []string{`"handle":"h"`, `"max_write_bytes":1`, `"max_read_bytes":1048576`, `"max_wait_ms":20000`, `"stdin_window_bytes":5`, `"stdin":{"accepted":0`}},
		{closed, []string{`"quiescent":false`, `"fence":{"id":"f"`}},
		{out, []string{`"records":[{"stream":"stdout","offset":1,"data_base64":"eA=="}]`, `"next_cursor":"n"`, `"oldest_cursor":"o"`, `"gap":{"from":"a","to":"b","bytes":2}`, `"eof":true`}},
		{outputOf(api.ReadResponse{}), []string{`"records":[]`}},
		{Limits(), []string{`"max_write_bytes":1048576`, `"stdin_window_bytes":1048576`}},
	} {
		b, err := json.Marshal(c.v)
		if err != nil || strings.Contains(string(b), "secret") {
			t.Errorf("%s, %v", b, err)
		}
		for _, w := range c.want {
			if !strings.Contains(string(b), w) {
				t.Errorf("%s lacks %s", b, w)
			}
		}
	}
}

// TestPayloads: what is not exactly as it must be is refused with the field's name.
func TestPayloads(t *testing.T) {
	t.Parallel()
	f := newFake()
	k := rig(t, f)
	k.Begin(runOf("a", "r"))
	const (
		o = pluginwire.ActionOpenRunProcess
		w = pluginwire.ActionWriteRunProcess
		r = pluginwire.ActionReadRunProcess
		g = pluginwire.ActionGetRunProcess
		c = pluginwire.ActionCloseRunProcess
	)
	write := m{"run_id": "r", "handle": "h", "offset": 0, "data_base64": "eA==", "eof": false}
	named := m{"run_id": "r", "handle": "h"}
	for _, good := range []struct {
		action  string
		payload m
	}{
		{o, open}, {o, with(open, "cwd", nil, "env", nil, "pty", nil, "limits", nil, "stdin", nil, "target_ref", nil)},
		{o, with(open, "pty", m{"rows": 24, "cols": 80}, "limits", m{"deadline_ms": 5, "overflow": "block"}, "target_ref", "local", "env", m{"A": "b"})},
		{w, write}, {w, m{"run_id": "r", "handle": "h", "offset": 5}}, {w, with(write, "data_base64", base64.StdEncoding.EncodeToString(make([]byte, MaxData)))},
		{r, named}, {r, with(named, "cursor", "x.5", "max_bytes", 1<<40, "wait_ms", 1<<40)},
		{g, named}, {g, m{"run_id": "r", "request_id": "q", "handle": nil}}, {c, with(named, "reason", "x", "grace_ms", 0)},
	} {
		if _, err := ask(t.Context(), k, "a", good.action, good.payload); err != nil {
			t.Errorf("%s %v: %v", good.action, good.payload, err)
		}
	}
	if last := f.reads[len(f.reads)-1]; last.MaxBytes != MaxData || last.Wait != MaxWait {
		t.Errorf("not bounded: %+v", last)
	}
	for _, bad := range []struct {
		action  string
		payload m
		names   string
	}{
		{o, m{"request_id": "q", "argv": []string{"true"}}, "run_id"}, {o, with(open, "run_id", 5), "run_id"}, {o, with(open, "Argv", []string{}), "Argv"},
		{o, with(open, "request_id", ""), "request_id"}, {o, with(open, "argv", "true"), "argv"}, {o, with(open, "argv", []any{"a", nil, 1}), "argv"},
		{o, with(open, "argv", []string{"a\ufffd"}), "argv"}, {o, with(open, "env", []string{}), "env"}, {o, with(open, "env", m{"A": 1}), "env"},
		{o, with(open, "stdin", "yes"), "stdin"}, {o, with(open, "pty", m{"rows": -1}), "pty.rows"}, {o, with(open, "pty", m{"lines": 1}), "lines"},
		{o, with(open, "limits", m{"cpu": 1}), "cpu"}, {o, with(open, "limits", m{"pids": 1.5}), "limits.pids"}, {o, with(open, "box", "b"), "box"},
		{o, with(open, "context", m{}), "context"}, {o, with(open, "cwd", strings.Repeat("x", 5000)), "cwd"},
		{w, with(write, "offset", nil), "offset"}, {w, with(write, "offset", -1), "offset"}, {w, with(write, "offset", 1.5), "offset"}, {w, with(write, "data_base64", "eA"), "data_base64"},
		{w, with(write, "data_base64", "eB=="), "data_base64"}, {w, with(write, "data_base64", "eA\n=="), "data_base64"},
		{w, with(write, "data_base64", base64.StdEncoding.EncodeToString(make([]byte, MaxData+1))), "data_base64"}, {w, with(write, "handle", ""), "handle"},
		{r, with(named, "max_bytes", 0), "max_bytes"}, {r, with(named, "wait_ms", -5), "wait_ms"}, {r, with(named, "cursor", 5), "cursor"},
		{g, m{"run_id": "r"}, "handle"}, {g, with(named, "request_id", "q"), "exactly one"}, {c, with(named, "grace_ms", 600001), "grace_ms"}, {c, with(named, "reason", strings.Repeat("x", 1025)), "reason"},
	} {
		_, err := ask(t.Context(), k, "a", bad.action, bad.payload)
		if err == nil {
			t.Errorf("%s %v was taken", bad.action, bad.payload)
			continue
		}
		if code, _, text := refusal(t, err); code != errdefs.Invalid || !strings.Contains(text, bad.names) || len(text) > 400 {
			t.Errorf("%s %v: %s %s", bad.action, bad.payload, code, text)
		}
	}
	_, err := ask(t.Context(), k, "a", o, with(open, "target_ref", "elsewhere"))
	if code, _, _ := refusal(t, err); code != errdefs.NotFound {
		t.Errorf("another target: %v", err)
	}
}

// TestAcknowledged: a reader that comes back has received what it was handed; one
// that only looks at the end has not.
func TestAcknowledged(t *testing.T) {
	t.Parallel()
	f := newFake()
	k := rig(t, f)
	k.Begin(runOf("a", "r"))
	for i, s := range []struct {
		cursor, next string
		most         int
		ack          bool
	}{
		{"", "c.10", 0, false}, {"c.10", "c.20", 0, true}, {"c.10", "c.20", 0, true}, // again, its answer was lost
		{"c.99", "c.100", 1, false}, {"c.100", "c.101", 1, false}, // waits for news at the end
		{"c.20", "c.21", 1, true}, {"c.21", "c.22", 1, false}, {"c.20", "c.30", 0, true}, {"c.30", "c.40", 0, true},
		{"c.70", "c.80", 0, false}, {"c.80", "c.90", 0, false}, // from the middle
		{"", "c.5", 0, false}, {"c.5", "c.15", 0, true}, {"c.40", "c.50", 0, true}, // a second reader
	} {
		f.log = api.ReadResponse{Next: s.next}
		p := m{"run_id": "r", "handle": "h", "cursor": s.cursor}
		if s.most > 0 {
			p["max_bytes"] = s.most
		}
		if _, err := ask(t.Context(), k, "a", pluginwire.ActionReadRunProcess, p); err != nil {
			t.Fatal(err)
		}
		if got := f.reads[len(f.reads)-1].Ack; got != s.ack {
			t.Errorf("read %d, at %s: acknowledged %v", i, s.cursor, got)
		}
	}
	if c := k.Counters(); c.Active != 1 || c.Calls != 14 {
		t.Errorf("%+v", c)
	}
}

// FuzzPayload: whatever a worker sends is answered or refused with a code.
func FuzzPayload(f *testing.F) {
	for _, s := range []string{`{"run_id":"r","request_id":"q","argv":["a"]}`, `{"run_id":"r","handle":"h","offset":1,"data_base64":"eA=="}`, `{`, `[]`, `null`,
		`{"run_id":"r","handle":"h","wait_ms":1e3}`, `{"run_id":"\ud800","handle":{}}`, `{"limits":{"pids":NaN}}`} {
		f.Add([]byte(s))
	}
	broker := newFake()
	k := New(Config{Broker: broker, Plugins: []string{plug}})
	k.Begin(runOf("a", "r"))
	f.Cleanup(func() { _ = k.Close(f.Context()) })
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, action := range []string{pluginwire.ActionOpenRunProcess, pluginwire.ActionWriteRunProcess, pluginwire.ActionReadRunProcess,
			pluginwire.ActionGetRunProcess, pluginwire.ActionCloseRunProcess} {
			out, err := k.Answer(t.Context(), 1, plug, binding("a"), action, b)
			if err != nil {
				refusal(t, err)
			} else if _, err := json.Marshal(out); err != nil {
				t.Error(err)
			}
		}
	})
}
