// Package config is the server's configuration: one struct that flags, the
// environment and a YAML file all fill, in that order of strength, over
// defaults that work on a fresh machine.
//
// Every field is reachable in all three ways because all three names are made
// from its path: box.max_per_target is --box-max-per-target, the environment
// variable STOCKADE_BOX_MAX_PER_TARGET, and the file's key.
package config

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
)

// Version is the version of the file format; a file without one is of version 1.
const Version = 1

// Config is everything an operator can set. See docs/configuration.md, which is
// generated from the doc tags.
type Config struct {
	Version  int    `koanf:"version" doc:"Version of the file format."`
	StateDir string `koanf:"state_dir" doc:"Directory of the ledger, the keys and the host program. One server at a time may use it."`
	Listen   string `koanf:"listen" doc:"Address of the HTTP API. Put TLS in front of it before it leaves the machine."`

	Log struct {
		Level  string `koanf:"level" doc:"debug, info, warn or error."`
		Format string `koanf:"format" doc:"text or json."`
	} `koanf:"log"`

	Host struct {
		Program           string        `koanf:"program" doc:"Path of stockade-host; empty looks beside this program, then on the PATH."`
		Socket            string        `koanf:"socket" doc:"Unix socket of a host program that somebody else keeps running; empty starts and keeps our own."`
		Runtime           string        `koanf:"runtime" doc:"OCI runtime: runc, crun, runsc or a path; empty takes the first found."`
		ProfileDirs       []string      `koanf:"profile_dirs" doc:"More directories of this machine that boxes on the host profile see, read-only, at the same path."`
		Tools             []string      `koanf:"tools" doc:"NAME=DIR: shows DIR read-only at /opt/NAME in every box; its bin and node_modules/.bin join the PATH."`
		AllowMounts       []string      `koanf:"allow_mounts" doc:"Directories below which a box may mount; none by default."`
		RequireHardLimits bool          `koanf:"require_hard_limits" doc:"Have no boxes at all where a limit on processor, memory or processes cannot be enforced."`
		Lease             time.Duration `koanf:"lease" doc:"How long processes go on while no server answers for them."`
	} `koanf:"host"`

	Box struct {
		MaxPerTarget    int           `koanf:"max_per_target" doc:"Boxes at a time on one target."`
		MaxPerWorkspace int           `koanf:"max_per_workspace" doc:"Boxes at a time of one workspace."`
		Idle            time.Duration `koanf:"idle" doc:"A box without process, run, fence or transfer of files is removed after so long."`
		CPUMillis       int64         `koanf:"cpu_millis" doc:"Processor share of a box whose request names none; 1000 is one processor."`
		MemoryBytes     int64         `koanf:"memory_bytes" doc:"Memory of a box whose request names none."`
		Pids            int64         `koanf:"pids" doc:"Processes and threads of a box whose request names none."`
		MaxCPUMillis    int64         `koanf:"max_cpu_millis" doc:"Most processor share a request may ask for; never less than a box gets by itself."`
		MaxMemoryBytes  int64         `koanf:"max_memory_bytes" doc:"Most memory a request may ask for; never less than a box gets by itself."`
		MaxPids         int64         `koanf:"max_pids" doc:"Most processes and threads a request may ask for; never less than a box gets by itself."`
	} `koanf:"box"`

	Run struct {
		TTL             time.Duration `koanf:"ttl" doc:"Life of a run and its token when the request names none."`
		MaxPerWorkspace int           `koanf:"max_per_workspace" doc:"Unfinished runs of one workspace."`
	} `koanf:"run"`

	Process struct {
		MaxPerRun       int           `koanf:"max_per_run" doc:"Live processes of one run."`
		MaxPerWorkspace int           `koanf:"max_per_workspace" doc:"Live processes of one workspace."`
		Deadline        time.Duration `koanf:"deadline" doc:"Wall time of a process whose request names none."`
		SpoolBytes      int64         `koanf:"spool_bytes" doc:"Log bytes kept per process when the request names none."`
		MaxSpoolBytes   int64         `koanf:"max_spool_bytes" doc:"Most log bytes a request may ask for."`
	} `koanf:"process"`

	Retention struct {
		Log          time.Duration `koanf:"log" doc:"Logs of closed processes are kept so long."`
		MaxLogs      int           `koanf:"max_logs" doc:"Logs of closed processes kept for one workspace; the oldest go first."`
		MaxLogBytes  int64         `koanf:"max_log_bytes" doc:"Bytes of those logs together; at least the largest log a request may ask for is kept."`
		Audit        time.Duration `koanf:"audit" doc:"Acts in the audit record are kept so long."`
		Record       time.Duration `koanf:"record" doc:"Records of finished runs, and with them their request ids, are kept so long."`
		MaxRuns      int           `koanf:"max_runs" doc:"Runs recorded of one workspace, finished or not; beyond, nothing new begins in it."`
		MaxProcesses int           `koanf:"max_processes" doc:"Processes recorded of one workspace, ended or not; beyond, nothing new starts in it."`
		MaxSpecBytes int64         `koanf:"max_spec_bytes" doc:"Bytes of the arguments and environments of those processes together."`
	} `koanf:"retention"`

	Relay struct {
		Listen        string        `koanf:"listen" doc:"Address at which daemons connect to the relay (coding-relay-v1); empty is no relay. Put TLS in front of it before it leaves the machine."`
		TokenFile     string        `koanf:"token_file" doc:"File with the token that daemons say."`
		Profile       string        `koanf:"profile" doc:"shared: the token must be strong. dedicated: only this installation can reach the address; on loopback the token may then be missing."`
		Workspace     string        `koanf:"workspace" doc:"The workspace whose keys may use the relay."`
		MaxJobs       int           `koanf:"max_jobs" doc:"Jobs at a time."`
		MaxDaemons    int           `koanf:"max_daemons" doc:"Daemons that are connected or fenced."`
		MessageBytes  int64         `koanf:"message_bytes" doc:"Largest payload or event."`
		RunTimeout    time.Duration `koanf:"run_timeout" doc:"Bounds a job whose request names no time."`
		HelloTimeout  time.Duration `koanf:"hello_timeout" doc:"How long a daemon that connects has to say who it is."`
		CancelTimeout time.Duration `koanf:"cancel_timeout" doc:"How long a daemon has to acknowledge a cancel before it is fenced."`
		Tools         []string      `koanf:"tools" doc:"NAME=URL[,key-file=PATH][,key-env=VAR]: MCP servers (Streamable HTTP) whose tools a job may be granted. The key stays in the server."`
	} `koanf:"relay"`

	Models []string `koanf:"models" doc:"NAME=URL[,style=openai|anthropic][,key-file=PATH][,key-env=VAR]: model providers a run may be granted. The key stays in the server."`
}

