package runprocess

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// maxRunID bounds LangBot's id of a run, in bytes.
const maxRunID = 256

// Start is a run of a runner that begins.
type Start struct {
	Plugin  string             // author/name
	Binding pluginwire.Context // the installation it acts under
	RunID   string             // LangBot's
	// Conversation is what names the run's conversation; runs of one conversation find
	// each other's files. Empty: the run has its box to itself, and it goes with it.
	Conversation []string
	Deadline     time.Time // zero: none
	// Gone, if not nil, is closed when the worker has no right to act any more.
	Gone <-chan struct{}
}

// Run is the right of one run of a runner to have processes, from [Keeper.Begin] to
// [Run.End]. A nil Run is a run without that right.
type Run struct {
	k      *Keeper
	start  Start
	ctx    context.Context // of its requests
	cancel context.CancelCauseFunc
	idle   chan struct{} // closed: it has ended and no request is under way
	done   chan struct{} // closed: it is finished, or that was given up

	// Of Keeper.mu.
	ended        bool
	used         bool // an open was passed on
	calls, polls int
	last         *attempt
	read         map[string]*cursors // by handle
}

// attempt is one attempt to begin a run in the ledger. Its fields are set when done
// is closed.
type attempt struct {
	done  chan struct{}
	box   api.Box
	run   api.Run
	calls Processes
	err   error
}

// Begin begins a run, if its plugin is granted processes; otherwise it returns nil.
// It does not wait for the broker.
func (k *Keeper) Begin(s Start) *Run {
	if k == nil || !k.Granted(s.Plugin, s.Binding) {
		return nil
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	r := &Run{k: k, start: s, ctx: ctx, cancel: cancel, idle: make(chan struct{}), done: make(chan struct{}), read: map[string]*cursors{}}
	k.mu.Lock()
	defer k.mu.Unlock()
	at := key{s.Binding, s.RunID}
	why := ""
	switch {
	case s.RunID == "" || len(s.RunID) > maxRunID:
		why = "its id is empty or too long"
	case k.closing:
		why = "the runtime is shutting down"
	case k.runs[at] != nil:
		why = "a run with its id is active for this installation"
	case k.open >= MaxRuns:
		why = "the limit of runs that are not finished is reached: " + strconv.Itoa(MaxRuns)
	}
	if why != "" {
		cancel(nil)
		k.log.Warn("a run is not granted processes", "plugin", s.Plugin, "installation", s.Binding.InstallationUUID, "because", why)
		return nil
	}
	k.runs[at] = r
	k.open++
	r.beginLocked()
	k.wg.Go(r.watch)
	return r
}

// watch ends the run when its worker has gone or its time is over, whatever its
// stream is waiting for: LangBot may be slow to take what was sent before.
func (r *Run) watch() {
	var over <-chan time.Time
	if d := r.start.Deadline; !d.IsZero() {
		timer := time.NewTimer(time.Until(d) + overMargin)
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-r.start.Gone:
		r.End(r.ctx, "its worker ended, or its installation was fenced", 0)
	case <-over:
		r.End(r.ctx, "its deadline was over", 0)
	case <-r.ctx.Done():
	}
}

// beginLocked starts an attempt; mu is held and the run has not ended.
func (r *Run) beginLocked() {
	a := &attempt{done: make(chan struct{})}
	r.last = a
	r.k.wg.Go(func() {
		defer close(a.done)
		ctx, cancel := context.WithTimeout(r.k.life, BeginWithin)
		defer cancel()
		a.err = r.begin(ctx, a)
		r.k.mu.Lock()
		defer r.k.mu.Unlock()
		if a.err == nil {
			r.k.counts.Begun++
			b := r.k.boxes[a.box.ID]
			if b == nil {
				b = &boxUse{}
				r.k.boxes[a.box.ID] = b
			}
			b.runs++
			b.made = b.made || !a.box.Reused
			return
		}
		r.k.counts.Failed++
		r.k.log.Warn("a run could not be begun at the broker", "plugin", r.start.Plugin, "run", r.start.RunID, "err", a.err)
	})
}

// beginTries bounds the tries of one attempt: a box may be removed before the run is in it.
const beginTries = 3

func (r *Run) begin(ctx context.Context, a *attempt) (err error) {
	select {
	case r.k.lane <- struct{}{}:
		defer func() { <-r.k.lane }()
	case <-ctx.Done():
		return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "the broker is too slow to begin a run within %s", BeginWithin)
	}
	b := r.start.Binding
	ask := api.RunRequest{
		TTLMillis: TTL(r.start.Deadline, time.Now()).Milliseconds(),
		Installation: &api.Installation{
			InstanceUUID: b.InstanceUUID, WorkspaceUUID: b.WorkspaceUUID, PlacementGeneration: b.PlacementGeneration,
			InstallationUUID: b.InstallationUUID, RuntimeRevision: b.RuntimeRevision, ArtifactDigest: b.ArtifactDigest,
		},
	}
	for try := 1; ; try++ {
		a.box, err = r.k.cfg.Broker.AcquireBox(ctx, api.BoxRequest{Key: BoxKey(b, r.start.Conversation, r.start.RunID), Target: r.k.cfg.Target})
		if err == nil {
			ask.Box = a.box.ID
			a.run, a.calls, err = r.k.cfg.Broker.BeginRun(ctx, ask)
		}
		if err == nil || try == beginTries {
			return err
		}
		switch errdefs.CodeOf(err) {
		case errdefs.NotFound, errdefs.Conflict: // the box went meanwhile: another one comes
		case errdefs.Invalid: // the broker's own limit of a run's life is lower
			most, ok := limitOf(err)
			if !ok || most >= ask.TTLMillis {
				return err
			}
			ask.TTLMillis = most
		default:
			return err
		}
	}
}

