// Package claude is the codec of Claude Code's command line: one turn per
// process, the prompt on standard input, one JSON object per line of output.
package claude

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/agent"
)

const prefix = "claude_code"

// sessionState is the key under which a host keeps the session's id.
const sessionState = "external.claude_code_session_id"

const (
	defaultTimeout = 300 * time.Second
	linger         = 10 * time.Second
)

// mcpFile is the private file with the servers and their tokens.
const mcpFile = "mcp.json"

// hint is told to the model beside its own instructions.
const hint = "The host's tools come from an MCP server and may be deferred. Load such a tool with ToolSearch before you call it for the first time. " +
	"If you coordinate workers, let one worker do both, the search and the call. Never report the result of a tool call that has not completed."

type payload struct {
	Prompt  string `json:"prompt"`
	Session string `json:"session_id"`
	Resume  bool   `json:"resume"`
	Config  struct {
		Command   agent.Words    `json:"command"`
		Args      agent.Words    `json:"args"`
		Workspace string         `json:"workspace"`
		Env       agent.Env      `json:"env"`
		Timeout   agent.Seconds  `json:"timeout"`
		Streaming agent.On       `json:"streaming"`
		Skip      agent.On       `json:"dangerously_skip_permissions"`
		Servers   []agent.Server `json:"mcp_servers"`
		Assets    agent.On       `json:"langbot_assets_enabled"`
	} `json:"config"`
}

// codec is an agent.Codec.
type codec struct {
	p       payload
	session string // the last one told
	text    agent.Text
	result  string // the CLI's own final text
	partial bool   // text of the message now coming was told piece by piece
	spoke   bool   // it printed an event at all
	plain   string // what it printed before that
	failure *agent.Failure
	ended   bool // its result has come
}

// New reads a payload. The error is an [agent.Failure].
func New(raw json.RawMessage) (agent.Codec, error) {
	c := &codec{}
	if err := agent.Decode(prefix, raw, &c.p); err != nil {
		return nil, err
	}
	if strings.TrimSpace(c.p.Prompt) == "" {
		return nil, &agent.Failure{Code: "claude_code.empty_input", Message: "the prompt is empty"}
	}
	if c.p.Resume && c.p.Session == "" {
		return nil, agent.Invalid(prefix, "a session to resume needs its session_id")
	}
	c.session = c.p.Session
	return c, nil
}

// Launch makes the command line.
func (c *codec) Launch(h agent.Host) (agent.Launch, error) {
	cfg := &c.p.Config
	l := agent.Launch{
		Command: cfg.Command, Workspace: cfg.Workspace, Env: cfg.Env, Inherit: []string{"ANTHROPIC_*", "CLAUDE_*"},
		Timeout: cfg.Timeout.Or(defaultTimeout), CallTimeout: cfg.Timeout.Or(defaultTimeout), Linger: linger,
	}
	if len(l.Command) == 0 {
		l.Command, l.Preset = []string{"claude"}, true
	}
	const skip = "--dangerously-skip-permissions"
	a := append(slices.Clone(cfg.Args), "-p", "--verbose", "--output-format", "stream-json")
	if !cfg.Skip.Off && !slices.Contains(a, skip) {
		a = append(a, skip)
	}
	if h.MCP.Name != "" {
		a = append(a, "--allowedTools", "ToolSearch,mcp__"+h.MCP.Name+"__*")
	}
	if servers := c.servers(h.MCP); len(servers) > 0 {
		data, err := json.Marshal(map[string]any{"mcpServers": servers})
		if err != nil {
			return l, agent.Invalid(prefix, "the MCP servers cannot be written")
		}
		l.Files = []agent.File{{Name: mcpFile, Data: data}}
		a = append(a, "--append-system-prompt", hint, "--strict-mcp-config", "--mcp-config", h.Private+"/"+mcpFile)
	}
	switch {
	case c.p.Resume:
		a = append(a, "--resume", c.p.Session)
	case c.p.Session != "":
		a = append(a, "--session-id", c.p.Session)
	}
	l.Args = a
	return l, nil
}

