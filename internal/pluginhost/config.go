package pluginhost

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

// Host is LangBot as plugins reach it: the active control connection. Without
// one every method is an unavailable error.
//
// from is the trusted context the call is made under; it was derived from the
// worker's registration, never from what the worker sent. A timeout of 0 is the
// protocol's default (15 s), a negative one is none.
type Host interface {
	Call(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (json.RawMessage, error)
	Stream(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (*rpc.Stream, error)
	ReadFile(ctx context.Context, key string, as pluginwire.Context) ([]byte, error)
	DeleteFile(key string, as pluginwire.Context) error
	SendFile(ctx context.Context, data []byte, ext string, from pluginwire.Context) (key string, err error)
}

// Trees prepares dependency trees; *deptree.Store is one.
type Trees interface {
	Prepare(ctx context.Context, artifactDigest, code string) (deptree.Tree, error)
	// Ready reports whether Prepare is known to need no installer.
	Ready(artifactDigest, code string) bool
}

// Processes answers the actions by which the runners of granted plugins run processes;
// *runprocess.Keeper does. conn is only compared, plugin is what the connection
// registered as, and binding was admitted. Where nothing is granted it answers as to
// any unknown action.
type Processes interface {
	Answer(ctx context.Context, conn any, plugin string, binding pluginwire.Context, action string, data json.RawMessage) (any, error)
}

// Config is what a Manager is made of. All but Processes, PingEvery and Logger is required.
type Config struct {
	// DataDir is the runtime's data directory; the manager keeps everything in
	// plugin-runtime/ below it.
	DataDir   string
	Artifacts *artifact.Store
	// Launchers makes the launcher for a configuration, once. An error refuses
	// the configuration: hard limits that cannot be had, for example.
	Launchers func(pluginwire.RuntimeConfig) (worker.Launcher, error)
	// Trees gives the store of dependency trees for the configuration, with the
	// launcher as its installer. It is called once, after Launchers.
	Trees     func(pluginwire.RuntimeConfig, worker.Launcher) (Trees, error)
	Host      Host
	Processes Processes // nil: the actions are unknown
	// PingEvery is how often a connection of the plugin port is asked for a sign of life;
	// see rpc.Config.
	PingEvery time.Duration
	Logger    *slog.Logger
}
