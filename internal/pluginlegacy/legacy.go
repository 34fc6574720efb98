package pluginlegacy

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/turns"
)

// Times of the published runtime (SDK 0.6.3 and 0.7).
const (
	readyWithin   = 30 * time.Second       // a started plugin must be initialised by then
	pollEvery     = 100 * time.Millisecond // how often that is looked at
	installWithin = 300 * time.Second      // one dependency
	tries         = 3                      // of one dependency
	between       = time.Second            // tries
	preparing     = 2                      // plugins whose dependencies are looked at together, at the start
)

// Plugin is a plugin of the legacy directory that shall run.
type Plugin struct {
	Author, Name string
	Dir          string // absolute
	SitePackages string // of its .venv; "" for none
	Problem      string // for its log: why a dependency is missing; "" for none
}

// Runner runs plugins and speaks with LangBot; the plugin host does.
type Runner interface {
	// Start keeps a plugin running until Stop, which waits until it is gone.
	Start(p Plugin) error
	Stop(author, name string)
	// Ready reports whether a started plugin is initialised, and why its last attempt
	// failed.
	Ready(author, name string) (ready bool, failure string)
	// Debug reports whether a scope has a plugin under development with an identity;
	// EndDebug asks its process to shut down, so that its author's tool connects anew.
	Debug(scope pluginwire.Context, author, name string) bool
	EndDebug(ctx context.Context, scope pluginwire.Context, author, name string) error
	// Pinned waits until LangBot's Workspace is known.
	Pinned(ctx context.Context) error
	// InitialiseSettings has LangBot make the settings of a plugin that is installed;
	// Source is what its settings say it was installed from.
	InitialiseSettings(ctx context.Context, scope pluginwire.Context, author, name, source string, info json.RawMessage) error
	Source(ctx context.Context, scope pluginwire.Context, author, name string) (source string, err error)
}

// Config is what an Owner is made of.
type Config struct {
	DataDir string // absolute
	Interp  deptree.Interpreter
	// Installer runs pip or uv as the profile runs workers. It is asked for once
	// LangBot has configured the runtime.
	Installer    func() deptree.Installer
	Uv           string // path of uv; "" installs with pip
	IndexURL     string // package index; "" is the installer's own default
	TrustedHosts []string
	Runner       Runner
	// DebugOnly starts nothing; SkipDeps looks at no dependencies at the start.
	DebugOnly, SkipDeps bool
	Logger              *slog.Logger // nil discards

	// For tests; 0 is the published runtime's.
	ReadyWithin, Between time.Duration
	// step is called before each step that a crash may separate from the next; an
	// error stops everything where it is, as a crash would.
	step func(name string) error
}

// Owner owns the legacy directory. It is safe for concurrent use. Make it with
// [New], begin with [Owner.Configured], end with [Owner.Close].
type Owner struct {
	cfg    Config
	log    *slog.Logger
	market market
	locks  turns.Turns // by directory name (LM-14)

	life  context.Context
	end   context.CancelCauseFunc
	work  sync.WaitGroup
	ready chan struct{} // closed when what a crash left is repaired

	mu       sync.Mutex
	began    bool
	broken   error // why it could not be repaired
	capacity int
	running  map[string]bool // directories with a supervisor
	waiting  []Plugin        // found at the start when there was no more room
	cloud    string          // the marketplace's address
}

// New makes an Owner that touches nothing yet.
func New(cfg Config) (*Owner, error) {
	if !filepath.IsAbs(cfg.DataDir) || cfg.Installer == nil || cfg.Runner == nil || cfg.Interp.Path == "" {
		return nil, errdefs.New(errdefs.Internal, "pluginlegacy.Config lacks a required field")
	}
	if cfg.ReadyWithin == 0 {
		cfg.ReadyWithin = readyWithin
	}
	if cfg.Between == 0 {
		cfg.Between = between
	}
	if cfg.step == nil {
		cfg.step = func(string) error { return nil }
	}
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	life, end := context.WithCancelCause(context.Background())
	return &Owner{cfg: cfg, log: log, market: newMarket(), life: life, end: end,
		ready: make(chan struct{}), running: map[string]bool{}}, nil
}

