package pluginwire

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/txtar"
	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

var update = flag.Bool("update", false, "rewrite the transcripts in testdata")

// TestTranscripts holds what each text means: the first part of a transcript is what
// came, one text a line, the second what it is.
func TestTranscripts(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(names) == 0 {
		t.Fatal("no transcripts", err)
	}
	for _, name := range names {
		t.Run(filepath.Base(name), func(t *testing.T) {
			t.Parallel()
			a, err := txtar.ParseFile(name)
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			var d Dechunker
			for line := range strings.Lines(string(a.Files[0].Data)) {
				line = strings.TrimSuffix(line, "\n")
				if strings.HasPrefix(line, "#") || line == "" && a.Files[0].Name != "lines" {
					fmt.Fprintln(&out, line)
					d = Dechunker{}
					continue
				}
				fmt.Fprintln(&out, transcribe(a.Files[0].Name, line, &d))
			}
			if *update {
				a.Files = []txtar.File{a.Files[0], {Name: "is", Data: []byte(out.String())}}
				if err := os.WriteFile(name, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if len(a.Files) < 2 || string(a.Files[1].Data) != out.String() {
				t.Errorf("got\n%s", out.String())
			}
		})
	}
}

func transcribe(kind, line string, d *Dechunker) string {
	show := func(v any, err error) string {
		if err != nil {
			return "refused: " + FromError(err)
		}
		b, _ := json.Marshal(v)
		return string(b)
	}
	switch kind {
	case "messages":
		return transcribeMessage([]byte(line))
	case "lines":
		msg, err := d.Line([]byte(line))
		switch {
		case err != nil:
			return "ends: " + err.Error()
		case msg == nil && d.Idle():
			return "nothing"
		case msg == nil:
			return "more"
		}
		return transcribeMessage(msg)
	case "contexts":
		return show(DecodeContext([]byte(line)))
	case "configs":
		return show(DecodeRuntimeConfig([]byte(line)))
	case "reconciles":
		return show(DecodeReconcile([]byte(line)))
	case "applies":
		return show(DecodeApply([]byte(line)))
	case "removes":
		return show("empty", DecodeRemove([]byte(line)))
	}
	return "no such kind"
}

func transcribeMessage(b []byte) string {
	var m Message
	if err := m.Decode(b); err != nil {
		return "ignored: " + err.Error()
	}
	switch m.Kind {
	case KindRequest:
		r := m.Request
		if r.Problem != "" {
			return fmt.Sprintf("answered %s: %s", r.Seq, r.Problem)
		}
		out := string(AppendRequest(nil, &OutRequest{Seq: r.ID, Action: r.Action, Data: r.Data, FlowControl: r.FlowControl}))
		if r.Context != nil {
			out += " under " + string(r.Context)
		}
		return "request " + out
	case KindResponse:
		return "response " + string(AppendResponse(nil, &m.Response))
	}
	return "ignored"
}

// texts are JSON strings and the pieces of them that break things.
func jsonValue(depth int) *rapid.Generator[string] {
	leaves := []*rapid.Generator[string]{
		rapid.SampledFrom([]string{"null", "true", "false", "NaN", "Infinity", "-Infinity", "0", "-0", "1.5e-9", "123456789012345678901234567890"}),
		rapid.Custom(func(t *rapid.T) string { return string(jsonscan.AppendString(nil, rapid.String().Draw(t, "s"))) }),
		rapid.SampledFrom([]string{`"\ud800"`, `"\udc00x"`, `"\ud83d\ude00"`, `"\u0000\/\b"`, `"\"\\"`, `"é🐮"`}),
	}
	if depth == 0 {
		return rapid.OneOf(leaves...)
	}
	space := rapid.SampledFrom([]string{"", "", " ", "\n", "\r\n\t"})
	list := rapid.Custom(func(t *rapid.T) string {
		return "[" + space.Draw(t, "w") + strings.Join(rapid.SliceOfN(jsonValue(depth-1), 0, 4).Draw(t, "l"), ","+space.Draw(t, "w")) + space.Draw(t, "w") + "]"
	})
	return rapid.OneOf(append(leaves, list, jsonObject(depth-1))...)
}

func jsonObject(depth int) *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		var parts []string
		for range rapid.IntRange(0, 4).Draw(t, "n") {
			name := rapid.OneOf(rapid.SampledFrom([]string{"a", "b", "context", "artifact_digest", "timeout", "caller_plugin_identity"}), rapid.String()).Draw(t, "k")
			parts = append(parts, string(jsonscan.AppendString(nil, name))+" :"+jsonValue(depth).Draw(t, "v"))
		}
		return "{" + strings.Join(parts, " ,") + "}"
	})
}

