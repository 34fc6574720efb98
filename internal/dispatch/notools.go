package dispatch

import (
	"context"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// The Model Context Protocol, as far as a server without tools speaks it.
const (
	mcpVersion   = "2025-06-18" // what we answer to a client that names none
	rpcNoMethod  = -32601       // JSON-RPC 2.0, section 5.1
	maxBatch     = 256          // messages of one batch
	maxVersion   = 32           // bytes of a version we repeat
	mcpServer    = "stockade-relay"
	mcpServerVer = "0.1.0"
)

// noTools answers the tool calls of a job that was granted none: an MCP server
// whose list of tools is empty. An agent that looks for tools finds none, instead
// of a server that fails.
type noTools struct{}

// Call answers one JSON-RPC message or a batch; nil if nothing in it wants one.
func (noTools) Call(_ context.Context, payload json.RawMessage) (json.RawMessage, error) {
	if len(payload) == 0 || payload[0] != '[' {
		return answerOne(payload), nil
	}
	var batch []json.RawMessage
	if json.Unmarshal(payload, &batch) != nil || len(batch) == 0 {
		return relaywire.RPCError(payload, relaywire.RPCInvalid, "the batch is empty"), nil
	}
	if len(batch) > maxBatch {
		return nil, errdefs.New(errdefs.Exhausted, "the batch has %d messages, the limit is %d", len(batch), maxBatch)
	}
	var answers []json.RawMessage
	for _, one := range batch {
		if a := answerOne(one); a != nil {
			answers = append(answers, a)
		}
	}
	if answers == nil {
		return nil, nil
	}
	return json.Marshal(answers)
}

func answerOne(raw json.RawMessage) json.RawMessage {
	var call struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params struct {
			ProtocolVersion string `json:"protocolVersion"`
		} `json:"params"`
	}
	if !relaywire.IsObject(raw) || json.Unmarshal(raw, &call) != nil {
		return relaywire.RPCError(raw, relaywire.RPCInvalid, "the call is not a JSON-RPC request")
	}
	if call.ID == nil {
		return nil
	}
	var result any
	switch call.Method {
	case "initialize":
		version := call.Params.ProtocolVersion
		if version == "" || len(version) > maxVersion {
			version = mcpVersion
		}
		result = map[string]any{
			"protocolVersion": version,
			"capabilities":    map[string]any{"tools": map[string]any{}},
			"serverInfo":      map[string]any{"name": mcpServer, "version": mcpServerVer},
		}
	case "ping":
		result = map[string]any{}
	case "tools/list":
		result = map[string]any{"tools": []any{}}
	case "resources/list":
		result = map[string]any{"resources": []any{}}
	case "prompts/list":
		result = map[string]any{"prompts": []any{}}
	default:
		return relaywire.RPCError(raw, rpcNoMethod, "this job was granted no tools")
	}
	// The id of a request is a string or a number; RPCError says so to others.
	if c := call.ID[0]; c != '"' && c != '-' && (c < '0' || c > '9') {
		return relaywire.RPCError(raw, relaywire.RPCInvalid, "the id is neither a string nor a number")
	}
	b, err := json.Marshal(map[string]any{"jsonrpc": "2.0", "id": call.ID, "result": result})
	if err != nil {
		return relaywire.RPCError(raw, relaywire.RPCFailed, "the answer could not be made")
	}
	return b
}
