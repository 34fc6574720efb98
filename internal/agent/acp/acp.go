// Package acp is the codec of agents that speak the Agent Client Protocol:
// JSON-RPC, line by line, on standard input and output.
package acp

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/agent"
)

const prefix = "acp"

// Version of the protocol, and how we call ourselves.
const (
	protocolVersion = 1
	clientName      = "stockade-relay"
	clientVersion   = "1"
)

// sessionState is the key under which a host keeps the session's id.
const sessionState = "external.acp_session_id"

// Times that a payload may change.
const (
	defaultTimeout = 300 * time.Second
	defaultStart   = 30 * time.Second
	linger         = time.Second
)

// maxTools bounds the tool calls of one run that are told of.
const maxTools = 10_000

type payload struct {
	PromptText string `json:"prompt_text"`
	InputText  string `json:"input_text"`
	Config     struct {
		Provider    string         `json:"provider"`
		Command     agent.Words    `json:"acp_command"`
		Workspace   string         `json:"workspace"`
		Cwd         string         `json:"cwd"`
		SessionCwd  string         `json:"session_cwd"`
		Env         agent.Env      `json:"env"`
		Timeout     agent.Seconds  `json:"timeout"`
		Startup     agent.Seconds  `json:"startup_timeout"`
		Initialize  agent.Seconds  `json:"initialize_timeout"`
		Reuse       agent.On       `json:"reuse_session"`
		Create      agent.On       `json:"create_session_if_missing"`
		Streaming   agent.On       `json:"streaming"`
		Permission  string         `json:"permission_decision"`
		Session     string         `json:"stored_session_id"`
		Servers     []agent.Server `json:"mcp_servers"`
		Assets      agent.On       `json:"langbot_assets_enabled"`
		CallTimeout agent.Seconds  `json:"mcp_request_timeout"`
	} `json:"config"`
}

// preset is the command of a provider that needs no command of its own, nil for
// others.
func preset(provider string) []string {
	switch provider {
	case "auggie":
		return []string{"npx", "-y", "@augmentcode/auggie", "--acp"}
	case "autohand":
		return []string{"npx", "-y", "@autohandai/autohand-acp"}
	case "claude-code":
		return []string{"npx", "-y", "@agentclientprotocol/claude-agent-acp@0.62.0"}
	case "codebuddy-code":
		return []string{"npx", "-y", "@tencent-ai/codebuddy-code", "--acp"}
	case "codex":
		return []string{"npx", "-y", "@zed-industries/codex-acp"}
	case "deepagents":
		return []string{"npx", "-y", "deepagents-acp"}
	case "dimcode":
		return []string{"npx", "-y", "dimcode", "acp"}
	case "dirac":
		return []string{"npx", "-y", "dirac-cli", "--acp"}
	case "factory-droid":
		return []string{"npx", "-y", "droid", "exec", "--output-format", "acp-daemon"}
	case "gemini":
		return []string{"npx", "-y", "@google/gemini-cli", "--acp"}
	case "glm-agent":
		return []string{"npx", "-y", "glm-acp-agent"}
	case "kilo":
		return []string{"npx", "-y", "@kilocode/cli", "acp"}
	case "opencode":
		return []string{"opencode", "acp"}
	case "pi-acp":
		return []string{"npx", "-y", "pi-acp"}
	case "qwen-code":
		return []string{"npx", "-y", "@qwen-code/qwen-code", "--acp", "--experimental-skills"}
	}
	return nil
}

// inherit is what a provider's agent needs of the machine's variables.
func inherit(provider string) []string {
	switch provider {
	case "claude-code":
		return []string{"ANTHROPIC_*", "CLAUDE_*"}
	case "codex":
		return []string{"OPENAI_*", "CODEX_*"}
	case "gemini":
		return []string{"GEMINI_*", "GOOGLE_*"}
	}
	return nil
}

// unset is what would make Claude Code behave otherwise below an ACP client.
var unset = []string{"CLAUDE_CODE_COORDINATOR_MODE", "ENABLE_TOOL_SEARCH"}

// claudeTools are the tools that a Claude Code session is given.
var claudeTools = []string{"Bash", "Read", "Edit", "Write", "Glob", "Grep", "Agent"}

type phase int

const (
	initializing phase = iota
	restoring          // session/resume or session/load
	opening            // session/new
	prompting
	over
)

// calls of ours, by id.
const (
	callInitialize = iota + 1
	callRestore
	callNew
	callPrompt
)

// codec is an agent.Codec.
type codec struct {
	p       payload
	mcp     agent.MCP
	cwd     string
	phase   phase
	session string
	text    agent.Text
	message string            // id of the message that text belongs to
	tools   map[string]string // names of calls, by id
	done    map[string]bool
	failure *agent.Failure
}

