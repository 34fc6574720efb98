package pluginhost

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/desired"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
	"github.com/stockade-run/stockade/internal/restart/gate"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/turns"
	"github.com/stockade-run/stockade/internal/worker"
)

// Manager owns the installations of one runtime. Its methods are safe for
// concurrent use. Make it with [New], end it with [Manager.Shutdown].
type Manager struct {
	cfg     Config
	log     *slog.Logger
	root    string // DataDir/plugin-runtime
	debug   *registration.DebugTokens
	keys    turns.Turns // per installation
	ready   tokens      // one: Configure
	recon   tokens      // one: Reconcile
	counter counters
	uses    *lastUse
	budget  *rpc.Budget   // of all workers' connections
	pinned  chan struct{} // closed once a Workspace is pinned (oss_dev)
	use     useRecord

	// life ends every supervisor at shutdown; running counts them.
	life    context.Context
	end     context.CancelCauseFunc
	running sync.WaitGroup

	mu       sync.Mutex
	set      bool // Configure has succeeded; what follows is then fixed
	runtime  pluginwire.RuntimeConfig
	launcher worker.Launcher
	trees    Trees
	gate     *gate.Gate
	pending  *registration.Registrations
	limiter  tokens
	table    *desired.Table
	closing  bool
	launches uint64 // number of the last launch

	installs  map[pluginwire.Context]*installation
	managed   map[string]pluginwire.Context // what apply made current; authorised bindings of legacy plugins are not here
	preparing map[string]preparation        // by installation
	changes   map[string][]*change          // by installation: who waits for its turn
	pools     map[string]*pool              // by artifact digest; a draining one is still there
	others    []*Plugin                     // plugins under development and legacy ones, oldest first
	legacy    map[string]*legacyUnit
	debugging map[string]int // connections of the debug port by Workspace; "" of capabilities
}

// installation is the record of one binding. Fields below the line belong to
// Manager.mu; those above are fixed.
type installation struct {
	binding pluginwire.Context
	dirs    dirs
	logs    *pluginlog.Buffer
	since   time.Time
	// ---
	artifact      artifact.Artifact
	enabled       bool
	mode          pluginwire.Mode
	state         string
	code, message string
	tree          deptree.Tree
	prepared      bool
	plugin        *Plugin
	sup           *supervisor // dedicated, while there is one
	slot          *slot       // of a pool, while attached or to be
}

// New makes a manager that knows nothing yet; Configure must come first.
func New(cfg Config) (*Manager, error) {
	if cfg.DataDir == "" || cfg.Artifacts == nil || cfg.Launchers == nil || cfg.Trees == nil || cfg.Host == nil {
		return nil, errdefs.New(errdefs.Internal, "pluginhost.Config lacks a required field")
	}
	abs, err := filepath.Abs(cfg.DataDir)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "the data directory %s has no absolute path", cfg.DataDir)
	}
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	life, end := context.WithCancelCause(context.Background())
	root := filepath.Join(abs, "plugin-runtime")
	return &Manager{
		cfg: cfg, log: log, root: root, uses: openLastUse(root, log),
		debug: registration.NewDebug(), ready: make(tokens, 1), recon: make(tokens, 1), limiter: make(tokens, 1),
		life: life, end: end, budget: rpc.NewBudget(InboundBytes), pinned: make(chan struct{}),
		installs: map[pluginwire.Context]*installation{}, managed: map[string]pluginwire.Context{}, preparing: map[string]preparation{}, changes: map[string][]*change{},
		pools: map[string]*pool{}, legacy: map[string]*legacyUnit{}, debugging: map[string]int{},
	}, nil
}