// servers are the payload's, then the host's.
func (c *codec) servers(m agent.MCP) map[string]any {
	out := map[string]any{}
	for _, s := range c.p.Config.Servers {
		out[s.Name] = s.Rest
	}
	if m.URL != "" {
		out[m.Name] = map[string]any{"type": "http", "url": m.URL, "headers": map[string]any{"Authorization": "Bearer " + m.Token}}
	}
	return out
}

// Start gives the prompt.
func (c *codec) Start(string) agent.Step {
	return agent.Step{Write: []byte(strings.ToValidUTF8(c.p.Prompt, "\uFFFD")), CloseInput: true}
}

type sessionRef struct {
	A string `json:"id"`
	B string `json:"session_id"`
}

type event struct {
	Type     string          `json:"type"`
	Event    json.RawMessage `json:"event"`
	Session0 string          `json:"session_id"`
	Session1 string          `json:"sessionId"`
	Session2 json.RawMessage `json:"session"`
	Code     string          `json:"code"`
	Subtype  string          `json:"subtype"`
	IsError  bool            `json:"is_error"`
	Text     json.RawMessage `json:"text"`
	Content  json.RawMessage `json:"content"`
	Message  json.RawMessage `json:"message"`
	Result   json.RawMessage `json:"result"`
	Errors   []string        `json:"errors"`
	Parent   *string         `json:"parent_tool_use_id"`
}

// Feed takes one line.
func (c *codec) Feed(line []byte) agent.Step {
	line = bytes.TrimSpace(line)
	if len(line) == 0 {
		return agent.Step{}
	}
	var e event
	if line[0] != '{' || json.Unmarshal(line, &e) != nil {
		return c.plainLine(line)
	}
	c.spoke = true
	if e.Type == "" {
		_ = json.Unmarshal(e.Event, &e.Type) // older forms
	}
	var s agent.Step
	if id := e.sessionID(); id != "" && id != c.session {
		c.session = id
		s.Events = append(s.Events, agent.State(sessionState, id))
	}
	switch e.Type {
	case "error":
		code := "claude_code.cli_error"
		if e.Code != "" {
			code = e.Code
		}
		c.failure = &agent.Failure{Code: code, Message: "Claude Code reports an error: " + text(e.Message)}
	case "result":
		c.ended = true
		s.Done = true
		c.result = text(e.Result)
		if e.IsError {
			why := joined(c.result, e.Errors)
			if e.Subtype != "" && e.Subtype != "success" { // which it also says of an error of the model's
				why = e.Subtype + ": " + why
			}
			c.failure = &agent.Failure{Code: "claude_code.cli_error", Message: "Claude Code gave up: " + why}
		}
	case "stream_event":
		s.Events = append(s.Events, c.piece(e)...)
	case "user", "system", "session.started", "turn.started", "turn.completed", "mcp.server.started":
		// Tool results, and what is no text of the assistant's.
	default:
		s.Events = append(s.Events, c.words(e)...)
	}
	return s
}

func joined(text string, more []string) string {
	return strings.TrimSpace(strings.Join(append([]string{text}, more...), "\n"))
}

func (e event) sessionID() string {
	var ref sessionRef
	_ = json.Unmarshal(e.Session2, &ref)
	for _, id := range []string{e.Session0, e.Session1, ref.A, ref.B} {
		if id != "" {
			return id
		}
	}
	return ""
}

// words tells a message of the assistant's. What a sub-agent says is its caller's
// business.
func (c *codec) words(e event) []json.RawMessage {
	if e.Parent != nil {
		return nil
	}
	if c.partial {
		c.partial = false
		return nil // told already
	}
	for _, raw := range []json.RawMessage{e.Text, e.Content, e.Message, e.Result} {
		if t := text(raw); t != "" {
			return c.say(t)
		}
	}
	return nil
}

// say tells text, with an empty line between two messages.
func (c *codec) say(t string) []json.RawMessage {
	if !c.text.Empty() {
		t = "\n\n" + t
	}
	if c.p.Config.Streaming.Off {
		c.text.Add(t)
		return nil
	}
	return []json.RawMessage{c.text.Delta(t)}
}

