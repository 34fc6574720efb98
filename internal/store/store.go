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
	ID        string
	Workspace string
	Box       string
	Target    string
	State     api.RunState
	TokenHash [32]byte // SHA-256 of the run token
	Exclusive bool     // no other active run may be bound to the box
	Models    []ModelGrant
	Created   time.Time
	Expires   time.Time
	Finished  *time.Time
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
	PerWorkspace int
	PerRun       int
}

// Page asks for at most Limit records (1 to 1000) that come after the one with
// the id After, newest first.
type Page struct {
	Limit int
	After string
}

// ProcessFilter selects processes within a scope. Zero fields select all.
type ProcessFilter struct {
	Box          string
	Target       string
	Live         bool      // only those for which Process.Live holds
	ClosedBefore time.Time // only closed before; for retention
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
	Workspaces(ctx context.Context, p Page) ([]Workspace, error) // After is a name; by name

	CreateKey(ctx context.Context, k Key, a AuditEvent) error
	Key(ctx context.Context, id string) (Key, error) // revoked ones too
	Keys(ctx context.Context, workspace string, p Page) ([]Key, error)
	RevokeKey(ctx context.Context, id string, at time.Time, a AuditEvent) error

	// PutTarget inserts a target or leaves an existing one as it is, and returns
	// what is recorded.
	PutTarget(ctx context.Context, t Target) (Target, error)
	Target(ctx context.Context, name string) (Target, error)
	Targets(ctx context.Context) ([]Target, error)
	// SetTargetEnabled changes it and raises the generation.
	SetTargetEnabled(ctx context.Context, name string, enabled bool, a AuditEvent) (Target, error)
	// SetTargetHost records which host and boot was seen there.
	SetTargetHost(ctx context.Context, name, hostID, bootID string) error

	// CreateBox inserts b, or returns the box that already has its workspace and
	// key (created false). A box with the key in state removing is a conflict;
	// counts over the capacity are exhausted, naming the limit.
	CreateBox(ctx context.Context, b Box, c Capacity) (box Box, created bool, err error)
	Box(ctx context.Context, s Scope, id string) (Box, error)
	Boxes(ctx context.Context, s Scope, p Page) ([]Box, error)
	// SetBoxState moves it. To removing is a conflict while a live process or an
	// active run is in it, and fenced while a fence stands on it.
	SetBoxState(ctx context.Context, id string, state api.BoxState) error
	TouchBox(ctx context.Context, id string, used time.Time) error
	DeleteBox(ctx context.Context, id string) error
	// IdleBoxes returns ready boxes whose Used + IdleMillis is before now and
	// that hold no live process, no active run and no fence.
	IdleBoxes(ctx context.Context, now time.Time) ([]Box, error)

	// CreateRun inserts r if its box is ready and in the same workspace (else
	// not_found or conflict), and is not bound exclusively by another active run,
	// nor r exclusive while any other is active (conflict). Touches the box.
	CreateRun(ctx context.Context, r Run) error
	Run(ctx context.Context, s Scope, id string) (Run, error)
	// SetRunState moves it forward: active, finishing, finished. Moving to where
	// it is changes nothing. Returns the run as recorded.
	SetRunState(ctx context.Context, id string, state api.RunState, at time.Time) (Run, error)
	// AddRunUsage adds to the counters of one model grant.
	AddRunUsage(ctx context.Context, id, provider string, requests, up, down int64) error
	Runs(ctx context.Context, s Scope, p Page) ([]Run, error)
	// UnfinishedRuns returns those not finished; expired ones included.
	UnfinishedRuns(ctx context.Context) ([]Run, error)
	// DeleteRunsFinishedBefore forgets old runs with all their processes and
	// receipts, but none that has a live process, a log still kept or a standing
	// fence. It returns how many.
	DeleteRunsFinishedBefore(ctx context.Context, t time.Time) (int, error)

	// CreateProcess records the intent p, in state requested, starting (it is told
	// to the host at once, HostID and BootID are set) or never_started
	// (a tombstone, made by a close that came first), or returns the record that
	// already has its run and request id, created false, whatever its digest: the
	// caller compares. In the same transaction it checks that the run is active
	// (conflict), and for a state other than never_started that no fence stands
	// on the box or target (fenced, with the fence's id), that no process of the
	// box is closing unproven, that the target is enabled, and the capacity, which
	// counts live processes. It touches the box.
	CreateProcess(ctx context.Context, p Process, c Capacity, a AuditEvent) (proc Process, created bool, err error)
	// SaveProcess replaces the record with p if the recorded version is
	// p.Version, and raises it; returns the new version. Everything of the change
	// is committed with it.
	SaveProcess(ctx context.Context, p Process, c Change) (version int64, err error)
	Process(ctx context.Context, s Scope, handle string) (Process, error)
	ProcessByRequest(ctx context.Context, s Scope, run, requestID string) (Process, error)
	Processes(ctx context.Context, s Scope, f ProcessFilter) ([]Process, error)

	Receipt(ctx context.Context, handle string) (Receipt, error)
	Fence(ctx context.Context, s Scope, id string) (Fence, error)
	Fences(ctx context.Context, s Scope, standing bool, p Page) ([]Fence, error)

	AppendAudit(ctx context.Context, a AuditEvent) error
	Audit(ctx context.Context, workspace string, p Page) ([]AuditEvent, error) // "" is all
}