// Model is one parsed entry of Config.Models.
type Model struct {
	Name    string
	BaseURL string
	Style   string // openai or anthropic
	KeyFile string
	KeyEnv  string
}

// Default returns the embedded defaults: SQLite, local boxes, loopback.
func Default() Config {
	var c Config
	c.Version = Version
	c.StateDir = DefaultStateDir()
	c.Listen = "127.0.0.1:7878"
	c.Log.Level, c.Log.Format = "info", "text"
	c.Host.Lease = 30 * time.Minute
	c.Host.RequireHardLimits = true
	c.Box.MaxPerTarget, c.Box.MaxPerWorkspace = 64, 32
	c.Box.Idle = 30 * time.Minute
	c.Box.CPUMillis, c.Box.MemoryBytes, c.Box.Pids = 2000, 2<<30, 1024
	c.Box.MaxCPUMillis, c.Box.MaxMemoryBytes, c.Box.MaxPids = 64_000, 64<<30, 32768
	c.Run.TTL, c.Run.MaxPerWorkspace = 24*time.Hour, 1000
	c.Process.MaxPerRun, c.Process.MaxPerWorkspace = 256, 1024
	c.Process.Deadline = 24 * time.Hour
	c.Process.SpoolBytes, c.Process.MaxSpoolBytes = 64<<20, 1<<30
	c.Relay.Profile, c.Relay.Workspace = "shared", "default"
	c.Relay.MaxJobs, c.Relay.MaxDaemons = 128, 128
	c.Relay.MessageBytes = 16 << 20
	c.Relay.RunTimeout, c.Relay.CancelTimeout, c.Relay.HelloTimeout = 30*time.Minute, 10*time.Second, 10*time.Second
	c.Retention.Log, c.Retention.Record, c.Retention.Audit = 24*time.Hour, 7*24*time.Hour, 365*24*time.Hour
	c.Retention.MaxLogs, c.Retention.MaxLogBytes = 1000, 16<<30
	c.Retention.MaxRuns, c.Retention.MaxProcesses, c.Retention.MaxSpecBytes = 100_000, 200_000, 1<<30
	return c
}

