// Package relaywire holds the rules of coding-relay-v1 that need no connection:
// the frames, their decoder, the limits, the close codes and the error codes.
//
// A frame is one JSON object in one WebSocket message, named by its "type". The
// decoder reads the envelope only: an event or a payload stays the bytes it came
// as, checked to be JSON but not built into values. So a hub pays for the bytes
// of an event once, and passes on exactly what the daemon said.
package relaywire

import "encoding/json"

// Protocol is the one version both sides must name.
const Protocol = "coding-relay-v1"

// Type names a kind of frame.
type Type string

// The frames. Direction and fields as in the protocol's table.
const (
	Hello       Type = "daemon.hello" // daemon to hub, first: daemon_id, protocol, token, metadata
	Ready       Type = "daemon.ready" // hub to daemon: daemon_id, protocol
	Ping        Type = "daemon.ping"  // daemon to hub: nothing
	Pong        Type = "daemon.pong"  // hub to daemon: nothing
	Start       Type = "run.start"    // hub to daemon: job_id, payload
	Event       Type = "run.event"    // daemon to hub: job_id, event
	Finished    Type = "run.finished" // daemon to hub: job_id; the job's processes are gone
	Cancel      Type = "run.cancel"   // hub to daemon: job_id
	Cleanup     Type = "run.cleanup"  // a hub older than v1: a client must give up on it
	MCPRequest  Type = "mcp.request"  // daemon to hub: request_id, job_id, payload
	MCPResponse Type = "mcp.response" // hub to daemon: request_id, job_id, payload
)

// Frame is one message. A field the frame did not have, or had with another type
// than a string, is empty. Event, Payload and Metadata are valid JSON of any kind
// and alias the bytes that were decoded.
type Frame struct {
	Type      Type
	JobID     string
	RequestID string
	DaemonID  string
	Protocol  string
	Token     string
	Event     json.RawMessage
	Payload   json.RawMessage
	Metadata  json.RawMessage
}

// IsObject reports whether raw is a JSON object, given that it is valid JSON
// without space around it.
func IsObject(raw json.RawMessage) bool { return len(raw) > 0 && raw[0] == '{' }

// IsNull reports whether raw is absent or null, given that it is valid JSON.
func IsNull(raw json.RawMessage) bool { return len(raw) == 0 || raw[0] == 'n' }
