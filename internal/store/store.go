// Package store is the seam to the ledger: what Stockade must remember through
// the death of the server. Implementations are packages below it; storetest is
// the conformance suite they all pass.
//
// Rules every implementation keeps:
//
//   - A method that returns nil has made its change durable (P5): it survives a
//     power cut.
//   - Every query that takes a [Scope] answers not_found for a record outside
//     it, exactly as for one that does not exist (P6).
//   - Errors are *errdefs.Error: invalid, not_found, conflict, fenced,
//     cancelling, exhausted; anything of the database itself is unavailable
//     (busy, disk full) or internal, with the cause wrapped.
//   - Methods may be called from any goroutine.
//   - Times are stored to the microsecond, in UTC.
//   - A record that breaks its Validate is invalid and changes nothing; so no
//     unknown kind or state is ever stored. An id that is taken is a conflict.
//   - A method whose context ended returns unavailable with the context's cause
//     wrapped; a write has then definitely not happened. Once a write is under
//     way it is waited for.
package store

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
)

// Scope is the authority under which a record is looked up, made by
// authz.Principal.Scope. The zero Scope sees nothing. Of a run's scope are the
// run, its box, its processes, and the fences its processes raised.
type Scope = authz.Scope

// Workspace is a tenant.
type Workspace struct {
	Name    string
	Created time.Time
}

// Key kinds.
const (
	KeyAdmin     = "admin"
	KeyWorkspace = "workspace"
)

// Key is a long-lived credential. Hash is SHA-256 of the secret, which has 256
// random bits; the secret is stored nowhere.
type Key struct {
	ID        string
	Kind      string
	Workspace string
	Name      string
	Hash      [32]byte
	Created   time.Time
	Revoked   *time.Time
}

// Target is an operator-registered place where processes may run.
type Target struct {
	Name       string
	Kind       string // box
	Generation int64  // raised by every change
	Enabled    bool
	MaxBoxes   int
	HostID     string // the host last seen there
	BootID     string
}

// Box is a tenant's envelope. (Workspace, Key) is unique while Key is not empty.
type Box struct {
	ID         string
	Workspace  string
	Key        string
	Target     string
	State      api.BoxState
	Image      string // digest
	Limits     api.BoxLimits
	Mounts     []api.Mount
	IdleMillis int64
	Created    time.Time
	Used       time.Time
}

// ModelGrant is a run's right to one model provider, and its use so far.
type ModelGrant struct {
	Provider  string
	Port      int // the gateway's port in the box, kept so that a restart restores it
	Requests  int64
	BytesUp   int64
	BytesDown int64
}

// Run is one active invocation in one box.
type Run struct {
	ID         string
	Workspace  string
	Box        string
	Target     string
	State      api.RunState
	TokenHash  [32]byte // SHA-256 of the run token
	Exclusive  bool     // no other active run may be bound to the box
	AutoFinish bool     // finishes once it had a process and none lives
	// Installation is the plugin that the run acts for; nil for any other run.
	Installation *api.Installation
	Models       []ModelGrant
	Created      time.Time
	Expires      time.Time
	Finished     *time.Time
}

// Process is the record of one process. Owner and RequestID are unique together;
// the owner is the run.
type Process struct {
	Handle      string
	RequestID   string
	Digest      [32]byte // of the canonical open arguments
	Workspace   string
	Run         string
	Target      string
	Box         string
	Generation  int64 // the target's, at open
	HostID      string
	BootID      string // of the host when it was told; "" before
	Version     int64  // raised by each save; a save with another version is a conflict
	State       api.ProcessState
	Spec        []byte // JSON wire.ProcSpec; empty for a tombstone
	Exit        *api.Exit
	Cleanup     api.Cleanup
	Reason      string // why it was closed
	CloseAsked  *time.Time
	GraceMillis int64
	Fence       string
	Receipt     string
	Stdin       api.StdinState // last known
	Log         api.LogState   // last known
	LogGone     bool           // the host was told to forget it
	Created     time.Time
	Started     *time.Time
	Exited      *time.Time
	Closed      *time.Time
}

// Live reports whether something may still be running because of p.
func (p *Process) Live() bool {
	switch p.State {
	case api.StateClosed, api.StateNeverStarted, api.StateFenced:
		return false
	}
	return true
}

// Fence is a standing record that something may still be running. Box is empty
// when it covers the whole target.
type Fence struct {
	ID          string
	Workspace   string
	Target      string
	Box         string
	Handle      string
	Reason      string
	Evidence    map[string]string
	Created     time.Time
	Cleared     *time.Time
	ClearedBy   string
	ClearReason string
}

// Receipt is a signed proof.
type Receipt struct {
	ID      string
	Handle  string
	Created time.Time
	Body    api.Receipt
}

