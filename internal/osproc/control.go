package osproc

import "time"

// order is what the caller says to the keeper, as JSON on the control socket:
// first start, later stop. The end of the socket means stop.
type order struct {
	Start    *startOrder   `json:"start,omitempty"`
	Stop     bool          `json:"stop,omitempty"`
	Grace    time.Duration `json:"grace,omitempty"`
	KillWait time.Duration `json:"kill_wait,omitempty"`
}

// startOrder goes over the socket and not on the keeper's command line: an
// environment holds secrets, and a command line is public.
type startOrder struct {
	Argv []string `json:"argv"`
	Env  []string `json:"env"`
}

// report is what the keeper says to the caller.
type report struct {
	// Started is the agent's process number, Failed why there is none and Errno
	// the kernel's number for it.
	Started int    `json:"started,omitempty"`
	Failed  string `json:"failed,omitempty"`
	Errno   int    `json:"errno,omitempty"`
	// Exit is how the agent itself ended; others of its tree may go on.
	Exit *Exit `json:"exit,omitempty"`
	// Gone is the proof: the keeper has no child left. Left says why it has none.
	Gone bool   `json:"gone,omitempty"`
	Left string `json:"left,omitempty"`
}

// Exit is how the agent's own process ended.
type Exit struct {
	// Code is the exit code, -1 when a signal ended it.
	Code int `json:"code"`
	// Signal is the signal's name, such as SIGSEGV, or empty.
	Signal string `json:"signal,omitempty"`
}

// Outcome is what is known of the tree after [Process.Stop].
type Outcome struct {
	// Confirmed: it is proven that no process of the tree is left.
	Confirmed bool
	// Why says, for people, why it is not confirmed.
	Why string
}
