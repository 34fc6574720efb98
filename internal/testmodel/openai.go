package testmodel

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// responsesRequest is what is read of a request to /v1/responses.
type responsesRequest struct {
	Model string `json:"model"`
	Input []struct {
		Type   string          `json:"type"`
		Output json.RawMessage `json:"output"`
	} `json:"input"`
	Tools []struct {
		Type string `json:"type"`
		Name string `json:"name"`
	} `json:"tools"`
}

func (s *Server) responses(w http.ResponseWriter, r *http.Request, body []byte, rec *Request) {
	var q responsesRequest
	if err := json.Unmarshal(body, &q); err != nil {
		refuse(w, http.StatusBadRequest, "invalid_request_error", "the body is no request")
		return
	}
	a := asked{Model: q.Model, tools: map[string]bool{}}
	for _, t := range q.Tools {
		if t.Type == "function" {
			a.tools[t.Name] = true
		}
	}
	for _, i := range q.Input {
		if i.Type == "function_call_output" {
			a.outputs = append(a.outputs, flatten(i.Output))
		}
	}
	turn, use := s.turn(a, rec)
	s.record(*rec)

	id := fmt.Sprintf("resp_%d", len(a.outputs))
	e := s.begin(w, r, rec.Turn)
	e.event("response.created", map[string]any{"response": map[string]any{"id": id}})
	index := 0
	if turn.Text != "" {
		msg := fmt.Sprintf("msg_%d", len(a.outputs))
		item := func(status string, content []any) map[string]any {
			return map[string]any{"type": "message", "role": "assistant", "id": msg, "status": status, "content": content}
		}
		e.event("response.output_item.added", map[string]any{"output_index": index, "item": item("in_progress", []any{})})
		e.text(pieces(turn.Text, s.cfg.Piece), func(p string) {
			e.event("response.output_text.delta", map[string]any{"item_id": msg, "output_index": 0, "content_index": 0, "delta": p})
		})
		e.event("response.output_item.done", map[string]any{"output_index": index,
			"item": item("completed", []any{map[string]any{"type": "output_text", "text": turn.Text, "annotations": []any{}}})})
		index++
	}
	if use.name != "" {
		arguments, err := json.Marshal(use.input)
		if err != nil {
			e.err = err
		}
		e.event("response.output_item.done", map[string]any{"output_index": index, "item": map[string]any{
			"type": "function_call", "id": fmt.Sprintf("fc_%d", len(a.outputs)), "call_id": fmt.Sprintf("call_%d", len(a.outputs)),
			"name": use.name, "arguments": string(arguments), "status": "completed"}})
	}
	e.event("response.completed", map[string]any{"response": map[string]any{"id": id, "usage": map[string]any{
		"input_tokens": len(body) / 4, "input_tokens_details": nil, "output_tokens": len(turn.Text) / 4, "output_tokens_details": nil,
		"total_tokens": (len(body) + len(turn.Text)) / 4}}})
}

// flatten takes the text out of a tool's output, which is a string or a list of
// parts with a text in each.
func flatten(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(raw, &parts) == nil {
		for _, p := range parts {
			s += p.Text
		}
		return s
	}
	return string(raw)
}