// New reads a payload. The error is an [agent.Failure].
func New(raw json.RawMessage) (agent.Codec, error) {
	c := &codec{tools: map[string]string{}, done: map[string]bool{}}
	if err := agent.Decode(prefix, raw, &c.p); err != nil {
		return nil, err
	}
	cfg := &c.p.Config
	if cfg.Provider == "" {
		cfg.Provider = "claude-code"
	}
	switch cfg.Permission {
	case "":
		cfg.Permission = "allow_once"
	case "allow_once", "reject_once", "first":
	default:
		return nil, agent.Invalid(prefix, "the permission decision %q is not known: allow_once, reject_once or first", cfg.Permission)
	}
	if c.prompt() == "" {
		return nil, &agent.Failure{Code: "acp.daemon_empty_prompt", Message: "the prompt is empty"}
	}
	return c, nil
}

func (c *codec) prompt() string {
	if strings.TrimSpace(c.p.PromptText) != "" {
		return c.p.PromptText
	}
	return strings.TrimSpace(c.p.InputText)
}

// Launch chooses the command.
func (c *codec) Launch(h agent.Host) (agent.Launch, error) {
	cfg := &c.p.Config
	l := agent.Launch{
		Command: cfg.Command, Env: cfg.Env, Inherit: inherit(cfg.Provider),
		Timeout:      cfg.Timeout.Or(defaultTimeout),
		StartTimeout: cfg.Startup.Or(defaultStart) + cfg.Initialize.Or(defaultStart),
		CallTimeout:  cfg.CallTimeout.Or(0), Linger: linger,
	}
	if len(l.Command) == 0 {
		l.Command, l.Preset = preset(cfg.Provider), true
	}
	if len(l.Command) == 0 {
		return l, agent.Invalid(prefix, "the provider %q needs an acp_command", cfg.Provider)
	}
	if cfg.Provider == "claude-code" {
		l.Unset = unset
	}
	for _, dir := range []string{cfg.Workspace, cfg.Cwd, cfg.SessionCwd} {
		if l.Workspace == "" {
			l.Workspace = dir
		}
	}
	if !cfg.Assets.Off {
		c.mcp = h.MCP
	}
	return l, nil
}

// Start begins the conversation.
func (c *codec) Start(workspace string) agent.Step {
	c.cwd = workspace
	return agent.Step{Write: agent.Call(callInitialize, "initialize", map[string]any{
		"protocolVersion": protocolVersion,
		"clientCapabilities": map[string]any{
			"fs": map[string]any{"readTextFile": false, "writeTextFile": false}, "terminal": false,
		},
		"clientInfo": map[string]any{"name": clientName, "title": "Stockade", "version": clientVersion},
	})}
}

// Feed takes one message of the agent's.
func (c *codec) Feed(line []byte) agent.Step {
	if c.phase == over || len(strings.TrimSpace(string(line))) == 0 {
		return agent.Step{}
	}
	m, ok := agent.ParseRPC(line)
	switch {
	case !ok:
		return c.fail("acp.protocol_error", "the agent printed a line that is no message of the protocol")
	case m.Method == "session/update":
		return agent.Step{Events: c.update(m.Params)}
	case m.Method == "session/request_permission" && m.ID != nil:
		return agent.Step{Write: agent.Answer(m.ID, map[string]any{"outcome": c.permission(m.Params)})}
	case m.Method != "" && m.ID != nil:
		return agent.Step{Write: agent.Refuse(m.ID, agent.MethodNotFound, "this client does not offer "+m.Method)}
	}
	if id, ok := m.Reply(); ok {
		return c.reply(id, m)
	}
	return agent.Step{}
}

// fail ends the run with a failure.
func (c *codec) fail(code, format string, args ...any) agent.Step {
	c.failure = &agent.Failure{Code: code, Message: fmt.Sprintf(format, args...)}
	c.phase = over
	return agent.Step{CloseInput: true, Done: true}
}

func (c *codec) reply(id int, m agent.RPC) agent.Step {
	switch {
	case c.phase == restoring && id == callRestore:
		if m.Error != nil {
			if c.p.Config.Create.Off {
				return c.fail("acp.session_missing", "the agent does not have the session any more: %s", m.Error)
			}
			return c.open()
		}
		return c.opened(m.Result, c.p.Config.Session)
	case c.phase == initializing && id == callInitialize, c.phase == opening && id == callNew, c.phase == prompting && id == callPrompt:
		if m.Error != nil {
			return c.fail("acp.protocol_error", "the agent refused: %s", m.Error)
		}
	default:
		return agent.Step{} // an answer to nothing that is asked
	}
	switch c.phase {
	case initializing:
		return c.initialized(m.Result)
	case opening:
		return c.opened(m.Result, "")
	default:
		c.phase = over
		return agent.Step{CloseInput: true, Done: true}
	}
}