// What is encoded is decoded to the same, and the raw parts pass byte by byte.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		data := jsonObject(3).Draw(t, "data")
		c := anyContext(t)
		out := OutRequest{Seq: rapid.Int64().Draw(t, "seq"), Action: rapid.String().Draw(t, "action"), Data: json.RawMessage(data), Context: c, FlowControl: rapid.Bool().Draw(t, "flow")}
		if len(out.Action) > MaxID {
			t.Skip()
		}
		var m Message
		if err := m.Decode(AppendRequest(nil, &out)); err != nil || m.Kind != KindRequest || m.Request.Problem != "" {
			t.Fatalf("%v, %+v", err, m)
		}
		r := m.Request
		got, err := DecodeContext(r.Context)
		if err != nil || r.ID != out.Seq || r.Action != strings.ToValidUTF8(out.Action, "\uFFFD") || string(r.Data) != data || got != c || r.FlowControl != out.FlowControl {
			t.Fatalf("%+v, %+v, %v", r, got, err)
		}
		resp := Response{Seq: json.RawMessage("7"), ID: 7, Code: rapid.IntRange(0, 1).Draw(t, "code"), Message: rapid.StringN(1, 20, -1).Draw(t, "message"), Data: json.RawMessage(data),
			Chunk: rapid.SampledFrom([]string{ChunkContinue, ChunkEnd}).Draw(t, "chunk"), StreamIndex: rapid.IntRange(0, 9).Draw(t, "index")}
		if err := m.Decode(AppendResponse(nil, &resp)); err != nil || m.Kind != KindResponse {
			t.Fatalf("%v, %+v", err, m)
		}
		resp.Message = strings.ToValidUTF8(resp.Message, "\uFFFD")
		if a, b := fmt.Sprintf("%+v", m.Response), fmt.Sprintf("%+v", resp); a != b {
			t.Fatalf("%s\n%s", a, b)
		}
	})
}

func anyContext(t *rapid.T) Context {
	id := rapid.StringMatching(`[a-z0-9é"\\-]{1,8}`)
	switch rapid.IntRange(0, 3).Draw(t, "form") {
	case 0:
		return Context{}
	case 1:
		return Context{InstanceUUID: id.Draw(t, "i"), WorkspaceUUID: id.Draw(t, "w"), PlacementGeneration: rapid.Int64Range(1, 9).Draw(t, "g")}
	case 2:
		return Context{InstanceUUID: id.Draw(t, "i"), WorkspaceUUID: id.Draw(t, "w"), PlacementGeneration: 1, InstallationUUID: id.Draw(t, "p")}
	}
	return Context{InstanceUUID: id.Draw(t, "i"), WorkspaceUUID: id.Draw(t, "w"), PlacementGeneration: rapid.Int64Range(1, 9).Draw(t, "g"),
		InstallationUUID: id.Draw(t, "p"), RuntimeRevision: rapid.Int64Range(1, 1<<60).Draw(t, "r"), ArtifactDigest: strings.Repeat("0f", 32)}
}

// The stdio framing gives back what went in, save for line ends between tokens, and no
// line reaches the peers' limit.
func TestStdioRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		unit := jsonValue(2).Draw(t, "unit")
		msg := []byte(`{"a":[` + strings.Repeat(unit+",\n", rapid.IntRange(0, 60<<10).Draw(t, "size")/(len(unit)+2)) + unit + "]}")
		lines, err := appendFrames(nil, msg)
		if err != nil {
			t.Fatal(err)
		}
		var d Dechunker
		var got []byte
		for line := range bytes.Lines(lines) {
			if len(line) > StdioLine {
				t.Fatalf("a line of %d bytes", len(line))
			}
			if got != nil {
				t.Fatal("a line after the message")
			}
			if got, err = d.Line(line); err != nil {
				t.Fatalf("%v: %.100s", err, line)
			}
		}
		if want := oneLined(msg, len(msg) <= StdioInline); !bytes.Equal(got, want) {
			t.Fatalf("%.200q\n%.200q", got, want)
		}
	})
}

