package relaywire

import (
	"encoding/json"
	"strconv"

	"github.com/stockade-run/stockade/internal/jsonscan"
)

// The error codes of JSON-RPC that the relay uses itself.
const (
	RPCInvalid = -32600 // not a request, or an empty batch
	RPCFailed  = -32000 // refused, revoked, failed or timed out
)

// RPCError answers a tool call, one JSON-RPC message or a batch, with an error
// for each request in it, its id kept. The answer is null (nil) when nothing in it
// wants one. payload must be valid JSON.
func RPCError(payload json.RawMessage, code int, message string) json.RawMessage {
	if len(payload) == 0 || payload[0] != '[' {
		return rpcErrorTo(payload, code, message)
	}
	var batch []json.RawMessage
	if json.Unmarshal(payload, &batch) != nil || len(batch) == 0 {
		return appendRPCError(nil, nil, RPCInvalid, "the batch is empty")
	}
	var out []byte
	for _, one := range batch {
		if e := rpcErrorTo(one, code, message); e != nil {
			out = append(append(out, ','), e...)
		}
	}
	if out == nil {
		return nil
	}
	out[0] = '['
	return append(out, ']')
}

func rpcErrorTo(raw json.RawMessage, code int, message string) json.RawMessage {
	if !IsObject(raw) {
		return appendRPCError(nil, nil, RPCInvalid, "the call is not a JSON-RPC object")
	}
	var call map[string]json.RawMessage
	if json.Unmarshal(raw, &call) != nil {
		return appendRPCError(nil, nil, RPCInvalid, "the call is not a JSON-RPC object")
	}
	id, has := call["id"]
	if !has {
		return nil // a notification
	}
	return appendRPCError(nil, id, code, message)
}

func appendRPCError(dst []byte, id json.RawMessage, code int, message string) json.RawMessage {
	dst = append(dst, `{"jsonrpc":"2.0","id":`...)
	switch {
	case len(id) > 0 && (id[0] == '"' || id[0] == '-' || id[0] >= '0' && id[0] <= '9'):
		dst = append(dst, id...)
	default: // an id is a string or a number
		dst = append(dst, "null"...)
	}
	dst = strconv.AppendInt(append(dst, `,"error":{"code":`...), int64(code), 10)
	dst = jsonscan.AppendString(append(dst, `,"message":`...), message)
	return append(dst, "}}"...)
}
