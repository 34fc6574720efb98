package pluginlegacy

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/joho/godotenv"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

func errNotFound(author, name string) error {
	return errdefs.New(errdefs.NotFound, "Plugin %s/%s not found", author, name)
}

// open is the beginning of every action on a plugin that is there.
func (o *Owner) open(ctx context.Context, author, name string) (context.Context, func(), error) {
	ctx, leave, err := o.enter(ctx)
	if err != nil {
		return nil, nil, err
	}
	unlock, err := o.locks.Take(ctx, base(author, name))
	if err != nil {
		leave()
		return nil, nil, err
	}
	return ctx, func() { unlock(); leave() }, nil
}

// Restart stops a plugin and starts it again; it returns when it is ready. One under
// development is only told to shut down: its author's tool brings it back.
func (o *Owner) Restart(ctx context.Context, scope pluginwire.Context, author, name string, tell Tell) error {
	ctx, leave, err := o.open(ctx, author, name)
	if err != nil {
		return err
	}
	defer leave()
	if o.cfg.Runner.Debug(scope, author, name) {
		if err := tell(tellShutDown, nil); err != nil {
			return err
		}
		if err := o.cfg.Runner.EndDebug(ctx, scope, author, name); err != nil {
			return err
		}
		return tellAll(tell, tellContainer, tellRestarted)
	}
	p, _, ok, err := o.installed(author, name)
	if err != nil {
		return err
	}
	if !ok {
		return errNotFound(author, name)
	}
	if err := tell(tellShutDown, nil); err != nil {
		return err
	}
	o.halt(p)
	// It is stopped: it is started whether or not anybody still listens.
	told := tellAll(tell, tellContainer, tellLaunch)
	if err := o.start(p); err != nil {
		return err
	}
	if told != nil {
		return told
	}
	if err := o.await(ctx, p); err != nil {
		return err
	}
	return tell(tellRestarted, nil)
}

// Delete stops a plugin and removes its files.
func (o *Owner) Delete(ctx context.Context, scope pluginwire.Context, author, name string, tell Tell) error {
	_, leave, err := o.open(ctx, author, name)
	if err != nil {
		return err
	}
	defer leave()
	if o.cfg.Runner.Debug(scope, author, name) {
		return errdefs.New(errdefs.Conflict, "Plugin %s/%s is being debugged, and cannot be deleted", author, name).WithNext("stop lbp run first")
	}
	p := Plugin{Author: author, Name: name, Dir: o.dir(pluginsDir, base(author, name))}
	if _, _, ok, err := o.installed(author, name); err != nil && !errdefs.Is(err, errdefs.Invalid) {
		return err
	} else if !ok && err == nil {
		return errNotFound(author, name)
	}
	steps := []string{tellShutDown, tellContainer}
	if ready, _ := o.cfg.Runner.Ready(author, name); !ready {
		steps = []string{tellSupervisor}
	}
	if err := tell(steps[0], nil); err != nil {
		return err
	}
	o.halt(p)
	o.vacate(p)
	// From here it is finished, whether or not anybody still listens.
	told := tellAll(tell, append(steps[1:], tellFiles)...)
	if err := o.cfg.step("delete"); err != nil {
		return err
	}
	if err := o.discard(p.Dir, filepath.Base(p.Dir)); err != nil {
		return err
	}
	return errors.Join(told, tell(tellDeleted, nil))
}

// Upgrade installs the marketplace's latest version of a plugin that was installed
// from there. A plugin that does not run, on account of its version perhaps, is
// upgraded too.
func (o *Owner) Upgrade(ctx context.Context, scope pluginwire.Context, author, name string, tell Tell) error {
	ctx, leave, err := o.open(ctx, author, name)
	if err != nil {
		return err
	}
	defer leave()
	if o.cfg.Runner.Debug(scope, author, name) {
		return errdefs.New(errdefs.Conflict, "Plugin %s/%s is being debugged, and cannot be upgraded", author, name).WithNext("stop lbp run first")
	}
	_, have, ok, err := o.installed(author, name)
	if err != nil && !errdefs.Is(err, errdefs.Invalid) {
		return err
	}
	if !ok && err == nil {
		return errNotFound(author, name)
	}
	source, err := o.cfg.Runner.Source(ctx, scope, author, name)
	if err != nil {
		return err
	}
	if source != "marketplace" {
		return errdefs.New(errdefs.Conflict, "Plugin %s/%s is not installed from marketplace", author, name).
			WithNext("install the newer package over it")
	}
	if err := tell(tellLatest, nil); err != nil {
		return err
	}
	r, err := o.market.latest(ctx, o.cloudURL(), author, name)
	if err != nil {
		return err
	}
	if r.Version == have {
		return tell(tellUpToDate, nil)
	}
	info, err := json.Marshal(r)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "install_info cannot be encoded")
	}
	if err := o.install(ctx, Install{Scope: scope, Source: source, Info: info}, &r, base(author, name), tell); err != nil {
		return err
	}
	return tell(tellUpgraded, nil)
}

func tellAll(tell Tell, actions ...string) error {
	for _, a := range actions {
		if err := tell(a, nil); err != nil {
			return err
		}
	}
	return nil
}

// defaultCloud is the marketplace of the published runtime.
const defaultCloud = "https://space.langbot.app"

// cloudURL is the address of the marketplace: what LangBot told, else what data/.env
// says, else the published runtime's.
func (o *Owner) cloudURL() string {
	o.mu.Lock()
	told := o.cloud
	o.mu.Unlock()
	if told != "" {
		return told
	}
	vars, err := godotenv.Read(o.dir(".env"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		o.log.Warn("a settings file cannot be read", "file", o.dir(".env"), "err", err)
	}
	for _, name := range []string{"cloud_service_url", "CLOUD_SERVICE_URL"} {
		if v := vars[name]; v != "" {
			return v
		}
	}
	return defaultCloud
}
