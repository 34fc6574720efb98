package agent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// RPC is one JSON-RPC message of an agent that speaks it line by line.
type RPC struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *RPCError       `json:"error"`
}

// RPCError is the error member.
type RPCError struct {
	Code    int64           `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data,omitempty"`
}

// maxErrorData bounds what is told of an error's data.
const maxErrorData = 1000

// String says the error for people, with its data, where agents put the reason.
func (e *RPCError) String() string {
	data := strings.ToValidUTF8(string(e.Data[:min(len(e.Data), maxErrorData)]), "\uFFFD")
	if data == "" || data == "null" {
		return fmt.Sprintf("%s (JSON-RPC code %d)", e.Message, e.Code)
	}
	return fmt.Sprintf("%s (JSON-RPC code %d): %s", e.Message, e.Code, data)
}

// ParseRPC reads a line. ok is false for what is no JSON object.
func ParseRPC(line []byte) (m RPC, ok bool) {
	line = bytes.TrimSpace(line)
	if len(line) == 0 || line[0] != '{' || json.Unmarshal(line, &m) != nil {
		return RPC{}, false
	}
	if string(m.ID) == "null" {
		m.ID = nil
	}
	return m, true
}

// Reply reports whether the message answers a call of ours, and which.
func (m RPC) Reply() (id int, ok bool) {
	if m.Method != "" || m.ID == nil {
		return 0, false
	}
	id, err := strconv.Atoi(string(bytes.Trim(m.ID, `"`)))
	return id, err == nil
}

// Call writes a request line.
func Call(id int, method string, params any) []byte {
	return rpcLine(map[string]any{"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

// Notify writes a notification line.
func Notify(method string, params any) []byte {
	m := map[string]any{"jsonrpc": "2.0", "method": method}
	if params != nil {
		m["params"] = params
	}
	return rpcLine(m)
}

// Answer writes the result line of a request of the agent's.
func Answer(id json.RawMessage, result any) []byte {
	return rpcLine(map[string]any{"jsonrpc": "2.0", "id": id, "result": result})
}

// Refuse writes the error line of a request of the agent's.
func Refuse(id json.RawMessage, code int, message string) []byte {
	return rpcLine(map[string]any{"jsonrpc": "2.0", "id": id, "error": RPCError{Code: int64(code), Message: message}})
}

// MethodNotFound is JSON-RPC's code for it.
const MethodNotFound = -32601

func rpcLine(m map[string]any) []byte {
	b, err := json.Marshal(m)
	if err != nil { // only values that were decoded before are in it
		return nil
	}
	return append(b, '\n')
}
