package broker

import (
	"context"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

// retain forgets what has been kept long enough: first logs on their hosts, then
// the records of finished runs, and the oldest acts of the audit record.
func (b *Broker) retain(ctx context.Context) {
	if err := b.forgetLogs(ctx); err != nil && ctx.Err() == nil {
		b.log.Warn("old logs were not all forgotten", "error", err)
	}
	n, err := b.cfg.Store.DeleteRunsFinishedBefore(ctx, now().Add(-b.cfg.Limits.RecordRetention))
	if err != nil && ctx.Err() == nil {
		b.log.Warn("old records were not forgotten", "error", err)
	}
	if n > 0 {
		b.log.Info("the records of old runs were forgotten", "runs", n)
	}
	if _, err := b.cfg.Store.DeleteAuditBefore(ctx, now().Add(-b.cfg.Limits.AuditRetention)); err != nil && ctx.Err() == nil {
		b.log.Warn("old audit events were not forgotten", "error", err)
	}
}

func (b *Broker) forgetLogs(ctx context.Context) error {
	filter := store.ProcessFilter{ClosedBefore: now().Add(-b.cfg.Limits.LogRetention), LogKept: true, NoSpec: true, Page: store.Page{Limit: 1000}}
	for {
		recs, err := b.cfg.Store.Processes(ctx, everything(), filter)
		if err != nil {
			return err
		}
		for _, rec := range recs {
			if err := b.forgetLog(ctx, rec); err != nil {
				return err
			}
		}
		if len(recs) < filter.Page.Limit {
			return nil
		}
		filter.Page.After = recs[len(recs)-1].Handle
	}
}

// forgetLog tells the host first and the ledger then: a log that is recorded as
// gone is gone. Hosts that are away are tried another time; one that has been
// replaced has nothing to forget.
func (b *Broker) forgetLog(ctx context.Context, rec store.Process) error {
	t := b.targetOf(rec.Target)
	l := t.here()
	if l == nil && b.targets[rec.Target] != nil {
		return nil
	}
	if l != nil && l.info.HostID == rec.HostID {
		err := l.client.Forget(ctx, rec.Handle)
		switch {
		case errdefs.Is(err, errdefs.Conflict):
			// It lives although its record is closed: an operator cleared its fence.
			b.log.Warn("the log of a closed process cannot be forgotten: the host says that it lives", "handle", rec.Handle, "error", err)
			return nil
		case err != nil && !errdefs.Is(err, errdefs.NotFound):
			return err
		}
	}
	rec.LogGone = true
	rec.Log.Oldest = rec.Log.Next
	_, err := b.cfg.Store.SaveProcess(ctx, rec, store.Change{})
	if errdefs.Is(err, errdefs.Conflict) {
		return nil // changed meanwhile: next time
	}
	return err
}