// AuditEvent is one recorded act. Detail never holds a secret.
type AuditEvent struct {
	ID        string
	At        time.Time
	Actor     string
	Workspace string
	Action    string
	Object    string
	Detail    map[string]string
}

// Change is what is committed together with the new state of a process: all of
// it or nothing.
type Change struct {
	Fence      *Fence   // raised
	ClearFence *Clear   // lifted
	Receipt    *Receipt // issued
	Audit      []AuditEvent
}

// Clear lifts a fence.
type Clear struct {
	ID     string
	By     string // key id of the operator, or "proof"
	Reason string
	At     time.Time
}

// Capacity bounds what a create may bring the counts to. Zero is no bound.
type Capacity struct {
	PerTarget    int
	PerWorkspace int // of a run: unfinished ones
	PerRun       int
	Kept         Kept
}

// Kept bounds what is recorded of a workspace, ended or not, so that no tenant
// fills the ledger. Records go with their run, some time after it finished. Zero
// is no bound.
type Kept struct {
	Runs      int
	Processes int   // those that never started included
	SpecBytes int64 // of their specs together
}

// MaxPage is the largest Page.Limit.
const MaxPage = 1000

// Page asks for at most Limit records (1 to 1000, else invalid) that come after
// the one with the id After, newest first: in the reverse of the order in which
// they were recorded, whatever their times say. An After that does not exist in
// the scope (any more) is not_found.
type Page struct {
	Limit int
	After string
}

// ProcessFilter selects processes within a scope. Zero fields select all.
type ProcessFilter struct {
	Box          string
	Target       string
	Live         bool      // only those for which Process.Live holds
	ClosedBefore time.Time // only those with Closed before it; for retention
	LogKept      bool      // only those with LogGone not set
	NoSpec       bool      // leave Spec empty, which may be large: for those who do not need it
	Page         Page
}

