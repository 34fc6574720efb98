package pluginlegacy

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/shelf"
)

// Tell is called with each step of an action, for who asked for it. Its error ends
// the action where nothing has been changed yet.
type Tell func(action string, metadata map[string]any) error

// Steps of the actions, as the published runtime (SDK 0.7) calls them.
const (
	tellDownload   = "downloading plugin package"
	tellDeps       = "installing dependencies"
	tellSettings   = "initializing plugin settings"
	tellLaunch     = "launching plugin"
	tellShutDown   = "shutting down plugin"
	tellContainer  = "removing plugin container"
	tellRestarted  = "plugin restarted"
	tellSupervisor = "stopping plugin supervisor"
	tellFiles      = "deleting plugin files"
	tellDeleted    = "plugin deleted"
	tellLatest     = "checking for latest version"
	tellUpToDate   = "plugin is up to date"
	tellUpgraded   = "plugin upgraded"
)

// Install is what to install.
type Install struct {
	Scope   pluginwire.Context
	Source  string          // local, github or marketplace
	Info    json.RawMessage // an object; for the marketplace it names the plugin and its version
	Package []byte          // for the sources local and github
}

// Install installs a plugin, or replaces another version of it, and returns when it
// runs. Everything before the new generation is started leaves the old one running;
// when the new one does not become ready, the old one is brought back. Once its files
// are moved, the installation is finished or undone whatever becomes of ctx.
//
// Errors, besides those of the archive and the marketplace: conflict when this version
// is installed or a copy of it is under development, exhausted when no more plugins may
// run, unavailable when a dependency cannot be had or the plugin does not become ready.
func (o *Owner) Install(ctx context.Context, in Install, tell Tell) error {
	ctx, leave, err := o.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	var want *release
	if in.Source == "marketplace" {
		var r release
		if err := json.Unmarshal(in.Info, &r); err != nil || r.check() != nil {
			return errdefs.New(errdefs.Invalid, "install_info must name plugin_author, plugin_name and plugin_version")
		}
		want = &r
	}
	return o.install(ctx, in, want, "", tell)
}

// install is Install; held is the directory whose lock the caller has, "" for none.
func (o *Owner) install(ctx context.Context, in Install, want *release, held string, tell Tell) error {
	if err := tell(tellDownload, nil); err != nil {
		return err
	}
	if want != nil {
		var err error
		if in.Package, err = o.market.download(ctx, o.cloudURL(), *want, func(m map[string]any) error { return tell(tellDownload, m) }); err != nil {
			return err
		}
	}
	m, err := artifact.Inspect(in.Package)
	if err != nil {
		return err
	}
	if want != nil && (m.Author != want.Author || m.Name != want.Name) {
		return errdefs.New(errdefs.Denied, "the marketplace's package of %s/%s is that of %s/%s", want.Author, want.Name, m.Author, m.Name)
	}
	next := Plugin{Author: m.Author, Name: m.Name, Dir: o.dir(pluginsDir, base(m.Author, m.Name))}
	if held != filepath.Base(next.Dir) {
		unlock, err := o.locks.Take(ctx, filepath.Base(next.Dir))
		if err != nil {
			return err
		}
		defer unlock()
	}
	if err := o.admit(in.Scope, next, m.Version); err != nil {
		return err
	}
	staged, err := o.stage(ctx, in.Package, next, tell)
	if err != nil {
		return err
	}
	defer o.remove(staged) // moved away when it is active
	if err := tell(tellSettings, nil); err != nil {
		return err
	}
	if err := o.cfg.Runner.InitialiseSettings(ctx, in.Scope, m.Author, m.Name, in.Source, in.Info); err != nil {
		return err
	}
	if err := tell(tellLaunch, nil); err != nil {
		return err
	}
	return o.activate(ctx, staged, next)
}

