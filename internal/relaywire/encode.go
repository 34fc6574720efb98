package relaywire

import (
	"encoding/json"

	"github.com/stockade-run/stockade/internal/jsonscan"
)

// Append writes the frame to dst as one JSON object. Empty fields are left out,
// save that an mcp.response always has a payload (null for a notification). Event,
// Payload and Metadata must be valid JSON and are written as they are.
func Append(dst []byte, f *Frame) []byte {
	dst = append(dst, `{"type":`...)
	dst = jsonscan.AppendString(dst, string(f.Type))
	for _, s := range [...]struct{ name, value string }{
		{`,"daemon_id":`, f.DaemonID}, {`,"protocol":`, f.Protocol}, {`,"token":`, f.Token},
		{`,"request_id":`, f.RequestID}, {`,"job_id":`, f.JobID},
	} {
		if s.value != "" {
			dst = jsonscan.AppendString(append(dst, s.name...), s.value)
		}
	}
	for _, r := range [...]struct {
		name string
		raw  json.RawMessage
	}{{`,"metadata":`, f.Metadata}, {`,"event":`, f.Event}, {`,"payload":`, f.Payload}} {
		if len(r.raw) > 0 {
			dst = append(append(dst, r.name...), r.raw...)
		}
	}
	if f.Type == MCPResponse && len(f.Payload) == 0 {
		dst = append(dst, `,"payload":null`...)
	}
	return append(dst, '}')
}

// FailedEvent is the run.failed event that a hub or client makes itself.
func FailedEvent(code, message string, retryable bool) json.RawMessage {
	dst := jsonscan.AppendString([]byte(`{"type":"run.failed","data":{"error":`), message)
	dst = jsonscan.AppendString(append(dst, `,"code":`...), code)
	if retryable {
		return append(dst, `,"retryable":true}}`...)
	}
	return append(dst, `,"retryable":false}}`...)
}
