// Package codex is the codec of the Codex CLI's app server: JSON-RPC, line by
// line, on standard input and output; one thread and one turn per process.
package codex

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/agent"
)

const prefix = "codex"

// sessionState is the key under which a host keeps the thread's id.
const sessionState = "external.codex_session_id"

const (
	defaultTimeout = 1800 * time.Second
	startTimeout   = 60 * time.Second
	linger         = 10 * time.Second
)

// maxItems bounds how many messages of one turn are told apart.
const maxItems = 10_000

type payload struct {
	Prompt  string `json:"prompt"`
	Session string `json:"session_id"`
	Config  struct {
		Command   agent.Words    `json:"command"`
		Args      agent.Words    `json:"args"`
		Workspace string         `json:"workspace"`
		Env       agent.Env      `json:"env"`
		Timeout   agent.Seconds  `json:"timeout"`
		Streaming agent.On       `json:"streaming"`
		Approval  string         `json:"approval_policy"`
		Sandbox   string         `json:"sandbox_mode"`
		Servers   []agent.Server `json:"mcp_servers"`
		Assets    agent.On       `json:"langbot_assets_enabled"`
	} `json:"config"`
}

type phase int

const (
	initializing phase = iota
	resuming
	starting
	asking // turn/start is sent
	turning
	over
)

// calls of ours, by id.
const (
	callInitialize = iota + 1
	callResume
	callStart
	callTurn
	callInterrupt
)

// codec is an agent.Codec.
type codec struct {
	p      payload
	mcp    agent.MCP
	config map[string]any
	cwd    string
	phase  phase
	thread string
	turn   string

	text     agent.Text
	streamed map[string]bool // messages that were told piece by piece
	told     map[string]bool // messages that were told
	last     string          // the last message, to drop an equal one
	final    string          // the message that Codex calls the final answer
	failure  *agent.Failure
}

// New reads a payload. The error is an [agent.Failure].
func New(raw json.RawMessage) (agent.Codec, error) {
	c := &codec{streamed: map[string]bool{}, told: map[string]bool{}}
	if err := agent.Decode(prefix, raw, &c.p); err != nil {
		return nil, err
	}
	cfg := &c.p.Config
	if strings.TrimSpace(c.p.Prompt) == "" {
		return nil, &agent.Failure{Code: "codex.empty_input", Message: "the prompt is empty"}
	}
	if cfg.Approval == "" {
		cfg.Approval = "never"
	}
	if cfg.Sandbox == "" {
		cfg.Sandbox = "danger-full-access"
	}
	if !slices.Contains([]string{"never", "inherit", "untrusted", "on-request"}, cfg.Approval) {
		return nil, agent.Invalid(prefix, "the approval policy %q is not known: never, inherit, untrusted or on-request", cfg.Approval)
	}
	if !slices.Contains([]string{"danger-full-access", "inherit", "read-only", "workspace-write"}, cfg.Sandbox) {
		return nil, agent.Invalid(prefix, "the sandbox mode %q is not known: danger-full-access, inherit, read-only or workspace-write", cfg.Sandbox)
	}
	return c, nil
}

// Launch makes the command line. The MCP servers are not on it: they hold tokens,
// and the thread takes them as its configuration.
func (c *codec) Launch(h agent.Host) (agent.Launch, error) {
	cfg := &c.p.Config
	l := agent.Launch{
		Command: cfg.Command, Args: append([]string{"app-server", "--listen", "stdio://"}, cfg.Args...),
		Workspace: cfg.Workspace, Env: cfg.Env, Inherit: []string{"OPENAI_*", "CODEX_*"},
		Timeout: cfg.Timeout.Or(defaultTimeout), StartTimeout: startTimeout,
		CallTimeout: cfg.Timeout.Or(defaultTimeout), Linger: linger,
	}
	if len(l.Command) == 0 {
		l.Command, l.Preset = []string{"codex"}, true
	}
	if !cfg.Assets.Off {
		c.mcp = h.MCP
	}
	var err error
	c.config, err = c.servers()
	return l, err
}

// Start begins the conversation.
func (c *codec) Start(workspace string) agent.Step {
	c.cwd = workspace
	return agent.Step{Write: append(agent.Call(callInitialize, "initialize", map[string]any{
		"clientInfo":   map[string]any{"name": "stockade-relay", "title": "Stockade", "version": "1"},
		"capabilities": map[string]any{"experimentalApi": true},
	}), agent.Notify("initialized", nil)...)}
}

// or is null for what the payload leaves to the user's own configuration.
func or(v string) any {
	if v == "inherit" {
		return nil
	}
	return v
}

func (c *codec) threadParams() map[string]any {
	p := map[string]any{"cwd": c.cwd, "model": nil, "approvalPolicy": or(c.p.Config.Approval),
		"approvalsReviewer": nil, "sandbox": or(c.p.Config.Sandbox), "developerInstructions": nil}
	if c.p.Config.Approval != "inherit" {
		p["approvalsReviewer"] = "user"
	}
	if c.config != nil {
		p["config"] = c.config
	}
	return p
}

