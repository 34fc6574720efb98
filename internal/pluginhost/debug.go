package pluginhost

import (
	"context"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// Admission is the right to open a connection on the debug port. It was decided
// by [Manager.CheckAdmission] when the connection was accepted, and decides
// nothing more: a debug key is checked again with every message, a capability
// when the worker registers.
type Admission struct {
	debugKey  string
	workspace pluginwire.Context
}

// IssueDebugToken returns the debug key of a Workspace and when it ends. It must
// be a plain Workspace context of this runtime's instance.
func (m *Manager) IssueDebugToken(workspace pluginwire.Context, now time.Time) (string, time.Time, error) {
	m.mu.Lock()
	err := m.usable()
	instance := m.runtime.Identity.InstanceUUID
	m.mu.Unlock()
	switch {
	case err != nil:
		return "", time.Time{}, err
	case workspace.IsZero() || workspace.IsBinding():
		return "", time.Time{}, errdefs.New(errdefs.Denied, "a debug key needs a Workspace context, not an installation binding")
	case workspace.InstanceUUID != instance:
		return "", time.Time{}, errdefs.New(errdefs.Denied, "the Workspace belongs to another instance")
	}
	return m.debug.Issue(workspace.Workspace(), now)
}

// CheckAdmission decides whether a connection on the debug port may be opened:
// with a live debug key, or with a registration capability that is still pending.
// It uses neither up.
func (m *Manager) CheckAdmission(debugKey, capability string) (Admission, error) {
	m.mu.Lock()
	pending := m.pending
	m.mu.Unlock()
	now := time.Now()
	if debugKey != "" {
		ws, err := m.debug.Check(debugKey, now)
		if err != nil {
			return Admission{}, err
		}
		return Admission{debugKey: debugKey, workspace: ws}, nil
	}
	if capability != "" && pending != nil && pending.Pending(capability, now) {
		return Admission{}, nil
	}
	return Admission{}, errdefs.New(errdefs.Unauthenticated, "the debug port needs a debug key or a pending registration capability").
		WithNext("ask LangBot for the debug key; it is valid for two hours")
}

// ServeWorker serves one connection of the debug port until it ends or ctx or the
// manager does. A Workspace has [DebugConnections] of them at most, and so have all
// that came with a capability together; one more is closed.
func (m *Manager) ServeWorker(ctx context.Context, t rpc.Transport, adm Admission) error {
	launch, leave, err := m.enterDebug(adm)
	if err != nil {
		_ = t.Close()
		return err
	}
	defer leave()
	kind := kindDebug
	if adm.debugKey == "" {
		kind = kindDedicated
	}
	l, err := m.newLink(kind, "debug-"+strconv.FormatUint(launch, 10), launch,
		filepath.Join(m.root, debugTransfersDir, strconv.FormatUint(launch, 10)))
	if err != nil {
		_ = t.Close()
		return err
	}
	if kind == kindDedicated {
		l.launch = 0 // no worker of ours was told to come here: its registration is refused
	}
	l.token, l.workspace = adm.debugKey, adm.workspace
	l.conn = rpc.New(t, l.config())
	defer l.release()
	stop := context.AfterFunc(m.life, func() { l.conn.Close(errClosing()) })
	defer stop()
	late := time.AfterFunc(RegisterWithin, func() {
		m.mu.Lock()
		registered := l.phase == phaseRegistered
		m.mu.Unlock()
		if !registered {
			l.conn.Close(errdefs.New(errdefs.Unavailable, "the connection did not register a plugin within %s", RegisterWithin))
		}
	})
	defer late.Stop()
	return l.conn.Run(ctx)
}

// enterDebug numbers a connection of the debug port and counts it until leave.
func (m *Manager) enterDebug(adm Admission) (launch uint64, leave func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.usable(); err != nil {
		return 0, nil, err
	}
	who := adm.workspace.WorkspaceUUID
	if m.debugging[who] >= DebugConnections {
		return 0, nil, errdefs.New(errdefs.Exhausted, "a Workspace may have %d connections of plugins under development", DebugConnections).
			WithNext("end one of the lbp run that are connected").With("limit", "debug connections of a Workspace")
	}
	m.debugging[who]++
	m.running.Add(1)
	return m.nextLaunch(), func() {
		defer m.running.Done()
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.debugging[who]--; m.debugging[who] == 0 {
			delete(m.debugging, who)
		}
	}, nil
}

// recheck looks at a debug connection's key again: it may have expired, or its
// Workspace moved to a newer generation.
func (l *link) recheck(now time.Time) error {
	ws, err := l.m.debug.Check(l.token, now)
	if err != nil {
		return err
	}
	if ws != l.workspace {
		return errdefs.New(errdefs.Fenced, "the debug key's Workspace was fenced")
	}
	return nil
}

// registerDebug registers a plugin under development: its key must be that of the
// connection, and LangBot says which installation it is.
func (l *link) registerDebug(ctx context.Context, req registerRequest) error {
	m := l.m
	if req.ProdMode || req.Capability != "" {
		return errdefs.New(errdefs.Denied, "a plugin on a debug connection registers with its debug key alone")
	}
	if ws, err := m.debug.Check(req.DebugKey, time.Now()); err != nil {
		return err
	} else if ws != l.workspace {
		return errdefs.New(errdefs.Fenced, "the debug key is of another Workspace than the connection's: fenced")
	}
	c, err := decodeContainer(req.Container)
	if err != nil {
		return err
	}
	m.mu.Lock()
	l.bound, l.id = l.workspace, c.ID()
	m.mu.Unlock()
	_, err = m.cfg.Host.Call(ctx, pluginwire.ActionInitializePluginSettings, map[string]any{
		"plugin_author": c.Author, "plugin_name": c.Name, "install_source": "debug", "install_info": struct{}{},
	}, l.workspace, 0)
	if err != nil {
		return err
	}
	return l.settle(ctx, l.workspace, c, pluginlog.New(), true)
}

// settle is the end of registering a plugin outside the desired state: LangBot's
// settings name its installation, and it acts under that.
func (l *link) settle(ctx context.Context, ws pluginwire.Context, c Container, logs *pluginlog.Buffer, debug bool) error {
	m := l.m
	s, err := m.settingsOf(ctx, ws, c)
	if err != nil {
		return err
	}
	if s.installationUUID == "" {
		return errdefs.New(errdefs.Invalid, "LangBot's settings of %s have no installation_uuid", c.ID())
	}
	bound := ws
	bound.InstallationUUID = s.installationUUID
	m.mu.Lock()
	l.bound = bound
	m.mu.Unlock()
	return l.initialise(ctx, bound, c, s, logs, debug, func(p *Plugin) error {
		if i := slices.IndexFunc(m.others, func(o *Plugin) bool { return o.bound == bound && o.ID() == p.ID() }); i >= 0 {
			return errdefs.New(errdefs.Conflict, "plugin %s is already registered", p.ID()).WithNext("stop the other copy first")
		}
		m.others = append(m.others, p)
		return nil
	})
}

// dropOtherLocked takes a plugin off the list of the others; mu is held.
func (m *Manager) dropOtherLocked(p *Plugin) {
	m.others = slices.DeleteFunc(m.others, func(o *Plugin) bool { return o == p })
}
