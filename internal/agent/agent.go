// Package agent holds what the codecs of coding agents have in common: how an
// agent is launched, what goes in and comes out, and the result events that a
// hub hands to whoever asked for the run.
//
// A codec is a pure machine: it is given lines and gives back events and lines.
// It starts nothing, waits for nothing and knows no time, so that it can be
// tested from transcripts and fuzzed. Codecs are in the packages below this one;
// who runs them is in relayclient.
package agent

import (
	"encoding/json"
	"strconv"
	"strings"
	"time"
)

// Launch is how an agent is started.
type Launch struct {
	// Command are the words of the program and its own arguments, as the payload or
	// a preset has them; the runner checks Command[0] against what this machine
	// allows. Preset says that they are ours and not the payload's.
	Command []string
	Preset  bool
	// Args follow Command.
	Args []string
	// Workspace is the directory to start in; "" leaves it to the machine.
	Workspace string
	// Env is the payload's environment. Inherit lists the names, also with a final
	// *, of this machine's variables that this kind of agent needs beside the usual
	// ones. Unset wins over both.
	Env     map[string]string
	Inherit []string
	Unset   []string
	// Set holds variables of ours, such as the token of the tools.
	Set map[string]string
	// Files are written, for the user alone, into Private before the start, and
	// removed after the end.
	Files []File
	// Timeout bounds the whole run; 0 is no bound.
	Timeout time.Duration
	// StartTimeout bounds the time to the first line; 0 is no bound.
	StartTimeout time.Duration
	// CallTimeout bounds one tool call; 0 leaves it to the machine.
	CallTimeout time.Duration
	// Linger is how long an agent whose turn is over may take to end by itself.
	Linger time.Duration
}

// File is a private file of one run.
type File struct {
	Name string // a plain name
	Data []byte
}

// Host is what the machine offers to one run.
type Host struct {
	// Private is where Launch.Files will be.
	Private string
	// MCP is where the host's tools are reached.
	MCP MCP
}

// MCP is an HTTP endpoint of the Model Context Protocol for one run. The zero
// value is none.
type MCP struct {
	Name  string // of the server, as the agent shows it
	URL   string
	Token string // bearer token
}

// Step is what a codec wants after it was given something.
type Step struct {
	// Events are results for the hub, in order.
	Events []json.RawMessage
	// Write goes to the agent's input.
	Write []byte
	// CloseInput ends the agent's input after Write.
	CloseInput bool
	// Done: the turn is over; the agent may go.
	Done bool
}

// Exit is how the agent ended, for the last events.
type Exit struct {
	Code     int
	Signal   string
	Stopped  bool   // we ended it
	TimedOut bool   // because Launch.Timeout or StartTimeout was over
	Overflow string // because its output broke a bound: which
	Stderr   string // the redacted end of it
}

// Codec is one run of one agent.
type Codec interface {
	// Launch says how to start it. It is called once; the error is a *Failure.
	Launch(Host) (Launch, error)
	// Start is called once, when the agent runs, with the real path of where.
	Start(workspace string) Step
	// Feed takes one line of output.
	Feed(line []byte) Step
	// Cancel is called at most once: what to say to an agent that is about to be
	// ended. It gives no events.
	Cancel() Step
	// Finish is called last, after the output has ended, and gives the last events.
	Finish(Exit) []json.RawMessage
}

// Failure is a refusal or failure in the words of the protocol: a code such as
// "codex.config_invalid".
type Failure struct {
	Code      string
	Message   string
	Retryable bool
}

// Error returns the message.
func (f *Failure) Error() string { return f.Message }

// Event returns the run.failed event, whose text is bounded.
func (f *Failure) Event() json.RawMessage {
	message := f.Message
	if len(message) > maxFailure {
		message = strings.ToValidUTF8(message[:maxFailure], "") + " … (cut)"
	}
	return event("run.failed", failedData{Error: message, Code: f.Code, Retryable: f.Retryable})
}

// maxFailure bounds the text of a failure in bytes: the tail of stderr and the words
// around it have room, what a vendor's program puts into an error may be as large as one
// of its messages.
const maxFailure = 64 << 10

// Exited is the failure of an agent that ended too early, or with an error.
func Exited(code string, e Exit, retryable bool) *Failure {
	how := "ended with code " + strconv.Itoa(e.Code)
	if e.Signal != "" {
		how = "was ended by " + e.Signal
	} else if e.Code < 0 {
		how = "ended in a way that nobody saw"
	}
	message := "the agent " + how
	if s := strings.TrimSpace(e.Stderr); s != "" {
		message += ": " + s
	}
	return &Failure{Code: code, Message: message, Retryable: retryable}
}
