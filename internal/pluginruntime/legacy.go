package pluginruntime

import (
	"context"
	"encoding/json"
	"os/exec"
	"time"

	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/plugincontrol"
	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginlegacy"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// uv is the path of uv, "" to install with pip.
func (c Config) uv() string {
	switch c.Uv {
	case "none":
		return ""
	case "":
		path, _ := exec.LookPath("uv")
		return path
	}
	return c.Uv
}

// openLegacy makes the owner of data/plugins.
func (r *runtime) openLegacy(host pluginhost.Host) (err error) {
	c := r.Config
	r.legacy, err = pluginlegacy.New(pluginlegacy.Config{
		DataDir: c.DataDir, Interp: r.interp, Installer: func() deptree.Installer { return *r.installer.Load() },
		Uv: c.uv(), IndexURL: c.IndexURL, TrustedHosts: c.TrustedHosts, Runner: legacyRunner{r.manager, host},
		DebugOnly: c.DebugOnly, SkipDeps: c.SkipDepsCheck, Logger: r.log,
	})
	return err
}

// legacyRunner runs the plugins of data/plugins in the plugin host.
type legacyRunner struct {
	m    *pluginhost.Manager
	host pluginhost.Host
}

func (l legacyRunner) Start(p pluginlegacy.Plugin) error {
	return l.m.StartLegacy(pluginhost.Legacy{Author: p.Author, Name: p.Name, Dir: p.Dir, SitePackages: p.SitePackages, Problem: p.Problem})
}

func (l legacyRunner) Stop(author, name string) { l.m.StopLegacy(author, name) }

func (l legacyRunner) Ready(author, name string) (bool, string) {
	return l.m.LegacyReady(author, name)
}

// debugged finds a plugin under development, hidden or not by an installation.
func (l legacyRunner) debugged(scope pluginwire.Context, author, name string) (*pluginhost.Plugin, bool) {
	for _, p := range l.m.Plugins(pluginwire.Context{}) {
		if p.Debug() && p.Author() == author && p.Name() == name && p.Binding().SameWorkspace(scope) {
			return p, true
		}
	}
	return nil, false
}

func (l legacyRunner) Debug(scope pluginwire.Context, author, name string) bool {
	_, ok := l.debugged(scope, author, name)
	return ok
}

// endDebugWithin bounds the request to a plugin under development to shut down.
const endDebugWithin = 5 * time.Second

func (l legacyRunner) EndDebug(ctx context.Context, scope pluginwire.Context, author, name string) error {
	p, ok := l.debugged(scope, author, name)
	if !ok {
		return nil
	}
	if _, err := p.Call(ctx, pluginwire.ActionShutdown, struct{}{}, endDebugWithin); err != nil && !errdefs.Is(err, errdefs.Unavailable) {
		return err // unavailable: it was gone before it had answered
	}
	return nil
}

func (l legacyRunner) Pinned(ctx context.Context) error {
	_, err := l.m.Pinned(ctx)
	return err
}

func (l legacyRunner) InitialiseSettings(ctx context.Context, scope pluginwire.Context, author, name, source string, info json.RawMessage) error {
	_, err := l.host.Call(ctx, pluginwire.ActionInitializePluginSettings, map[string]any{
		"plugin_author": author, "plugin_name": name, "install_source": source, "install_info": info,
	}, scope, 0)
	return err
}

func (l legacyRunner) Source(ctx context.Context, scope pluginwire.Context, author, name string) (string, error) {
	raw, err := l.host.Call(ctx, pluginwire.ActionGetPluginSettings, map[string]string{"plugin_author": author, "plugin_name": name}, scope, 0)
	if err != nil {
		return "", err
	}
	source, _ := pluginwire.StringField(raw, "install_source")
	return source, nil
}

// legacyActions are LangBot's four actions over the owner of data/plugins.
type legacyActions struct{ o *pluginlegacy.Owner }

func teller(tell func(plugincontrol.Progress) error) pluginlegacy.Tell {
	return func(action string, metadata map[string]any) error {
		return tell(plugincontrol.Progress{CurrentAction: action, Metadata: metadata})
	}
}

func (a legacyActions) Install(ctx context.Context, req plugincontrol.InstallRequest, tell func(plugincontrol.Progress) error) error {
	return a.o.Install(ctx, pluginlegacy.Install{Scope: req.Scope, Source: req.Source, Info: req.Info, Package: req.Package}, teller(tell))
}

func (a legacyActions) Restart(ctx context.Context, scope pluginwire.Context, author, name string, tell func(plugincontrol.Progress) error) error {
	return a.o.Restart(ctx, scope, author, name, teller(tell))
}

func (a legacyActions) Delete(ctx context.Context, scope pluginwire.Context, author, name string, tell func(plugincontrol.Progress) error) error {
	return a.o.Delete(ctx, scope, author, name, teller(tell))
}

func (a legacyActions) Upgrade(ctx context.Context, scope pluginwire.Context, author, name string, tell func(plugincontrol.Progress) error) error {
	return a.o.Upgrade(ctx, scope, author, name, teller(tell))
}