// ready returns what the run's token can do, once the run is begun.
func (r *Run) ready(ctx context.Context) (*attempt, error) {
	k := r.k
	k.mu.Lock()
	a := r.last
	select {
	case <-a.done:
		if a.err != nil && !r.ended {
			r.beginLocked()
			a = r.last
		}
	default:
	}
	k.mu.Unlock()
	select {
	case <-a.done:
		return a, a.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// End ends the run: no request finds it any more, those under way are cancelled, and
// the broker finishes it. If the run has started a process, End waits until that is
// done, but at most so long, or until ctx ends. It may be called again.
func (r *Run) End(ctx context.Context, reason string, wait time.Duration) {
	if r == nil {
		return
	}
	r.k.mu.Lock()
	r.k.endLocked(r, reason)
	used := r.used
	r.k.mu.Unlock()
	if !used || wait <= 0 {
		return
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-r.done:
	case <-ctx.Done():
	case <-timer.C:
		r.k.log.Warn("the end of a run is told before its processes are proven gone", "plugin", r.start.Plugin, "run", r.start.RunID, "waited", wait)
	}
}

// endLocked is the first half of End; mu is held.
func (k *Keeper) endLocked(r *Run, reason string) {
	if r.ended {
		return
	}
	r.ended = true
	delete(k.runs, key{r.start.Binding, r.start.RunID})
	r.cancel(errNoRun(r.start.RunID))
	if r.calls == 0 {
		close(r.idle)
	}
	a := r.last
	k.wg.Go(func() {
		<-r.idle
		<-a.done
		if a.err == nil {
			r.finish(a, reason)
		}
		k.mu.Lock()
		k.open--
		k.mu.Unlock()
		close(r.done)
	})
}

// finish has the broker finish the run, and repeats that while it does not answer.
func (r *Run) finish(a *attempt, reason string) {
	k := r.k
	ctx, cancel := context.WithTimeout(k.life, FinishWithin)
	defer cancel()
	grace := EndGrace.Milliseconds()
	var out api.FinishResponse
	var err error
	for delay := 50 * time.Millisecond; ; delay = min(2*delay, 5*time.Second) {
		out, err = k.cfg.Broker.FinishRun(ctx, a.run.ID, api.FinishRequest{Reason: reason, GraceMillis: &grace})
		if err == nil || !passes(err) || !sleep(ctx, delay) {
			break
		}
	}
	log := k.log.With("plugin", r.start.Plugin, "run", a.run.ID, "box", a.box.ID)
	k.mu.Lock()
	switch {
	case err != nil:
		k.counts.Unproven++
	case !out.Quiescent:
		k.counts.Fenced++
	default:
		k.counts.Proven++
	}
	box := k.boxes[a.box.ID]
	if box.runs--; box.runs == 0 {
		delete(k.boxes, a.box.ID)
	}
	useless := box.runs == 0 && (len(r.start.Conversation) == 0 || box.made && !box.used)
	k.mu.Unlock()
	switch {
	case err != nil:
		log.Warn("a run could not be finished: the broker ends it when its time is over", "expires", a.run.ExpiresAt, "err", err)
		return
	case !out.Quiescent:
		log.Warn("a run has ended, and not all of its processes are proven gone: a fence stands", "processes", len(out.Processes))
		return
	}
	log.Debug("a run has ended", "reason", reason, "processes", len(out.Processes))
	// A box that nobody will look for again, or that was made for nothing, would only
	// take the place of one that is needed.
	if useless {
		if err := k.cfg.Broker.RemoveBox(ctx, a.box.ID); err != nil && !errdefs.Is(err, errdefs.Conflict) {
			log.Warn("the box of a run was not removed: it goes when it was idle for long", "err", err)
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// limitOf is the limit that a refusal names, in milliseconds.
func limitOf(err error) (int64, bool) {
	n, perr := strconv.ParseInt(detail(err, "limit"), 10, 64)
	return n, perr == nil && n > 0
}

// BoxKey is the reuse key of the box of a conversation of an installation, or, where
// there is none, of a run. An upgrade of the plugin keeps it; another installation,
// Workspace or instance never has the same.
func BoxKey(b pluginwire.Context, conversation []string, runID string) string {
	kind := "conversation"
	if len(conversation) == 0 {
		kind, conversation = "run", []string{runID}
	}
	h := sha256.New()
	for _, s := range append([]string{kind, b.InstanceUUID, b.WorkspaceUUID, b.InstallationUUID}, conversation...) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(s)))
		h.Write(n[:])
		h.Write([]byte(s))
	}
	return "run-" + hex.EncodeToString(h.Sum(nil)[:20])
}
