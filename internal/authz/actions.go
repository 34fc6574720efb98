package authz

import (
	"slices"
	"strings"
)

// Action is one thing that can be asked for, as it is written in the audit record.
type Action string

// The actions.
const (
	WorkspaceCreate Action = "workspace.create"
	WorkspaceList   Action = "workspace.list"
	KeyCreate       Action = "key.create"
	KeyList         Action = "key.list"
	KeyRevoke       Action = "key.revoke"
	TargetRead      Action = "target.read"
	TargetUpdate    Action = "target.update"
	AuditRead       Action = "audit.read"
	MetricsRead     Action = "metrics.read"

	ImageRead   Action = "image.read"
	ImageLoad   Action = "image.load"
	ImageRemove Action = "image.remove"

	FenceRead  Action = "fence.read"
	FenceClear Action = "fence.clear"

	BoxAcquire  Action = "box.acquire"
	BoxRead     Action = "box.read"
	BoxRemove   Action = "box.remove"
	BoxFilesPut Action = "box.files.put"
	BoxFilesGet Action = "box.files.get"

	RunCreate Action = "run.create"
	RunRead   Action = "run.read" // one run, by id
	RunList   Action = "run.list"
	RunFinish Action = "run.finish"

	ProcessOpen           Action = "process.open"
	ProcessRead           Action = "process.read" // its record
	ProcessList           Action = "process.list"
	ProcessOutput         Action = "process.output" // the bytes of its log
	ProcessAck            Action = "process.ack"
	ProcessWrite          Action = "process.write"
	ProcessSignal         Action = "process.signal"
	ProcessResize         Action = "process.resize"
	ProcessAttach         Action = "process.attach"
	ProcessClose          Action = "process.close"
	ProcessReadByRequest  Action = "process.read_by_request"
	ProcessCloseByRequest Action = "process.close_by_request"

	RelayJobRun     Action = "relay.job.run"
	RelayJobRead    Action = "relay.job.read"
	RelayJobCancel  Action = "relay.job.cancel"
	RelayDaemonRead Action = "relay.daemon.read"
	RelayFenceRead  Action = "relay.fence.read"
	RelayFenceClear Action = "relay.fence.clear"
)

// rule is one line of the table: who may do an action, and how it is called in
// a sentence.
type rule struct {
	action Action
	what   string
	kinds  []Kind
}

// rules is the whole table; nothing writes to it. A switch would hide a missing
// action from the tests.
var rules = [...]rule{
	{WorkspaceCreate, "creating a workspace", []Kind{Admin}},
	{WorkspaceList, "listing workspaces", []Kind{Admin}},
	{KeyCreate, "creating a key", []Kind{Admin}},
	{KeyList, "listing keys", []Kind{Admin}},
	{KeyRevoke, "revoking a key", []Kind{Admin}},
	// A target's record counts what all tenants have there, so it is not for tenants.
	{TargetRead, "reading targets", []Kind{Admin}},
	{TargetUpdate, "changing a target", []Kind{Admin}},
	{AuditRead, "reading the audit record", []Kind{Admin}},
	{MetricsRead, "reading metrics", []Kind{Admin}},

	{ImageRead, "listing images", []Kind{Admin, Workspace}},
	{ImageLoad, "loading an image", []Kind{Admin}},
	{ImageRemove, "removing an image", []Kind{Admin}},

	{FenceRead, "reading fences", []Kind{Admin, Workspace}},
	// A tenant must not talk its way past a fence: only the operator can look at the machine.
	{FenceClear, "clearing a fence", []Kind{Admin}},

	{BoxAcquire, "acquiring a box", []Kind{Workspace}},
	{BoxRead, "reading boxes", []Kind{Admin, Workspace}},
	{BoxRemove, "removing a box", []Kind{Admin, Workspace}},
	{BoxFilesPut, "putting files into a box", []Kind{Workspace}},
	{BoxFilesGet, "getting files out of a box", []Kind{Workspace}},

	{RunCreate, "creating a run", []Kind{Workspace}},
	{RunRead, "reading a run", []Kind{Admin, Workspace, Run}},
	{RunList, "listing runs", []Kind{Admin, Workspace}},
	{RunFinish, "finishing a run", []Kind{Admin, Workspace, Run}},

	// What a process is owned by is its run (P1), so only the run's token opens one,
	// and only it can name one by the request id it minted.
	{ProcessOpen, "opening a process", []Kind{Run}},
	{ProcessReadByRequest, "reading a process by its request id", []Kind{Run}},
	{ProcessCloseByRequest, "closing a process by its request id", []Kind{Run}},
	{ProcessRead, "reading a process", []Kind{Admin, Workspace, Run}},
	{ProcessList, "listing processes", []Kind{Admin, Workspace, Run}},
	{ProcessOutput, "reading the output of a process", []Kind{Admin, Workspace, Run}},
	{ProcessClose, "closing a process", []Kind{Admin, Workspace, Run}},
	// A workspace key may take part in a process of its own, so that people can attach.
	{ProcessAck, "acknowledging the output of a process", []Kind{Workspace, Run}},
	{ProcessWrite, "writing to a process", []Kind{Workspace, Run}},
	{ProcessSignal, "sending a signal to a process", []Kind{Workspace, Run}},
	{ProcessResize, "resizing the terminal of a process", []Kind{Workspace, Run}},
	{ProcessAttach, "attaching to a process", []Kind{Workspace, Run}},

	// The relay belongs to one workspace, which the operator names; for the keys of
	// others it does not exist (package dispatch).
	{RelayJobRun, "running a job on a daemon", []Kind{Workspace}},
	{RelayJobRead, "reading relay jobs", []Kind{Admin, Workspace}},
	{RelayJobCancel, "cancelling a relay job", []Kind{Admin, Workspace}},
	{RelayDaemonRead, "reading the relay's daemons", []Kind{Admin, Workspace}},
	{RelayFenceRead, "reading the relay's fences", []Kind{Admin}},
	{RelayFenceClear, "clearing a fence of the relay", []Kind{Admin}},
}

// Actions lists every action there is a rule for.
func Actions() []Action {
	var all []Action
	for _, r := range rules {
		all = append(all, r.action)
	}
	return all
}

func ruleOf(a Action) (rule, bool) {
	for _, r := range rules {
		if r.action == a {
			return r, true
		}
	}
	return rule{}, false
}

func (r rule) allows(k Kind) bool { return slices.Contains(r.kinds, k) }

// next says which credential can do it and where it comes from.
func (r rule) next() string {
	var ways []string
	for _, k := range r.kinds {
		switch k {
		case Admin:
			ways = append(ways, "the admin key (admin.key in the server's state directory)")
		case Workspace:
			ways = append(ways, "a key of the workspace (made by the operator with 'stockade key create')")
		case Run:
			ways = append(ways, "the token of the run (shown once when the run was created)")
		}
	}
	return "use " + strings.Join(ways, " or ")
}
