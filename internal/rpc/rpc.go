// Package rpc is one connection of the plugin protocol: calls and streams either way
// at the same time, over stdio or a WebSocket, with the limits of pluginwire.
//
// A Conn has one goroutine that reads and one for each inbound action that runs, of
// which there are at most MaxInflight, a few reserved ones, and a cancel for each.
// Whoever sends writes by itself, one at a time: nothing is queued behind a peer that
// does not read, and a peer that takes nothing for the stall time loses its connection.
package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// StallTime is how long a write may make no progress. Ours: the peers' pings give up
// after 20 s and three of them after a minute.
const StallTime = 30 * time.Second

// AckPatience is how long a stream waits for the acknowledgement that lets its next
// frame go: the longest time in the table of actions.
const AckPatience = pluginwire.MaxTimeout

// The errors of a connection. What is returned wraps them.
var (
	// ErrClosed: the connection has ended, here or there.
	ErrClosed error = errdefs.New(errdefs.Unavailable, "the connection is closed")
	// ErrTimeout: the peer did not answer in time, or not in time with the next frame.
	ErrTimeout error = errdefs.New(errdefs.Unavailable, "action call timed out")
	// ErrStream: a stream broke its rules (order, size) and was ended.
	ErrStream error = errdefs.New(errdefs.Unavailable, "the stream was ended")
	// ErrCancelled is the cause of the context of an inbound action that was cancelled.
	ErrCancelled error = errdefs.New(errdefs.Unavailable, "the action was cancelled")
)

// PeerError is an answer with an error code.
type PeerError struct {
	Action  string
	Message string          // as the peer wrote it, mostly "PythonClass: text"
	Data    json.RawMessage // an object, {} from older peers
}

// Error returns the peer's text.
func (e *PeerError) Error() string { return e.Message }

// failure is an error of a call: a text, the kind it is and perhaps a cause.
type failure struct {
	text, class string
	kind, cause error
}

func (f *failure) Error() string     { return f.text }
func (f *failure) Unwrap() []error   { return []error{f.kind, f.cause} }
func (f *failure) WireClass() string { return f.class }

func closedError(cause error) error {
	if cause == nil {
		return &failure{ErrClosed.Error(), pluginwire.ClassClosed, ErrClosed, nil}
	}
	return &failure{"the connection is closed: " + cause.Error(), pluginwire.ClassClosed, ErrClosed, cause}
}

// Cause is why a connection ended, of an error that wraps ErrClosed: nil for an end in
// order.
func Cause(err error) error {
	if f, ok := errors.AsType[*failure](err); ok && f.kind == ErrClosed {
		return f.cause
	}
	return nil
}

func timeoutError(action string, after time.Duration) error {
	return &failure{fmt.Sprintf("action call timed out: %s was not answered within %s", action, after),
		pluginwire.ClassTimeout, ErrTimeout, nil}
}

func streamError(format string, args ...any) error {
	return &failure{fmt.Sprintf(format, args...), pluginwire.ClassRuntime, ErrStream, nil}
}

// Handler runs one inbound action. What it returns is the data of the answer: nil (an
// empty object), a json.RawMessage that is a valid object, or anything that encodes as
// one. An error is answered with its text, see [pluginwire.FromError]; a *PeerError is
// passed on as it is, with its data.
//
// A handler that streams calls Send for each frame, or BeginStream when there may be
// none, and returns nil: the end frame follows. ctx ends when the action is cancelled
// or the connection closes; nothing is sent after that.
type Handler func(ctx context.Context, in *Inbound) (any, error)

// Config is what a Conn needs to know. Only Handle is usual to set.
type Config struct {
	Name   string  // for the log
	Handle Handler // nil: every action is unknown
	// Admit runs first, on the action's own goroutine, for every action but
	// __stream_ack. It may set in.Context to the effective context, and refuse. Nil
	// admits all with the context they carry.
	Admit func(in *Inbound) error
	// Reserved reports actions that have the reserved lane. A __cancel_action has one of
	// its own.
	Reserved func(action string) bool
	// InflightBytes bounds the data of the inbound actions in flight; 0: 64 MiB. A
	// single one may be as large as a message.
	InflightBytes int
	// Budget bounds what this and other connections hold together; nil: nothing does.
	Budget *Budget
	// FirstSeq is the number before that of the first request; 0: random up to 100000.
	FirstSeq int64
	// PingEvery is how often an idle WebSocket peer is asked, and within which time it
	// must answer. 0: 20 s; negative: never.
	PingEvery time.Duration
	Logger    *slog.Logger // nil: discard
}

// CallOptions say how one call is made. The zero value is usual.
type CallOptions struct {
	Context    pluginwire.Context // on whose behalf; zero: none
	Timeout    time.Duration      // for the answer, or each frame; 0: 15 s, negative: none
	CancelPeer bool               // tell the peer when this side gives up (streams always do)
}

func (o CallOptions) timeout() time.Duration {
	if o.Timeout == 0 {
		return pluginwire.DefaultTimeout
	}
	return o.Timeout
}

// Counters count what a connection did.
type Counters struct {
	Requests  uint64 // inbound, run or refused
	Busy      uint64 // refused because a lane was full
	Cancelled uint64 // inbound, ended without an answer
	Calls     uint64 // outbound, streams too
	Timeouts  uint64 // outbound, not answered in time
	Ignored   uint64 // messages that were none
	Late      uint64 // responses nobody waited for
	InFlight  int    // inbound, now
	Waiting   int    // outbound, now
}