// initialized chooses how to get a session.
func (c *codec) initialized(result json.RawMessage) agent.Step {
	var r struct {
		Version      json.Number `json:"protocolVersion"`
		Capabilities struct {
			Load     bool                       `json:"loadSession"`
			Sessions map[string]json.RawMessage `json:"sessionCapabilities"`
		} `json:"agentCapabilities"`
	}
	if json.Unmarshal(result, &r) != nil {
		return c.fail("acp.response_invalid", "the agent's answer to initialize cannot be read")
	}
	if v := r.Version.String(); v != "" && v != fmt.Sprint(protocolVersion) {
		return c.fail("acp.protocol_error", "the agent speaks version %s of the protocol, not %d", v, protocolVersion)
	}
	stored := c.p.Config.Session
	if stored == "" || c.p.Config.Reuse.Off {
		return c.open()
	}
	method := ""
	if v, ok := r.Capabilities.Sessions["resume"]; ok && string(v) != "null" && string(v) != "false" {
		method = "session/resume"
	} else if r.Capabilities.Load {
		method = "session/load"
	}
	if method == "" {
		if c.p.Config.Create.Off {
			return c.fail("acp.session_missing", "the agent cannot go on with a session")
		}
		return c.open()
	}
	c.phase = restoring
	return agent.Step{Write: agent.Call(callRestore, method, c.sessionParams(map[string]any{"sessionId": stored}))}
}

func (c *codec) open() agent.Step {
	c.phase = opening
	return agent.Step{Write: agent.Call(callNew, "session/new", c.sessionParams(map[string]any{}))}
}

// opened begins the turn. A restored session may leave its id out.
func (c *codec) opened(result json.RawMessage, known string) agent.Step {
	var r struct {
		A string `json:"sessionId"`
		B string `json:"session_id"`
		C string `json:"id"`
	}
	_ = json.Unmarshal(result, &r)
	for _, id := range []string{r.A, r.B, r.C, known} {
		if c.session == "" {
			c.session = id
		}
	}
	if c.session == "" {
		return c.fail("acp.response_invalid", "the agent's answer to session/new has no session")
	}
	c.phase = prompting
	s := agent.Step{Write: agent.Call(callPrompt, "session/prompt", map[string]any{
		"sessionId": c.session, "prompt": []any{map[string]any{"type": "text", "text": c.prompt()}},
	})}
	if c.session != c.p.Config.Session {
		s.Events = []json.RawMessage{agent.State(sessionState, c.session)}
	}
	return s
}

// permission answers a question that nobody is there to answer.
func (c *codec) permission(params json.RawMessage) map[string]any {
	var p struct {
		Options []struct {
			ID   string `json:"optionId"`
			Kind string `json:"kind"`
		} `json:"options"`
	}
	_ = json.Unmarshal(params, &p)
	want := c.p.Config.Permission
	for _, o := range p.Options {
		if want == "first" || o.Kind == want || o.ID == want {
			return map[string]any{"outcome": "selected", "optionId": o.ID}
		}
	}
	return map[string]any{"outcome": "cancelled"}
}

// Cancel asks the agent to end its turn.
func (c *codec) Cancel() agent.Step {
	if c.phase != prompting {
		return agent.Step{CloseInput: true, Done: true}
	}
	return agent.Step{Write: agent.Notify("session/cancel", map[string]any{"sessionId": c.session})}
}

// Finish says how it ended.
func (c *codec) Finish(e agent.Exit) []json.RawMessage {
	text := strings.TrimSpace(c.text.String())
	f := c.failure
	switch {
	case e.TimedOut && c.phase != over:
		f = &agent.Failure{Code: "acp.timeout", Message: "the run took longer than its time-out", Retryable: true}
		if c.phase == initializing {
			f.Code, f.Message = "acp.start_timeout", "the agent did not answer in time after its start"
		}
	case e.Overflow != "":
		f = &agent.Failure{Code: "acp.output_too_large", Message: e.Overflow}
	case f == nil && c.phase != over:
		f = agent.Exited("acp.process_exited", e, false)
	case f == nil && text == "":
		f = &agent.Failure{Code: "acp.empty_response", Message: "the agent ended its turn without a word"}
	}
	var events []json.RawMessage
	if text != "" && (f == nil || c.p.Config.Streaming.Off) {
		events = append(events, agent.Message(text)) // what was said is not lost behind an error
	}
	if f != nil {
		return append(events, f.Event())
	}
	return append(events, agent.Completed())
}