// appendFrames writes a whole message to dst in the stdio framing.
func appendFrames(dst, msg []byte) ([]byte, error) {
	c, err := NewChunker(msg)
	if err != nil {
		return dst, err
	}
	dst, _ = c.Append(dst, int(^uint(0)>>1))
	return dst, nil
}

func oneLined(msg []byte, inline bool) []byte {
	msg = bytes.Clone(msg)
	if inline {
		msg = []byte(strings.NewReplacer("\n", " ", "\r", " ").Replace(string(msg)))
	}
	return msg
}

func TestChunkerLimits(t *testing.T) {
	t.Parallel()
	if _, err := appendFrames(nil, make([]byte, MaxMessage+1)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	// The worst a valid message can be: everything escaped, everything multi-byte.
	for _, unit := range []string{`\\`, "🐮"} {
		msg := []byte(`{"a":"` + strings.Repeat(unit, MaxMessage/8/len(unit)) + `"}`)
		lines, err := appendFrames(nil, msg)
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		var d Dechunker
		var got []byte
		for line := range bytes.Lines(lines) {
			if n++; len(line) > StdioLine || n > MaxFragments/8 || !utf8.Valid(line) {
				t.Fatalf("%q: line %d has %d bytes", unit, n, len(line))
			}
			if got, err = d.Line(line); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(got, msg) {
			t.Errorf("%q: not the same", unit)
		}
	}
}

func TestFragments(t *testing.T) {
	t.Parallel()
	var d Dechunker
	if _, err := d.Line([]byte(`{"type":"chunk_start","total_size":5}`)); err != nil {
		t.Fatal(err)
	}
	for i := range MaxFragments {
		if _, err := d.Line([]byte("noise")); err != nil {
			t.Fatalf("line %d: %v", i, err)
		}
	}
	if _, err := d.Line([]byte("noise")); !errors.Is(err, ErrFragments) {
		t.Errorf("%v", err)
	}
}

// Edit keeps what it keeps byte by byte, and agrees with a map.
func TestEdit(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		data := json.RawMessage(jsonObject(2).Draw(t, "data"))
		if bytes.Contains(data, []byte("N")) || bytes.Contains(data, []byte("Inf")) {
			t.Skip("encoding/json has no NaN")
		}
		var want map[string]json.RawMessage
		if err := json.Unmarshal(data, &want); err != nil {
			t.Fatal(err)
		}
		Scrub(want)
		want["caller_plugin_identity"] = json.RawMessage(`"a/b"`)
		want["a"] = json.RawMessage(`1`)
		raw, err := ForHost(data, "a/b", Member{"a", json.RawMessage(`1`)})
		if err != nil {
			t.Fatal(err)
		}
		var got map[string]json.RawMessage
		if err := json.Unmarshal(raw, &got); err != nil {
			t.Fatalf("%v: %s", err, raw)
		}
		if !maps.EqualFunc(got, want, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
			t.Fatalf("%s\n%s\n%s", data, raw, want)
		}
		for k, v := range want {
			if k != "a" && k != "caller_plugin_identity" && utf8.ValidString(k) && !bytes.Equal(Field(data, k), v) {
				t.Fatalf("Field %q: %s, want %s", k, Field(data, k), v)
			}
		}
		if same, err := Edit(data, func(n []byte) bool { return false }); err != nil || &same[0] != &data[0] {
			t.Fatal("an edit of nothing made a copy")
		}
	})
	for _, bad := range []string{"", "[]", "{", `{"a":}`, `{"a":1}x`, "null", `{"a":1,}`, `{,}`} {
		if _, err := ForHost(json.RawMessage(bad), "a/b"); err == nil {
			t.Errorf("%q was edited", bad)
		}
	}
	if got, _ := ForHost(json.RawMessage(`{"contex\u0074":1,"x":2}`), `a/"b`); string(got) != `{"x":2,"caller_plugin_identity":"a/\"b"}` {
		t.Errorf("an escaped name: %s", got)
	}
}

