package pluginhost

import (
	"context"
	"encoding/json"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
	"github.com/stockade-run/stockade/internal/rpc"
)

// registerRequest is the data of register_plugin.
type registerRequest struct {
	Container  json.RawMessage `json:"plugin_container"`
	ProdMode   bool            `json:"prod_mode"`
	DebugKey   string          `json:"plugin_debug_key"`
	Capability string          `json:"registration_capability"`
}

// register answers register_plugin; it may be called once per connection. The
// capability is consumed before anything is asked of LangBot.
func (l *link) register(ctx context.Context, in *rpc.Inbound) (any, error) {
	l.m.mu.Lock()
	if l.phase != phaseFresh {
		l.m.mu.Unlock()
		return nil, errdefs.New(errdefs.Denied, "this worker connection is already registered")
	}
	l.phase = phaseRegistering
	l.m.mu.Unlock()
	if err := l.admitRegistration(ctx, in.Data); err != nil {
		return nil, l.refuse(err)
	}
	return struct{}{}, nil
}

func (l *link) admitRegistration(ctx context.Context, data json.RawMessage) error {
	var req registerRequest
	if err := json.Unmarshal(data, &req); err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "register_plugin's data is not the expected object")
	}
	if l.kind == kindDebug {
		return l.registerDebug(ctx, req)
	}
	if !req.ProdMode || req.Capability == "" {
		return errdefs.New(errdefs.Denied, "a worker that the runtime started must register with prod_mode and its registration capability")
	}
	m := l.m
	now := time.Now()
	grant, ok := m.pending.Peek(req.Capability, now)
	if !ok {
		return errdefs.New(errdefs.Unauthenticated, "the registration capability is invalid, expired or was used")
	}
	// A capability is bound to the launch it was made for: over any other
	// connection it is refused and, so that a thief cannot spoil the launch, kept.
	if grant.Launch != l.launch || l.launch == 0 {
		return errdefs.New(errdefs.Denied, "the registration's transport changed: this capability belongs to another launch")
	}
	if grant, err := m.pending.Consume(req.Capability, now); err != nil {
		return err
	} else if grant.Launch != l.launch {
		return errdefs.New(errdefs.Denied, "the registration's generation changed")
	}
	c, err := decodeContainer(req.Container)
	if err != nil {
		return err
	}
	if c.Author != grant.Author || c.Name != grant.Name {
		return errdefs.New(errdefs.Denied, "plugin %s registered with a capability of plugin %s/%s", c.ID(), grant.Author, grant.Name)
	}
	switch l.kind {
	case kindPool:
		return m.registerPool(l, grant, c)
	case kindLegacy:
		return l.registerLegacy(ctx, c)
	}
	return l.registerDedicated(ctx, grant, c)
}

func (l *link) registerDedicated(ctx context.Context, grant registration.Grant, c Container) error {
	m := l.m
	m.mu.Lock()
	inst := m.installs[grant.Binding]
	switch {
	case inst == nil || inst != l.inst || !m.currentLocked(grant.Binding):
		m.mu.Unlock()
		return errdefs.New(errdefs.Denied, "the worker's installation binding was revoked")
	case !inst.enabled:
		m.mu.Unlock()
		return errdefs.New(errdefs.Denied, "the installation is disabled")
	case inst.plugin != nil:
		m.mu.Unlock()
		return errdefs.New(errdefs.Conflict, "the installation already has a registered worker")
	}
	l.bound, l.id = grant.Binding, c.ID()
	m.mu.Unlock()
	s, err := m.settingsOf(ctx, grant.Binding, c)
	if err != nil {
		return err
	}
	return l.initialise(ctx, grant.Binding, c, s, inst.logs, false, func(p *Plugin) error {
		if m.installs[grant.Binding] != inst || !m.currentLocked(grant.Binding) || inst.plugin != nil {
			return errdefs.New(errdefs.Denied, "the worker's installation binding was revoked")
		}
		inst.plugin = p
		return nil
	})
}

// settingsOf asks LangBot for a plugin's settings under a context; what they say
// about the installation must agree with it.
func (m *Manager) settingsOf(ctx context.Context, as pluginwire.Context, c Container) (settings, error) {
	raw, err := m.cfg.Host.Call(ctx, pluginwire.ActionGetPluginSettings,
		map[string]string{"plugin_author": c.Author, "plugin_name": c.Name}, as, 0)
	if err != nil {
		return settings{}, err
	}
	s, err := decodeSettings(raw)
	if err != nil {
		return settings{}, err
	}
	if s.installationUUID != "" && as.InstallationUUID != "" && s.installationUUID != as.InstallationUUID {
		return settings{}, errdefs.New(errdefs.Denied, "LangBot's plugin settings are of another installation")
	}
	return s, nil
}

// initialise makes the plugin known, so that what it asks while it initialises
// is its own, and initialises it. index puts it where it is found; mu is held.
func (l *link) initialise(ctx context.Context, as pluginwire.Context, c Container, s settings, logs *pluginlog.Buffer, debug bool, index func(*Plugin) error) error {
	m := l.m
	c = c.with(s, debug)
	p := newPlugin(l, as, c, logs)
	m.mu.Lock()
	err := error(nil)
	if l.phase != phaseRegistering {
		err = errdefs.New(errdefs.Denied, "this worker connection was revoked")
	} else if err = index(p); err == nil {
		l.plugin = p
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	if _, err := p.call(ctx, pluginwire.ActionInitializePlugin, map[string]json.RawMessage{"plugin_settings": s.raw}, 0); err != nil {
		return err
	}
	raw, err := p.call(ctx, pluginwire.ActionGetPluginContainer, struct{}{}, 0)
	if err != nil {
		return err
	}
	fresh, err := decodeContainer(raw)
	if err != nil {
		return err
	}
	if fresh.ID() != c.ID() {
		return errdefs.New(errdefs.Denied, "plugin %s changed its identity to %s while it initialised", c.ID(), fresh.ID())
	}
	p.setContainer(fresh.with(s, debug))
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.phase != phaseRegistering {
		return errdefs.New(errdefs.Denied, "this worker connection was revoked")
	}
	l.phase = phaseRegistered
	close(l.ready)
	return nil
}
