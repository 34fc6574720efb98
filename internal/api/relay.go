package api

import (
	"encoding/json"
	"time"
)

// RelayJobRequest asks for one job on one daemon.
type RelayJobRequest struct {
	DaemonID string `json:"daemon_id" minLength:"1" maxLength:"512" doc:"The daemon's id, as it connected."`
	// Payload is passed on as the bytes it came as.
	Payload       json.RawMessage `json:"payload" doc:"A JSON object, passed on to the daemon unchanged. Which fields it has is between the caller and the daemon's runner."`
	TimeoutMillis int64           `json:"timeout_ms,omitempty" minimum:"0" maximum:"2592000000" doc:"Bounds the job from its dispatch; 0 is the relay's default. At least 10."`
	WaitMillis    int64           `json:"wait_ms,omitempty" minimum:"0" maximum:"600000" doc:"How long to wait for the daemon to connect; 0 does not wait."`
	Tools         []string        `json:"tools,omitempty" maxItems:"1" doc:"The name of the tool set the job is granted, one of those the operator registered (relay.tools); without one the job's tool calls find an empty list of tools. A program that embeds the hub (client/relay) grants its own."`
}

// RelayJob is one job that is not settled.
type RelayJob struct {
	ID          string    `json:"job_id"`
	DaemonID    string    `json:"daemon_id"`
	Incarnation uint64    `json:"incarnation" doc:"The connection that the job belongs to."`
	State       string    `json:"state" enum:"starting,running,cancelling,settling"`
	StartedAt   time.Time `json:"started_at"`
	Deadline    time.Time `json:"deadline"`
	Events      int64     `json:"events" doc:"Events received."`
	QueuedBytes int64     `json:"queued_bytes" doc:"Bytes of events in memory that the caller has not taken."`
	SpillBytes  int64     `json:"spill_bytes" doc:"The same on disk."`
	Waiting     bool      `json:"waiting" doc:"The daemon's next event waits until the caller takes one."`
}

// RelayLine is one line of the answer to a job: the first says started, each event
// is one, the last says how the job ended. An answer without a line of type outcome
// was cut off.
type RelayLine struct {
	Type string `json:"type" enum:"started,event,alive,outcome" doc:"alive says nothing, every 15 seconds in which nothing else is said."`
	// Job is set for started.
	Job *RelayJob `json:"job,omitempty" doc:"For started."`
	// Event is set for event, as the daemon sent it.
	Event json.RawMessage `json:"event,omitempty" doc:"For event: as the daemon sent it."`
	// Outcome is set for outcome.
	Outcome *RelayOutcome `json:"outcome,omitempty" doc:"For outcome."`
}

// RelayOutcome is how a job ended.
type RelayOutcome struct {
	Acknowledged bool        `json:"acknowledged" doc:"The daemon says that the job's processes are gone. If false, a fence stands or the job was never sent."`
	Code         string      `json:"code,omitempty" doc:"Why it ended, such as relay.daemon_timeout; empty when it finished by itself."`
	Cause        string      `json:"cause,omitempty" doc:"The same for people."`
	Fence        *RelayFence `json:"fence,omitempty" doc:"The fence that stands because the end could not be confirmed."`
}

// RelayDaemon is one connected daemon.
type RelayDaemon struct {
	ID          string          `json:"daemon_id"`
	Incarnation uint64          `json:"incarnation" doc:"Grows with every connection to the hub."`
	Remote      string          `json:"remote" doc:"The address it connected from."`
	Metadata    json.RawMessage `json:"metadata,omitempty" doc:"What the daemon says about itself; believe it as far as you believe the daemon."`
	ConnectedAt time.Time       `json:"connected_at"`
	LastSeenAt  time.Time       `json:"last_seen_at"`
	Jobs        []string        `json:"jobs" doc:"Its active jobs."`
	Fenced      bool            `json:"fenced"`
}

// RelayFence is the evidence that something may still be running where a daemon was.
type RelayFence struct {
	ID          string            `json:"id" doc:"Names the fence as it was seen: a later one of the daemon has another, and so has this one once more jobs are in it."`
	DaemonID    string            `json:"daemon_id" doc:"Empty when a damaged record no longer says it; the key still does."`
	Key         string            `json:"key" doc:"SHA-256 of the daemon id, in hex. Accepted wherever a daemon id names a fence."`
	Since       time.Time         `json:"since"`
	Code        string            `json:"code" doc:"unacknowledged, disconnected, hub_died or damaged."`
	Cause       string            `json:"cause"`
	Jobs        []string          `json:"jobs" doc:"Jobs whose end was not confirmed."`
	Remote      string            `json:"remote,omitempty"`
	Incarnation uint64            `json:"incarnation,omitempty"`
	Metadata    json.RawMessage   `json:"metadata,omitempty"`
	Late        []RelayLateFinish `json:"late,omitempty" doc:"Acknowledgements that came after the fence. They are evidence and lift nothing."`
}

// ClearRelayFenceRequest is an operator's statement that nothing runs on the daemon's
// machine any more.
type ClearRelayFenceRequest struct {
	Fence  string `json:"fence" minLength:"1" maxLength:"64" doc:"The id of the fence that was looked at. Another one is not cleared."`
	Reason string `json:"reason" minLength:"8" maxLength:"1024" doc:"What you checked. It is kept in the audit record."`
}

// RelayLateFinish is an acknowledgement that came too late to count.
type RelayLateFinish struct {
	JobID string    `json:"job_id"`
	At    time.Time `json:"at"`
}
