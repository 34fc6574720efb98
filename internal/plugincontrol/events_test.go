package plugincontrol

import (
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// edits is a plugin that changes fields of an event it is given.
func edits(name string, priority int, event, inner map[string]string) *fakePlugin {
	p := plugin(name, priority, KindEventListener)
	p.answer = func(_ context.Context, _ string, data json.RawMessage) (string, error) {
		ctx := object{data}.within("event_context")
		for key, v := range event {
			if v == "" {
				ctx, _ = ctx.without(key)
				continue
			}
			ctx, _ = ctx.with(field(key, json.RawMessage(v)))
		}
		in := ctx.within("event")
		for key, v := range inner {
			in, _ = in.with(field(key, json.RawMessage(v)))
		}
		ctx, _ = ctx.with(field("event", in.raw))
		return `{"emitted":true,"event_context":` + string(ctx.raw) + `}`, nil
	}
	return p
}

const event = `{"event_context":{"query_id":7,"query_uuid":"q","event_name":"E","event":{"event_name":"E","query_uuid":"q","text":"x"},"is_prevent_postorder":false}}`

// TestEmission (LM-41): the order, what is handed on, what a plugin may not change.
func TestEmission(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		plugins []*fakePlugin
		emitted string // names in order
		sources string
		event   string // a part of the event at the end
	}{
		{"by priority", []*fakePlugin{edits("low", 0, nil, nil), edits("high", 9, nil, nil), edits("mid", 5, nil, nil)}, "high mid low", "", `"text":"x"`},
		{"each once", []*fakePlugin{edits("p", 0, nil, nil), edits("p", 0, nil, nil)}, "p", "", ""},
		{"stopped", []*fakePlugin{edits("first", 2, map[string]string{"is_prevent_postorder": "true"}, nil), edits("second", 1, nil, nil)}, "first", "", ""},
		{"handed on", []*fakePlugin{edits("first", 2, nil, map[string]string{"text": `"y"`}), edits("second", 1, map[string]string{"more": "1"}, nil)}, "first second", "", `"text":"y"`},
		{"a forged query", []*fakePlugin{edits("bad", 2, map[string]string{"query_uuid": `"other"`}, map[string]string{"text": `"evil"`}), edits("good", 1, nil, nil)}, "good", "", `"text":"x"`},
		{"a forged id", []*fakePlugin{edits("bad", 2, map[string]string{"query_id": `8`}, nil)}, "", "", `"query_id":7`},
		{"a forged scope", []*fakePlugin{edits("bad", 2, map[string]string{"workspace_uuid": `"other"`}, nil)}, "", "", `"workspace_uuid":"w"`},
		{"a forged query inside", []*fakePlugin{edits("bad", 2, nil, map[string]string{"query_uuid": `"other"`})}, "", "", `"query_uuid":"q"`},
		{"a dropped query", []*fakePlugin{edits("p", 2, map[string]string{"query_uuid": ""}, nil)}, "p", "", `"query_uuid":"q"`},
		{"a reply", []*fakePlugin{edits("p", 2, nil, map[string]string{"reply_message_chain": `[1]`}), edits("same", 1, nil, map[string]string{"reply_message_chain": `[ 1 ]`}),
			edits("other", 0, nil, map[string]string{"reply_message_chain": `[2]`})}, "p same other", "p other", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var all []Plugin
			for _, p := range c.plugins {
				all = append(all, p)
			}
			out, err := open(t, pluginwire.ProfileOSS, all...).ready(t).ask(t, pluginwire.ActionEmitEvent, event)
			if err != nil {
				t.Fatal(err)
			}
			var got struct {
				Emitted []struct{ Name string }                  `json:"emitted_plugins"`
				Sources []struct{ Plugin struct{ Name string } } `json:"response_sources"`
				Event   json.RawMessage                          `json:"event_context"`
			}
			if err := json.Unmarshal([]byte(out), &got); err != nil {
				t.Fatal(err)
			}
			var names, sources []string
			for _, p := range got.Emitted {
				names = append(names, p.Name)
			}
			for _, p := range got.Sources {
				sources = append(sources, p.Plugin.Name)
			}
			if strings.Join(names, " ") != c.emitted || strings.Join(sources, " ") != c.sources || !strings.Contains(string(got.Event), c.event) {
				t.Errorf("%s", out)
			}
		})
	}
}