// Configured begins, once LangBot has said what the runtime is; it does not wait.
// In the profile shared it does nothing, and a repeat only moves the marketplace.
func (o *Owner) Configured(rc pluginwire.RuntimeConfig) {
	if rc.Profile == pluginwire.ProfileShared {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.cloud = rc.CloudServiceURL
	if o.began || o.life.Err() != nil {
		return
	}
	o.began, o.capacity = true, rc.Policy.Capacity()
	o.work.Go(o.begin)
}

// Close ends what is under way and waits for it. Running plugins are the Runner's to stop.
func (o *Owner) Close() {
	o.mu.Lock()
	o.end(errdefs.New(errdefs.Unavailable, "the plugin runtime is shutting down"))
	o.mu.Unlock()
	o.work.Wait()
	o.market.close()
}

// enter waits until the directory is repaired, and joins ctx with the owner's life.
func (o *Owner) enter(ctx context.Context) (context.Context, func(), error) {
	o.mu.Lock()
	began := o.began
	if began && o.life.Err() == nil {
		o.work.Add(1)
	}
	o.mu.Unlock()
	switch {
	case o.life.Err() != nil:
		return nil, nil, context.Cause(o.life)
	case !began:
		return nil, nil, errdefs.New(errdefs.Unavailable, "the runtime is not configured for plugins of data/plugins")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(o.life, func() { cancel(context.Cause(o.life)) })
	leave := func() { stop(); cancel(nil); o.work.Done() }
	select {
	case <-o.ready:
	case <-ctx.Done():
		err := context.Cause(ctx)
		leave()
		return nil, nil, err
	}
	if o.broken != nil {
		leave()
		return nil, nil, o.broken
	}
	return ctx, leave, nil
}

// begin repairs, then looks at every plugin's dependencies and starts it.
func (o *Owner) begin() {
	if err := o.repair(); err != nil {
		o.log.Error("the directory of plugins cannot be repaired", "err", err)
		o.broken = err
	}
	close(o.ready)
	if o.broken != nil {
		return
	}
	all, err := o.plugins()
	if err != nil {
		o.log.Error("the directory of plugins cannot be read", "err", err)
		return
	}
	// Plugins whose dependencies are there do not wait for those whose are not.
	places := make(chan struct{}, preparing)
	var group sync.WaitGroup
	for _, p := range all {
		group.Go(func() { o.beginOne(p, places) })
	}
	group.Wait()
}

// beginOne starts a plugin that was found. It reports false if it did not take a place
// that it could have had.
func (o *Owner) beginOne(p Plugin, places chan struct{}) bool {
	unlock, err := o.locks.Take(o.life, filepath.Base(p.Dir))
	if err != nil {
		return true
	}
	defer unlock()
	if _, err := os.Stat(p.Dir); err != nil || o.supervised(filepath.Base(p.Dir)) {
		return false // deleted or started meanwhile
	}
	if !o.cfg.SkipDeps {
		select {
		case places <- struct{}{}:
		case <-o.life.Done():
			return true
		}
		err := o.prepare(o.life, p, p.Dir, nil)
		<-places
		if err != nil {
			o.log.Warn("a plugin's dependencies are not all there; it is started nevertheless", "plugin", p.Author+"/"+p.Name, "err", err)
			p.Problem = "dependencies: " + cut(err.Error(), maxReason)
		}
	}
	if o.cfg.DebugOnly || o.cfg.Runner.Pinned(o.life) != nil {
		return true
	}
	err = o.start(p)
	if err == nil {
		return true
	}
	o.log.Warn("a plugin of the legacy directory is not started", "plugin", p.Author+"/"+p.Name, "err", err)
	if !errdefs.Is(err, errdefs.Exhausted) {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.waiting = append(o.waiting, p)
	return true
}

// room starts the next plugin that found no room at the start, if there is room now.
func (o *Owner) room() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.waiting) == 0 || len(o.running) >= o.capacity || o.life.Err() != nil {
		return
	}
	p := o.waiting[0]
	o.waiting = o.waiting[1:]
	o.work.Go(func() {
		if !o.beginOne(p, make(chan struct{}, 1)) {
			o.room()
		}
	})
}

// maxReason is how much of a failure is kept, in bytes (published SDK 0.7: the last
// 2000 characters of an installer's output).
const maxReason = 2000

// start starts a plugin's supervisor, within the capacity. After a failure the plugin
// has no place.
func (o *Owner) start(p Plugin) error {
	if err := o.take(filepath.Base(p.Dir)); err != nil {
		return err
	}
	p.SitePackages = o.sitePackages(p.Dir)
	err := o.cfg.Runner.Start(p)
	if err != nil {
		o.vacate(p)
	}
	return err
}

// take takes a place for a plugin that has none.
func (o *Owner) take(base string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := o.hasRoomLocked(base); err != nil {
		return err
	}
	o.running[base] = true
	return nil
}

// hasRoomLocked reports whether a plugin may run; mu is held.
func (o *Owner) hasRoomLocked(base string) error {
	if o.running[base] || len(o.running) < o.capacity {
		return nil
	}
	return errdefs.New(errdefs.Exhausted, "as many plugins run as the worker policy has room for: %d", o.capacity).
		WithNext("raise max_workers, max_total_cpus or max_total_memory_mb in LangBot's configuration")
}

// halt stops a plugin's supervisor, registered or not (LM-16). The plugin keeps its
// place, so that nobody takes it before it is started again.
func (o *Owner) halt(p Plugin) { o.cfg.Runner.Stop(p.Author, p.Name) }

// vacate gives a plugin's place to the next that waits for one.
func (o *Owner) vacate(p Plugin) {
	o.mu.Lock()
	delete(o.running, filepath.Base(p.Dir))
	o.mu.Unlock()
	o.room()
}

func (o *Owner) supervised(base string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.running[base]
}

// await waits until a started plugin is initialised.
func (o *Owner) await(ctx context.Context, p Plugin) error {
	limited, cancel := context.WithTimeout(ctx, o.cfg.ReadyWithin)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		ready, failure := o.cfg.Runner.Ready(p.Author, p.Name)
		if ready {
			return nil
		}
		select {
		case <-tick.C:
		case <-limited.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			why := ""
			if failure != "" {
				why = ": " + cut(failure, maxReason)
			}
			return errdefs.New(errdefs.Unavailable, "Plugin %s/%s did not become ready within %.0fs%s", p.Author, p.Name, o.cfg.ReadyWithin.Seconds(), why).
				WithNext("see get_plugin_logs")
		}
	}
}
