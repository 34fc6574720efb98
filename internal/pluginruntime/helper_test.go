package pluginruntime

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// series are the SDKs that every end-to-end test runs with.
var series = []string{"0.5", "0.6", "0.7"}

// patience bounds a wait for workers: on a busy machine one that did not become ready
// within its 30 s is started again, and then once more.
const patience = 3 * time.Minute

// live is a runtime in this process, and a LangBot beside it.
type live struct {
	t    *testing.T
	dir  string
	at   Addresses
	stop func() error // of the runtime; may be called again
	deaf bool         // while it installs, it answers no ping
}

// start runs a runtime with an SDK ("" needs none: no worker will run) until the
// test ends.
func start(t *testing.T, sdk string, change func(*Config)) *live {
	t.Helper()
	c := Default()
	c.DataDir, c.Listen, c.ControlPort, c.PluginPort = t.TempDir(), "127.0.0.1", 0, 0
	if sdk == "" {
		sdk = "0.7"
	}
	c.Python = need.SDK(t, sdk)
	if change != nil {
		change(&c)
	}
	r, err := run(t, c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// run starts a runtime and waits until it listens, or returns why it does not.
func run(t *testing.T, c Config) (*live, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan Addresses, 1), make(chan error, 1)
	go func() {
		ended <- Run(ctx, Options{Config: c, Version: "test", Logger: logger(t), Ready: func(at Addresses) { ready <- at }})
	}()
	r := &live{t: t, dir: c.DataDir}
	var over bool
	var result error
	r.stop = func() error {
		cancel()
		if !over {
			over, result = true, <-ended
		}
		return result
	}
	select {
	case r.at = <-ready:
	case err := <-ended:
		cancel()
		return nil, err
	}
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("the runtime did not end well: %v", err)
		}
	})
	return r, nil
}

func logger(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// dial connects a LangBot without a handshake.
func (r *live) dial(cfg lbhost.Config) *lbhost.Host {
	r.t.Helper()
	cfg.Dir = filepath.Join(r.dir, "langbot")
	if r.deaf {
		cfg.PingEvery = -1
	}
	h, err := lbhost.Dial(r.t.Context(), r.at.Control, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = h.Close() })
	return h
}

// connect connects a LangBot and goes through the handshake.
func (r *live) connect(cfg lbhost.Config, all ...lbhost.Installation) *lbhost.Host {
	r.t.Helper()
	h := r.dial(cfg)
	if _, err := h.Handshake(r.t.Context(), h.Workspace("ws-1"), all...); err != nil {
		r.t.Fatal(err)
	}
	return h
}

// install makes an installation of a plugin of testdata.
func install(ws pluginwire.Context, uuid, plugin string, replace ...string) func(t *testing.T) lbhost.Installation {
	return func(t *testing.T) lbhost.Installation {
		t.Helper()
		pack := plugintest.Pack(t, plugin, replace...)
		b := ws
		b.InstallationUUID, b.RuntimeRevision, b.ArtifactDigest = uuid, 1, plugintest.Digest(pack)
		return lbhost.Installation{Binding: b, Enabled: true, Package: pack}
	}
}

// workspace is a Workspace of lbhost's default instance.
func workspace(uuid string) pluginwire.Context {
	return pluginwire.Context{InstanceUUID: "instance-1", WorkspaceUUID: uuid, PlacementGeneration: 1}
}

// until asks again and again until ask is satisfied.
func until(t *testing.T, what string, ask func() (bool, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := ask()
		if ok {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("%s did not happen: %v", what, errors.Join(err, context.Cause(ctx)))
		}
	}
}

// running waits until an installation's plugin answers.
func running(t *testing.T, h *lbhost.Host, i lbhost.Installation) {
	t.Helper()
	until(t, "installation "+i.Binding.InstallationUUID+" running", func() (bool, error) {
		all, err := h.ListPlugins(t.Context(), i.Binding)
		return len(all) == 1 && all[0]["status"] == "initialized", err
	})
}

// nowPlus is a point in time as runs carry it, in seconds.
func nowPlus(seconds float64) float64 { return float64(time.Now().UnixMicro())/1e6 + seconds }

// addresses waits for the address file of a runtime in another process.
func addresses(t *testing.T, data string) (at Addresses) {
	t.Helper()
	until(t, "the runtime listening", func() (bool, error) {
		b, err := os.ReadFile(filepath.Join(data, filepath.FromSlash(AddressFile)))
		if err != nil {
			return false, err
		}
		return json.Unmarshal(b, &at) == nil, nil
	})
	return at
}
