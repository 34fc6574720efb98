// Package api holds the JSON shapes of the public HTTP API, version 1, and
// nothing else: the server answers with them, the Go client decodes them, the
// OpenAPI document is generated from them.
//
// Times are RFC 3339 in UTC. Sizes are bytes, durations are milliseconds and
// say so in their name. Byte strings in JSON are base 64.
package api

import (
	"time"
)

// MaxOffset is the largest stream offset or cursor: 2^53, the largest integer
// that every JSON implementation carries exactly (RFC 8259 section 6).
const MaxOffset = int64(1) << 53

// ExitKind says how a process ended.
type ExitKind string

// The exit kinds (DESIGN section 4). Only ExitExited carries a code and only
// ExitSignalled a signal; every kind but ExitUnknown, ExitSpawnFailed exists
// only because wait returned a status (P3).
const (
	ExitExited      ExitKind = "exited"
	ExitSignalled   ExitKind = "signalled"
	ExitOOM         ExitKind = "oom"
	ExitDeadline    ExitKind = "deadline"
	ExitSpawnFailed ExitKind = "spawn_failed"
	ExitUnknown     ExitKind = "unknown"
)

// Exit is how a process ended.
type Exit struct {
	Kind ExitKind `json:"kind" enum:"exited,signalled,oom,deadline,spawn_failed,unknown" doc:"How it ended. unknown is never success."`
	// Code is set for exited.
	Code *int `json:"code,omitempty" doc:"The exit code, for exited."`
	// Signal is a name such as "SIGKILL", set when a signal ended it.
	Signal string `json:"signal,omitempty" doc:"The signal's name, when a signal ended it."`
	Detail string `json:"detail,omitempty" doc:"What is known beyond kind, code and signal."`
}

// ProcessState is a state of the life of a process (see package process, which
// owns the rules).
type ProcessState string

// The states.
const (
	StateRequested    ProcessState = "requested"
	StateStarting     ProcessState = "starting"
	StateRunning      ProcessState = "running"
	StateClosing      ProcessState = "closing"
	StateExited       ProcessState = "exited"
	StateUnknown      ProcessState = "unknown"
	StateFenced       ProcessState = "fenced"
	StateClosed       ProcessState = "closed"
	StateNeverStarted ProcessState = "never_started"
)

// Overflow says what happens when the log of a process reaches its cap.
type Overflow string

// The overflow policies. OverflowBlock stops reading the child's pipe until a
// reader acknowledges; OverflowDropOldest drops whole segments and the reader is
// told the exact range.
const (
	OverflowBlock      Overflow = "block"
	OverflowDropOldest Overflow = "drop_oldest"
)

// Winsize is the size of a terminal in character cells.
type Winsize struct {
	Rows uint16 `json:"rows" minimum:"1" maximum:"4096"`
	Cols uint16 `json:"cols" minimum:"1" maximum:"4096"`
}

// MinPids is the least limit of processes and threads: the runtime and the
// container's init, both with threads of their own, count as well (about 20).
const MinPids = 32

// Limits bounds one process. Zero means the server's default.
type Limits struct {
	DeadlineMillis int64    `json:"deadline_ms,omitempty" minimum:"0" doc:"Wall time after which it is stopped; 0 is the server's default."`
	SpoolBytes     int64    `json:"spool_bytes,omitempty" minimum:"0" doc:"Log bytes kept on disk (default 64 MiB)."`
	Overflow       Overflow `json:"overflow,omitempty" enum:"block,drop_oldest" doc:"What happens at the log's cap (default block)."`
	MemoryBytes    int64    `json:"memory_bytes,omitempty" minimum:"0" doc:"Memory of this process tree; the box's limit holds as well."`
	Pids           int64    `json:"pids,omitempty" minimum:"0" doc:"Processes and threads of this tree; the box's limit holds as well."`
}

// IOLimits tells a caller how much one call may carry.
type IOLimits struct {
	MaxWriteBytes int64 `json:"max_write_bytes"`
	MaxReadBytes  int64 `json:"max_read_bytes"`
	MaxWaitMillis int64 `json:"max_wait_ms"`
	StdinWindow   int64 `json:"stdin_window_bytes" doc:"Input bytes buffered while the child does not read."`
}

