package agent

import "encoding/json"

// The data of each event type. Payloads are closed: a field that is not named in
// the protocol makes a host drop the event.
type (
	envelope struct {
		Type string `json:"type"`
		Data any    `json:"data"`
	}
	failedData struct {
		Error     string `json:"error"`
		Code      string `json:"code"`
		Retryable bool   `json:"retryable"`
	}
	chunk struct {
		Role       string `json:"role"`
		Content    string `json:"content"`
		AllContent string `json:"all_content"`
		IsFinal    bool   `json:"is_final"`
		Sequence   int    `json:"msg_sequence"`
	}
	deltaData struct {
		Chunk chunk `json:"chunk"`
	}
	message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messageData struct {
		Message message `json:"message"`
	}
	completedData struct {
		FinishReason string `json:"finish_reason"`
	}
	stateData struct {
		Scope string `json:"scope"`
		Key   string `json:"key"`
		Value any    `json:"value"`
	}
	toolStarted struct {
		ID         string         `json:"tool_call_id"`
		Name       string         `json:"tool_name"`
		Parameters map[string]any `json:"parameters"`
	}
	toolCompleted struct {
		ID     string          `json:"tool_call_id"`
		Name   string          `json:"tool_name"`
		Result json.RawMessage `json:"result,omitempty"`
		Error  string          `json:"error,omitempty"`
	}
)

func event(kind string, data any) json.RawMessage {
	b, err := json.Marshal(envelope{kind, data})
	if err != nil { // only for a raw message that is not JSON
		return (&Failure{Code: "agent_runtime.event_invalid", Message: "an event could not be written"}).Event()
	}
	return b
}

// Completed is run.completed.
func Completed() json.RawMessage { return event("run.completed", completedData{"stop"}) }

// Message is message.completed with the assistant's whole text.
func Message(text string) json.RawMessage {
	return event("message.completed", messageData{message{"assistant", text}})
}

// State is state.updated for the conversation.
func State(key string, value any) json.RawMessage {
	return event("state.updated", stateData{"conversation", key, value})
}

// ToolStarted is tool.call.started.
func ToolStarted(id, name string) json.RawMessage {
	return event("tool.call.started", toolStarted{id, name, map[string]any{}})
}

// ToolCompleted is tool.call.completed, with a result (a JSON object) or an error.
func ToolCompleted(id, name string, result json.RawMessage, failure string) json.RawMessage {
	return event("tool.call.completed", toolCompleted{id, name, result, failure})
}

// MaxText bounds the text of one run that is kept for the final message. What is
// longer is cut there and the run goes on.
const MaxText = 8 << 20

// maxCumulative bounds the text that deltas repeat: all_content grows with each,
// so without a bound a long answer would cost its square.
const maxCumulative = 64 << 10

// Text collects the assistant's words and makes the delta events.
type Text struct {
	all      []byte
	sequence int
}

// Delta adds text and returns its event. all_content repeats what was said so far
// as long as that is short; a longer text is whole again in the final event.
func (t *Text) Delta(text string) json.RawMessage {
	t.Add(text)
	t.sequence++
	c := chunk{Role: "assistant", Content: text, Sequence: t.sequence}
	if len(t.all) <= maxCumulative {
		c.AllContent = string(t.all)
	} else {
		return event("message.delta", shortDelta{shortChunk{c.Role, c.Content, false, c.Sequence}})
	}
	return event("message.delta", deltaData{c})
}

// shortChunk is a chunk without all_content, which is optional.
type (
	shortChunk struct {
		Role     string `json:"role"`
		Content  string `json:"content"`
		IsFinal  bool   `json:"is_final"`
		Sequence int    `json:"msg_sequence"`
	}
	shortDelta struct {
		Chunk shortChunk `json:"chunk"`
	}
)

// Final returns the last delta, which holds the whole text.
func (t *Text) Final(text string) json.RawMessage {
	t.sequence++
	return event("message.delta", deltaData{chunk{"assistant", text, text, true, t.sequence}})
}

// Add adds text without an event.
func (t *Text) Add(text string) { t.all = append(t.all, text[:min(len(text), MaxText-len(t.all))]...) }

// Reset forgets the text: what follows is another message.
func (t *Text) Reset() { t.all = t.all[:0] }

// Empty reports whether there is none. It costs nothing, unlike String.
func (t *Text) Empty() bool { return len(t.all) == 0 }

// String is the text so far.
func (t *Text) String() string { return string(t.all) }