// DefaultStateDir is /var/lib/stockade for root, else $XDG_STATE_HOME/stockade
// (XDG Base Directory Specification), where the commands look for keys as well.
func DefaultStateDir() string {
	if dir := os.Getenv("STOCKADE_STATE_DIR"); dir != "" {
		return dir
	}
	if os.Geteuid() == 0 {
		return "/var/lib/stockade"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "stockade")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/"
	}
	return filepath.Join(home, ".local/state/stockade")
}

// Validate refuses, as invalid, the first setting that cannot work, by name.
func (c *Config) Validate() error {
	bad := func(key, format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "setting %s: "+format, append([]any{key}, args...)...)
	}
	switch {
	case c.Version > Version:
		return bad("version", "the file is of version %d, this program knows %d; use a newer program", c.Version, Version)
	case c.Version < 1:
		return bad("version", "must be %d", Version)
	case c.StateDir == "":
		return bad("state_dir", "is empty")
	case c.Listen == "":
		return bad("listen", "is empty")
	case !slices.Contains([]string{"debug", "info", "warn", "error"}, c.Log.Level):
		return bad("log.level", "%q is none of debug, info, warn, error", c.Log.Level)
	case !slices.Contains([]string{"text", "json"}, c.Log.Format):
		return bad("log.format", "%q is neither text nor json", c.Log.Format)
	case c.Host.Socket != "" && !filepath.IsAbs(c.Host.Socket):
		return bad("host.socket", "%q is not an absolute path", c.Host.Socket)
	case !slices.Contains([]string{"shared", "dedicated"}, c.Relay.Profile):
		return bad("relay.profile", "%q is neither shared nor dedicated", c.Relay.Profile)
	case ident.CheckName("workspace", c.Relay.Workspace) != nil:
		return bad("relay.workspace", "%q is not the name of a workspace", c.Relay.Workspace)
	case c.Host.Lease < time.Minute:
		return bad("host.lease", "%v is under one minute, the renewal period is a thirtieth of it", c.Host.Lease)
	}
	for _, n := range []struct {
		key      string
		v        int64
		min, max int64
	}{
		{"box.max_per_target", int64(c.Box.MaxPerTarget), 1, 10000},
		{"box.max_per_workspace", int64(c.Box.MaxPerWorkspace), 1, 10000},
		// The kernel refuses quotas of 2^44 ns, which are 175 million millis, and pids beyond PID_MAX_LIMIT.
		{"box.max_cpu_millis", c.Box.MaxCPUMillis, 10, 1_000_000},
		{"box.max_memory_bytes", c.Box.MaxMemoryBytes, 16 << 20, 1 << 45},
		{"box.max_pids", c.Box.MaxPids, api.MinPids, 1 << 22},
		{"box.cpu_millis", c.Box.CPUMillis, 10, 1_000_000},
		{"box.memory_bytes", c.Box.MemoryBytes, 16 << 20, 1 << 45},
		{"box.pids", c.Box.Pids, api.MinPids, 1 << 22},
		{"process.max_per_run", int64(c.Process.MaxPerRun), 1, 100000},
		{"process.max_per_workspace", int64(c.Process.MaxPerWorkspace), 1, 100000},
		{"process.spool_bytes", c.Process.SpoolBytes, 1 << 20, c.Process.MaxSpoolBytes},
		{"process.max_spool_bytes", c.Process.MaxSpoolBytes, 1 << 20, 1 << 45},
		{"run.max_per_workspace", int64(c.Run.MaxPerWorkspace), 1, 1_000_000},
		{"retention.max_logs", int64(c.Retention.MaxLogs), 1, 10_000},
		{"retention.max_log_bytes", c.Retention.MaxLogBytes, 1 << 20, 1 << 50},
		{"retention.max_runs", int64(c.Retention.MaxRuns), 1, 100_000_000},
		{"retention.max_processes", int64(c.Retention.MaxProcesses), 1, 100_000_000},
		{"retention.max_spec_bytes", c.Retention.MaxSpecBytes, 4 << 20, 1 << 45},
		{"relay.max_jobs", int64(c.Relay.MaxJobs), 1, 100000},
		{"relay.max_daemons", int64(c.Relay.MaxDaemons), 1, 1_000_000},
		{"relay.message_bytes", c.Relay.MessageBytes, 64 << 10, 256 << 20},
	} {
		if n.v < n.min || n.v > n.max {
			return bad(n.key, "%d is outside %d to %d", n.v, n.min, n.max)
		}
	}
	for _, d := range []struct {
		key      string
		v        time.Duration
		min, max time.Duration
	}{
		{"box.idle", c.Box.Idle, time.Second, 365 * 24 * time.Hour},
		{"run.ttl", c.Run.TTL, time.Second, 365 * 24 * time.Hour},
		{"process.deadline", c.Process.Deadline, time.Second, 365 * 24 * time.Hour},
		{"relay.run_timeout", c.Relay.RunTimeout, time.Second, 30 * 24 * time.Hour},
		{"relay.hello_timeout", c.Relay.HelloTimeout, 100 * time.Millisecond, 10 * time.Minute},
		{"relay.cancel_timeout", c.Relay.CancelTimeout, 100 * time.Millisecond, 10 * time.Minute},
		{"retention.log", c.Retention.Log, time.Minute, 10 * 365 * 24 * time.Hour},
		{"retention.audit", c.Retention.Audit, time.Minute, 100 * 365 * 24 * time.Hour},
		{"retention.record", c.Retention.Record, time.Minute, 10 * 365 * 24 * time.Hour},
	} {
		if d.v < d.min || d.v > d.max {
			return bad(d.key, "%v is outside %v to %v", d.v, d.min, d.max)
		}
	}
	for _, dir := range slices.Concat(c.Host.ProfileDirs, c.Host.AllowMounts) {
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
			return bad("host.profile_dirs or host.allow_mounts", "%q is not a clean absolute path", dir)
		}
	}
	for _, tool := range c.Host.Tools {
		name, dir, ok := strings.Cut(tool, "=")
		if !ok || !filepath.IsAbs(dir) || ident.CheckName("tool", name) != nil {
			return bad("host.tools", "%q is not NAME=DIR with an absolute DIR", tool)
		}
	}
	if _, err := c.ParseTools(); err != nil {
		return err
	}
	_, err := c.ParseModels()
	return err
}

