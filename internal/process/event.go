package process

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// Record is what Step reads and changes: the part of the ledger's record that
// has a life.
type Record struct {
	State       api.ProcessState
	HostID      string // host that was told; "" before dispatch
	BootID      string // its boot when it was told
	Exit        *api.Exit
	Cleanup     api.Cleanup
	Proof       *wire.Proof
	Reason      string
	CloseAsked  bool
	GraceMillis int64
	FenceReason string // set when a fence must stand
	Fenced      bool   // a fence stands because of this process
	Started     *time.Time
	Exited      *time.Time
	Closed      *time.Time
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
	// Refused: the host answered the start with a definite refusal; it started nothing and keeps no record.
	Refused struct{ Detail string }
	// Missing: the host answers, and has no record of the process.
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
	// Cleared: an operator cleared the fence with a reason.
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

// Effect is something the owner must do after the new state is saved.
type Effect interface{ effect() }

// The effects.
type (
	// StartHost: tell the host to start it (idempotent by handle).
	StartHost struct{}
	// AskHost: ask the host what it knows.
	AskHost struct{}
	// CloseHost: tell the host to stop it.
	CloseHost struct {
		GraceMillis int64
		Reason      string
	}
	// IssueReceipt: sign the proof; committed with the state.
	IssueReceipt struct{}
	// RaiseFence and LiftFence: committed with the state.
	RaiseFence struct{ Reason string }
	LiftFence  struct{ By string }
)

func (StartHost) effect()    {}
func (AskHost) effect()      {}
func (CloseHost) effect()    {}
func (IssueReceipt) effect() {}
func (RaiseFence) effect()   {}
func (LiftFence) effect()    {}
