package relaywire

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

func TestDecodeFrames(t *testing.T) {
	t.Parallel()
	f, err := Decode([]byte(` { "type" : "daemon.hello", "daemon_id":"d", "protocol":"coding-relay-v1","token":"t\u00e9\ud83d\ude00","metadata":{"pid":1, "x":[1,-2.5e+3,true,null]} , "extra": [ ] } `), 0)
	if err != nil || f.Type != Hello || f.DaemonID != "d" || f.Protocol != Protocol || f.Token != "té😀" ||
		string(f.Metadata) != `{"pid":1, "x":[1,-2.5e+3,true,null]}` {
		t.Errorf("got %+v, %v", f, err)
	}
	f, err = Decode([]byte(`{"type":"run.event","job_id":"j","event":{"type":"a","b":"\ud800"}}`), 0)
	if err != nil || f.Type != Event || f.JobID != "j" || string(f.Event) != `{"type":"a","b":"\ud800"}` {
		t.Errorf("got %+v, %v", f, err)
	}
	// The last of two counts, names may be escaped, names are exact.
	f, err = Decode([]byte(`{"type":"run.event","typ\u0065":"run.finished","job_id":"x","job_id":"y","JOB_ID":"z"}`), 0)
	if err != nil || f.Type != Finished || f.JobID != "y" {
		t.Errorf("got %+v, %v", f, err)
	}
	// A field of another type is no field.
	f, err = Decode([]byte(`{"type":"daemon.ping","job_id":5,"request_id":["a"],"daemon_id":null,"token":{"a":1}}`), 0)
	if err != nil || f.Type != Ping || f.JobID+f.RequestID+f.DaemonID+f.Token != "" {
		t.Errorf("got %+v, %v", f, err)
	}
	// Half a surrogate pair is no text, so it names nothing.
	for _, id := range []string{`\ud800`, `\udc00`, `\ud800x`, `\ud800\u0041`, `a\ud83d\ud83d`} {
		if f, err := Decode([]byte(`{"type":"daemon.ping","daemon_id":"`+id+`"}`), 0); err != nil || f.DaemonID != "" {
			t.Errorf("%s: got %+v, %v", id, f, err)
		}
	}
	if f, err := Decode([]byte(`{"type":"run.finished","job_id":"`+strings.Repeat("x", MaxIDBytes+1)+`"}`), 0); err != nil || f.JobID != "" {
		t.Errorf("got %d bytes of id, %v", len(f.JobID), err)
	}
}

