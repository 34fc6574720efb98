// Package desired holds the fences of desired state: which installation binding
// is the current one, which may replace it, and what was the last one of an
// installation that is gone. It is a table and rules; whoever owns it locks it.
//
// A binding is ordered by (placement generation, runtime revision) within its
// installation. The rules are those of the published SDK 0.6.3 and 0.7:
//
//   - a candidate is accepted if it is the current binding, or newer than the
//     current one, or newer than the last one (the watermark) where none is
//     current. Everything else is stale;
//   - an installation never moves to another Workspace;
//   - a watermark outlives the removal of its installation, so that a removed
//     binding cannot come back. The number of watermarks is bounded.
//
// A runtime of a single Workspace also takes in bindings that were never applied:
// those under which its host speaks of plugins of the older kind. They are
// current, but leave no watermark. In the published SDK such a binding may be
// older than the watermark of a removed installation, and lets an old revision be
// applied again; here it may not.
package desired

import (
	"maps"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Table is the fences of one runtime. It is not safe for concurrent use. The
// zero Table is not usable; see [New] and [NewSingle].
type Table struct {
	instance string
	max      int
	single   bool
	pin      pluginwire.Context            // the Workspace of a single-Workspace runtime, or zero
	current  map[string]pluginwire.Context // by installation
	marks    map[string]pluginwire.Context // by installation; equal to current for what was applied
}

// New returns an empty table for a runtime of the instance that knows only
// desired state (the profile "shared"). It remembers at most maxInstallations
// installations, removed ones included.
func New(instance string, maxInstallations int) *Table {
	return &Table{
		instance: instance, max: maxInstallations,
		current: map[string]pluginwire.Context{}, marks: map[string]pluginwire.Context{},
	}
}

// NewSingle is [New] for a runtime of one Workspace (the profile "oss_dev"): the
// first authorised binding of an unknown installation pins its Workspace, and
// from then on unknown installations of that Workspace are taken in as they come.
func NewSingle(instance string, maxInstallations int) *Table {
	t := New(instance, maxInstallations)
	t.single = true
	return t
}

// Candidate says whether b may become the current binding of its installation,
// without changing anything. Errors: Invalid (not a full binding), Denied (other
// instance), Conflict (stale, or another Workspace), Exhausted (fence capacity).
func (t *Table) Candidate(b pluginwire.Context) error {
	if err := t.candidate(b); err != nil {
		return err
	}
	if _, marked := t.marks[b.InstallationUUID]; !marked && len(t.marks) >= t.max {
		return t.full(1)
	}
	return nil
}

// Candidates is [Table.Candidate] of a whole desired state: it says whether all
// of them may become current, one of each installation, so that a replay is
// refused as a whole before anything changed. Further errors: Invalid (an
// installation twice).
func (t *Table) Candidates(bs []pluginwire.Context) error {
	seen := make(map[string]bool, len(bs))
	fresh := 0
	for _, b := range bs {
		if err := t.candidate(b); err != nil {
			return err
		}
		if seen[b.InstallationUUID] {
			return errdefs.New(errdefs.Invalid, "the desired state names installation %s twice", b.InstallationUUID).
				WithNext("name every installation_uuid once")
		}
		seen[b.InstallationUUID] = true
		if _, marked := t.marks[b.InstallationUUID]; !marked {
			fresh++
		}
	}
	if fresh > 0 && len(t.marks)+fresh > t.max {
		return t.full(fresh)
	}
	return nil
}

// candidate does all checks but that of capacity.
func (t *Table) candidate(b pluginwire.Context) error {
	if err := t.shape(b); err != nil {
		return err
	}
	base, known := t.current[b.InstallationUUID]
	if known && b == base {
		return nil
	}
	if !known {
		base, known = t.marks[b.InstallationUUID]
	}
	switch {
	case !known:
		return nil
	case b.WorkspaceUUID != base.WorkspaceUUID:
		return errdefs.New(errdefs.Conflict, "installation %s cannot move to another Workspace", b.InstallationUUID).
			WithNext("give an installation of another Workspace an installation_uuid of its own")
	case !newer(b, base):
		return errdefs.New(errdefs.Conflict, "the binding of installation %s is stale: generation %d revision %d is not newer than generation %d revision %d",
			b.InstallationUUID, b.PlacementGeneration, b.RuntimeRevision, base.PlacementGeneration, base.RuntimeRevision).
			WithNext("send the binding of the newest revision")
	}
	return nil
}

// newer orders bindings of one installation. The digest has no part in it: other
// bytes need another revision.
func newer(a, b pluginwire.Context) bool {
	if a.PlacementGeneration != b.PlacementGeneration {
		return a.PlacementGeneration > b.PlacementGeneration
	}
	return a.RuntimeRevision > b.RuntimeRevision
}

func (t *Table) shape(b pluginwire.Context) error {
	switch {
	case !b.IsBinding() || b.InstallationUUID == "":
		return errdefs.New(errdefs.Invalid, "a full installation binding is needed: the context lacks installation_uuid, runtime_revision or artifact_digest").
			WithNext("send all six fields of the binding as the context of the message")
	case b.InstanceUUID != t.instance:
		return errdefs.New(errdefs.Denied, "the binding is of another instance than this runtime's").
			WithNext("connect the LangBot instance to its own plugin runtime")
	}
	return nil
}

func (t *Table) full(fresh int) error {
	return errdefs.New(errdefs.Exhausted, "the runtime's fence capacity is reached: %d of %d installations are remembered, removed ones included, and %d more are asked for",
		len(t.marks), t.max, fresh).
		WithNext("reconcile, which forgets installations that are gone, or raise max_installations").With("limit", "max_installations")
}

// Activate makes b the current binding of its installation and returns the one
// it replaces, which from this moment on is fenced; had is false where none was
// current. Activating the current binding again returns it as prev. The errors
// are those of [Table.Candidate], which is asked again: the answer to an earlier
// question may be out of date.
func (t *Table) Activate(b pluginwire.Context) (prev pluginwire.Context, had bool, err error) {
	if err := t.Candidate(b); err != nil {
		return pluginwire.Context{}, false, err
	}
	prev, had = t.current[b.InstallationUUID]
	t.current[b.InstallationUUID], t.marks[b.InstallationUUID] = b, b
	return prev, had, nil
}

// Deactivate removes the current binding b; its watermark stays. Errors: those
// of the shape, and Conflict if exactly b is not current.
func (t *Table) Deactivate(b pluginwire.Context) error {
	if err := t.shape(b); err != nil {
		return err
	}
	if cur, ok := t.current[b.InstallationUUID]; !ok || cur != b {
		return errdefs.New(errdefs.Conflict, "the removal binding is stale: it is not the current one of installation %s", b.InstallationUUID).
			WithNext("remove the installation by its current binding")
	}
	delete(t.current, b.InstallationUUID)
	return nil
}

// Authorise says whether b may act: it must be current. Errors: those of the
// shape, Denied (generation, revision or artifact differ from the current ones),
// NotFound (the installation is not in desired state).
//
// In a single-Workspace runtime a binding of an installation without a current one
// becomes current, though it leaves no watermark, and its Workspace and generation
// are pinned. Errors are then those of [Table.Pin] and [Table.Candidate]: what was
// applied and removed comes back only with a newer binding.
func (t *Table) Authorise(b pluginwire.Context) error {
	if err := t.shape(b); err != nil {
		return err
	}
	cur, ok := t.current[b.InstallationUUID]
	switch {
	case ok && cur == b:
		return nil
	case ok:
		return errdefs.New(errdefs.Denied, "the binding of installation %s is not the current one; an action cannot change generation, revision, or artifact", b.InstallationUUID).
			WithNext("apply the new revision first")
	case !t.single:
		return errdefs.New(errdefs.NotFound, "installation %s is not in desired state", b.InstallationUUID).
			WithNext("apply or reconcile it first")
	}
	if err := t.candidate(b); err != nil {
		return err
	}
	if len(t.current) >= t.max {
		return errdefs.New(errdefs.Exhausted, "the runtime's fence capacity is reached: %d of %d installations are current", len(t.current), t.max).
			WithNext("raise max_installations").With("limit", "max_installations")
	}
	if err := t.Pin(b); err != nil {
		return err
	}
	t.current[b.InstallationUUID] = b
	return nil
}

// Pin fixes the Workspace and generation that a single-Workspace runtime serves,
// at its first call; ws may be any context of that Workspace. Errors: Denied, if
// it is another than the pinned one or the runtime serves many.
func (t *Table) Pin(ws pluginwire.Context) error {
	ws = ws.Workspace()
	switch {
	case !t.single:
		return errdefs.New(errdefs.Denied, "a shared runtime serves no single Workspace").WithNext("use the profile oss_dev")
	case ws.InstanceUUID != t.instance || ws.WorkspaceUUID == "":
		return errdefs.New(errdefs.Denied, "the context is of another instance than this runtime's").
			WithNext("connect the LangBot instance to its own plugin runtime")
	case t.pin.IsZero():
		t.pin = ws
		return nil
	case ws != t.pin:
		return errdefs.New(errdefs.Denied, "this runtime serves one Workspace at one generation, and the context is of another Workspace or generation").
			WithNext("restart the runtime to serve another Workspace or generation")
	}
	return nil
}

// Pinned returns the Workspace that [Table.Pin] fixed, if any.
func (t *Table) Pinned() (pluginwire.Context, bool) { return t.pin, !t.pin.IsZero() }

// Current returns the current binding of an installation.
func (t *Table) Current(installation string) (pluginwire.Context, bool) {
	b, ok := t.current[installation]
	return b, ok
}

// Applied returns the current bindings that were activated, by installation: a
// copy. What a single-Workspace runtime only took in is not among them.
func (t *Table) Applied() map[string]pluginwire.Context {
	applied := maps.Clone(t.current)
	maps.DeleteFunc(applied, func(id string, b pluginwire.Context) bool { return t.marks[id] != b })
	return applied
}

// Watermarks returns the last binding of every installation that is remembered:
// a copy, for [Table.Collect].
func (t *Table) Watermarks() map[string]pluginwire.Context { return maps.Clone(t.marks) }

// Collect forgets the watermarks of installations that are gone: not in keep,
// without a current binding, and still exactly as in the snapshot, so that what
// happened since the snapshot was taken is never lost. It is for the end of a
// reconcile, whose desired state is keep, and returns how many it forgot.
func (t *Table) Collect(keep map[string]bool, snapshot map[string]pluginwire.Context) int {
	n := 0
	for id, mark := range snapshot {
		_, running := t.current[id]
		if now, ok := t.marks[id]; ok && now == mark && !running && !keep[id] {
			delete(t.marks, id)
			n++
		}
	}
	return n
}
