package relay

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// greeting is how many connections may be between their upgrade and the end of
// their handshake at once.
const greeting = 1024

// Hub hands jobs to daemons. Its methods may be called from any goroutine.
type Hub struct {
	cfg     HubConfig
	lim     relaywire.Limits
	log     *slog.Logger
	state   *stateDir // nil: fences live in memory
	spills  string    // directory of spill files
	poll    *poller
	spilled atomic.Int64

	wg       sync.WaitGroup // links, writers, job owners, pings
	greeting chan struct{}  // one slot per handshake
	quit     chan struct{}  // closed when Stop begins

	listen listener

	clearing sync.Mutex    // held by ClearFence; before mu
	comeback time.Duration // comeback; not changed once daemons connect

	mu        sync.Mutex
	targets   map[string]*target // by key
	jobs      map[string]*Job    // not settled
	strangers map[*link]bool     // in their handshake
	held      int                // targets that are connected or fenced
	sockets   uint64             // the last incarnation given
	stopping  bool
	changed   chan struct{} // closed and made anew when a target changed
	stopped   chan struct{} // closed when Stop is through
}

// target is one daemon id that is connected, has jobs, or is fenced. Hub.mu guards
// it, save for disk.
type target struct {
	key   string
	id    string // "" when only a damaged marker is left of it
	step  Target
	link  *link  // of step.Socket
	fence *Fence // while step.Fenced

	disk  targetDisk // see settleDisk
	users int        // goroutines between a step and its disk work; Hub.mu
}

// targetDisk is what the state directory holds of a target. Its lock is held around
// file operations.
type targetDisk struct {
	sync.Mutex
	marker markerState
	told   bool // there may be evidence
}

type markerState uint8

const (
	none   markerState = iota
	spare              // a file that only has to be renamed to be a marker
	marked             // a marker
)

// NewHub checks the configuration, locks the state directory and loads its fences.
// Call Stop when done.
func NewHub(cfg HubConfig) (*Hub, error) {
	cfg, err := cfg.check()
	if err != nil {
		return nil, err
	}
	h := &Hub{
		cfg: cfg, lim: cfg.Limits, log: cfg.Logger,
		greeting:  make(chan struct{}, greeting),
		quit:      make(chan struct{}),
		targets:   map[string]*target{},
		jobs:      map[string]*Job{},
		strangers: map[*link]bool{},
		changed:   make(chan struct{}),
		stopped:   make(chan struct{}),
		comeback:  comeback,
	}
	if cfg.StateDir != "" {
		var fences []Fence
		if h.state, fences, err = openState(cfg.StateDir, cfg.Prefix, time.Now()); err != nil {
			return nil, err
		}
		for _, f := range fences {
			h.targets[f.Key] = &target{key: f.Key, id: f.DaemonID, step: Target{Fenced: true}, fence: &f, disk: targetDisk{marker: marked, told: true}}
			h.held++
			h.log.Warn("relay: a fence stands", "daemon", f.DaemonID, "cause", f.Cause)
		}
	}
	switch {
	case cfg.SpillDir != "":
		h.spills = cfg.SpillDir
	case cfg.StateDir != "":
		h.spills = cfg.StateDir
	default:
		// Not os.TempDir: that is often memory.
		h.spills = "/var/tmp"
		if _, err := os.Stat(h.spills); err != nil {
			h.spills = os.TempDir()
		}
	}
	h.poll = newPoller()
	if h.lim.PingInterval > 0 {
		h.spawn(h.pinger)
	}
	return h, nil
}

func (h *Hub) spawn(f func()) {
	h.wg.Add(1)
	go func() {
		defer h.wg.Done()
		f()
	}()
}

func (h *Hub) errorf(code relaywire.Code, format string, args ...any) *errdefs.Error {
	return relaywire.Errorf(h.cfg.Prefix, code, format, args...)
}

func (h *Hub) code(code relaywire.Code) string { return h.cfg.Prefix + "." + string(code) }

// keyOf names the marker of a daemon id.
func keyOf(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hex.EncodeToString(sum[:])
}

// at returns the target of an id, making it if it is new. Hub.mu is held.
func (h *Hub) at(id string) *target {
	key := keyOf(id)
	t := h.targets[key]
	if t == nil {
		t = &target{key: key}
		h.targets[key] = t
	}
	if t.id == "" {
		t.id = id // a damaged marker did not say it
	}
	return t
}

