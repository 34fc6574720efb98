package demo

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// maxEvent bounds one line of a vendor's CLI: a file it shows is in it.
const maxEvent = 16 << 20

// codexLine is the command line of the Codex CLI. The box is its sandbox, so it
// makes none of its own.
func codexLine(baseURL string, scripted bool) []string {
	line := []string{
		"codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
		"-c", "model_provider=stockade",
		"-c", fmt.Sprintf(`model_providers.stockade={name="stockade",base_url=%q,env_key="OPENAI_API_KEY",wire_api="responses",request_max_retries=20,stream_max_retries=20}`, baseURL),
	}
	if scripted {
		line = append(line, "-m", "gpt-5")
	}
	return append(line, task)
}

// claudeLine is the command line of Claude Code.
func claudeLine() []string {
	return []string{"claude", "-p", task, "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"}
}

// claudeEnv keeps Claude Code from calling anywhere but its model.
var claudeEnv = map[string]string{
	"DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1",
	"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}

// driveLines reads JSON lines to their end and hands each to on.
func driveLines(out io.Reader, on func(line []byte) error) error {
	sc := bufio.NewScanner(out)
	sc.Buffer(make([]byte, 64<<10), maxEvent)
	var failed error
	for sc.Scan() {
		if failed == nil && strings.HasPrefix(sc.Text(), "{") {
			failed = on(sc.Bytes()) // and read on to the end
		}
	}
	if err := sc.Err(); err != nil {
		return err
	}
	return failed
}

// codex follows what "codex exec --json" prints.
type codex struct {
	ev   *events
	done bool
}

type codexEvent struct {
	Type string `json:"type"`
	Item struct {
		Type    string `json:"type"`
		Text    string `json:"text"`
		Message string `json:"message"`
		Command string `json:"command"`
		Output  string `json:"aggregated_output"`
		Exit    *int   `json:"exit_code"`
	} `json:"item"`
	Message string `json:"message"`
	Error   struct {
		Message string `json:"message"`
	} `json:"error"`
}

func (c *codex) line(b []byte) error {
	var e codexEvent
	if err := json.Unmarshal(b, &e); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "codex printed a line that is no event: %s", shorten(string(b), 200))
	}
	switch e.Type {
	case "item.completed":
		switch e.Item.Type {
		case "agent_message":
			c.ev.words(false, e.Item.Text+"\n")
		case "reasoning":
			c.ev.words(true, e.Item.Text+"\n")
		case "command_execution":
			c.ev.did(e.Item.Command, e.Item.Output)
		case "file_change":
			c.ev.did("edit", "")
		}
	case "error": // it tries again by itself; turn.failed is the end
		c.ev.say.note("│ codex: %s", shorten(clean(e.Message), textWidth))
	case "turn.failed":
		return errdefs.New(errdefs.Internal, "codex gave up: %s", clean(e.Error.Message))
	case "turn.completed":
		c.done = true
	}
	return nil
}

// claude follows what "claude -p --output-format stream-json" prints.
type claude struct {
	ev     *events
	titles map[string]string
	done   bool
}

type claudeEvent struct {
	Type    string `json:"type"`
	IsError bool   `json:"is_error"`
	Result  string `json:"result"`
	Message struct {
		Content json.RawMessage `json:"content"`
	} `json:"message"`
}

type claudeBlock struct {
	Type      string          `json:"type"`
	Text      string          `json:"text"`
	Thinking  string          `json:"thinking"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Input     map[string]any  `json:"input"`
	ToolUseID string          `json:"tool_use_id"`
	Content   json.RawMessage `json:"content"`
}

func (c *claude) line(b []byte) error {
	var e claudeEvent
	if err := json.Unmarshal(b, &e); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "claude printed a line that is no event: %s", shorten(string(b), 200))
	}
	if e.Type == "result" {
		if e.IsError {
			return errdefs.New(errdefs.Internal, "claude gave up: %s", clean(e.Result))
		}
		c.done = true
		return nil
	}
	if e.Type != "assistant" && e.Type != "user" {
		return nil
	}
	var blocks []claudeBlock
	if json.Unmarshal(e.Message.Content, &blocks) != nil {
		return nil // plain text: the prompt
	}
	for _, k := range blocks {
		switch k.Type {
		case "text":
			c.ev.words(false, k.Text+"\n")
		case "thinking":
			c.ev.words(true, k.Thinking+"\n")
		case "tool_use":
			c.titles[k.ID] = claudeTitle(k)
		case "tool_result":
			c.ev.did(c.titles[k.ToolUseID], blockText(k.Content))
		}
	}
	return nil
}

// claudeTitle says a tool call in few words.
func claudeTitle(k claudeBlock) string {
	for _, name := range []string{"command", "file_path", "pattern"} {
		if v, ok := k.Input[name].(string); ok {
			if k.Name == "Bash" {
				return v
			}
			return k.Name + " " + v
		}
	}
	return k.Name
}

// blockText is the text of a tool's result: a string, or blocks with text.
func blockText(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var blocks []claudeBlock
	if json.Unmarshal(raw, &blocks) != nil {
		return ""
	}
	for _, b := range blocks {
		s += b.Text
	}
	return s
}
