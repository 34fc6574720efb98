package pluginhost

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

// Several workers that do not want to stop are stopped at the same time.
func TestShutdownIsParallel(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		r.launcher.set(func(w *puppet) {
			w.ignoreTerm = true
			go func() { _, _ = w.register(w.spec.Capability) }()
			_ = w.conn.Run(context.Background())
		})
		for _, id := range []string{"1", "2", "3", "4", "5", "6"} {
			r.run(p.bind(id, 1, 1), p, pluginwire.ModeDedicated)
		}
		before := time.Now()
		if err := r.m.Shutdown(r.t.Context()); err != nil {
			r.t.Error(err)
		}
		if took := time.Since(before); took != 2*worker.StopStep {
			r.t.Errorf("it took %s", took)
		}
		if err := r.m.Shutdown(r.t.Context()); err != nil {
			r.t.Errorf("again: %v", err)
		}
		_, err := r.m.Apply(r.t.Context(), p.bind("7", 1, 1), p.archive, pluginwire.ApplyRequest{Enabled: true, Mode: pluginwire.ModeDedicated})
		isCode(r.t, err, errdefs.Unavailable)
	})
}

// With its time over, a shutdown kills.
func TestShutdownDeadline(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		r.launcher.set(func(w *puppet) {
			w.ignoreTerm = true
			w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
				if in.Action == pluginwire.ActionShutdown {
					<-ctx.Done()
				}
				return nil, nil, false
			}
			go func() { _, _ = w.register(w.spec.Capability) }()
			_ = w.conn.Run(context.Background())
		})
		r.run(p.bind("1", 1, 1), p, pluginwire.ModeDedicated)
		ctx, cancel := context.WithTimeout(r.t.Context(), time.Second)
		defer cancel()
		before := time.Now()
		isCode(r.t, r.m.Shutdown(ctx), errdefs.Unavailable)
		if took := time.Since(before); took != time.Second {
			r.t.Errorf("it took %s", took)
		}
	})
}

// IM-33, IM-57: health counts and names nobody.
func TestHealth(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p, a, _ := r.pair()
		d := p.bind("inst-d", 1, 1)
		r.run(d, p, pluginwire.ModeDedicated)
		r.apply(p.bind("inst-e", 1, 1), p, false, pluginwire.ModeDedicated)
		h := r.m.Health()
		states := h["installation_states"].(map[string]int)
		if states[pluginwire.StateRunning] != 3 || states[pluginwire.StateDisabled] != 1 || states["other"] != 0 {
			r.t.Errorf("%v", states)
		}
		pool := h["shared_pool"].(map[string]any)
		if pool["workers"] != 1 || pool["slots"] != 2 || pool["ready"] != 1 || pool["slot_attach_success_total"] != int64(2) {
			r.t.Errorf("%v", pool)
		}
		text := string(mustJSON(r.t, h))
		for _, secret := range []string{a.InstallationUUID, p.digest, "toy", instance, "ws-1"} {
			if strings.Contains(text, secret) {
				r.t.Errorf("%q is in the health: %s", secret, text)
			}
		}
	})
}

// What is configured while the runtime shuts down leaves no launcher behind.
func TestShutdownWhileConfiguring(t *testing.T) {
	r := newRig(t, t.TempDir())
	defer r.host.close()
	r.m.cfg.Launchers = func(pluginwire.RuntimeConfig) (worker.Launcher, error) {
		if err := r.m.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		return r.launcher, nil
	}
	err := r.m.Configure(t.Context(), runtimeConfig(pluginwire.ProfileOSS, policy()))
	isCode(t, err, errdefs.Unavailable)
	if _, set := r.m.Configured(); set || !r.launcher.closed {
		t.Errorf("configured %v, launcher closed %v", set, r.launcher.closed)
	}
}