func TestPayloadTimeout(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]time.Duration{
		`{}`: time.Minute, `{"timeout":5}`: 5 * time.Second, `{"timeout":0.5}`: time.Second / 2, `{"timeout":0}`: time.Minute, `{"timeout":-1}`: time.Minute,
		`{"timeout":1e300}`: MaxTimeout, `{"timeout":"5"}`: time.Minute, `{"timeout":null}`: time.Minute, `{"timeout":NaN}`: time.Minute, `{"timeout":1e-30}`: time.Millisecond, `[]`: time.Minute,
	} {
		if got := PayloadTimeout(json.RawMessage(raw), time.Minute); got != want {
			t.Errorf("%s: %s, want %s", raw, got, want)
		}
	}
}

// Every action of the enumerations is known, is one constant and stands where it should.
func TestTables(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, a := range Actions() {
		if seen[a] {
			t.Errorf("%s stands twice", a)
		}
		seen[a] = true
		if f, ok := ForwardOf(a); ok {
			if !slices.Contains(Actions(), f.Host) || f.Timeout < time.Second || f.Timeout > MaxTimeout || (f.Owner != OwnerNone) != (f.Host != a) {
				t.Errorf("%s goes on as %+v", a, f)
			}
		}
		if OSSOnly(a) && ControlScope(a) != ScopeTenant || ControlStream(a) && ControlScope(a) != ScopeTenant {
			t.Errorf("%s is in no scope", a)
		}
	}
	for _, a := range []string{ActionRegisterPlugin, ActionListTools, ActionListCommands, ActionListPluginsManifest, ActionCancelAction, "nonsense", ""} {
		if _, ok := ForwardOf(a); ok {
			t.Errorf("%q goes on to LangBot", a)
		}
	}
	if f, ok := ForwardOf(ActionSetWorkspaceStorage); !ok || f.Host != ActionSetBinaryStorage || f.Owner != OwnerWorkspace {
		t.Errorf("%+v", f)
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want string
	}{
		{UnknownAction("x"), "ValueError: Action x not found"},
		{UnknownAction(strings.Repeat("é", 500)), "ValueError: Action " + strings.Repeat("é", 64) + "… not found"},
		{MissingKey("k"), "KeyError: 'k'"},
		{errdefs.New(errdefs.Fenced, "stale"), "PermissionError: stale"},
		{errdefs.New(errdefs.Exhausted, "full"), "RuntimeError: full"},
		{errors.New("/secret/path"), "RuntimeError: the action failed inside the runtime; its log says why"},
		{fmt.Errorf("outer: %w", errdefs.New(errdefs.Invalid, "inner")), "ValueError: outer: inner"},
	} {
		if got := FromError(c.err); got != c.want {
			t.Errorf("%v: %s", c.err, got)
		}
	}
	if got := ErrorMessage("A", strings.Repeat("é", 4097)); utf8.RuneCountInString(got) != 3+4096+utf8.RuneCountInString(truncated) {
		t.Errorf("%d characters", utf8.RuneCountInString(got))
	}
}

func TestCapacityAndOverrides(t *testing.T) {
	t.Parallel()
	p := WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 512, MaxWorkers: 16, MaxTotalCPUs: 8, MaxTotalMemoryMB: 8192, Shared: WorkerOverrides{MaxMemoryMB: 1024, MaxCPUs: 2}}
	if n := p.Capacity(); n != 8 {
		t.Errorf("%d", n)
	}
	if q := p.For(ModeShared, ProfileShared); q.MaxMemoryMB != 1024 || q.MaxCPUs != 2 {
		t.Errorf("%+v", q)
	}
	if p.For(ModeShared, ProfileOSS) != p || p.For(ModeDedicated, ProfileShared) != p {
		t.Error("overrides hold for the mode in the shared profile alone")
	}
	p.MaxTotalCPUs = 0.5
	if n := p.Capacity(); n != 1 {
		t.Errorf("%d", n)
	}
}