// piece tells a part of a message, when the arguments asked for parts
// (--include-partial-messages); the whole message that follows is not told again.
func (c *codec) piece(e event) []json.RawMessage {
	var p struct {
		Type  string `json:"type"`
		Delta struct {
			Type string `json:"type"`
			Text string `json:"text"`
		} `json:"delta"`
	}
	if e.Parent != nil || json.Unmarshal(e.Event, &p) != nil || p.Delta.Type != "text_delta" || p.Delta.Text == "" {
		return nil
	}
	if c.partial && !c.p.Config.Streaming.Off {
		return []json.RawMessage{c.text.Delta(p.Delta.Text)}
	}
	if c.partial {
		c.text.Add(p.Delta.Text)
		return nil
	}
	c.partial = true
	return c.say(p.Delta.Text)
}

// text reads a string, a list of blocks, or an object with either as its content.
func text(raw json.RawMessage) string {
	if len(raw) == 0 {
		return ""
	}
	switch raw[0] {
	case '"':
		var s string
		_ = json.Unmarshal(raw, &s)
		return s
	case '[':
		var blocks []json.RawMessage
		_ = json.Unmarshal(raw, &blocks)
		var all strings.Builder
		for _, b := range blocks {
			var one struct {
				Text string `json:"text"`
			}
			if json.Unmarshal(b, &one) == nil {
				all.WriteString(one.Text)
			}
		}
		return all.String()
	case '{':
		var m struct {
			Content json.RawMessage `json:"content"`
			Message string          `json:"message"`
		}
		if json.Unmarshal(raw, &m) != nil {
			return ""
		}
		if len(m.Content) > 0 && m.Content[0] != '{' { // one level, so that nothing recurses
			return text(m.Content)
		}
		return m.Message
	}
	return ""
}

// maxPlain is as much as is kept of what the CLI says on stderr.
const maxPlain = 20_000

// plainLine takes what is no event. Among events it counts as the assistant's
// words; a CLI that prints nothing else has refused to work, and says why in the first
// maxPlain bytes.
func (c *codec) plainLine(line []byte) agent.Step {
	t := strings.ToValidUTF8(string(line), "\uFFFD")
	if !c.spoke {
		t += "\n"
		c.plain += t[:min(len(t), maxPlain-len(c.plain))]
		return agent.Step{}
	}
	return agent.Step{Events: c.say(t)}
}

// Cancel has nothing to say: the CLI listens to signals.
func (c *codec) Cancel() agent.Step { return agent.Step{CloseInput: true, Done: true} }

// Finish says how it ended.
func (c *codec) Finish(e agent.Exit) []json.RawMessage {
	final := strings.TrimSpace(c.result)
	if final == "" {
		final = strings.TrimSpace(c.text.String())
	}
	f := c.failure
	switch {
	case e.TimedOut && !c.ended:
		f = &agent.Failure{Code: "claude_code.timeout", Message: "the run took longer than its time-out", Retryable: true}
	case e.Overflow != "":
		f = &agent.Failure{Code: "claude_code.output_too_large", Message: e.Overflow}
	case f != nil:
	case (e.Code != 0 || e.Signal != "") && !(e.Stopped && c.ended):
		e.Stderr = joined(c.plain, []string{e.Stderr})
		f = agent.Exited("claude_code.process_failed", e, false)
	case !c.spoke && c.plain != "":
		f = &agent.Failure{Code: "claude_code.process_failed", Message: "Claude Code did not start its work: " + strings.TrimSpace(c.plain)}
	case final == "":
		f = &agent.Failure{Code: "claude_code.empty_response", Message: "Claude Code ended without an answer"}
	}
	if f != nil {
		return []json.RawMessage{f.Event()}
	}
	last := agent.Message(final)
	if !c.p.Config.Streaming.Off {
		last = c.text.Final(final)
	}
	return []json.RawMessage{last, agent.Completed()}
}
