package process

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// The keeper's own bounds. They are policy, not measurements: long enough that a
// healthy machine never meets them, short enough that a person would wait.
const (
	// KeepGrace is the time between SIGTERM and SIGKILL when nobody named one:
	// deadline, lease expiry, a log that can no longer be kept.
	KeepGrace = 5 * time.Second
	// KeepRetry is the pause before SIGKILL is sent again to a tree whose init
	// was not reaped, and before a failed exit record is written again.
	KeepRetry = time.Second
	// KeepRecheck is the pause between two looks at a tree that is not empty yet.
	KeepRecheck = 50 * time.Millisecond
	// KeepProof is how long the proof that the tree is empty may take before the
	// keeper says that there is none.
	KeepProof = 10 * time.Second
	// KeepDrain is how long pipes and report may stay open after the init was
	// reaped. Only a descriptor that was passed out of the container holds them.
	KeepDrain = 10 * time.Second
)

// Stage refines [wire.PhaseStopping].
type Stage uint8

// The stages, in order. A process may skip any of them.
const (
	StageNone      Stage = iota
	StageSignalled       // SIGTERM was sent, the grace runs
	StageKilled          // SIGKILL was sent to the whole tree
	StageEnding          // the init was reaped, or nothing was started: what is left is draining and proof
)

// Cause is why the keeper stops a process. The first cause stands.
type Cause uint8

// The causes. CauseNone: it ended by itself, or has not ended.
const (
	CauseNone Cause = iota
	CauseClose
	CauseDeadline
	CauseLease
	CauseLog
)

// KeepState is what a keeper knows of its process. The zero value with
// [wire.PhaseAccepted], see [NewKeep], is the beginning. It is a plain
// comparable value; only KeepStep changes it.
type KeepState struct {
	Phase wire.Phase
	Stage Stage
	Cause Cause
	// Reason is what the one who closed it said.
	Reason string

	Begun     bool      // LaunchContainer was ordered; it never is again
	StartedAt time.Time // zero: the runtime has not said that it runs
	EndedAt   time.Time // when the init was reaped or the start failed

	Failed     bool // RuntimeFailed came instead of Started
	MayHaveRun bool // … and the command may have been started all the same
	FailDetail string

	HasReport   bool
	Report      InitReport
	ReportFirst bool // the report was here before the stop began
	ReportDone  bool // nothing more will come from the init

	Killed bool // SIGKILL was sent before the init was reaped
	Reaped bool
	Status Reaped

	OOMDone  bool
	OOMKills int64

	Drained     bool
	DrainDetail string // why output may be missing
	LogDetail   string // why the log could not be kept

	Checked  bool      // the empty check is over: EmptyAt or Unproven says how
	EmptyAt  time.Time // when the kernel said the tree was empty
	Unproven string    // why there is no proof so far; with Checked, for good

	Recording bool // WriteExitRecord was ordered and has not been answered

	// Times at which the machine wants a Tick; zero is never.
	Deadline   time.Duration // from Begin, counted from Started
	DeadlineAt time.Time
	LeaseUntil time.Time
	LeaseAsked bool
	KillAt     time.Time // stage none and signalled: the grace ends; killed: kill again
	ProofBy    time.Time
	RecheckAt  time.Time
	DrainBy    time.Time
	RecordAt   time.Time
	Armed      time.Time // what the last ArmTimer said
}

// NewKeep returns the state of a process that was accepted and not begun.
func NewKeep() KeepState { return KeepState{Phase: wire.PhaseAccepted} }

// KeepEvent is something that happened to a keeper's process.
type KeepEvent interface{ keepEvent() }

