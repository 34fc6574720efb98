// Package relay is the hub of coding-relay-v1 for Go programs that hand coding jobs
// to daemons on their users' machines themselves, without a Stockade server.
//
// A [Hub] is an http.Handler for the daemons' WebSocket connections, or listens by
// itself with [Hub.Start]. [Hub.RunJob] sends a job to a connected daemon;
// [Job.Next] returns what the daemon says. What a program may rely on:
//
//   - A job belongs to the connection it was sent on; nobody else can feed or end it.
//   - Leaving is settling. When the job's context ends, its time is over, [Job.Cancel]
//     is called or the hub stops, the job's [Tools] are revoked first, then the daemon
//     is told, and nothing returns before it acknowledged that the job's processes
//     are gone, or its id is fenced.
//   - A fence stands, through restarts when there is a state directory, until
//     [Hub.ClearFence] is called by somebody who looked, with what was seen.
//
// The types are those of the server's own hub; their documentation is theirs.
package relay

import (
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/relaywire"
)

type (
	// Hub hands jobs to daemons. Its methods may be called from any goroutine.
	Hub = relay.Hub
	// Config configures a [Hub]. The zero value is a hub without a token, without a
	// state directory, on the protocol's limits: for loopback and tests.
	Config = relay.HubConfig
	// Limits are the caps and times of a hub. A zero field means its default.
	Limits = relaywire.Limits
	// Profile says who shares the network the hub listens on.
	Profile = relay.Profile
	// Endpoint is where a hub listens by itself.
	Endpoint = relay.Endpoint
	// JobRequest is one job for one daemon.
	JobRequest = relay.JobRequest
	// Job is one job from its dispatch on. It must be read to its end or cancelled.
	Job = relay.Job
	// Tools answers the tool calls of one job: JSON-RPC of the Model Context Protocol.
	// Its right to be asked ends before the job does.
	Tools = relay.Tools
	// Outcome is how a job ended.
	Outcome = relay.Outcome
	// Fence is the evidence that something may still be running on a daemon's machine.
	Fence = relay.Fence
	// LateFinish is an acknowledgement that came too late to count.
	LateFinish = relay.LateFinish
	// DaemonInfo is one connected daemon.
	DaemonInfo = relay.DaemonInfo
	// JobInfo is one job that is not settled.
	JobInfo = relay.JobInfo
	// Error is the type of the errors a hub makes; Code says what can be done.
	Error = errdefs.Error
	// Code is the part of a relay error code after the hub's prefix.
	Code = relaywire.Code
)

// The profiles.
const (
	Dedicated = relay.Dedicated // one installation's own network; an empty token is allowed
	Shared    = relay.Shared    // several share it; the token must be strong
)

// The codes of refusals and ends.
const (
	CodeTokenRequired   = relaywire.CodeTokenRequired
	CodeHubConflict     = relaywire.CodeHubConflict
	CodeBindFailed      = relaywire.CodeBindFailed
	CodeNotStarted      = relaywire.CodeNotStarted
	CodeOffline         = relaywire.CodeOffline
	CodeFenced          = relaywire.CodeFenced
	CodeCancelling      = relaywire.CodeCancelling
	CodeBusy            = relaywire.CodeBusy
	CodeDisconnected    = relaywire.CodeDisconnected
	CodeTimeout         = relaywire.CodeTimeout
	CodeCancelled       = relaywire.CodeCancelled
	CodeIDInvalid       = relaywire.CodeIDInvalid
	CodeStateFailed     = relaywire.CodeStateFailed
	CodePayloadInvalid  = relaywire.CodePayloadInvalid
	CodePayloadTooLarge = relaywire.CodePayloadTooLarge
	CodeOverflow        = relaywire.CodeOverflow
)

// New checks the configuration, locks the state directory and loads its fences. The
// hub answers nobody yet: serve it, or call Start. Call Stop when done.
func New(cfg Config) (*Hub, error) { return relay.NewHub(cfg) }

// Is reports whether err carries the relay code, whatever the hub's prefix.
func Is(err error, code Code) bool { return relaywire.Is(err, code) }

// CodeOf returns the relay code of an error with its prefix, such as
// "relay.daemon_fenced", or "".
func CodeOf(err error) string { return relaywire.CodeOf(err) }
