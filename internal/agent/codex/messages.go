package codex

import (
	"encoding/json"
	"strings"

	"github.com/stockade-run/stockade/internal/agent"
)

// asked answers a request of the app server's. Nobody is there to be asked: what
// the policy does not allow is refused, and the run ends.
func (c *codec) asked(m agent.RPC) agent.Step {
	switch m.Method {
	case "item/permissions/requestApproval":
		var p struct {
			Permissions json.RawMessage `json:"permissions"`
		}
		_ = json.Unmarshal(m.Params, &p)
		if c.p.Config.Approval != "never" {
			return c.approval(m, map[string]any{"permissions": map[string]any{}, "scope": "turn"})
		}
		if p.Permissions == nil {
			p.Permissions = json.RawMessage("{}")
		}
		return agent.Step{Write: agent.Answer(m.ID, map[string]any{"permissions": p.Permissions, "scope": "session", "strictAutoReview": false})}
	case "item/commandExecution/requestApproval", "item/fileChange/requestApproval":
		if c.p.Config.Approval == "never" {
			return agent.Step{Write: agent.Answer(m.ID, map[string]any{"decision": "accept"})}
		}
		return c.approval(m, map[string]any{"decision": "cancel"})
	case "execCommandApproval", "applyPatchApproval":
		if c.p.Config.Approval == "never" {
			return agent.Step{Write: agent.Answer(m.ID, map[string]any{"decision": "approved"})}
		}
		return c.approval(m, map[string]any{"decision": "abort"})
	case "mcpServer/elicitation/request":
		return agent.Step{Write: agent.Answer(m.ID, map[string]any{"action": "accept", "content": nil, "_meta": nil})}
	}
	return agent.Step{Write: agent.Refuse(m.ID, agent.MethodNotFound, "this client does not offer "+m.Method)}
}

// approval refuses what somebody would have to approve, and ends the run.
func (c *codec) approval(m agent.RPC, answer map[string]any) agent.Step {
	write := agent.Answer(m.ID, answer)
	if c.turn != "" {
		write = append(write, c.interrupt()...)
	}
	s := c.fail("codex.approval_required", "Codex asks for an approval, and nobody can give it in this run: allow more with approval_policy, or use never")
	s.Write = write
	return s
}

type item struct {
	ID    string `json:"id"`
	Type  string `json:"type"`
	Text  string `json:"text"`
	Phase string `json:"phase"`
}

type note struct {
	Thread string `json:"threadId"`
	TurnID string `json:"turnId"`
	ItemID string `json:"itemId"`
	Delta  string `json:"delta"`
	Item   item   `json:"item"`
	Retry  bool   `json:"willRetry"`
	Turn   struct {
		ID     string `json:"id"`
		Status string `json:"status"`
		Error  *struct {
			Message string `json:"message"`
		} `json:"error"`
	} `json:"turn"`
	Status struct {
		Type string `json:"type"`
	} `json:"status"`
	Error struct {
		Message string `json:"message"`
	} `json:"error"`
	Message string `json:"message"`
	Msg     struct {
		Type    string `json:"type"`
		Message string `json:"message"`
		Reason  string `json:"reason"`
	} `json:"msg"`
}

// notified takes a notification.
func (c *codec) notified(m agent.RPC) agent.Step {
	var n note
	if c.phase < asking || json.Unmarshal(m.Params, &n) != nil {
		return agent.Step{}
	}
	if m.Method == "codex/event" || strings.HasPrefix(m.Method, "codex/event/") {
		return c.legacy(n)
	}
	if n.Thread != "" && n.Thread != c.thread {
		return agent.Step{} // a sub-agent's
	}
	switch m.Method {
	case "turn/started":
		c.phase, c.turn = turning, first(n.Turn.ID, c.turn)
	case "turn/completed":
		if n.Turn.Status == "failed" || n.Turn.Error != nil {
			message := "no reason given"
			if n.Turn.Error != nil {
				message = n.Turn.Error.Message
			}
			return c.fail("codex.turn_failed", "the turn failed: %s", message)
		}
		return c.end()
	case "thread/status/changed":
		if c.phase == turning && n.Status.Type == "idle" && len(c.told) > 0 {
			return c.end()
		}
	case "error":
		if !n.Retry {
			return c.fail("codex.turn_failed", "Codex reports an error: %s", first(n.Error.Message, n.Message))
		}
	case "item/agentMessage/delta":
		return c.piece(n)
	case "item/completed":
		if n.Item.Type == "agentMessage" {
			return agent.Step{Events: c.message(n.Item)}
		}
	}
	return agent.Step{}
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// piece tells a part of a message. Without streaming it waits for the whole.
func (c *codec) piece(n note) agent.Step {
	if c.p.Config.Streaming.Off || n.ItemID == "" || n.Delta == "" || c.told[n.ItemID] ||
		!c.streamed[n.ItemID] && len(c.streamed) >= maxItems {
		return agent.Step{}
	}
	t := n.Delta
	if !c.streamed[n.ItemID] {
		c.streamed[n.ItemID] = true
		t = c.apart(t)
	}
	return agent.Step{Events: []json.RawMessage{c.text.Delta(t)}}
}

// apart puts an empty line between two messages.
func (c *codec) apart(t string) string {
	if !c.text.Empty() {
		return "\n\n" + t
	}
	return t
}

// message takes a whole message: each once, and an equal one after another only
// once too. The one that Codex calls final is the answer, whatever was said before.
func (c *codec) message(it item) []json.RawMessage {
	if it.Text == "" || it.ID != "" && c.told[it.ID] || len(c.told) >= maxItems {
		return nil
	}
	if it.Phase == "final_answer" {
		c.final = it.Text[:min(len(it.Text), agent.MaxText)]
	}
	c.told[it.ID] = it.ID != ""
	same := it.Text == c.last
	c.last = it.Text
	switch {
	case same || c.streamed[it.ID]:
		return nil
	case c.p.Config.Streaming.Off:
		c.text.Add(c.apart(it.Text))
		return nil
	}
	return []json.RawMessage{c.text.Delta(c.apart(it.Text))}
}

// legacy takes the events of older versions.
func (c *codec) legacy(n note) agent.Step {
	switch n.Msg.Type {
	case "task_started":
		c.phase = turning
	case "agent_message":
		return agent.Step{Events: c.message(item{Text: n.Msg.Message})}
	case "task_complete":
		return c.end()
	case "turn_aborted":
		return c.fail("codex.turn_failed", "the turn was aborted: %s", first(n.Msg.Reason, "no reason given"))
	}
	return agent.Step{}
}
