package process

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// Record is what Step reads and changes: the part of the ledger's record that
// has a life. The pointers are never written through, only replaced.
type Record struct {
	State       api.ProcessState
	HostID      string     // host that was told; "" before dispatch
	BootID      string     // its boot when it was told, then when it first answered
	Started     *time.Time // set once the host has said that it keeps the process
	Exited      *time.Time
	Closed      *time.Time
	Exit        *api.Exit
	Cleanup     api.Cleanup
	Reason      string // why it was closed or refused; the first reason stays
	CloseAsked  bool
	GraceMillis int64
	Fenced      bool        // a fence stands because of this process
	Proof       *wire.Proof // what the last IssueReceipt rests on; not kept in the ledger
}

// Acked reports whether the host has said that it keeps the process. From then
// on a host without a record of it has lost it, and does not merely not know it.
func (r Record) Acked() bool { return r.Started != nil }

// Final reports whether nothing changes r any more.
func (r Record) Final() bool {
	return r.State == api.StateClosed || r.State == api.StateNeverStarted
}

// Event is something that happened, as the owner of a process learned it.
type Event interface{ event() }

// The events.
type (
	// Dispatch: the owner is about to tell the host, whose identity is given.
	Dispatch struct{ HostID, BootID string }
	// Reported: the host said what it knows of the process.
	Reported struct {
		HostID, BootID string
		State          wire.ProcState
	}
	// Refused: the host answered a start with a definite refusal: because of that
	// request, as it arrived this time, it started nothing.
	Refused struct{ Detail string }
	// Missing: the host was asked and has no record of the process. The owner must
	// have asked after the answer to its last request, or after giving up on it.
	Missing struct{ HostID, BootID string }
	// Lost: the host's answer to a start or close never came; nothing is known.
	Lost struct{ Detail string }
	// Gone: this target's host directory is not the one that was told (another
	// host id): what was started there cannot be asked about.
	Gone struct{ HostID, BootID string }
	// CloseAsked: somebody with the right asked for the end.
	CloseAsked struct {
		Reason      string
		GraceMillis int64
	}
	// GaveUp: the bounded time for proving a close has passed.
	GaveUp struct{ Detail string }
	// Cleared: an operator cleared the fence, having looked.
	Cleared struct{}
)

func (Dispatch) event()   {}
func (Reported) event()   {}
func (Refused) event()    {}
func (Missing) event()    {}
func (Lost) event()       {}
func (Gone) event()       {}
func (CloseAsked) event() {}
func (GaveUp) event()     {}
func (Cleared) event()    {}

// What lifts a fence (P5).
const (
	ByProof    = "proof"
	ByOperator = "operator"
)

// Effect is something the owner must do. IssueReceipt, RaiseFence and LiftFence
// are part of the commit of the new state; the others come after it.
type Effect interface{ effect() }

// The effects.
type (
	// StartHost: tell the host to start it (idempotent by handle).
	StartHost struct{}
	// AskHost: ask the host what it knows.
	AskHost struct{}
	// CloseHost: tell the host to stop it, or, if it does not know it, never to
	// start it. The owner repeats it, with pauses, until an event settles it.
	CloseHost struct {
		GraceMillis int64
		Reason      string
	}
	// IssueReceipt: sign the proof; committed with the state.
	IssueReceipt struct{}
	// RaiseFence: committed with the state.
	RaiseFence struct{ Reason string }
	// LiftFence: committed with the state. By is ByProof or ByOperator.
	LiftFence struct{ By string }
)

func (StartHost) effect()    {}
func (AskHost) effect()      {}
func (CloseHost) effect()    {}
func (IssueReceipt) effect() {}
func (RaiseFence) effect()   {}
func (LiftFence) effect()    {}