// TestEmissionGoesOn: a plugin that fails or answers nonsense disturbs nobody else.
func TestEmissionGoesOn(t *testing.T) {
	t.Parallel()
	var all []Plugin
	for i, answer := range []string{"", "[]", "null", "{}", `{"emitted":true}`, `{"event_context":7}`, `{"emitted":true,"event_context":{"event":[]}}`} {
		p := plugin("bad"+strconv.Itoa(i), 1, KindEventListener)
		p.answer = func(context.Context, string, json.RawMessage) (string, error) {
			if answer == "" {
				return "", errors.New("it is gone")
			}
			return answer, nil
		}
		all = append(all, p)
	}
	good := edits("good", 0, nil, nil)
	out, err := open(t, pluginwire.ProfileOSS, append(all, good)...).ready(t).ask(t, pluginwire.ActionEmitEvent, event)
	if err != nil || len(good.asked) != 1 || !strings.Contains(out, `{"name":"good"}`) {
		t.Errorf("%s, %v", out, err)
	}
}

// TestEmissionScope: an event that claims another scope reaches nobody.
func TestEmissionScope(t *testing.T) {
	t.Parallel()
	p := edits("p", 0, nil, nil)
	l := open(t, pluginwire.ProfileOSS, p).ready(t)
	for _, data := range []string{
		`{"event_context":{"workspace_uuid":"other","event":{}}}`, `{"event_context":{"event":{"placement_generation":2}}}`,
		`{"event_context":{"instance_uuid":7}}`, `{}`, `{"event_context":[]}`, `{"event_context":{"event":7}}`,
	} {
		if out, err := l.ask(t, pluginwire.ActionEmitEvent, data); err == nil {
			t.Errorf("%s: %s", data, out)
		}
	}
	if len(p.asked) != 0 {
		t.Errorf("it reached %v", p.asked)
	}
}

// TestStreams: commands and runs frame by frame, and how they end.
func TestStreams(t *testing.T) {
	t.Parallel()
	p := plugin("p", 0, KindCommand, runnerKind)
	l := open(t, pluginwire.ProfileOSS, p).ready(t)
	command := `{"command_context":{"command":"p-Command","session":{}}}`
	p.frames = []string{`{"command_response":{"text":"1"}}`, `{"command_response":{"text":"2","new":NaN}}`}
	if got, err := l.frames(t, pluginwire.ActionExecuteCommand, command); err != nil || len(got) != 2 || got[1] != `{"text":"2","new":NaN}` {
		t.Errorf("%q, %v", got, err)
	}
	p.frames = []string{`{"command_response":{"text":"1"}}`, `!ValueError: broken`}
	if got, err := l.frames(t, pluginwire.ActionExecuteCommand, command); err == nil || err.Error() != "ValueError: broken" || len(got) != 1 {
		t.Errorf("%q, %v", got, err)
	}
	for _, bad := range []string{`{"command_context":{"command":"p-Command","session":{"workspace_uuid":"x"}}}`, `{"command_context":{"command":7}}`, `{}`} {
		if got, err := l.frames(t, pluginwire.ActionExecuteCommand, bad); err == nil {
			t.Errorf("%s: %q", bad, got)
		}
	}
	run := `{"plugin_author":"a","plugin_name":"p","runner_name":"p-Runner","context":{"run_id":"r"}}`
	p.frames = []string{`{"type":"message.delta","sequence":90,"x":NaN}`, `{"type":"run.completed"}`}
	if got, err := l.frames(t, pluginwire.ActionRunRunner, run); err != nil || len(got) != 2 ||
		got[0] != `{"type":"message.delta","x":NaN,"sequence":1}` || got[1] != `{"type":"run.completed","sequence":2}` {
		t.Errorf("%q, %v", got, err)
	}
	for _, c := range []struct{ frame, code string }{
		{`!ValueError: Action run_runner not found`, codeHandlerNotFound}, {`!RuntimeError: no`, codeForwardException}, {`[]`, codeForwardException},
	} {
		p.frames = []string{`{"type":"message.delta"}`, c.frame}
		got, err := l.frames(t, pluginwire.ActionRunRunner, run)
		if err != nil || len(got) != 2 || !strings.Contains(got[1], `"`+c.code+`"`) || !strings.Contains(got[1], `"sequence":2`) || !strings.Contains(got[1], `"run_id":"r"`) {
			t.Errorf("%s: %q, %v", c.frame, got, err)
		}
	}
	// A result that LangBot does not take, the last one too, is the run's failure and not the action's.
	for _, kind := range []string{"message.delta", "run.completed"} {
		p.frames = []string{`{"type":"message.delta"}`, `{"type":"` + kind + `","data":"` + strings.Repeat("x", pluginwire.MaxStreamFrame) + `"}`}
		got, err := l.frames(t, pluginwire.ActionRunRunner, run)
		if err != nil || len(got) != 2 || !strings.Contains(got[1], codeForwardException) || !strings.Contains(got[1], `"sequence":2`) {
			t.Errorf("a large %s: %d results, %v", kind, len(got), err)
		}
	}
	// What a runner says is no word about the action.
	p.frames = []string{`!ValueError: Action Jackson not found`}
	if got, err := l.frames(t, pluginwire.ActionRunRunner, run); err != nil || len(got) != 1 || !strings.Contains(got[0], codeForwardException) {
		t.Errorf("%q, %v", got, err)
	}
	// A run has one last result: that the stream then breaks, or goes on, is not another.
	for _, after := range []string{`!RuntimeError: no`, `[]`, `{"type":"run.failed"}`, `{"type":"message.delta"}`} {
		p.frames = []string{`{"type":"run.failed","data":{"code":"runner.timeout"}}`, after}
		if got, err := l.frames(t, pluginwire.ActionRunRunner, run); err != nil || len(got) != 1 || !strings.Contains(got[0], codeTimeout) {
			t.Errorf("after the last result %s: %q, %v", after, got, err)
		}
	}
	p.c.Enabled = false
	if got, err := l.frames(t, pluginwire.ActionRunRunner, run); err != nil || len(got) != 1 || !strings.Contains(got[0], codePluginDisabled) {
		t.Errorf("disabled: %q, %v", got, err)
	}
	p.c.Enabled, p.c.Status = true, "mounted"
	if got, err := l.frames(t, pluginwire.ActionRunRunner, run); err != nil || len(got) != 1 || !strings.Contains(got[0], codePluginNotInitialized) {
		t.Errorf("not initialised: %q, %v", got, err)
	}
}