// ParseModels returns the model providers, or which entry is wrong.
func (c *Config) ParseModels() ([]Model, error) { return parseEntries("models", c.Models) }

// ParseTools returns the relay's tool sets, or which entry is wrong. A style
// means nothing to them.
func (c *Config) ParseTools() ([]Model, error) { return parseEntries("relay.tools", c.Relay.Tools) }

func parseEntries(setting string, entries []string) ([]Model, error) {
	var models []Model
	for _, entry := range entries {
		bad := func(format string, args ...any) error {
			return errdefs.New(errdefs.Invalid, "setting "+setting+": entry %q: "+format, append([]any{entry}, args...)...).
				WithNext("write NAME=URL[,style=openai|anthropic][,key-file=PATH][,key-env=VAR]")
		}
		parts := strings.Split(entry, ",")
		name, base, ok := strings.Cut(parts[0], "=")
		if !ok {
			return nil, bad("it has no =")
		}
		m := Model{Name: name, BaseURL: base}
		if err := ident.CheckName("the name", name); err != nil {
			return nil, bad("%v", err)
		}
		u, err := url.Parse(base)
		if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" || u.User != nil || u.RawQuery != "" {
			return nil, bad("the URL must be http(s)://HOST[/PATH] without user or query")
		}
		for _, opt := range parts[1:] {
			k, v, _ := strings.Cut(opt, "=")
			switch k {
			case "style":
				m.Style = v
			case "key-file":
				m.KeyFile = v
			case "key-env":
				m.KeyEnv = v
			default:
				return nil, bad("unknown option %q", k)
			}
		}
		if m.Style == "" {
			m.Style = "openai"
			if strings.Contains(name, "anthropic") || strings.Contains(name, "claude") {
				m.Style = "anthropic"
			}
		}
		if m.Style != "openai" && m.Style != "anthropic" {
			return nil, bad("style %q is neither openai nor anthropic", m.Style)
		}
		if slices.ContainsFunc(models, func(o Model) bool { return o.Name == m.Name }) {
			return nil, bad("the name is used twice")
		}
		models = append(models, m)
	}
	return models, nil
}

// ReadKey returns the provider's key from its file or environment variable, or
// "" when neither is named. The error never holds what was read.
func (m Model) ReadKey() (string, error) {
	switch {
	case m.KeyFile != "":
		b, err := os.ReadFile(m.KeyFile)
		if err != nil {
			return "", errdefs.Wrap(err, errdefs.Invalid, "the key file of %s cannot be read: %v", m.Name, err)
		}
		return strings.TrimSpace(string(b)), nil
	case m.KeyEnv != "":
		key := os.Getenv(m.KeyEnv)
		if key == "" {
			return "", errdefs.New(errdefs.Invalid, "%s: the environment variable %s is empty", m.Name, m.KeyEnv)
		}
		return key, nil
	}
	return "", nil
}

// String names the provider without its key.
func (m Model) String() string { return fmt.Sprintf("%s (%s, %s)", m.Name, m.Style, m.BaseURL) }