// apply takes one step of a target and does everything of its effects that is not
// disk work, at once, so that two steps cannot overtake each other. Hub.mu is held.
// The disk follows by settleDisk, which whoever owns the event calls without the lock.
func (h *Hub) apply(t *target, e FenceEvent) (refused relaywire.Code) {
	before := t.step
	var effects []Effect
	t.step, effects, refused = FenceStep(t.step, e)
	for _, f := range effects {
		switch f.Kind {
		case Mark, Unmark: // settleDisk
		case Dispatch:
			if j := h.jobs[f.Job]; !j.dispatch() {
				j.unsent = true
				h.apply(t, FenceEvent{Kind: CancelAsked, Job: f.Job})
			}
		case Revoke:
			h.jobs[f.Job].tools.revoke()
		case SendStop:
			j := h.jobs[f.Job]
			if j.unsent || j.link.out.withdraw(f.Job) {
				h.apply(t, FenceEvent{Kind: Withdrawn, Job: f.Job})
			} else {
				j.link.out.put(relaywire.Frame{Type: relaywire.Cancel, JobID: f.Job}, true)
			}
		case SetFence:
			h.setFence(t, before, e, time.Now())
		case EndJob:
			h.endJob(h.jobs[f.Job], f.End)
		}
	}
	h.count(before, t)
	return refused
}

// count keeps held, tells those who wait, and forgets a target of which nothing is
// left.
func (h *Hub) count(before Target, t *target) {
	was, is := before.Socket != 0 || before.Fenced, t.step.Socket != 0 || t.step.Fenced
	switch {
	case is && !was:
		h.held++
	case was && !is:
		h.held--
	}
	if was != is || before.Socket != t.step.Socket || before.Fenced != t.step.Fenced ||
		before.cancelling() != t.step.cancelling() {
		close(h.changed)
		h.changed = make(chan struct{})
	}
	h.forget(t)
}

func (h *Hub) forget(t *target) {
	if t.step.Socket == 0 && !t.step.wantsMarker() && t.users == 0 && h.targets[t.key] == t {
		delete(h.targets, t.key)
	}
}

// use keeps the target in the registry until unuse: its file must not be worked on
// through two records. Hub.mu is held.
func (t *target) use() { t.users++ }

func (h *Hub) unuse(t *target) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t.users--
	h.forget(t)
}

// settleDisk makes the files of a target what its state wants, and syncs them. It
// may be called by several goroutines; each returns when the disk is at least as new
// as the state it saw.
func (h *Hub) settleDisk(t *target) error {
	if h.state == nil {
		return nil
	}
	t.disk.Lock()
	defer t.disk.Unlock()
	h.mu.Lock()
	want, connected, id := t.step.wantsMarker(), t.step.Socket != 0, t.id
	var fence *Fence
	if t.fence != nil {
		f := t.fence.clone()
		fence = &f
	}
	h.mu.Unlock()
	if want && t.disk.marker != marked {
		if err := h.state.mark(t.key, id, t.disk.marker == spare); err != nil {
			t.disk.marker = none
			return err
		}
		t.disk.marker = marked
	}
	if fence != nil {
		t.disk.told = true
		return h.state.writeEvidence(*fence)
	}
	var err error
	switch {
	case want:
	case t.disk.marker == marked && t.disk.told:
		err = h.state.unmark(t.key)
		t.disk.told = false
		t.disk.marker = none
	case t.disk.marker == marked:
		if err = h.state.lay(t.key); err == nil {
			t.disk.marker = spare
		}
	}
	if err == nil && !connected && t.disk.marker == spare {
		err = h.state.discard(t.key)
		t.disk.marker = none
	}
	return err
}

// checkID trims a daemon id and refuses one that no daemon can have.
func (h *Hub) checkID(id string) (string, error) {
	id = strings.TrimSpace(id)
	if id == "" || !utf8.ValidString(id) || utf8.RuneCountInString(id) > h.lim.IDRunes {
		return "", h.errorf(relaywire.CodeIDInvalid, "a daemon id must have 1 to %d characters", h.lim.IDRunes)
	}
	return id, nil
}

// refusal explains why a target takes no job. Hub.mu is held.
func (h *Hub) refusal(code relaywire.Code, id string) *errdefs.Error {
	switch code {
	case relaywire.CodeFenced:
		return h.errorf(code, "daemon %q is fenced: something of an earlier job may still run there", id).
			WithNext("verify that its machine is quiet, then clear the fence with a reason")
	case relaywire.CodeCancelling:
		return h.errorf(code, "daemon %q is still stopping a job", id).
			WithNext("try again when it has answered, at most %s from now", h.lim.CancelTimeout)
	default:
		return h.errorf(code, "daemon %q is not connected", id).
			WithNext("start it with this daemon id, or check its URL and token")
	}
}

