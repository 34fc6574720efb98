package acp

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/agent"
)

// block is a content block; only text matters here.
type block struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

type sessionUpdate struct {
	Kind0 string `json:"sessionUpdate"`
	Kind1 string `json:"kind"`
	Kind2 string `json:"type"`
	Role  string `json:"role"`

	Content  json.RawMessage `json:"content"`
	Message0 string          `json:"messageId"`
	Message1 string          `json:"message_id"`

	Tool0  string                     `json:"toolCallId"`
	Tool1  string                     `json:"id"`
	Name   string                     `json:"name"`
	Title  string                     `json:"title"`
	Status string                     `json:"status"`
	Meta   map[string]json.RawMessage `json:"_meta"`
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// update turns one session/update into events.
func (c *codec) update(params json.RawMessage) []json.RawMessage {
	if c.phase != prompting {
		return nil // the history of a session that is loaded
	}
	var p struct {
		Update json.RawMessage `json:"update"`
	}
	if json.Unmarshal(params, &p) != nil {
		return nil
	}
	raw := p.Update
	if len(raw) == 0 || raw[0] != '{' {
		raw = params
	}
	var u sessionUpdate
	if json.Unmarshal(raw, &u) != nil {
		return nil
	}
	// "kind" of a tool call is something else, so the first name goes first.
	kind := or(u.Kind0, or(u.Kind1, u.Kind2))
	switch {
	case strings.Contains(kind, "tool_call"):
		return c.toolCall(u, raw)
	case strings.Contains(kind, "thought"):
		return nil
	case strings.Contains(kind, "agent_message") || u.Role == "assistant":
		return c.words(u)
	}
	return nil
}

// words collects the answer. A new message is a new answer: only the last one
// counts.
func (c *codec) words(u sessionUpdate) []json.RawMessage {
	var b block
	if json.Unmarshal(u.Content, &b) != nil || b.Text == "" || b.Type != "" && b.Type != "text" {
		return nil
	}
	if id := or(u.Message0, u.Message1); id != "" && id != c.message {
		c.message = id
		c.text.Reset()
	}
	if c.p.Config.Streaming.Off {
		c.text.Add(b.Text)
		return nil
	}
	return []json.RawMessage{c.text.Delta(b.Text)}
}

func (c *codec) toolCall(u sessionUpdate, raw json.RawMessage) (events []json.RawMessage) {
	id := or(u.Tool0, u.Tool1)
	if id == "" || c.done[id] || c.tools[id] == "" && len(c.tools) >= maxTools {
		return nil
	}
	name, known := c.tools[id]
	if !known {
		name = or(metaName(u.Meta), or(u.Name, or(u.Title, "acp_tool")))
		c.tools[id] = name // the first name stays
		events = append(events, agent.ToolStarted(id, name))
	}
	switch u.Status {
	case "completed":
		c.done[id] = true
		events = append(events, agent.ToolCompleted(id, name, raw, ""))
	case "failed", "cancelled":
		c.done[id] = true
		events = append(events, agent.ToolCompleted(id, name, nil, string(raw)))
	}
	return events
}

// metaName finds the name that an adapter gives a tool in its own metadata.
func metaName(meta map[string]json.RawMessage) string {
	for _, key := range slices.Sorted(maps.Keys(meta)) {
		raw := meta[key]
		var m struct {
			ToolName string `json:"toolName"`
		}
		if json.Unmarshal(raw, &m) == nil && m.ToolName != "" {
			return m.ToolName
		}
	}
	return ""
}