// admit decides whether a version may be installed over what is there, and whether
// there is room for it to run, before LangBot is told of it.
func (o *Owner) admit(scope pluginwire.Context, next Plugin, version string) error {
	if o.cfg.Runner.Debug(scope, next.Author, next.Name) {
		return errdefs.New(errdefs.Conflict, "Plugin %s/%s is being debugged, and cannot be installed", next.Author, next.Name).
			WithNext("stop lbp run first")
	}
	_, have, ok, err := o.installed(next.Author, next.Name)
	switch {
	case errdefs.Is(err, errdefs.Invalid): // what is there has a broken manifest: it is replaced
	case err != nil:
		return err
	case ok && have == version:
		return errdefs.New(errdefs.Conflict, "Plugin %s/%s:%s already exists", next.Author, next.Name, version)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.hasRoomLocked(filepath.Base(next.Dir))
}

// stage unpacks a package beside the plugins and gives it its dependencies.
func (o *Owner) stage(ctx context.Context, pack []byte, next Plugin, tell Tell) (string, error) {
	dir, err := o.fresh(stagingDir, filepath.Base(next.Dir))
	if err != nil {
		return "", err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", shelf.Refusal(err, "the plugin cannot be unpacked")
	}
	keep := false
	defer func() {
		if !keep {
			o.remove(dir)
		}
	}()
	if _, err := artifact.ExtractTo(ctx, pack, dir); err != nil {
		return "", err
	}
	// The author's settings are in the package; those of who runs it are not.
	if err := carryEnv(next.Dir, dir); err != nil {
		return "", err
	}
	if err := tell(tellDeps, nil); err != nil {
		return "", err
	}
	if err := o.prepare(ctx, next, dir, tell); err != nil {
		return "", err
	}
	keep = true
	return dir, nil
}

// carryEnv copies the .env that stands in a plugin's directory into the next
// generation, if that brings none.
func carryEnv(from, to string) error {
	const name, most = ".env", 1 << 20
	st, err := os.Lstat(filepath.Join(from, name))
	if err != nil || !st.Mode().IsRegular() || st.Size() > most {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(to, name)); err == nil {
		return nil
	}
	b, err := os.ReadFile(filepath.Join(from, name))
	if err == nil {
		err = os.WriteFile(filepath.Join(to, name), b, 0o600)
	}
	if err != nil {
		return shelf.Refusal(err, "the plugin's .env cannot be kept")
	}
	return nil
}

// activate makes a staged generation the plugin, and starts it; see the package
// comment for its steps. Its own failure is undone.
func (o *Owner) activate(ctx context.Context, staged string, next Plugin) error {
	if err := writeThrough(staged); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(next.Dir), 0o755); err != nil {
		return shelf.Refusal(err, "the directory of plugins cannot be made")
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	_, err := os.Lstat(next.Dir)
	had := err == nil
	wasRunning := o.supervised(filepath.Base(next.Dir))
	backup := ""
	if had {
		if backup, err = o.fresh(backupsDir, filepath.Base(next.Dir)); err != nil {
			return err
		}
	}
	if err := o.cfg.step("stop"); err != nil {
		return err
	}
	o.halt(next)
	if had {
		if err := o.cfg.step("set aside"); err != nil {
			return err
		}
		if err := o.move(next.Dir, backup); err != nil {
			if wasRunning {
				o.startAgain(next)
			}
			return err
		}
	}
	if err := o.cfg.step("put in place"); err != nil {
		return err
	}
	if err := o.move(staged, next.Dir); err != nil {
		return o.undo(next, backup, wasRunning, err)
	}
	if err := o.cfg.step("start"); err != nil {
		return err
	}
	err = o.start(next)
	if err == nil {
		err = o.await(ctx, next)
	}
	if err != nil {
		if o.life.Err() != nil {
			return err // the next start undoes it
		}
		return o.undo(next, backup, wasRunning, err)
	}
	if !had {
		return nil
	}
	if err := o.cfg.step("commit"); err != nil {
		return err
	}
	return o.discard(backup, filepath.Base(next.Dir))
}

// undo takes a generation away that did not become ready, and brings the one before
// back (LM-17). It returns why, and what of the undoing failed.
func (o *Owner) undo(next Plugin, backup string, wasRunning bool, why error) error {
	o.halt(next)
	again := false
	defer func() {
		if !again {
			o.vacate(next)
		}
	}()
	if err := o.cfg.step("undo"); err != nil {
		return why
	}
	if _, err := os.Lstat(next.Dir); err == nil {
		if err := o.discard(next.Dir, filepath.Base(next.Dir)); err != nil {
			o.log.Error("a generation that did not start stays in its place", "plugin", next.Author+"/"+next.Name, "err", err)
			return why
		}
	}
	if backup == "" {
		return why
	}
	if err := o.cfg.step("bring back"); err != nil {
		return why
	}
	if err := o.move(backup, next.Dir); err != nil {
		o.log.Error("the generation before stays among the backups until the next start", "plugin", next.Author+"/"+next.Name, "err", err)
		return why
	}
	if again = wasRunning; again {
		o.startAgain(next)
	}
	return why
}

func (o *Owner) startAgain(p Plugin) {
	if err := o.start(p); err != nil {
		o.log.Error("the generation before was not started again", "plugin", p.Author+"/"+p.Name, "err", err)
	}
}
