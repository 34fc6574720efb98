package plugincontrol

import (
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// admit decides whether a request may run in the scope it claims, in the order of
// the published runtime: the connection, the handshake, then the scope of the action.
func (s *session) admit(in *rpc.Inbound) error {
	if s.superseded.Load() {
		return errSuperseded()
	}
	scope := pluginwire.ControlScope(in.Action)
	switch scope {
	case pluginwire.ScopePing, pluginwire.ScopeConfig:
		return withoutContext(in)
	}
	if !s.configured.Load() {
		return errdefs.New(errdefs.Denied, "%s came before the runtime was configured on this connection", in.Action).
			WithNext("send set_runtime_config first")
	}
	cfg, _ := s.control.cfg.Manager.Configured()
	switch scope {
	case pluginwire.ScopeInstance:
		return withoutContext(in)
	case pluginwire.ScopeWorkspace:
		if in.Context.IsZero() || in.Context.IsBinding() {
			return errdefs.New(errdefs.Denied, "%s needs the context of a Workspace, and no installation binding", in.Action)
		}
		return sameInstance(in, cfg)
	case pluginwire.ScopeUnknown:
		return nil // answered as an unknown action
	}
	if cfg.Profile == pluginwire.ProfileShared && pluginwire.OSSOnly(in.Action) {
		return errdefs.New(errdefs.Denied, "%s is not available in the shared profile", in.Action).
			WithNext("change the desired state with apply_plugin_installation")
	}
	if in.Action == pluginwire.ActionFileChunk && !in.Context.IsBinding() {
		return s.legacyFile(in, cfg)
	}
	if !in.Context.IsBinding() {
		return errdefs.New(errdefs.Denied, "%s needs a complete InstallationBinding as its context", in.Action)
	}
	if err := sameInstance(in, cfg); err != nil {
		return err
	}
	if scope == pluginwire.ScopeCandidate {
		return s.control.cfg.Manager.Candidate(in.Context)
	}
	return s.control.cfg.Manager.Authorise(in.Context)
}

// legacyFile admits a file for a plugin of data/plugins, whose context has no
// revision: it must be exactly that of a plugin that is connected now.
func (s *session) legacyFile(in *rpc.Inbound, cfg pluginwire.RuntimeConfig) error {
	refused := errdefs.New(errdefs.Denied, "%s needs a complete InstallationBinding as its context", in.Action)
	if cfg.Profile == pluginwire.ProfileShared || in.Context.InstallationUUID == "" {
		return refused
	}
	if err := sameInstance(in, cfg); err != nil {
		return err
	}
	if s.control.cfg.Manager.LegacyBound(in.Context) {
		return nil
	}
	return refused.WithNext("no plugin with this installation is connected")
}

// mayPush reports why files of a context have no place here any more. Every piece was
// admitted already; this is asked again when what is wanted has changed.
func (s *session) mayPush(from pluginwire.Context) error {
	m := s.control.cfg.Manager
	if from.IsBinding() {
		return m.Candidate(from)
	}
	if m.LegacyBound(from) {
		return nil
	}
	return errdefs.New(errdefs.Denied, "no plugin with this installation is connected")
}

func withoutContext(in *rpc.Inbound) error {
	if in.HasContext {
		return errdefs.New(errdefs.Invalid, "%s must not carry a context", in.Action)
	}
	return nil
}

func sameInstance(in *rpc.Inbound, cfg pluginwire.RuntimeConfig) error {
	if in.Context.InstanceUUID != cfg.Identity.InstanceUUID {
		return errdefs.New(errdefs.Denied, "%s carries another instance_uuid than this runtime's", in.Action)
	}
	return nil
}