// OpenRequest starts a process. RequestID is minted by the caller before it
// sends: repeating the same request returns the same handle (P1).
type OpenRequest struct {
	RequestID string            `json:"request_id" minLength:"1" maxLength:"128" doc:"Minted by the caller; the same id with the same arguments is the same process, for ever."`
	Box       string            `json:"box,omitempty" doc:"The box to run in; by default the one the run is bound to."`
	Argv      []string          `json:"argv" minItems:"1" doc:"Program and arguments; no shell is involved."`
	Cwd       string            `json:"cwd,omitempty" doc:"Relative to the workspace; empty is the workspace itself."`
	Env       map[string]string `json:"env,omitempty" doc:"Overrides. The child's environment starts from a fixed list, never from the server's."`
	Stdin     bool              `json:"stdin,omitempty" doc:"Give the child a pipe as standard input instead of /dev/null."`
	PTY       *Winsize          `json:"pty,omitempty" doc:"Run on a terminal of this size; both outputs become one."`
	Limits    Limits            `json:"limits,omitempty"`
}

// StdinState is how far the input of a process was accepted.
type StdinState struct {
	Accepted int64 `json:"accepted" doc:"The next offset to write: every byte before it was accepted."`
	EOF      bool  `json:"eof" doc:"The end of the input was written at offset accepted."`
	Window   int64 `json:"window_bytes" doc:"Bytes that can be written now before the child reads."`
}

// LogState is how far the output of a process goes and how much of it is kept.
// Oldest and Next are cursors: positions in the one order of all output bytes.
type LogState struct {
	Oldest  int64  `json:"oldest" doc:"First kept position."`
	Next    int64  `json:"next" doc:"Position after the last byte so far."`
	Stdout  int64  `json:"stdout_bytes"`
	Stderr  int64  `json:"stderr_bytes"`
	EOF     bool   `json:"eof" doc:"Nothing will be added."`
	Blocked bool   `json:"blocked,omitempty" doc:"The log is at its cap and the child waits for a reader to acknowledge."`
	Failure string `json:"failure,omitempty" doc:"Why output after next could not be kept, if so."`
}

// Cleanup says what is known about the process tree being gone (P4).
type Cleanup string

// The clean-up states.
const (
	CleanupPending   Cleanup = "pending"
	CleanupQuiescent Cleanup = "quiescent"
	CleanupUnproven  Cleanup = "unproven"
)

// Process is one process as its owner sees it.
type Process struct {
	Handle     string       `json:"handle"`
	RequestID  string       `json:"request_id"`
	Workspace  string       `json:"workspace"`
	Run        string       `json:"run"`
	Target     string       `json:"target"`
	Box        string       `json:"box"`
	Generation int64        `json:"generation" doc:"The target's generation it was opened under."`
	State      ProcessState `json:"state" enum:"requested,starting,running,closing,exited,unknown,fenced,closed,never_started"`
	Argv       []string     `json:"argv"`
	Cwd        string       `json:"cwd"`
	PTY        bool         `json:"pty"`
	Limits     Limits       `json:"limits"`
	IO         IOLimits     `json:"io"`
	CreatedAt  time.Time    `json:"created_at"`
	StartedAt  *time.Time   `json:"started_at,omitempty"`
	ExitedAt   *time.Time   `json:"exited_at,omitempty"`
	ClosedAt   *time.Time   `json:"closed_at,omitempty"`
	Exit       *Exit        `json:"exit,omitempty"`
	Cleanup    Cleanup      `json:"cleanup" enum:"pending,quiescent,unproven"`
	Reason     string       `json:"reason,omitempty" doc:"Why it was closed."`
	Fence      string       `json:"fence,omitempty" doc:"The fence that stands because of it."`
	Receipt    *Receipt     `json:"receipt,omitempty"`
	Stdin      StdinState   `json:"stdin"`
	Log        LogState     `json:"log"`
	Cursor     string       `json:"cursor" doc:"The cursor of the log's current end, to read from."`
}

