// Package authz says who may do what (P6). It is pure: a [Principal] comes from
// an authenticated credential, [Check] compares it with one table, and
// [Principal.Scope] is what the ledger's queries are limited to. Check decides
// whether a kind of credential may ask at all; the scope decides which records
// exist for it.
package authz

import (
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Kind is a kind of credential. The zero Kind is nobody.
type Kind string

// The kinds of credential.
const (
	// Admin is the operator of the instance. It sees every record and can stop
	// things, but starts and feeds nothing in a tenant's name.
	Admin Kind = "admin"
	// Workspace is a tenant's long-lived key.
	Workspace Kind = "workspace"
	// Run is the token of one run: the only credential that opens processes.
	Run Kind = "run"
)

// Kinds lists every kind of credential.
func Kinds() []Kind { return []Kind{Admin, Workspace, Run} }

// Scope is the authority under which a record is looked up. The zero Scope sees
// nothing, and so does one that names a run without its workspace.
type Scope struct {
	Workspace string // only records of this workspace …
	Run       string // … and, if set, only of this run
	All       bool   // the server itself and its operator: everything
}

// Principal is whoever holds an authenticated credential. Only the tenant
// service makes one from a credential; the zero Principal may do nothing.
type Principal struct {
	Kind      Kind
	Key       string // the key's id, for admin and workspace
	Workspace string // empty for admin
	Run       string // the run's id, for run
}

// Scope returns which records exist for p. An incomplete principal gets the
// zero scope, never a wider one.
func (p Principal) Scope() Scope {
	switch {
	case p.Kind == Admin:
		return Scope{All: true}
	case p.Kind == Workspace && p.Workspace != "":
		return Scope{Workspace: p.Workspace}
	case p.Kind == Run && p.Workspace != "" && p.Run != "":
		return Scope{Workspace: p.Workspace, Run: p.Run}
	}
	return Scope{}
}

// String names p for the audit record and the log: the id of its key or run,
// which is no secret, or "nobody".
func (p Principal) String() string {
	switch {
	case (p.Kind == Admin || p.Kind == Workspace) && p.Key != "":
		return p.Key
	case p.Kind == Run && p.Run != "":
		return p.Run
	}
	return "nobody"
}

// Check returns nil if p's kind of credential may do the action, and denied,
// saying which credential can, if it may not. The zero principal is
// unauthenticated; an action missing from the table is internal.
func Check(p Principal, a Action) error {
	rule, ok := ruleOf(a)
	if !ok {
		return errdefs.New(errdefs.Internal, "there is no rule for the action %q", string(a))
	}
	if p.Scope() == (Scope{}) {
		return errdefs.New(errdefs.Unauthenticated, "%s needs a credential", rule.what).WithNext("%s", rule.next())
	}
	if rule.allows(p.Kind) {
		return nil
	}
	return errdefs.New(errdefs.Denied, "%s is not allowed with %s", rule.what, article(p.Kind)).
		WithNext("%s", rule.next()).With("credential", string(p.Kind)).With("action", string(a))
}

// Allowed reports whether the kind of credential may do the action.
func Allowed(k Kind, a Action) bool {
	rule, ok := ruleOf(a)
	return ok && rule.allows(k)
}

func article(k Kind) string {
	switch k {
	case Admin:
		return "an admin key"
	case Workspace:
		return "a workspace key"
	default:
		return "a run token"
	}
}
