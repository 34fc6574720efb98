package client

import (
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// The shapes of the API, so that programs outside this module can name them.
// They are described in the server's /docs page.
type (
	Health                 = api.Health
	Target                 = api.Target
	TargetUpdate           = api.TargetUpdate
	Box                    = api.Box
	BoxRequest             = api.BoxRequest
	BoxLimits              = api.BoxLimits
	BoxState               = api.BoxState
	Mount                  = api.Mount
	Image                  = api.Image
	Installation           = api.Installation
	Run                    = api.Run
	RunRequest             = api.RunRequest
	RunCreated             = api.RunCreated
	RunState               = api.RunState
	ModelRoute             = api.ModelRoute
	FinishRequest          = api.FinishRequest
	FinishResponse         = api.FinishResponse
	ProcessInfo            = api.Process
	ProcessState           = api.ProcessState
	OpenRequest            = api.OpenRequest
	Limits                 = api.Limits
	Overflow               = api.Overflow
	IOLimits               = api.IOLimits
	Winsize                = api.Winsize
	StdinState             = api.StdinState
	LogState               = api.LogState
	Cleanup                = api.Cleanup
	Exit                   = api.Exit
	ExitKind               = api.ExitKind
	Record                 = api.Record
	Gap                    = api.Gap
	ReadResponse           = api.ReadResponse
	CloseRequest           = api.CloseRequest
	CloseByRequest         = api.CloseByRequest
	CloseResponse          = api.CloseResponse
	Receipt                = api.Receipt
	Fence                  = api.Fence
	ClearFenceRequest      = api.ClearFenceRequest
	ClearRelayFenceRequest = api.ClearRelayFenceRequest
	Workspace              = api.Workspace
	WorkspaceRequest       = api.WorkspaceRequest
	Key                    = api.Key
	KeyRequest             = api.KeyRequest
	KeyCreated             = api.KeyCreated
	AuditEvent             = api.AuditEvent
	Problem                = api.Problem
	RelayJobRequest        = api.RelayJobRequest
	RelayJobInfo           = api.RelayJob
	RelayOutcome           = api.RelayOutcome
	RelayDaemon            = api.RelayDaemon
	RelayFence             = api.RelayFence
	RelayLateFinish        = api.RelayLateFinish
)

// List is a page of records, newest first.
type List[T any] = api.List[T]

// The exit kinds.
const (
	ExitExited      = api.ExitExited
	ExitSignalled   = api.ExitSignalled
	ExitOOM         = api.ExitOOM
	ExitDeadline    = api.ExitDeadline
	ExitSpawnFailed = api.ExitSpawnFailed
	ExitUnknown     = api.ExitUnknown
)

// The states of a process.
const (
	StateRequested    = api.StateRequested
	StateStarting     = api.StateStarting
	StateRunning      = api.StateRunning
	StateClosing      = api.StateClosing
	StateExited       = api.StateExited
	StateUnknown      = api.StateUnknown
	StateFenced       = api.StateFenced
	StateClosed       = api.StateClosed
	StateNeverStarted = api.StateNeverStarted
)

// The overflow policies.
const (
	OverflowBlock      = api.OverflowBlock
	OverflowDropOldest = api.OverflowDropOldest
)

// MaxOffset is the largest stream offset or cursor.
const MaxOffset = api.MaxOffset

// Code says what kind of refusal or failure an error is.
type Code = errdefs.Code

// Error is what every failed call returns: a code, what was refused, what to do
// next and the facts it hit. Get it with errors.As.
type Error = errdefs.Error

// The codes.
const (
	Invalid         = errdefs.Invalid
	Unauthenticated = errdefs.Unauthenticated
	Denied          = errdefs.Denied
	NotFound        = errdefs.NotFound
	Conflict        = errdefs.Conflict
	Fenced          = errdefs.Fenced
	Cancelling      = errdefs.Cancelling
	Exhausted       = errdefs.Exhausted
	Unavailable     = errdefs.Unavailable
	Indeterminate   = errdefs.Indeterminate
	Internal        = errdefs.Internal
)

// CodeOf returns the code of an error of this package, "internal" for any other
// error and "" for nil.
func CodeOf(err error) Code { return errdefs.CodeOf(err) }

// IsCode reports whether err carries the code.
func IsCode(err error, code Code) bool { return errdefs.Is(err, code) }
