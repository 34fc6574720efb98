package plugincontrol

import (
	"context"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// legacy returns what runs the plugins of data/plugins.
func (s *session) legacy(in *rpc.Inbound) (Legacy, error) {
	if s.control.cfg.Legacy == nil {
		return nil, errdefs.New(errdefs.Unavailable, "%s: this runtime does not manage plugins of data/plugins", in.Action).
			WithNext("install the plugin as a package: apply_plugin_installation runs it")
	}
	return s.control.cfg.Legacy, nil
}

// untrusted are keys of install_info that look like an authority, and the key of the
// package, which is gone. Nothing reads them; they must not be kept either.
var untrusted = []string{"context", "action_context", "instance_uuid", "workspace_uuid", "placement_generation",
	"execution_generation", "installation_uuid", "runtime_revision", "artifact_digest", "plugin_file_key"}

// installPlugin installs below data/plugins. For the sources local and github
// LangBot has pushed the package first.
func installPlugin(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	defer s.discard(in, "install_info", "plugin_file_key")
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	l, err := s.legacy(in)
	if err != nil {
		return nil, err
	}
	req := InstallRequest{Scope: in.Context}
	if req.Source, err = o.text("install_source"); err != nil {
		return nil, err
	}
	info, err := o.object("install_info")
	if err != nil {
		return nil, err
	}
	switch req.Source {
	case "local", "github":
		key, err := info.text("plugin_file_key")
		if err != nil {
			return nil, err
		}
		if req.Package, err = s.take(key, in.Context); err != nil {
			return nil, err
		}
	case "marketplace":
	default:
		return nil, errdefs.New(errdefs.Invalid, "install_source %q is not one of local, github and marketplace", req.Source)
	}
	if info, err = info.without(untrusted...); err != nil {
		return nil, err
	}
	req.Info = info.raw
	if err := l.Install(ctx, req, teller(ctx, in)); err != nil {
		return nil, err
	}
	return nil, in.Send(ctx, Progress{CurrentAction: "plugin installed"})
}

// lifecycle runs one of the other three, and says at the end that it is done.
func lifecycle(do func(Legacy, context.Context, pluginwire.Context, string, string, func(Progress) error) error, done string) handler {
	return func(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
		_, author, name, err := about(in)
		if err != nil {
			return nil, err
		}
		l, err := s.legacy(in)
		if err != nil {
			return nil, err
		}
		if err := do(l, ctx, in.Context, author, name, teller(ctx, in)); err != nil {
			return nil, err
		}
		return nil, in.Send(ctx, Progress{CurrentAction: done})
	}
}

func teller(ctx context.Context, in *rpc.Inbound) func(Progress) error {
	return func(p Progress) error { return in.Send(ctx, p) }
}
