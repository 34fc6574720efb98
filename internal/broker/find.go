package broker

import (
	"context"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

func missing(handle string) error {
	return errdefs.New(errdefs.NotFound, "there is no process %s", cutTo(handle, ident.MaxName)).
		WithNext("check the handle; records are kept for a while after their run has finished")
}

// find checks the right to an action on a process and returns its record as it
// is known now, and its owner if it has one. A process outside the principal's
// scope is missing (P6).
func (b *Broker) find(ctx context.Context, p authz.Principal, action authz.Action, handle string) (store.Process, *owner, error) {
	if err := authz.Check(p, action); err != nil {
		return store.Process{}, nil, err
	}
	if !ident.Valid(ident.Process, handle) {
		return store.Process{}, nil, missing(handle)
	}
	if o := b.owner(handle); o != nil {
		if v := o.view.Load(); v != nil && v.err == nil && covers(p.Scope(), v.rec) {
			return v.rec, o, nil
		}
	}
	rec, err := b.cfg.Store.Process(ctx, p.Scope(), handle)
	if errdefs.Is(err, errdefs.NotFound) {
		return store.Process{}, nil, missing(handle)
	}
	if err != nil {
		return store.Process{}, nil, err
	}
	if rec.State == api.StateClosed || rec.State == api.StateNeverStarted {
		return rec, nil, nil
	}
	o, err := b.adopt(handle)
	if err != nil {
		return store.Process{}, nil, err
	}
	v, err := o.wait(ctx, func(*view) bool { return true })
	if err != nil {
		return store.Process{}, nil, err
	}
	return v.rec, o, nil
}

// covers says the same of a record in memory as the ledger's query would.
func covers(s authz.Scope, p store.Process) bool {
	return s.All || s.Workspace != "" && s.Workspace == p.Workspace && (s.Run == "" || s.Run == p.Run)
}

// audit is the record of an act of a principal.
func (b *Broker) audit(p authz.Principal, workspace, action, object string, detail map[string]string) store.AuditEvent {
	return store.AuditEvent{ID: secret.ID(ident.Audit), At: now(), Actor: p.String(), Workspace: workspace,
		Action: action, Object: object, Detail: detail}
}

// linkTo returns the host program that keeps a process: not merely one that
// stands at the same target now.
func (b *Broker) linkTo(p store.Process) (*link, error) {
	l, err := b.targetOf(p.Target).reach()
	if err != nil {
		return nil, err
	}
	if l.info.HostID != p.HostID {
		return nil, errdefs.New(errdefs.Unavailable, "the host program that keeps %s is not the one at target %q now", p.Handle, p.Target).
			WithNext("put the host's directory back, or look at the fence with `stockade fence`").With("target", p.Target)
	}
	return l, nil
}