// FuzzPayloads: whatever LangBot sends as data, and whatever a plugin answers, is
// answered or refused; nothing ends the connection.
func FuzzPayloads(f *testing.F) {
	for _, s := range []string{`{}`, event, `{"plugin_author":"a","plugin_name":"p","context":{"file_key":"x","runtime":{"deadline_at":1e300}}}`,
		`{"plugin_author":"a","plugin_name":"p","runner_name":"p-Runner","context":{"runtime":{"metadata":{"component_kind":7}}}}`,
		`{"command_context":{"command":"p-Command","session":null}}`, `{"plugin":{"author":"a","name":"p"},"details":7,"query":NaN}`,
		`{"tool_name":"p-Tool","tool_parameters":null,"session":{},"query_id":null}`, `{"include_plugins":[7]}`, `{"limit":-1e99,"level":7}`} {
		f.Add(s, s)
	}
	p := plugin("p", 0, KindTool, KindCommand, KindEventListener, KindKnowledgeEngine, KindParser, runnerKind)
	l := open(f, pluginwire.ProfileOSS, p).ready(f)
	f.Fuzz(func(t *testing.T, data, answer string) {
		if m := (pluginwire.Message{}); m.Decode([]byte(`{"seq_id":1,"action":"x","data":`+data+`}`)) != nil || m.Kind != pluginwire.KindRequest || m.Request.Problem != "" {
			t.Skip("the connection refuses it already")
		}
		if m := (pluginwire.Message{}); m.Decode([]byte(`{"seq_id":1,"code":0,"message":"","data":`+answer+`}`)) != nil || m.Kind != pluginwire.KindResponse {
			t.Skip("the worker's connection refuses it already")
		}
		p.answer = func(context.Context, string, json.RawMessage) (string, error) { return answer, nil }
		p.frames = []string{answer, answer}
		for action := range l.known() {
			if pluginwire.ControlStream(action) {
				_, _ = l.frames(t, action, data)
			} else if action != pluginwire.ActionSetRuntimeConfig {
				_, _ = l.ask(t, action, data)
			}
			if err := l.Err(); err != nil {
				t.Fatalf("%s ended the connection: %v", action, err)
			}
		}
	})
}

// known lists what the runtime answers.
func (l *langbot) known() map[string]handler { return New(Config{}).known }