func TestDecodeRefusals(t *testing.T) {
	t.Parallel()
	deep := func(n int) string {
		return `{"type":"x","event":` + strings.Repeat("[", n) + strings.Repeat("]", n) + `}`
	}
	for _, c := range []struct {
		in   string
		want error
	}{
		{``, jsonscan.ErrSyntax}, {` `, jsonscan.ErrSyntax}, {`{`, jsonscan.ErrSyntax}, {`}`, jsonscan.ErrSyntax}, {`{"type":"x"`, jsonscan.ErrSyntax},
		{`{"type":"x"}}`, jsonscan.ErrSyntax}, {`{"type":"x"} {}`, jsonscan.ErrSyntax}, {`{"type":"x",}`, jsonscan.ErrSyntax}, {`{,}`, jsonscan.ErrSyntax},
		{`{"type" "x"}`, jsonscan.ErrSyntax}, {`{type:"x"}`, jsonscan.ErrSyntax}, {`{'type':'x'}`, jsonscan.ErrSyntax}, {`{"type":"x","a":NaN}`, jsonscan.ErrSyntax},
		{`{"type":"x","a":Infinity}`, jsonscan.ErrSyntax}, {`{"type":"x","a":-Infinity}`, jsonscan.ErrSyntax}, {`{"type":"x","a":01}`, jsonscan.ErrSyntax},
		{`{"type":"x","a":1.}`, jsonscan.ErrSyntax}, {`{"type":"x","a":.5}`, jsonscan.ErrSyntax}, {`{"type":"x","a":1e}`, jsonscan.ErrSyntax},
		{`{"type":"x","a":+1}`, jsonscan.ErrSyntax}, {`{"type":"x","a":-}`, jsonscan.ErrSyntax}, {`{"type":"x","a":tru}`, jsonscan.ErrSyntax},
		{`{"type":"x","a":[1,]}`, jsonscan.ErrSyntax}, {`{"type":"x","a":[1 2]}`, jsonscan.ErrSyntax}, {`{"type":"x","a":[}`, jsonscan.ErrSyntax},
		{`{"type":"x","a":{"b"}}`, jsonscan.ErrSyntax}, {`{"type":"x","a":{1:2}}`, jsonscan.ErrSyntax}, {`{"type":"x","a":"` + "\x01" + `"}`, jsonscan.ErrSyntax},
		{`{"type":"x","a":"\x"}`, jsonscan.ErrSyntax}, {`{"type":"x","a":"\u12g4"}`, jsonscan.ErrSyntax}, {`{"type":"x","a":"\u12`, jsonscan.ErrSyntax},
		{`{"type":"x","a":"\`, jsonscan.ErrSyntax}, {"{\"type\":\"x\",\"a\":\"\xff\"}", jsonscan.ErrSyntax}, {"{\"type\":\"x\",\"a\":\"\xed\xa0\x80\"}", jsonscan.ErrSyntax},
		{"\ufeff{\"type\":\"x\"}", jsonscan.ErrSyntax}, {`{"type":"x"}` + "\x00", jsonscan.ErrSyntax}, {`nul`, jsonscan.ErrSyntax},
		{`null`, ErrNotFrame}, {`[]`, ErrNotFrame}, {`[{"type":"x"}]`, ErrNotFrame}, {`"type"`, ErrNotFrame}, {`1`, ErrNotFrame},
		{`{}`, ErrNotFrame}, {`{"type":1}`, ErrNotFrame}, {`{"type":null}`, ErrNotFrame}, {`{"type":""}`, ErrNotFrame},
		{`{"type":"x","type":2}`, ErrNotFrame}, {`{"Type":"x"}`, ErrNotFrame},
		{deep(jsonscan.MaxDepth), jsonscan.ErrTooDeep}, {strings.Repeat("[", 1<<20), jsonscan.ErrTooDeep}, {strings.Repeat(`{"a":`, 1<<20), jsonscan.ErrTooDeep},
	} {
		f, err := Decode([]byte(c.in), 0)
		if !errors.Is(err, c.want) || err != c.want {
			t.Errorf("%.80q: got %v, want %v", c.in, err, c.want)
		}
		if f.Type != "" || f.Event != nil {
			t.Errorf("%.80q: a refused message left %+v", c.in, f)
		}
	}
	if _, err := Decode([]byte(deep(jsonscan.MaxDepth-1)), 0); err != nil {
		t.Errorf("%d levels: %v", jsonscan.MaxDepth, err)
	}
	in := []byte(`{"type":"x"}`)
	if _, err := Decode(in, int64(len(in))-1); err != ErrTooLarge {
		t.Errorf("got %v", err)
	}
	if _, err := Decode(in, int64(len(in))); err != nil {
		t.Errorf("got %v", err)
	}
}

func TestAppendIsDecoded(t *testing.T) {
	t.Parallel()
	for _, f := range []Frame{
		{Type: Hello, DaemonID: "d\"\\\n\x7f\u2028é😀", Protocol: Protocol, Token: "t", Metadata: json.RawMessage(`{"a":1}`)},
		{Type: Start, JobID: "j", Payload: json.RawMessage(`{"prompt":"x"}`)},
		{Type: Event, JobID: "j", Event: json.RawMessage(`{"type":"run.failed"}`)},
		{Type: MCPRequest, JobID: "j", RequestID: "r", Payload: json.RawMessage(`[]`)},
		{Type: Cancel, JobID: "j"}, {Type: Pong},
	} {
		b := Append(nil, &f)
		g, err := Decode(b, 0)
		if err != nil || g.Type != f.Type || g.JobID != f.JobID || g.RequestID != f.RequestID || g.DaemonID != f.DaemonID ||
			g.Protocol != f.Protocol || g.Token != f.Token || !bytes.Equal(g.Event, f.Event) || !bytes.Equal(g.Payload, f.Payload) || !bytes.Equal(g.Metadata, f.Metadata) {
			t.Errorf("%s became %+v, %v", b, g, err)
		}
	}
	if got := string(Append(nil, &Frame{Type: MCPResponse, JobID: "j", RequestID: "r"})); got != `{"type":"mcp.response","request_id":"r","job_id":"j","payload":null}` {
		t.Errorf("got %s", got)
	}
	if got := string(FailedEvent("a.b", `say "no"`, false)); got != `{"type":"run.failed","data":{"error":"say \"no\"","code":"a.b","retryable":false}}` {
		t.Errorf("got %s", got)
	}
}

func TestPeek(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]Frame{
		`{"type":"run.event","job_id":"j","event":{"x":"yyyy`: {Type: Event, JobID: "j"},
		`{"event":{"x":"yyyy`:                                {},
		`{"type":"mcp.request","request_id":"r","job_id":"j`: {Type: MCPRequest, RequestID: "r"},
		`[{"type":"run.event"`:                               {},
		``:                                                   {},
		`{"type":"run.event","job_id":"j","n":1,"x":[1,2],"y":{"a"`: {Type: Event, JobID: "j"},
	} {
		if f := Peek([]byte(in)); f.Type != want.Type || f.JobID != want.JobID || f.RequestID != want.RequestID {
			t.Errorf("%s: got %+v", in, f)
		}
	}
}

func TestRPCErrorKeepsIDs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want string }{
		{`{"jsonrpc":"2.0","id":7,"method":"x"}`, `{"jsonrpc":"2.0","id":7,"error":{"code":-32000,"message":"no"}}`},
		{`{"id":"a\"b"}`, `{"jsonrpc":"2.0","id":"a\"b","error":{"code":-32000,"message":"no"}}`},
		{`{"id":{"a":1}}`, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no"}}`},
		{`{"method":"notifications/x"}`, ``},
		{`[{"id":1},{"method":"n"},{"id":2}]`, `[{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"no"}},{"jsonrpc":"2.0","id":2,"error":{"code":-32000,"message":"no"}}]`},
		{`[{"method":"n"}]`, ``},
		{`[]`, `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"the batch is empty"}}`},
		{`[1]`, `[{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"the call is not a JSON-RPC object"}}]`},
		{`"x"`, `{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"the call is not a JSON-RPC object"}}`},
	} {
		if got := string(RPCError(json.RawMessage(c.in), RPCFailed, "no")); got != c.want {
			t.Errorf("%s: got %s", c.in, got)
		}
	}
}

func TestCodes(t *testing.T) {
	t.Parallel()
	for code, kind := range kinds {
		err := Errorf("claude_code", code, "limit %d", 3)
		if CodeOf(err) != "claude_code."+string(code) || !Is(err, code) || errdefs.CodeOf(err) != kind || err.Error() != "limit 3" {
			t.Errorf("%s became %v %s", code, err, CodeOf(err))
		}
		if !Is(errdefs.Wrap(err, errdefs.Internal, "outer"), code) {
			t.Errorf("%s was lost in wrapping", code)
		}
	}
	if Is(nil, CodeFenced) || CodeOf(errors.New("x")) != "" || Is(Errorf("p", CodeFenced, ""), "fenced") {
		t.Error("what is no relay code counts as one")
	}
	for _, reason := range []string{ReasonHello, ReasonID, ReasonToken, ReasonProtocol, ReasonTaken, ReasonStopping, ReasonHalted} {
		if len(reason) > 123 {
			t.Errorf("%q does not fit into a close frame", reason)
		}
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	l := Limits{}.WithDefaults()
	// The caps and times of the protocol as it is.
	if l.Jobs != 128 || l.Daemons != 128 || l.IDRunes != 128 || l.HelloTimeout != 10*time.Second || l.CancelTimeout != 10*time.Second ||
		l.ConnectTimeout != 30*time.Second || l.ReconnectDelay != 5*time.Second || l.MCPTimeout != 60*time.Second || l.MessageBytes != 16<<20 {
		t.Errorf("the defaults are %+v", l)
	}
	if err := (Limits{}).Check(); err != nil {
		t.Error(err)
	}
	for _, bad := range []Limits{{Jobs: -1}, {Daemons: 1 << 30}, {MessageBytes: 1 << 40}, {CancelTimeout: -1}, {HelloTimeout: 1}, {QueueBytes: -1}} {
		if err := bad.Check(); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

// FuzzDecode holds the decoder to encoding/json: the same messages are JSON, and the
// fields of a frame are the same.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		`{"type":"run.event","job_id":"abc","event":{"type":"message.delta","data":{"chunk":{"content":"x\n\u00e9 😀"}}}}`,
		`{"type":"mcp.request","request_id":"r","job_id":"j","payload":[{"id":1},{"id":"\ud83d\ude00"}]}`,
		`{"type":"daemon.hello","daemon_id":" d ","token":"\ud800","metadata":{}}`,
		`{"type":"x","a":NaN}`, `[]`, `{"type":"x","event":[[[[{"a":[]}]]]]}`, `{"type":"x","a":-0.5e-7}`, "{\"type\":\"\xff\"}",
		`{"type":"run.event","type":1}`, `{"\u0074ype":"q"}`, strings.Repeat("[", 600), ``,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Decode(data, 0)
		if cut := Peek(data[:len(data)/2]); cut.JobID != "" && len(cut.JobID) > MaxIDBytes {
			t.Fatalf("Peek found the job id %q", cut.JobID)
		}
		valid := json.Valid(data) && utf8.Valid(data)
		if err == jsonscan.ErrTooDeep {
			return
		}
		if (err == nil || err == ErrNotFrame) != valid {
			t.Fatalf("valid is %v, and Decode says %v", valid, err)
		}
		if err != nil {
			return
		}
		var want map[string]json.RawMessage
		if err := json.Unmarshal(data, &want); err != nil {
			t.Fatalf("decoded, but %v", err)
		}
		for name, raw := range map[string]json.RawMessage{"event": got.Event, "payload": got.Payload, "metadata": got.Metadata} {
			if _, ok := want[name]; ok != (raw != nil) || ok && !bytes.Equal(raw, want[name]) {
				t.Fatalf("%s is %q, want %q", name, raw, want[name])
			}
		}
		for name, text := range map[string]string{"type": string(got.Type), "job_id": got.JobID, "daemon_id": got.DaemonID} {
			var s string
			if text != "" && (json.Unmarshal(want[name], &s) != nil || s != text) {
				t.Fatalf("%s is %q, want %q", name, text, want[name])
			}
		}
		again, err := Decode(Append(nil, &got), 0)
		if err != nil || again.Type != got.Type || again.JobID != got.JobID || !bytes.Equal(again.Event, got.Event) {
			t.Fatalf("encoded again it is %+v, %v", again, err)
		}
	})
}

func FuzzRPCError(f *testing.F) {
	for _, s := range []string{`{"id":1}`, `[{"id":"a"},{}]`, `[]`, `[[1]]`, `null`, `{"id":null}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := DecodePayload(data)
		if err != nil {
			return
		}
		if out := RPCError(p, RPCFailed, "no"); out != nil && !json.Valid(out) {
			t.Fatalf("%q answers %q, which is not JSON", data, out)
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	for name, size := range map[string]int{"200": 200, "16KiB": 16 << 10} {
		b.Run(name, func(b *testing.B) {
			msg := Append(nil, &Frame{Type: Event, JobID: "abcdefghijklmnopqrstuv",
				Event: json.RawMessage(`{"type":"message.delta","data":{"chunk":{"role":"assistant","content":"` + strings.Repeat("words ", size/6) + `"}}}`)})
			var f Frame
			b.SetBytes(int64(len(msg)))
			b.ReportAllocs()
			for b.Loop() {
				if err := f.Decode(msg, 0); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