// Receipt is the signed statement that a process tree is gone. Payload is the
// exact text that was signed; the other fields repeat it for reading.
type Receipt struct {
	ID         string    `json:"id"`
	Handle     string    `json:"handle"`
	Generation int64     `json:"generation"`
	Host       string    `json:"host"`
	BootID     string    `json:"boot_id"`
	Method     string    `json:"method" enum:"pid_namespace,cgroup,reboot,never_started" doc:"What the proof rests on."`
	EmptyAt    time.Time `json:"empty_at" doc:"When the kernel said the tree was empty."`
	Exit       *Exit     `json:"exit,omitempty"`
	Payload    []byte    `json:"payload"`
	PublicKey  []byte    `json:"public_key" doc:"Ed25519."`
	Signature  []byte    `json:"signature"`
}

// Fence is a durable record that something may still be running, so that
// nothing new may start in its scope.
type Fence struct {
	ID          string            `json:"id"`
	Workspace   string            `json:"workspace"`
	Target      string            `json:"target"`
	Box         string            `json:"box,omitempty"`
	Handle      string            `json:"handle"`
	Reason      string            `json:"reason"`
	Evidence    map[string]string `json:"evidence" doc:"What was last known: host, boot id, container, offsets, times."`
	CreatedAt   time.Time         `json:"created_at"`
	ClearedAt   *time.Time        `json:"cleared_at,omitempty"`
	ClearedBy   string            `json:"cleared_by,omitempty" doc:"The key of the operator who cleared it, or \"proof\"."`
	ClearReason string            `json:"clear_reason,omitempty"`
}

// ClearFenceRequest is an operator's statement that nothing runs there any more.
type ClearFenceRequest struct {
	Reason string `json:"reason" minLength:"8" maxLength:"1024" doc:"What you checked. It is kept in the audit record."`
}

// Record is a piece of output. Offset counts bytes of its stream, Cursor bytes
// of both.
type Record struct {
	Stream string `json:"stream" enum:"stdout,stderr"`
	Offset int64  `json:"offset"`
	Cursor string `json:"cursor" doc:"The cursor of the record's first byte."`
	Data   []byte `json:"data"`
}

// Gap is an exact range of output that is no longer kept: cursors From up to,
// not including, To.
type Gap struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Bytes int64  `json:"bytes"`
}

// ReadResponse is a piece of the log. Reading consumes nothing: the same cursor
// returns the same bytes while they are kept.
type ReadResponse struct {
	Records []Record     `json:"records"`
	Gap     *Gap         `json:"gap,omitempty" doc:"Bytes before the first record that are no longer kept."`
	Next    string       `json:"next" doc:"The cursor to read on from."`
	Oldest  string       `json:"oldest" doc:"The first cursor still kept."`
	EOF     bool         `json:"eof" doc:"next is the end and nothing will be added."`
	State   ProcessState `json:"state"`
	Exit    *Exit        `json:"exit,omitempty"`
}

// CloseRequest stops a process, or forbids it to start. Exactly one of handle
// (in the path) and RequestID names it.
type CloseRequest struct {
	Reason      string `json:"reason,omitempty" maxLength:"1024"`
	GraceMillis *int64 `json:"grace_ms,omitempty" minimum:"0" maximum:"600000" doc:"Time between SIGTERM and SIGKILL; default 5000, 0 kills at once."`
}

// CloseByRequest is CloseRequest for a caller that never learned the handle.
type CloseByRequest struct {
	RequestID string `json:"request_id" minLength:"1" maxLength:"128"`
	CloseRequest
}

// CloseResponse says whether the tree is proven gone (P4). When Quiescent is
// false a fence stands and nothing new may start in its scope.
type CloseResponse struct {
	Quiescent bool     `json:"quiescent"`
	Receipt   *Receipt `json:"receipt,omitempty"`
	Fence     *Fence   `json:"fence,omitempty"`
	Process   Process  `json:"process"`
}

// SignalRequest sends a polite signal to the child.
type SignalRequest struct {
	Signal string `json:"signal" enum:"SIGHUP,SIGINT,SIGQUIT,SIGTERM,SIGUSR1,SIGUSR2,SIGWINCH,SIGCONT,SIGTSTP" doc:"To stop it for good use close."`
}

// Target is an operator-registered place where processes may run.
type Target struct {
	Name       string `json:"name"`
	Kind       string `json:"kind" enum:"box,ssh,daemon"`
	Generation int64  `json:"generation"`
	Enabled    bool   `json:"enabled"`
	Up         bool   `json:"up" doc:"The host program answers."`
	Problem    string `json:"problem,omitempty"`
	Host       string `json:"host,omitempty"`
	BootID     string `json:"boot_id,omitempty"`
	Version    string `json:"version,omitempty"`
	Boxes      int    `json:"boxes"`
	MaxBoxes   int    `json:"max_boxes"`
	Processes  int    `json:"processes"`
	Fences     int    `json:"fences"`
}

