package cli

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

func TestRelayTeller(t *testing.T) {
	t.Parallel()
	delta := func(s string, final bool) string {
		b, _ := json.Marshal(s)
		return fmt.Sprintf(`{"type":"message.delta","data":{"chunk":{"role":"assistant","content":%s,"is_final":%v}}}`, b, final)
	}
	whole := func(kind, content string) string {
		return fmt.Sprintf(`{"type":%q,"data":{"message":{"role":"assistant","content":%s}}}`, kind, content)
	}
	for name, tc := range map[string]struct {
		events    []string
		out, said string
		failed    string
	}{
		"pieces":                   {events: []string{delta("a", false), delta("b\n", false), `{"type":"run.completed","data":{"finish_reason":"stop"}}`}, out: "ab\n"},
		"the whole once more":      {events: []string{delta("a", false), delta("b", false), delta("ab", true), whole("run.completed", `"ab"`)}, out: "ab\n"},
		"the whole says more":      {events: []string{delta("I read.", false), delta("I read. Done.", true)}, out: "I read. Done.\n"},
		"the whole says otherwise": {events: []string{delta("thinking", false), delta("Answer", true)}, out: "thinking\nAnswer\n"},
		"only a whole":             {events: []string{whole("message.completed", `"hello"`), whole("run.completed", `"hello"`)}, out: "hello\n"},
		"a list of elements":       {events: []string{whole("message.completed", `[{"type":"text","text":"a"},{"type":"image"},7,{"text":"b"}]`)}, out: "a b\n"},
		"two messages":             {events: []string{delta("one", false), delta("one", true), delta("two", false), delta("two", true)}, out: "one\ntwo\n"},
		"tools in between": {events: []string{delta("look", false), `{"type":"tool.call.started","data":{"tool_name":"grep\u001b[2J"}}`, delta(" found", false)},
			out: "look\n found", said: "· grep?[2J\n"},
		"a failure":            {events: []string{`{"type":"run.failed","data":{"error":"no","code":"codex.timeout","retryable":true}}`}, failed: "no (codex.timeout)"},
		"a question and a log": {events: []string{`{"type":"action.requested","data":{"action":"interaction.requested"}}`, `{"type":"processor.log","data":{"text":"a\nb"}}`}, said: "· asks for: interaction.requested\n· a?b\n"},
		"terminal codes":       {events: []string{delta("a\x1b]0;evil\a\tb\r\nc\u009b", false)}, out: "a?]0;evil?\tb\nc?"},
		"foreign shapes": {events: []string{`{}`, `{"type":7}`, `{"type":"message.delta"}`, `{"type":"message.delta","data":{"chunk":{"content":{"a":1}}}}`, `{"type":"message.delta","data":[]}`,
			`{"type":"message.completed","data":{"message":null}}`, `{"type":"nonsense","data":"x"}`, `{"type":"run.failed","data":7}`}},
	} {
		t.Run(name, func(t *testing.T) {
			var out, said strings.Builder
			teller := &relayTeller{out: &out, say: func(format string, args ...any) { fmt.Fprintf(&said, format+"\n", args...) }}
			for _, e := range tc.events {
				teller.note(json.RawMessage(e))
				if err := teller.tell(json.RawMessage(e)); err != nil {
					t.Fatal(err)
				}
			}
			if out.String() != tc.out || said.String() != tc.said || teller.failed != tc.failed {
				t.Errorf("printed %q, said %q, failed %q; want %q, %q, %q", out.String(), said.String(), teller.failed, tc.out, tc.said, tc.failed)
			}
		})
	}
	// Much text is printed once, and not all of it kept.
	var out strings.Builder
	teller := &relayTeller{out: &out}
	big := strings.Repeat("x", maxSaid/2+1)
	for range 3 {
		_ = teller.tell(json.RawMessage(delta(big, false)))
	}
	_ = teller.tell(json.RawMessage(delta(big+big+big, true)))
	if out.Len() != 3*len(big)+1 || len(teller.said) > maxSaid {
		t.Errorf("%d bytes printed, %d kept", out.Len(), len(teller.said))
	}
}

// TestRelayPayloads holds the payloads that are made to what daemons tell agents by.
func TestRelayPayloads(t *testing.T) {
	t.Parallel()
	for agent, fields := range map[string][]string{
		"claude": {`"kind":"claude-code"`, `"prompt":"hi"`, `"resume":false`, `"command":"claude"`, `"dangerously_skip_permissions":false`},
		"codex":  {`"kind":"codex"`, `"prompt":"hi"`, `"approval_policy":"never"`, `"sandbox_mode":"workspace-write"`, `"command":"codex"`},
		"acp":    {`"kind":"acp"`, `"prompt_text":"hi"`, `"acp_command":"codex-acp"`, `"permission_decision":"reject_once"`},
	} {
		b, err := relayPayload(relayRunOptions{agent: agent, workspace: "/w"}, "hi")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range append(fields, `"workspace":"/w"`, `"streaming":true`) {
			if !strings.Contains(string(b), f) {
				t.Errorf("%s: %s lacks %s", agent, b, f)
			}
		}
	}
}