// Store is the ledger.
type Store interface {
	// Close flushes and closes it; later calls are unavailable.
	Close() error

	// Instance returns the id of this ledger, minted when it was created.
	Instance(ctx context.Context) (string, error)
	// NextGeneration raises and returns the server's generation (from 1).
	NextGeneration(ctx context.Context) (int64, error)

	CreateWorkspace(ctx context.Context, w Workspace, a AuditEvent) error
	Workspace(ctx context.Context, name string) (Workspace, error)
	// Workspaces lists by name; Page.After is a name, which need not exist.
	Workspaces(ctx context.Context, p Page) ([]Workspace, error)

	CreateKey(ctx context.Context, k Key, a AuditEvent) error
	Key(ctx context.Context, id string) (Key, error) // revoked ones too
	// Keys lists the keys of a workspace; "" is the operator's (KeyAdmin).
	Keys(ctx context.Context, workspace string, p Page) ([]Key, error)
	// RevokeKey ends a key. One that is revoked already stays as it is.
	RevokeKey(ctx context.Context, id string, at time.Time, a AuditEvent) error

	// PutTarget inserts a target or leaves an existing one as it is, and returns
	// what is recorded. A generation of 0 is recorded as 1.
	PutTarget(ctx context.Context, t Target) (Target, error)
	Target(ctx context.Context, name string) (Target, error)
	Targets(ctx context.Context) ([]Target, error)
	// SetTargetEnabled changes it and raises the generation; where nothing would
	// change it does nothing and records no audit event.
	SetTargetEnabled(ctx context.Context, name string, enabled bool, a AuditEvent) (Target, error)
	// SetTargetHost records which host and boot was seen there.
	SetTargetHost(ctx context.Context, name, hostID, bootID string) error

	// CreateBox inserts b, or returns the box that already has its workspace and
	// key (created false). A box with the key in state removing is a conflict;
	// counts over the capacity are exhausted, naming the limit; every box that is
	// still recorded counts. A new box needs an enabled target (not_found, conflict).
	CreateBox(ctx context.Context, b Box, c Capacity) (box Box, created bool, err error)
	// Box returns one. A run's scope sees the box the run is bound to.
	Box(ctx context.Context, s Scope, id string) (Box, error)
	Boxes(ctx context.Context, s Scope, p Page) ([]Box, error)
	// SetBoxState moves it forward: creating, ready, removing; to where it is
	// changes nothing, back is a conflict. To removing is a conflict while a live
	// process or an unfinished run is in it, and fenced while a fence stands on it
	// or on its whole target.
	SetBoxState(ctx context.Context, id string, state api.BoxState) error
	// TouchBox moves Used forward, never back.
	TouchBox(ctx context.Context, id string, used time.Time) error
	// DeleteBox forgets a box. A ready one is a conflict: move it to removing first.
	DeleteBox(ctx context.Context, id string) error
	// IdleBoxes returns ready boxes whose Used + IdleMillis is before now and
	// that hold no live process, no unfinished run and no fence; longest unused first.
	// What begins in a box touches it, and so does the end of a run and the lifting
	// of a fence, because the time that counts is the time without them.
	IdleBoxes(ctx context.Context, now time.Time) ([]Box, error)

	// CreateRun inserts r, active, if its box is ready and in the same workspace
	// (else not_found or conflict), and is not bound exclusively by another
	// unfinished run, nor r exclusive while any other is unfinished (conflict),
	// and no fence stands on it or its whole target (fenced): what may still run
	// there would share the run's rights. Its target must be the box's (invalid).
	// Touches the box. exhausted when the workspace has no room for it.
	CreateRun(ctx context.Context, r Run, c Capacity) error
	Run(ctx context.Context, s Scope, id string) (Run, error)
	// SetRunState moves it forward: active, finishing, finished. Moving to where
	// it is changes nothing, back is a conflict. To finished sets Finished to at and
	// touches the box.
	// Returns the run as recorded.
	SetRunState(ctx context.Context, id string, state api.RunState, at time.Time) (Run, error)
	// AddRunUsage adds to the counters of one model grant, which stop at
	// api.MaxOffset.
	AddRunUsage(ctx context.Context, id, provider string, requests, up, down int64) error
	Runs(ctx context.Context, s Scope, p Page) ([]Run, error)
	// UnfinishedRuns returns those not finished, oldest first; expired ones
	// included.
	UnfinishedRuns(ctx context.Context) ([]Run, error)
	// DeleteRunsFinishedBefore forgets old runs with all their processes and
	// receipts, but none that has a live process, a log still kept (LogGone not
	// set; a never_started process has no log) or a standing fence. It returns how
	// many. Lifted fences stay.
	DeleteRunsFinishedBefore(ctx context.Context, t time.Time) (int, error)

	// CreateProcess records the intent p, in state requested, starting (it is told
	// to the host at once, HostID and BootID are set) or never_started
	// (a tombstone, made by a close that came first), or returns the record that
	// already has its run and request id, created false, whatever its digest: the
	// caller compares. In the same transaction it checks that the run exists in
	// p's workspace (not_found) and is active (conflict), and for a state other
	// than never_started that box and target are the run's (invalid), that the
	// target is enabled (conflict), that no fence stands on the box or the whole
	// target (fenced, with the fence's id as detail "fence"), that no process of
	// another run in the box is in state closing without being quiescent
	// (cancelling: two runs must not overlap in one workspace; within a run the
	// caller knows what it closes), and the capacity, which counts live processes (exhausted). It touches the box and
	// sets Version to 1.
	CreateProcess(ctx context.Context, p Process, c Capacity, a AuditEvent) (proc Process, created bool, err error)
	// SaveProcess replaces the record with p if the recorded version is
	// p.Version (else conflict, with the recorded one as detail "version"), and
	// raises it; returns the new version. Everything of the change is committed
	// with it. What identifies a process - request id, digest, workspace, run,
	// target, box, generation, time of creation - never changes (invalid), nor does
	// Spec. A raised fence must be p's own (invalid); lifting one that is lifted
	// already, or a second receipt, is a conflict. Lifting touches the box.
	SaveProcess(ctx context.Context, p Process, c Change) (version int64, err error)
	Process(ctx context.Context, s Scope, handle string) (Process, error)
	ProcessByRequest(ctx context.Context, s Scope, run, requestID string) (Process, error)
	Processes(ctx context.Context, s Scope, f ProcessFilter) ([]Process, error)

	// ExcessLogs returns, without their Spec, closed processes whose logs are kept
	// beyond what one workspace may have: those after its newest logs, or after
	// its newest ones that have maxBytes together; longest closed first, at most
	// limit of them. Zero is no bound.
	ExcessLogs(ctx context.Context, logs int, maxBytes int64, limit int) ([]Process, error)

	// Receipt returns the receipt of a process; who may see it the caller has
	// decided by reading the process.
	Receipt(ctx context.Context, handle string) (Receipt, error)
	Fence(ctx context.Context, s Scope, id string) (Fence, error)
	// Fences lists fences; with standing only those not lifted.
	Fences(ctx context.Context, s Scope, standing bool, p Page) ([]Fence, error)

	// AppendAudit records an act that changes nothing else in the ledger.
	AppendAudit(ctx context.Context, a AuditEvent) error
	// Audit lists the acts in a workspace; "" is all of them.
	Audit(ctx context.Context, workspace string, p Page) ([]AuditEvent, error)
	// DeleteAuditBefore forgets acts older than t, and returns how many: the
	// record would else grow for ever.
	DeleteAuditBefore(ctx context.Context, t time.Time) (int, error)
}