// TargetUpdate changes a target; each change raises its generation.
type TargetUpdate struct {
	Enabled *bool `json:"enabled,omitempty"`
}

// BoxLimits bounds a box and everything in it. Zero means the server's default.
type BoxLimits struct {
	CPUMillis   int64 `json:"cpu_millis,omitempty" minimum:"0" doc:"1000 is one processor."`
	MemoryBytes int64 `json:"memory_bytes,omitempty" minimum:"0"`
	Pids        int64 `json:"pids,omitempty" minimum:"0"`
}

// Mount shows a directory of the machine inside a box. The operator must have
// allowed the source; nothing is allowed by default.
type Mount struct {
	Source   string `json:"source"`
	Dest     string `json:"dest"`
	Writable bool   `json:"writable,omitempty"`
}

// BoxRequest acquires a box. With a Key the same box comes back until it is
// removed; without one the box is new.
type BoxRequest struct {
	Key        string    `json:"key,omitempty" maxLength:"128" doc:"Reuse key, unique in the workspace."`
	Target     string    `json:"target,omitempty" doc:"Default: the local box target."`
	Image      string    `json:"image,omitempty" doc:"A loaded image; empty is the host profile."`
	Limits     BoxLimits `json:"limits,omitempty"`
	Mounts     []Mount   `json:"mounts,omitempty"`
	IdleMillis int64     `json:"idle_ms,omitempty" minimum:"0" doc:"Removed after so long without a process or a run; 0 is the server's default."`
}

// BoxState is the state of a box.
type BoxState string

// The states of a box. A removing box accepts nothing any more.
const (
	BoxReady    BoxState = "ready"
	BoxCreating BoxState = "creating"
	BoxRemoving BoxState = "removing"
)

// Box is a tenant's envelope for processes.
type Box struct {
	ID         string    `json:"id"`
	Workspace  string    `json:"workspace"`
	Key        string    `json:"key,omitempty"`
	Target     string    `json:"target"`
	State      BoxState  `json:"state" enum:"ready,creating,removing"`
	Image      string    `json:"image,omitempty"`
	Limits     BoxLimits `json:"limits"`
	Mounts     []Mount   `json:"mounts,omitempty"`
	IdleMillis int64     `json:"idle_ms"`
	Run        string    `json:"run,omitempty" doc:"An active run bound to it."`
	Processes  int       `json:"processes" doc:"Live processes in it."`
	Fence      string    `json:"fence,omitempty"`
	CreatedAt  time.Time `json:"created_at"`
	UsedAt     time.Time `json:"used_at"`
	Reused     bool      `json:"reused,omitempty" doc:"In the answer to acquire: it was there before."`
}

// Installation names an installed plugin by the six fields of its binding. It is a
// plain value.
type Installation struct {
	InstanceUUID        string `json:"instance_uuid" maxLength:"128"`
	WorkspaceUUID       string `json:"workspace_uuid" maxLength:"128"`
	PlacementGeneration int64  `json:"placement_generation" minimum:"1"`
	InstallationUUID    string `json:"installation_uuid" maxLength:"128"`
	RuntimeRevision     int64  `json:"runtime_revision" minimum:"1"`
	ArtifactDigest      string `json:"artifact_digest" pattern:"^[0-9a-f]{64}$"`
}

// RunRequest begins a run in a box.
type RunRequest struct {
	Box       string   `json:"box"`
	TTLMillis int64    `json:"ttl_ms,omitempty" minimum:"0" doc:"Life of the run and of its token; 0 is the server's default."`
	Models    []string `json:"models,omitempty" doc:"Model providers the run may reach through the gateway. Such a run has the box to itself."`
	// AutoFinish is for callers who go away, such as a detached command line.
	AutoFinish bool `json:"auto_finish,omitempty" doc:"Finish by itself, within seconds, once it has had a process and none of its processes lives."`
	// Installation is told by a Plugin Runtime, whose workspace key is trusted to
	// say which of its plugins it acts for.
	Installation *Installation `json:"installation,omitempty" doc:"The installed plugin on whose behalf the run is active; recorded with it."`
}

