package cli

import (
	"encoding/json"
	"io"
	"strings"
)

// relayTeller prints the events of a job for a person: the agent's text to standard
// output, a word about the rest to standard error.
type relayTeller struct {
	out    io.Writer
	say    func(format string, args ...any)
	said   string // text of the present message that was printed …
	much   bool   // … unless that was more than maxSaid
	over   bool   // the message was whole: what comes next is another
	open   bool   // the last line printed has no end yet
	failed string // what run.failed said
}

// relayEvent is what is looked at of an event. Everything else is the caller's.
type relayEvent struct {
	Type string `json:"type"`
	Data struct {
		Chunk struct {
			Content any  `json:"content"`
			Final   bool `json:"is_final"`
		} `json:"chunk"`
		Message struct {
			Content any `json:"content"`
		} `json:"message"`
		ToolName string `json:"tool_name"`
		Text     string `json:"text"`
		Action   string `json:"action"`
		Error    string `json:"error"`
		Code     string `json:"code"`
	} `json:"data"`
}

// note remembers a failure, whichever way events are printed.
func (t *relayTeller) note(raw json.RawMessage) {
	var e relayEvent
	if json.Unmarshal(raw, &e) == nil && e.Type == "run.failed" {
		if t.failed = e.Data.Error; e.Data.Code != "" {
			t.failed += " (" + e.Data.Code + ")"
		}
	}
}

func (t *relayTeller) tell(raw json.RawMessage) error {
	var e relayEvent
	if json.Unmarshal(raw, &e) != nil {
		return nil // not of the shape known here: --json shows it
	}
	switch e.Type {
	case "message.delta":
		text := textOf(e.Data.Chunk.Content)
		if e.Data.Chunk.Final {
			return t.whole(text)
		}
		return t.piece(text)
	case "message.completed", "run.completed":
		return t.whole(textOf(e.Data.Message.Content))
	case "tool.call.started":
		t.end()
		t.say("· %s", printable(e.Data.ToolName))
	case "action.requested":
		t.end()
		t.say("· asks for: %s", printable(e.Data.Action))
	case "processor.log":
		t.end()
		t.say("· %s", printable(e.Data.Text))
	}
	return nil
}

// maxSaid bounds what is compared with a whole message that comes after its pieces.
const maxSaid = 1 << 20

// piece prints the next piece of a message.
func (t *relayTeller) piece(text string) error {
	if t.over {
		t.said, t.much, t.over = "", false, false
	}
	text = printableText(text)
	if t.much = t.much || len(t.said)+len(text) > maxSaid; !t.much {
		t.said += text
	}
	return t.print(text)
}

// whole takes the whole message, which comes after its pieces, once or more often:
// what was not printed yet is.
func (t *relayTeller) whole(text string) error {
	defer func() { t.over = true }()
	defer t.end()
	text = printableText(text)
	if t.much || strings.TrimSpace(text) == "" || strings.TrimSpace(text) == strings.TrimSpace(t.said) {
		return nil
	}
	rest, ok := strings.CutPrefix(text, t.said)
	if !ok { // other words than its pieces were
		t.end()
		rest = text
	}
	t.said = text[:min(len(text), maxSaid)]
	return t.print(rest)
}

func (t *relayTeller) print(text string) error {
	if text == "" {
		return nil
	}
	t.open = !strings.HasSuffix(text, "\n")
	_, err := io.WriteString(t.out, text)
	return err
}

// end ends a line that is open.
func (t *relayTeller) end() {
	if t.open {
		_, _ = io.WriteString(t.out, "\n")
		t.open = false
	}
}

// textOf is the text of a message: a string, or the text elements of a list.
func textOf(content any) string {
	switch c := content.(type) {
	case string:
		return c
	case []any:
		var all []string
		for _, e := range c {
			if m, ok := e.(map[string]any); ok {
				if s, ok := m["text"].(string); ok {
					all = append(all, s)
				}
			}
		}
		return strings.Join(all, " ")
	}
	return ""
}

// printableText is printable for text of several lines.
func printableText(s string) string {
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		fields := strings.Split(l, "\t")
		for j, f := range fields {
			fields[j] = printable(strings.TrimSuffix(f, "\r"))
		}
		lines[i] = strings.Join(fields, "\t")
	}
	return strings.Join(lines, "\n")
}
