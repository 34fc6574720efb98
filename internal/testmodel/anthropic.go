package testmodel

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// messagesRequest is what is read of a request to /v1/messages.
type messagesRequest struct {
	Model    string `json:"model"`
	Stream   bool   `json:"stream"`
	Messages []struct {
		Content json.RawMessage `json:"content"` // a string or a list of blocks
	} `json:"messages"`
	Tools []struct {
		Name string `json:"name"`
	} `json:"tools"`
}

func (s *Server) messages(w http.ResponseWriter, r *http.Request, body []byte, rec *Request) {
	var q messagesRequest
	if err := json.Unmarshal(body, &q); err != nil {
		refuse(w, http.StatusBadRequest, "invalid_request_error", "the body is no request")
		return
	}
	a := asked{Model: q.Model, tools: map[string]bool{}}
	for _, t := range q.Tools {
		a.tools[t.Name] = true
	}
	for _, m := range q.Messages {
		var blocks []struct {
			Type    string          `json:"type"`
			Content json.RawMessage `json:"content"`
		}
		if json.Unmarshal(m.Content, &blocks) != nil {
			continue
		}
		for _, b := range blocks {
			if b.Type == "tool_result" {
				a.outputs = append(a.outputs, flatten(b.Content))
			}
		}
	}
	turn, use := s.turn(a, rec)
	s.record(*rec)

	e := s.begin(w, r, rec.Turn)
	message := map[string]any{
		"id": fmt.Sprintf("msg_%d", len(a.outputs)), "type": "message", "role": "assistant", "model": a.Model, "content": []any{},
		"stop_reason": nil, "stop_sequence": nil, "usage": map[string]any{"input_tokens": len(body) / 4, "output_tokens": 1}}
	if !q.Stream { // as Claude Code asks again when a stream has broken off
		if e.err == nil {
			whole(w, message, turn, use)
		}
		return
	}
	e.event("message_start", map[string]any{"message": message})
	index := 0
	block := func(start map[string]any, deltas func()) {
		e.event("content_block_start", map[string]any{"index": index, "content_block": start})
		deltas()
		e.event("content_block_stop", map[string]any{"index": index})
		index++
	}
	if turn.Text != "" {
		block(map[string]any{"type": "text", "text": ""}, func() {
			e.text(pieces(turn.Text, s.cfg.Piece), func(p string) {
				e.event("content_block_delta", map[string]any{"index": index, "delta": map[string]any{"type": "text_delta", "text": p}})
			})
		})
	}
	stop := "end_turn"
	if use.name != "" {
		stop = "tool_use"
		input, err := json.Marshal(use.input)
		if err != nil {
			e.err = err
		}
		block(map[string]any{"type": "tool_use", "id": fmt.Sprintf("toolu_%d", len(a.outputs)), "name": use.name, "input": map[string]any{}}, func() {
			e.event("content_block_delta", map[string]any{"index": index, "delta": map[string]any{"type": "input_json_delta", "partial_json": string(input)}})
		})
	}
	e.event("message_delta", map[string]any{"delta": map[string]any{"stop_reason": stop, "stop_sequence": nil}, "usage": map[string]any{"output_tokens": len(turn.Text)/4 + 1}})
	e.event("message_stop", map[string]any{})
}

// whole writes an answer that was not asked for as a stream.
func whole(w http.ResponseWriter, message map[string]any, turn Turn, use toolUse) {
	content, stop := []any{}, "end_turn"
	if turn.Text != "" {
		content = append(content, map[string]any{"type": "text", "text": turn.Text})
	}
	if use.name != "" {
		content, stop = append(content, map[string]any{"type": "tool_use", "id": fmt.Sprint("toolu_", message["id"]), "name": use.name, "input": use.input}), "tool_use"
	}
	message["content"], message["stop_reason"] = content, stop
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(message)
}
