package relay

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// Why a fence stands.
const (
	FenceUnacknowledged = "unacknowledged" // run.cancel was not answered in time
	FenceDisconnected   = "disconnected"   // the connection was lost with a job on it
	FenceHubDied        = "hub_died"       // a marker was found by a new hub
	FenceDamaged        = "damaged"        // and it does not say whose it is
)

// maxText bounds an operator's name and reason.
const maxText = 1 << 10

func (f Fence) clone() Fence {
	f.Jobs, f.Late = slices.Clone(f.Jobs), slices.Clone(f.Late)
	return f
}

// setFence makes the evidence of a fence, or adds to it. Hub.mu is held.
func (h *Hub) setFence(t *target, before Target, e FenceEvent, now time.Time) {
	f := t.fence
	if f == nil {
		f = &Fence{DaemonID: t.id, Key: t.key, Since: now}
		t.fence = f
	}
	switch e.Kind {
	case AckTimedOut:
		f.Jobs = append(f.Jobs, e.Job)
		if f.Code == "" {
			f.Code = FenceUnacknowledged
			f.Cause = "a job was cancelled and its end was not acknowledged within " + h.lim.CancelTimeout.String()
		}
	case Disconnected:
		for _, j := range before.Jobs {
			if j.Phase != Marking {
				f.Jobs = append(f.Jobs, j.ID)
			}
		}
		if f.Code == "" {
			f.Code = FenceDisconnected
			f.Cause = "the connection was lost before the end of its jobs was acknowledged"
		}
	}
	for _, j := range before.Jobs {
		if l := h.jobs[j.ID].link; l != nil {
			f.Remote, f.Incarnation, f.Metadata = l.remote, l.socket, l.metadata
		}
	}
	h.log.Warn("relay: fenced", "daemon", t.id, "cause", f.Cause, "jobs", f.Jobs)
}

// lateFinish keeps an acknowledgement that came after the fence as evidence. It does
// not wait for the disk.
func (h *Hub) lateFinish(t *target, job string) {
	h.mu.Lock()
	if t.fence == nil || !slices.Contains(t.fence.Jobs, job) {
		h.mu.Unlock()
		return
	}
	t.fence.Late = append(t.fence.Late, LateFinish{job, time.Now()})
	t.use()
	h.mu.Unlock()
	h.log.Warn("relay: an acknowledgement came too late, the fence stands", "daemon", t.id, "job", job)
	h.spawn(func() {
		h.diskWork(t)
		h.unuse(t)
	})
}

// Fences lists the fences with their evidence, oldest first.
func (h *Hub) Fences() []Fence {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []Fence
	for _, t := range h.targets {
		if t.fence != nil {
			all = append(all, t.fence.clone())
		}
	}
	slices.SortFunc(all, func(a, b Fence) int {
		if c := a.Since.Compare(b.Since); c != 0 {
			return c
		}
		return strings.Compare(a.Key, b.Key)
	})
	return all
}

// ErrOtherFence refuses to lift what the operator has not seen.
func ErrOtherFence(daemon string) error {
	return errdefs.New(errdefs.Conflict, "the fence of daemon %q is not the one that was looked at: it is newer, or more jobs are in it", daemon).
		WithNext("look at the evidence and at the machine again, then clear the fence that stands")
}

// cleared is a line of the audit log.
type cleared struct {
	At       time.Time `json:"at"`
	Action   string    `json:"action"`
	Operator string    `json:"operator"`
	Reason   string    `json:"reason"`
	Fence    Fence     `json:"fence"`
}

// ID names a fence as it was seen: another fence of the same daemon has another, and so
// has the same one once one more job is in it.
func (f Fence) ID() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %d %q", f.Key, f.Since.UnixNano(), f.Jobs))
	return hex.EncodeToString(sum[:8])
}

// ClearFence lifts a fence after a person verified that nothing runs there; the
// daemon may connect again, or be given jobs again when it still is connected. seen is
// the evidence that the person had, from Fences or an Outcome: it must be what stands
// (a conflict error), for whoever looked at one fence knows nothing of a later one.
// Operator and reason are required and written, with the evidence, to the audit log
// before the fence is lifted. It returns the evidence.
func (h *Hub) ClearFence(_ context.Context, seen Fence, operator, reason string) (Fence, error) {
	operator, reason = strings.TrimSpace(operator), strings.TrimSpace(reason)
	if operator == "" || reason == "" || len(operator) > maxText || len(reason) > maxText {
		return Fence{}, errdefs.New(errdefs.Invalid, "clearing a fence needs an operator and a reason, at most %d bytes each", maxText).
			WithNext("say who verified that nothing runs there, and how")
	}
	// One at a time: what one act has lifted may be used at once, and another that began
	// before must not take away the marker of a job that runs by now.
	h.clearing.Lock()
	defer h.clearing.Unlock()
	h.mu.Lock()
	if h.stopping {
		h.mu.Unlock()
		return Fence{}, h.notStarted()
	}
	t := h.targets[seen.Key]
	if t == nil || t.fence == nil {
		h.mu.Unlock()
		return Fence{}, errdefs.New(errdefs.NotFound, "the fence of %q does not stand", seen.DaemonID)
	}
	if t.fence.ID() != seen.ID() {
		h.mu.Unlock()
		return Fence{}, ErrOtherFence(seen.DaemonID)
	}
	if len(t.step.Jobs) > 0 {
		h.mu.Unlock()
		return Fence{}, h.errorf(relaywire.CodeCancelling, "daemon %q still has a job that is not settled", t.id).
			WithNext("cancel it first")
	}
	f := t.fence.clone()
	t.use()
	h.wg.Add(1) // Stop waits: the lock is held until the files are done
	h.mu.Unlock()
	defer h.wg.Done()
	defer h.unuse(t)

	if h.state != nil {
		entry := cleared{At: time.Now().UTC(), Action: "fence_cleared", Operator: operator, Reason: reason, Fence: f}
		if err := h.state.audit(entry); err != nil {
			return Fence{}, diskFailure(err, "the audit log cannot be written, so the fence stands")
		}
		// The disk first: a hub that dies here finds either the fence or none, and
		// while it lives its memory still refuses.
		t.disk.Lock()
		err := h.state.unmark(t.key)
		t.disk.marker, t.disk.told = none, err != nil
		t.disk.Unlock()
		if err != nil {
			h.diskWork(t) // what is gone of it comes back
			return Fence{}, diskFailure(err, "the marker cannot be removed, so the fence stands")
		}
	}
	h.mu.Lock()
	refused := h.apply(t, FenceEvent{Kind: Cleared})
	if refused == "" {
		t.fence = nil
	}
	h.mu.Unlock()
	if refused != "" { // not possible: a fenced daemon gets no jobs; but then the marker must be back
		h.diskWork(t)
		return Fence{}, h.errorf(refused, "daemon %q still has a job that is not settled", f.DaemonID)
	}
	h.log.Warn("relay: fence cleared", "daemon", f.DaemonID, "key", f.Key, "operator", operator, "reason", reason)
	return f, h.settleDisk(t)
}
