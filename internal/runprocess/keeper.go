package runprocess

import (
	"context"
	"log/slog"
	"slices"
	"sync"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// All in [Config].Plugins grants processes to every plugin.
const All = "all"

// Config is what a Keeper is made of.
type Config struct {
	Broker Broker
	// Plugins are the plugins, as author/name, whose installations may run processes;
	// [All] is every plugin. Without one nobody may.
	Plugins []string
	// Target is where their boxes are; "" is the broker's default.
	Target string
	Logger *slog.Logger // nil discards
}

// Keeper owns the runs that may have processes. It is safe for concurrent use; a nil
// Keeper grants nothing.
type Keeper struct {
	cfg  Config
	log  *slog.Logger
	life context.Context // of begins and finishes
	kill context.CancelFunc
	wg   sync.WaitGroup // begins and finishes
	lane chan struct{}  // a begin holds one

	mu      sync.Mutex
	runs    map[key]*Run
	conns   map[any]int // calls under way
	boxes   map[string]*boxUse
	closing bool
	open    int // runs that are not finished
	counts  Counters
}

// key names a run: LangBot's run id counts only under the installation it was given to.
type key struct {
	binding pluginwire.Context
	run     string
}

// boxUse is what the runs that are begun in a box, and are not finished, have made of it.
type boxUse struct {
	runs int
	made bool // by one of them
	used bool // an open was passed on
}

// Counters are numbers for health; they name nobody.
type Counters struct {
	Active   int   `json:"active"`
	Ending   int   `json:"ending"` // ended, and not finished yet
	Calls    int64 `json:"calls_total"`
	Busy     int64 `json:"busy_total"`
	Begun    int64 `json:"begun_total"`
	Failed   int64 `json:"begin_failures_total"`
	Proven   int64 `json:"ended_quiescent_total"`
	Fenced   int64 `json:"ended_fenced_total"`
	Unproven int64 `json:"ended_unproven_total"`
}

// New makes a keeper without runs.
func New(cfg Config) *Keeper {
	k := &Keeper{cfg: cfg, log: cfg.Logger, lane: make(chan struct{}, begins), runs: map[key]*Run{}, conns: map[any]int{}, boxes: map[string]*boxUse{}}
	if k.log == nil {
		k.log = slog.New(slog.DiscardHandler)
	}
	k.life, k.kill = context.WithCancel(context.Background())
	return k
}

// Granted reports whether a plugin may run processes when it acts under a context:
// it is named, and the context is the whole binding of an installation. Plugins
// under development and of data/plugins have none.
func (k *Keeper) Granted(plugin string, binding pluginwire.Context) bool {
	return k != nil && binding.IsBinding() && (slices.Contains(k.cfg.Plugins, plugin) || slices.Contains(k.cfg.Plugins, All))
}

// Counters returns the numbers of now, all 0 for a nil Keeper.
func (k *Keeper) Counters() Counters {
	if k == nil {
		return Counters{}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	c := k.counts
	c.Active, c.Ending = len(k.runs), k.open-len(k.runs)
	return c
}

// Close ends every run and waits until each is finished, or ctx ends: then what is
// left ends by its time. No run can begin afterwards.
func (k *Keeper) Close(ctx context.Context) error {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	k.closing = true
	for _, r := range k.runs {
		k.endLocked(r, "the plugin runtime is shutting down")
	}
	k.mu.Unlock()
	done := make(chan struct{})
	go func() {
		k.wg.Wait()
		close(done)
	}()
	defer func() {
		k.kill()
		if c, ok := k.cfg.Broker.(interface{ CloseIdle() }); ok {
			c.CloseIdle()
		}
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		k.kill()
		<-done
		return errdefs.Wrap(context.Cause(ctx), errdefs.Indeterminate, "runs could not be finished in time: the broker ends them when their time is over").
			WithNext("look at `stockade ps` on the broker")
	}
}

// enter finds the run a request is for and counts the request; leave takes it back.
func (k *Keeper) enter(conn any, binding pluginwire.Context, runID string, poll bool) (*Run, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	r := k.runs[key{binding, runID}]
	if r == nil {
		return nil, errNoRun(runID)
	}
	switch {
	case r.calls >= RunCalls:
		k.counts.Busy++
		return nil, errBusy("this run has %d process calls under way, the limit is %d", r.calls, RunCalls)
	case poll && r.polls >= RunPolls:
		k.counts.Busy++
		return nil, errBusy("this run has %d reads that wait, the limit is %d", r.polls, RunPolls)
	case k.conns[conn] >= ConnCalls:
		k.counts.Busy++
		return nil, errBusy("this worker has %d process calls under way, the limit is %d", k.conns[conn], ConnCalls)
	}
	k.counts.Calls++
	k.conns[conn]++
	r.calls++
	if poll {
		r.polls++
	}
	return r, nil
}

func (k *Keeper) leave(conn any, r *Run, poll bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.conns[conn]--; k.conns[conn] == 0 {
		delete(k.conns, conn)
	}
	r.calls--
	if poll {
		r.polls--
	}
	if r.ended && r.calls == 0 {
		close(r.idle)
	}
}