// RunState is the state of a run.
type RunState string

// The states of a run.
const (
	RunActive    RunState = "active"
	RunFinishing RunState = "finishing"
	RunFinished  RunState = "finished"
)

// Run is one active invocation in one box.
type Run struct {
	ID         string       `json:"id"`
	Workspace  string       `json:"workspace"`
	Box        string       `json:"box"`
	State      RunState     `json:"state" enum:"active,finishing,finished"`
	CreatedAt  time.Time    `json:"created_at"`
	ExpiresAt  time.Time    `json:"expires_at"`
	FinishedAt *time.Time   `json:"finished_at,omitempty"`
	Models     []ModelRoute `json:"models,omitempty"`
	AutoFinish bool         `json:"auto_finish,omitempty"`
	// Installation is the plugin that the run was begun for; nil for any other run.
	Installation *Installation `json:"installation,omitempty"`
	Processes    int           `json:"processes" doc:"Live processes of it."`
}

// ModelRoute is the way to one model provider from inside a run's box, and what
// went over it. BaseURL works only inside the box and only while the run is active.
type ModelRoute struct {
	Provider  string            `json:"provider"`
	BaseURL   string            `json:"base_url"`
	Env       map[string]string `json:"env" doc:"What every process of the run gets in its environment; the keys in it are placeholders."`
	Requests  int64             `json:"requests"`
	BytesUp   int64             `json:"bytes_up"`
	BytesDown int64             `json:"bytes_down"`
}

// RunCreated is the answer to creating a run: the only time its token is shown.
type RunCreated struct {
	Run   Run    `json:"run"`
	Token string `json:"token" doc:"The credential of every process operation of this run. Shown once."`
}

// FinishRequest ends a run: its rights are revoked, then its processes are closed.
type FinishRequest struct {
	Reason      string `json:"reason,omitempty" maxLength:"1024"`
	GraceMillis *int64 `json:"grace_ms,omitempty" minimum:"0" maximum:"600000"`
}

// FinishResponse says how every process of the run ended.
type FinishResponse struct {
	Run       Run             `json:"run"`
	Quiescent bool            `json:"quiescent"`
	Processes []CloseResponse `json:"processes"`
}

// Workspace is a tenant.
type Workspace struct {
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"created_at"`
}

// WorkspaceRequest creates a tenant.
type WorkspaceRequest struct {
	Name string `json:"name" minLength:"1" maxLength:"128"`
}

// Key is a credential's record; the secret itself is not kept.
type Key struct {
	ID        string     `json:"id"`
	Kind      string     `json:"kind" enum:"admin,workspace"`
	Workspace string     `json:"workspace,omitempty"`
	Name      string     `json:"name,omitempty"`
	CreatedAt time.Time  `json:"created_at"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
}

// KeyRequest creates a key of a workspace.
type KeyRequest struct {
	Name string `json:"name,omitempty" maxLength:"128"`
}

// KeyCreated is the answer to creating a key: the only time the secret is shown.
type KeyCreated struct {
	Key    Key    `json:"key"`
	Secret string `json:"secret"`
}

// Image is a root file system known to a target.
type Image struct {
	Digest    string    `json:"digest" doc:"sha256 of the image's manifest."`
	Names     []string  `json:"names,omitempty"`
	Size      int64     `json:"size_bytes"`
	CreatedAt time.Time `json:"created_at"`
	Boxes     int       `json:"boxes" doc:"Boxes that use it."`
}

// AuditEvent is one recorded act.
type AuditEvent struct {
	ID        string            `json:"id"`
	At        time.Time         `json:"at"`
	Actor     string            `json:"actor"`
	Workspace string            `json:"workspace,omitempty"`
	Action    string            `json:"action"`
	Object    string            `json:"object"`
	Detail    map[string]string `json:"detail,omitempty"`
}

// List is a page of records, newest first. Next is empty on the last page.
type List[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next,omitempty" doc:"Pass as 'after' for the next page."`
}

// Health is the one thing an unauthenticated caller may see.
type Health struct {
	Status  string `json:"status" enum:"ok,starting,failing" doc:"failing: nothing can be recorded until the server is restarted."`
	Version string `json:"version"`
}