func (c *codec) startThread() agent.Step {
	c.phase = starting
	p := c.threadParams()
	for _, name := range []string{"modelProvider", "profile", "baseInstructions", "compactPrompt", "includeApplyPatchTool"} {
		p[name] = nil
	}
	p["experimentalRawEvents"], p["persistExtendedHistory"] = false, true
	return agent.Step{Write: agent.Call(callStart, "thread/start", p)}
}

// Feed takes one message of the app server's.
func (c *codec) Feed(line []byte) agent.Step {
	m, ok := agent.ParseRPC(line)
	if !ok || c.phase == over {
		return agent.Step{} // what is no message is a stray line of a library's
	}
	if m.Method != "" && m.ID != nil {
		return c.asked(m)
	}
	if m.Method != "" {
		return c.notified(m)
	}
	if id, ok := m.Reply(); ok {
		return c.reply(id, m)
	}
	return agent.Step{}
}

func (c *codec) reply(id int, m agent.RPC) agent.Step {
	switch {
	case c.phase == initializing && id == callInitialize:
		if m.Error != nil {
			return c.refused(m)
		}
		if c.p.Session == "" {
			return c.startThread()
		}
		c.phase = resuming
		p := c.threadParams()
		p["threadId"] = c.p.Session
		return agent.Step{Write: agent.Call(callResume, "thread/resume", p)}
	case c.phase == resuming && id == callResume:
		c.thread = threadID(m.Result)
		if m.Error != nil || c.thread == "" {
			return c.startThread()
		}
		return c.startTurn()
	case c.phase == starting && id == callStart:
		if c.thread = threadID(m.Result); m.Error != nil || c.thread == "" {
			reason := "its answer names no thread"
			if m.Error != nil {
				reason = m.Error.String()
			}
			return c.fail("codex.thread_start_failed", "Codex does not start a thread: %s", reason)
		}
		return c.startTurn()
	case c.phase == asking && id == callTurn:
		if m.Error != nil {
			return c.refused(m)
		}
		var r struct {
			Turn struct {
				ID string `json:"id"`
			} `json:"turn"`
		}
		_ = json.Unmarshal(m.Result, &r)
		c.turn, c.phase = r.Turn.ID, turning
	}
	return agent.Step{}
}

func (c *codec) refused(m agent.RPC) agent.Step {
	return c.fail("codex.rpc_error", "Codex refused: %s", m.Error)
}

func (c *codec) startTurn() agent.Step {
	c.phase = asking
	s := agent.Step{Write: agent.Call(callTurn, "turn/start", map[string]any{
		"threadId": c.thread, "input": []any{map[string]any{"type": "text", "text": c.p.Prompt}},
	})}
	if c.thread != c.p.Session {
		s.Events = []json.RawMessage{agent.State(sessionState, c.thread)}
	}
	return s
}

func threadID(result json.RawMessage) string {
	type ids struct {
		A string `json:"threadId"`
		B string `json:"thread_id"`
		C string `json:"id"`
	}
	var r struct {
		ids
		Thread ids `json:"thread"`
	}
	_ = json.Unmarshal(result, &r)
	for _, id := range []string{r.A, r.B, r.C, r.Thread.C, r.Thread.A, r.Thread.B} {
		if id != "" {
			return id
		}
	}
	return ""
}

func (c *codec) fail(code, format string, args ...any) agent.Step {
	c.failure = &agent.Failure{Code: code, Message: fmt.Sprintf(format, args...)}
	return c.end()
}

// end ends the turn; the app server ends with its input.
func (c *codec) end() agent.Step {
	c.phase = over
	return agent.Step{CloseInput: true, Done: true}
}

// Cancel interrupts the turn.
func (c *codec) Cancel() agent.Step {
	if c.phase != turning || c.turn == "" {
		return agent.Step{CloseInput: true, Done: true}
	}
	return agent.Step{Write: c.interrupt(), CloseInput: true}
}

func (c *codec) interrupt() []byte {
	return agent.Call(callInterrupt, "turn/interrupt", map[string]any{"threadId": c.thread, "turnId": c.turn})
}

// Finish says how it ended.
func (c *codec) Finish(e agent.Exit) []json.RawMessage {
	text := strings.TrimSpace(c.final)
	if text == "" {
		text = strings.TrimSpace(c.text.String())
	}
	f := c.failure
	switch {
	case e.TimedOut && c.phase != over:
		f = &agent.Failure{Code: "codex.timeout", Message: "the run took longer than its time-out", Retryable: true}
	case e.Overflow != "":
		f = &agent.Failure{Code: "codex.output_too_large", Message: e.Overflow}
	case f != nil:
	case c.phase != over:
		f = agent.Exited("codex.process_exited", e, true)
	case (e.Code != 0 || e.Signal != "") && !e.Stopped:
		f = agent.Exited("codex.process_failed", e, false)
	case text == "":
		f = &agent.Failure{Code: "codex.empty_response", Message: "Codex ended its turn without a word"}
	}
	if f != nil {
		return []json.RawMessage{f.Event()}
	}
	last := agent.Message(text)
	if !c.p.Config.Streaming.Off {
		last = c.text.Final(text)
	}
	return []json.RawMessage{last, agent.Completed()}
}
