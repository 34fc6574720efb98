package broker

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/store"
)

// retain forgets what has been kept long enough: first logs on their hosts, then
// the records of finished runs, and the oldest acts of the audit record.
func (b *Broker) retain(ctx context.Context) {
	b.past.look(time.Now(), b.cfg.Limits)
	if err := b.forgetLogs(ctx); err != nil && ctx.Err() == nil {
		b.log.Warn("old logs were not all forgotten", "error", err)
	}
	n, err := b.cfg.Store.DeleteRunsFinishedBefore(ctx, b.past.before(b.cfg.Limits.RecordRetention))
	if err != nil && ctx.Err() == nil {
		b.log.Warn("old records were not forgotten", "error", err)
	}
	if n > 0 {
		b.log.Info("the records of old runs were forgotten", "runs", n)
	}
	if _, err := b.cfg.Store.DeleteAuditBefore(ctx, b.past.before(b.cfg.Limits.AuditRetention)); err != nil && ctx.Err() == nil {
		b.log.Warn("old audit events were not forgotten", "error", err)
	}
}

// past says how old what was recorded is, where the machine's clock was set forward
// meanwhile. Only retain uses it.
type past struct {
	now   time.Time // of the last look
	jumps []jump    // oldest first
}

// jump is when the clock, afterwards, was at, and by how much too far.
type jump struct {
	at time.Time
	by time.Duration
}

// maxDrift is how much more may pass on the machine's clock than has passed.
const maxDrift = 10 * time.Second

// look notes how far the clock has come since the last look.
func (p *past) look(at time.Time, l Limits) {
	if !p.now.IsZero() {
		p.passed(at.Round(0).Sub(p.now.Round(0)), at.Sub(p.now), at)
	}
	p.now = at
	longest := max(l.LogRetention, l.RecordRetention, l.AuditRetention)
	p.jumps = slices.DeleteFunc(p.jumps, func(j jump) bool { return at.Round(0).Sub(j.at) > longest })
}

// passed notes a jump if, until at, more has passed on the clock than in truth.
func (p *past) passed(onClock, inTruth time.Duration, at time.Time) {
	if by := onClock - inTruth; by > maxDrift {
		p.jumps = append(p.jumps, jump{at.Round(0), by})
	}
}

// before is what the clock showed when it was age ago.
func (p *past) before(age time.Duration) time.Time {
	at := p.now.UTC().Add(-age).Truncate(time.Microsecond)
	for _, j := range slices.Backward(p.jumps) {
		if at.Before(j.at) {
			at = at.Add(-j.by)
		}
	}
	return at
}

// trimEvery is how often it is looked whether workspaces keep too many logs.
// Between two looks no machine ends more than a few thousand processes, for
// which a host has room.
const trimEvery = 15 * time.Second

// trim forgets the logs beyond what one workspace may keep, so that no tenant
// fills a host's disk or its table of processes.
func (b *Broker) trim(ctx context.Context) {
	stay := map[string]bool{} // what could not be forgotten now
	for {
		limit := b.cfg.Limits.trimPiece + len(stay)
		recs, err := b.cfg.Store.ExcessLogs(ctx, b.cfg.Limits.KeptLogs, b.cfg.Limits.KeptLogBytes, limit)
		for _, rec := range recs {
			if err != nil {
				break
			}
			if !stay[rec.Handle] {
				var gone bool
				gone, err = b.forgetLog(ctx, rec)
				stay[rec.Handle] = !gone
			}
		}
		maps.DeleteFunc(stay, func(_ string, stays bool) bool { return !stays })
		if err != nil && ctx.Err() == nil {
			b.log.Warn("logs beyond what is kept were not all forgotten", "error", err)
		}
		if err != nil || len(recs) < limit {
			return
		}
	}
}

func (b *Broker) forgetLogs(ctx context.Context) error {
	filter := store.ProcessFilter{ClosedBefore: b.past.before(b.cfg.Limits.LogRetention), LogKept: true, NoSpec: true, Page: store.Page{Limit: 1000}}
	for {
		recs, err := b.cfg.Store.Processes(ctx, everything(), filter)
		if err != nil {
			return err
		}
		for _, rec := range recs {
			if _, err := b.forgetLog(ctx, rec); err != nil {
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
// gone is gone. Hosts that are away are tried another time, and so is a log that
// its host cannot forget; one that has been replaced has nothing to forget. It
// reports whether the log is recorded as gone; an error is one that the next log
// would meet too.
func (b *Broker) forgetLog(ctx context.Context, rec store.Process) (bool, error) {
	t := b.targetOf(rec.Target)
	l := t.here()
	if l == nil && b.targets[rec.Target] != nil {
		return false, nil
	}
	if l != nil && l.info.HostID == rec.HostID {
		err := l.client.Forget(ctx, rec.Handle)
		switch {
		case errdefs.Is(err, errdefs.Conflict):
			// It lives although its record is closed: an operator cleared its fence.
			b.log.Warn("the log of a closed process cannot be forgotten: the host says that it lives", "handle", rec.Handle, "error", err)
			return false, nil
		case errdefs.Is(err, errdefs.NotFound):
		case errors.Is(err, host.ErrAnswered):
			b.log.Warn("the log of a closed process cannot be forgotten now", "handle", rec.Handle, "error", err)
			return false, nil
		case err != nil:
			return false, err
		}
	}
	rec.LogGone = true
	rec.Log.Oldest = rec.Log.Next
	_, err := b.cfg.Store.SaveProcess(ctx, rec, store.Change{})
	if errdefs.Is(err, errdefs.Conflict) {
		return false, nil // changed meanwhile: next time
	}
	return err == nil, err
}