func FuzzMessage(f *testing.F) {
	for _, s := range []string{`{"seq_id":1,"action":"x","data":{},"context":null,"stream_flow_control":1}`, `{"seq_id":"1","code":0,"message":"\ud800","data":{"a":NaN}}`,
		`{"action":1}`, `{"code":0,"code":1}`, "[]", "{", strings.Repeat("[", 600), `{"\u0061ction":"x"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Message
		err := m.Decode(b)
		if err != nil && m.Kind != KindNone {
			t.Fatal("an error and a message")
		}
		if lenient(b) != (err == nil || errors.Is(err, jsonscan.ErrNotObject)) && !errors.Is(err, jsonscan.ErrTooDeep) {
			t.Fatalf("encoding/json disagrees: %v", err)
		}
		switch m.Kind {
		case KindRequest:
			if m.Request.Problem != "" {
				return
			}
			_, _ = DecodeContext(m.Request.Context)
			again := AppendRequest(nil, &OutRequest{Seq: m.Request.ID, Action: m.Request.Action, Data: m.Request.Data})
			var n Message
			if err := n.Decode(again); err != nil || n.Request.Action != m.Request.Action || !bytes.Equal(n.Request.Data, m.Request.Data) {
				t.Fatalf("%v: %s", err, again)
			}
		case KindResponse:
			again := AppendResponse(nil, &m.Response)
			var n Message
			if err := n.Decode(again); err != nil || n.Kind != KindResponse || !bytes.Equal(n.Response.Data, m.Response.Data) {
				t.Fatalf("%v: %s", err, again)
			}
		}
	})
}

// lenient reports whether encoding/json takes b, which must be UTF-8, once Python's
// words for numbers that are none are out of the way.
func lenient(b []byte) bool {
	if !utf8.Valid(b) || bytes.Contains(b, []byte("NaN")) || bytes.Contains(b, []byte("Infinity")) {
		s := jsonscan.Scanner{B: b, Python: true}
		return s.Value() && s.End()
	}
	return json.Valid(b)
}

func FuzzContext(f *testing.F) {
	f.Add([]byte(`{"instance_uuid":" i ","workspace_uuid":"w","placement_generation":"2"}`))
	f.Add([]byte(binding(1)))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeContext(b)
		if err != nil {
			if !c.IsZero() || errdefs.CodeOf(err) != errdefs.Invalid || len(err.Error()) > 8<<10 {
				t.Fatalf("%+v, %v", c, err)
			}
			return
		}
		if again, err := DecodeContext(c.Append(nil)); err != nil || again != c {
			t.Fatalf("%+v, %+v, %v", c, again, err)
		}
	})
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(`{"runtime_identity":{"instance_uuid":"i","runtime_id":"r"},"worker_policy":{"max_cpus":1,"max_memory_mb":1,"max_pids":1,"max_open_files":1,"max_file_size_mb":1,"shared":{"max_pids":2}},"runtime_profile":"shared"}`))
	f.Add([]byte(`{"installations":[` + "{\"binding\":" + binding(1) + "}" + `]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if c, err := DecodeRuntimeConfig(b); err == nil {
			// The pending limit is not sent: it comes back as the default.
			c.Policy.MaxPendingRegistrations = 1024
			raw, err := json.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			if c.Profile != ProfileShared {
				c.Policy.Dedicated, c.Policy.Shared = WorkerOverrides{}, WorkerOverrides{}
			}
			if again, err := DecodeRuntimeConfig(raw); err != nil || again != c {
				t.Fatalf("%s: %v", raw, err)
			}
			if n := c.Policy.Capacity(); n < 1 {
				t.Fatal(n)
			}
		}
		if list, err := DecodeReconcile(b); err == nil {
			for _, d := range list {
				if !d.Binding.IsBinding() {
					t.Fatalf("%+v", d)
				}
			}
		}
		_, _ = DecodeApply(b)
		_ = DecodeRemove(b)
		_ = PayloadTimeout(b, time.Second)
	})
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("{\"type\":\"chunk_start\",\"total_size\":2}\n{\"type\":\"chunk_data\",\"data\":\"{}\",\"offset\":0}\n{\"type\":\"chunk_end\"}\n"))
	f.Add([]byte("banner\n{}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var d Dechunker
		for line := range bytes.Lines(b) {
			msg, err := d.Line(line)
			if err != nil {
				return
			}
			if len(msg) > MaxMessage || cap(d.buf) > 2*len(b)+promised {
				t.Fatalf("%d bytes of %d", cap(d.buf), len(b))
			}
		}
	})
}

func FuzzEdit(f *testing.F) {
	f.Add([]byte(`{"context":1,"a":[{"context":2}],"\u0063ontext":3}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		raw, err := ForHost(b, "a/b")
		if err != nil {
			return
		}
		for _, name := range []string{"context", "installation_uuid", "artifact_digest"} {
			if Field(raw, name) != nil {
				t.Fatalf("%s is still in %s", name, raw)
			}
		}
		if s, ok := StringField(raw, "caller_plugin_identity"); !ok || s != "a/b" {
			t.Fatalf("%s", raw)
		}
	})
}