// Configure fixes identity, policy and profile. The first call makes the
// launcher, then the stores and tables; when a step refuses, nothing is kept. A
// repeat of the same is fine (LangBot sends it with every connection), and may
// change the marketplace's address; anything else is a conflict.
func (m *Manager) Configure(ctx context.Context, rc pluginwire.RuntimeConfig) error {
	unlock, err := m.ready.acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	m.mu.Lock()
	set, have, closing := m.set, m.runtime, m.closing
	m.mu.Unlock()
	if closing {
		return errClosing()
	}
	if set {
		if !have.SameFixed(rc) {
			return errdefs.New(errdefs.Conflict, "the runtime's identity, worker policy and profile cannot be changed once they are set").
				WithNext("restart the runtime to give it another configuration")
		}
		m.mu.Lock()
		m.runtime.CloudServiceURL = rc.CloudServiceURL
		m.mu.Unlock()
		return nil
	}
	launcher, err := m.cfg.Launchers(rc)
	if err != nil {
		return err
	}
	trees, err := m.cfg.Trees(rc, launcher)
	if err != nil {
		return joinClose(err, launcher)
	}
	m.sweep() // the launcher has ended what used it
	p := rc.Policy
	g := gate.New(policyOf(p))
	table := desired.New(rc.Identity.InstanceUUID, p.MaxInstallations)
	if !shared(rc) {
		table = desired.NewSingle(rc.Identity.InstanceUUID, p.MaxInstallations)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closing { // since it was asked: nobody else would close the launcher
		return joinClose(errClosing(), launcher)
	}
	m.launcher, m.trees, m.gate, m.table = launcher, trees, g, table
	m.pending = registration.New(p.MaxPendingRegistrations)
	m.limiter = make(tokens, max(1, p.MaxConcurrentRestarts))
	m.runtime, m.set = rc, true
	return nil
}

// Configured returns the configuration, once it is set.
func (m *Manager) Configured() (pluginwire.RuntimeConfig, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.runtime, m.set
}

// Candidate says whether b may become the current binding of its installation;
// it changes nothing. For uploads that come before Apply.
func (m *Manager) Candidate(b pluginwire.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usable(); err != nil {
		return err
	}
	return m.table.Candidate(b)
}

// Authorise says whether b may act now. In oss_dev the first one pins the
// Workspace.
func (m *Manager) Authorise(b pluginwire.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usable(); err != nil {
		return err
	}
	err := m.table.Authorise(b)
	m.notePinnedLocked()
	return err
}

// usable is called with mu held.
func (m *Manager) usable() error {
	switch {
	case m.closing:
		return errClosing()
	case !m.set:
		return errdefs.New(errdefs.Conflict, "the runtime is not configured yet").WithNext("send set_runtime_config first")
	}
	return nil
}

func errClosing() error {
	return errdefs.New(errdefs.Unavailable, "the plugin runtime is shutting down")
}

// Plugins returns the plugins a context may see, in the order they registered.
//
// A binding of an installation that is in desired state sees that installation
// alone, and in the profile shared nothing else is ever seen. In oss_dev any
// other context sees the legacy plugins and those under development, of its own
// Workspace, without the ones whose author and name belong to a managed
// installation of that Workspace, running or not: an old copy never answers for
// a managed plugin. The zero context sees all of the latter kind.
func (m *Manager) Plugins(c pluginwire.Context) []*Plugin {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.set {
		return nil
	}
	if c.IsBinding() {
		if inst, ok := m.installs[c]; ok {
			if inst.plugin == nil {
				return nil
			}
			return []*Plugin{inst.plugin}
		}
	}
	if shared(m.runtime) {
		return nil
	}
	if c.IsZero() {
		return slices.Clone(m.others)
	}
	managed := map[string]bool{}
	for b, inst := range m.installs {
		if b.SameWorkspace(c) {
			managed[inst.artifact.Manifest.Author+"/"+inst.artifact.Manifest.Name] = true
		}
	}
	var out []*Plugin
	for _, p := range m.others {
		if p.bound.SameWorkspace(c) && !managed[p.ID()] {
			out = append(out, p)
		}
	}
	return out
}

// Find returns the plugin of an author and name that a context may see.
func (m *Manager) Find(c pluginwire.Context, author, name string) (*Plugin, bool) {
	for _, p := range m.Plugins(c) {
		if p.author == author && p.name == name {
			return p, true
		}
	}
	return nil, false
}

// LegacyBound reports whether a live registered plugin, legacy or under
// development, acts under exactly this context: LangBot may then send it files
// without a full binding (only in oss_dev).
func (m *Manager) LegacyBound(c pluginwire.Context) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.set || shared(m.runtime) || c.InstallationUUID == "" {
		return false
	}
	if pin, ok := m.table.Pinned(); !ok || !pin.SameWorkspace(c) {
		return false
	}
	return slices.ContainsFunc(m.others, func(p *Plugin) bool { return p.bound == c && p.gone() == nil })
}

// Used returns the artifact digests that installations and pools hold: what a
// collector must keep.
func (m *Manager) Used() map[string]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	used := map[string]bool{}
	for b := range m.installs {
		used[b.ArtifactDigest] = true
	}
	for d := range m.pools {
		used[d] = true
	}
	return used
}

// currentLocked reports whether b is the current binding of its installation; mu
// is held.
func (m *Manager) currentLocked(b pluginwire.Context) bool {
	if !m.set {
		return false
	}
	cur, ok := m.table.Current(b.InstallationUUID)
	return ok && cur == b
}

// nextLaunch numbers a launch of a worker; called with mu held.
func (m *Manager) nextLaunch() uint64 {
	m.launches++
	return m.launches
}

// policyLocked is the policy as it holds for a worker of one mode; mu is held.
func (m *Manager) policyLocked(mode pluginwire.Mode) pluginwire.WorkerPolicy {
	return m.runtime.Policy.For(mode, m.runtime.Profile)
}

func shared(rc pluginwire.RuntimeConfig) bool { return rc.Profile == pluginwire.ProfileShared }
