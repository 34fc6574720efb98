package plugincontrol

import (
	"context"
	"encoding/json"
	"time"

	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Manager is the part of the plugin host that the control connection drives.
// [Hosted] makes one of a real plugin host.
type Manager interface {
	// Configure fixes identity, policy and profile. An exact repeat is fine,
	// any difference is refused.
	Configure(ctx context.Context, cfg pluginwire.RuntimeConfig) error
	// Configured returns what was fixed, false before that.
	Configured() (pluginwire.RuntimeConfig, bool)
	// Candidate says whether b could become the current binding.
	Candidate(b pluginwire.Context) error
	// Authorise says whether b is the current binding of its installation.
	Authorise(b pluginwire.Context) error
	// LegacyBound says whether a plugin of data/plugins, or one under development, is
	// connected and bound to exactly this context.
	LegacyBound(c pluginwire.Context) bool
	// Apply makes b current and runs it as asked; archive is nil where the
	// artifact is expected in the store.
	Apply(ctx context.Context, b pluginwire.Context, archive []byte, req pluginwire.ApplyRequest) (pluginwire.StateResult, error)
	// Reconcile makes the set of installations exactly the one given.
	Reconcile(ctx context.Context, states []pluginwire.DesiredState) (pluginwire.ReconcileResult, error)
	// Remove ends the installation whose current binding is b.
	Remove(ctx context.Context, b pluginwire.Context) (pluginwire.StateResult, error)
	// Plugins lists what a request with this context may see, in the order in
	// which they are called.
	Plugins(c pluginwire.Context) []Plugin
	// Logs returns the newest lines of a plugin's log.
	Logs(c pluginwire.Context, author, name string, limit int, level string) []pluginlog.Line
	// Note adds a line to a plugin's log, unless the plugin's own errors are read and
	// say it already.
	Note(c pluginwire.Context, author, name string, now time.Time, level, line string) bool
	// IssueDebugToken returns the debug token of a Workspace.
	IssueDebugToken(workspace pluginwire.Context, now time.Time) (token string, expires time.Time, err error)
	// Health returns the numbers of the reference's "resources".
	Health() map[string]any
}

// Plugin is a registered plugin that can be called.
type Plugin interface {
	Author() string
	Name() string
	// Container is what the plugin is, as of now.
	Container() pluginhost.Container
	// Ready reports whether it is enabled and initialised: whether its components may be called.
	Ready() bool
	// Binding is the context its connection is bound to.
	Binding() pluginwire.Context
	Debug() bool
	Call(ctx context.Context, action string, data any, timeout time.Duration) (json.RawMessage, error)
	Stream(ctx context.Context, action string, data any, timeout time.Duration) (Stream, error)
	// SendFile pushes bytes to the worker and returns the key it finds them under.
	SendFile(ctx context.Context, data []byte, ext string) (key string, err error)
	// ReadFile returns what the worker pushed under a key.
	ReadFile(key string) ([]byte, error)
	DeleteFile(key string) error
}

// Stream is an answer in frames; Next returns io.EOF after the last.
type Stream interface {
	Next(ctx context.Context) (json.RawMessage, error)
	Close()
}

// Legacy is the profile of plugins in data/plugins: the four lifecycle actions
// of the control connection, each with progress. They are only called in the
// profile oss_dev, with a scope that was authorised.
type Legacy interface {
	Install(ctx context.Context, req InstallRequest, tell func(Progress) error) error
	Restart(ctx context.Context, scope pluginwire.Context, author, name string, tell func(Progress) error) error
	Delete(ctx context.Context, scope pluginwire.Context, author, name string, tell func(Progress) error) error
	Upgrade(ctx context.Context, scope pluginwire.Context, author, name string, tell func(Progress) error) error
}

// InstallRequest is a plugin to install below data/plugins.
type InstallRequest struct {
	Scope  pluginwire.Context
	Source string // local, github or marketplace
	// Info is install_info without keys that look like a scope and without plugin_file_key.
	Info json.RawMessage
	// Package is the archive, for the sources local and github.
	Package []byte
}

// Progress is one frame of a lifecycle action.
type Progress struct {
	CurrentAction string         `json:"current_action"`
	Metadata      map[string]any `json:"metadata,omitempty"`
}