// The events of a keeper.
type (
	// Begin: the shim is ready to start it. Deadline 0 is none; Lease zero is none.
	Begin struct {
		Deadline time.Duration
		Lease    time.Time
	}
	// Started: the runtime says that the container's init runs and the shim is
	// able to wait for it.
	Started struct{}
	// RuntimeFailed: LaunchContainer ended without a container that can be waited
	// for. MayHaveRun says that the shim cannot exclude that the command was started.
	RuntimeFailed struct {
		Detail     string
		MayHaveRun bool
	}
	// InitReport: what the container's init said about the command it started.
	// Kind is exited (Code), signalled (Signal, "SIGSEGV") or spawn_failed (Detail).
	InitReport struct {
		Kind   api.ExitKind
		Code   int
		Signal string
		Detail string
	}
	// ReportClosed: the init's report channel is at its end; after it no
	// InitReport comes. It comes in every case once LaunchContainer was ordered.
	ReportClosed struct{}
	// Reaped: wait4 returned for the container's init. Signal 0: it exited with
	// Code; otherwise that signal number killed it.
	Reaped struct {
		Code   int
		Signal int
	}
	// KeepClose: somebody with the right asked for the end. Grace 0 kills at once.
	KeepClose struct {
		Reason string
		Grace  time.Duration
	}
	// LogFailed: output can no longer be kept, for example because the disk is full.
	LogFailed struct{ Detail string }
	// Tick: the armed time has come. One that comes early is harmless.
	Tick struct{}
	// LeaseRead: the lease file says Until (zero if it cannot be read), in the
	// time base of now.
	LeaseRead struct{ Until time.Time }
	// OOMRead: the cgroup counts Kills processes killed for memory since it was
	// made; 0 if the count cannot be read.
	OOMRead struct{ Kills int64 }
	// Emptied: no process is left in the cgroup, in every hierarchy.
	Emptied struct{}
	// NotEmpty: something is left in the cgroup, or it could not be looked at.
	NotEmpty struct{ Detail string }
	// Drained: both outputs are at their end and everything was appended to the
	// log. It comes in every case once LaunchContainer was ordered. Detail, if
	// set, says why output may be missing.
	Drained struct{ Detail string }
	// Recorded and RecordFailed answer WriteExitRecord.
	Recorded     struct{}
	RecordFailed struct{ Detail string }
)

func (Begin) keepEvent()         {}
func (Started) keepEvent()       {}
func (RuntimeFailed) keepEvent() {}
func (InitReport) keepEvent()    {}
func (ReportClosed) keepEvent()  {}
func (Reaped) keepEvent()        {}
func (KeepClose) keepEvent()     {}
func (LogFailed) keepEvent()     {}
func (Tick) keepEvent()          {}
func (LeaseRead) keepEvent()     {}
func (OOMRead) keepEvent()       {}
func (Emptied) keepEvent()       {}
func (NotEmpty) keepEvent()      {}
func (Drained) keepEvent()       {}
func (Recorded) keepEvent()      {}
func (RecordFailed) keepEvent()  {}

// KeepEffect is something the shim must do, in order, after a step. Each is
// answered by the events its comment names; none may block the machine.
type KeepEffect interface{ keepEffect() }

// The effects of a keeper.
type (
	// LaunchContainer: write the durable marker "starting", then start the
	// container, within a bound of the shim's own. If the marker cannot be written
	// nothing is started. Answer: Started or RuntimeFailed; later ReportClosed and
	// Drained in both cases, Reaped after Started. Ordered at most once.
	LaunchContainer struct{}
	// SignalTree: send the init a signal it forwards ("SIGTERM"). No answer.
	SignalTree struct{ Signal string }
	// KillTree: SIGKILL the init and everything in the cgroup. No answer.
	KillTree struct{}
	// LiftCap: let the log grow past its cap by what the pipes hold, because nobody
	// may be reading it. No answer.
	LiftCap struct{}
	// ReadOOM: read the cgroup's count of processes killed for memory. Answer: OOMRead.
	ReadOOM struct{}
	// CheckEmpty: look once whether the cgroup is empty. Answer: Emptied or NotEmpty.
	CheckEmpty struct{}
	// CutPipes: stop reading the outputs and the report, something outside the
	// container holds them. Answer: ReportClosed and Drained, as far as they are due.
	CutPipes struct{}
	// ReadLease: read the lease file. Answer: LeaseRead.
	ReadLease struct{}
	// ArmTimer: send a Tick at At instead of at any earlier armed time; zero: send none.
	ArmTimer struct{ At time.Time }
	// WriteExitRecord: write the exit record durably. Answer: Recorded or RecordFailed.
	WriteExitRecord struct {
		Exit    api.Exit
		Started time.Time // zero: never
		Ended   time.Time
		// Method is what the proof rests on (wire.Proof), "" when there is none;
		// then Unproven says why.
		Method   string
		EmptyAt  time.Time
		Unproven string
	}
)

func (LaunchContainer) keepEffect() {}
func (SignalTree) keepEffect()      {}
func (KillTree) keepEffect()        {}
func (LiftCap) keepEffect()         {}
func (ReadOOM) keepEffect()         {}
func (CheckEmpty) keepEffect()      {}
func (CutPipes) keepEffect()        {}
func (ReadLease) keepEffect()       {}
func (ArmTimer) keepEffect()        {}
func (WriteExitRecord) keepEffect() {}
