package pluginhost

import "time"

// Times and bounds; those without another word are the published Python
// runtime's.
const (
	// ReadyWithin is how long a dedicated worker may take from its start until it
	// is registered and initialised.
	ReadyWithin = 30 * time.Second
	// RegisterWithin is how long a pool's process may take until it registers, and
	// (ours) a connection of the debug port.
	RegisterWithin = 120 * time.Second
	// AttachWithin bounds one attempt to attach a slot.
	AttachWithin = 120 * time.Second
	// StableAfter is how long a probe of an open circuit must run to close it.
	StableAfter = 60 * time.Second
	// ShutdownWithin is how long a worker may take to acknowledge shutdown. The
	// Python runtime waits 15 s; a worker that does not answer a request without
	// work in five will not answer it.
	ShutdownWithin = 5 * time.Second
	// JoinWithin bounds the wait for a supervisor that was told to end. It is
	// longer than everything a stop may take; reaching it is logged.
	JoinWithin = 30 * time.Second
	// DetachWithin bounds the request to detach a slot.
	DetachWithin = 15 * time.Second
	// DebugConnections bounds the connections of the debug port that one Workspace has
	// at a time, so that one author's loop keeps no other Workspace out. Ours.
	DebugConnections = 32
	// InboundBytes bounds what the actions of all workers hold together while they
	// run, above the free share of each; a connection alone may hold 64 MiB. Ours.
	InboundBytes = 256 << 20
	// DefaultLogs is how many log lines get_plugin_logs answers when it is not told.
	DefaultLogs = 200
)