// WaitForDaemon returns when the daemon is connected and may be given a job.
// timeout: Limits.ConnectTimeout when zero, at least 100 ms. A fenced daemon, and
// one that is stopping a job, is refused at once.
func (h *Hub) WaitForDaemon(ctx context.Context, id string, timeout time.Duration) error {
	id, err := h.checkID(id)
	if err != nil {
		return err
	}
	if timeout == 0 {
		timeout = h.lim.ConnectTimeout
	}
	timer := time.NewTimer(max(timeout, relaywire.MinWait))
	defer timer.Stop()
	for {
		h.mu.Lock()
		changed, stopping := h.changed, h.stopping
		var step Target
		if t := h.targets[keyOf(id)]; t != nil {
			step = t.step
		}
		h.mu.Unlock()
		switch {
		case stopping:
			return h.notStarted()
		case step.Fenced:
			return h.refusal(relaywire.CodeFenced, id)
		case step.cancelling():
			return h.refusal(relaywire.CodeCancelling, id)
		case step.Socket != 0:
			return nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return h.refusal(relaywire.CodeOffline, id)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (h *Hub) notStarted() error {
	return h.errorf(relaywire.CodeNotStarted, "the relay hub does not run").WithNext("start it again")
}

// Daemons lists the connected daemons by id.
func (h *Hub) Daemons() []DaemonInfo {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []DaemonInfo
	for _, t := range h.targets {
		if t.link == nil {
			continue
		}
		d := DaemonInfo{
			ID: t.id, Incarnation: t.link.socket, Remote: t.link.remote, Metadata: t.link.metadata,
			ConnectedAt: t.link.connected, LastSeenAt: time.Unix(0, t.link.seen.Load()),
			Jobs: []string{}, Fenced: t.step.Fenced,
		}
		for _, j := range t.step.Jobs {
			d.Jobs = append(d.Jobs, j.ID)
		}
		slices.Sort(d.Jobs)
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b DaemonInfo) int { return strings.Compare(a.ID, b.ID) })
	return all
}

// Jobs lists the jobs that are not settled, oldest first.
func (h *Hub) Jobs() []JobInfo {
	h.mu.Lock()
	var all []JobInfo
	var queues []*queue
	for _, j := range h.jobs {
		phase, ok := j.target.step.phase(j.id)
		state := map[Phase]string{Marking: "starting", Running: "running", Cancelling: "cancelling"}[phase]
		if !ok {
			state = "settling"
		}
		all = append(all, JobInfo{
			ID: j.id, DaemonID: j.target.id, Incarnation: j.link.socket, State: state,
			StartedAt: j.started, Deadline: j.deadline, Events: j.queue.events.Load(), Waiting: j.waiting.Load(),
		})
		queues = append(queues, j.queue)
	}
	h.mu.Unlock()
	for i, q := range queues { // a queue may be busy with the disk
		all[i].QueuedBytes, all[i].SpillBytes = q.sizes()
	}
	slices.SortFunc(all, func(a, b JobInfo) int {
		if c := a.StartedAt.Compare(b.StartedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all
}

// Stop refuses new jobs and daemons, settles every job while daemons can still
// answer, then closes the connections with 1001 and frees the state directory. It
// does not return before that, at most the cancel time-out and some seconds for
// peers that do not close; ctx is not needed for it. Repeating it is harmless.
func (h *Hub) Stop(context.Context) error {
	h.mu.Lock()
	if h.stopping {
		h.mu.Unlock()
		<-h.stopped
		return nil
	}
	h.stopping = true
	close(h.quit)
	close(h.changed)
	h.changed = make(chan struct{})
	var jobs []*Job
	for _, j := range h.jobs {
		jobs = append(jobs, j)
	}
	h.mu.Unlock()
	defer close(h.stopped)

	for _, j := range jobs {
		j.ask(relaywire.CodeCancelled, "the hub stops")
	}
	for _, j := range jobs {
		<-j.settled
	}
	err := h.listen.close()
	h.mu.Lock()
	for l := range h.strangers {
		l.wire.Close()
	}
	for _, t := range h.targets {
		if l := t.link; l != nil {
			h.spawn(func() { l.bye(relaywire.CloseGoingAway, relaywire.ReasonStopping) })
		}
	}
	h.mu.Unlock()
	h.wg.Wait()
	h.poll.close()
	if h.state != nil {
		err = errors.Join(err, h.state.close())
	}
	return err
}
