package relayclient

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/url"
	"os"
	"runtime"
	"time"

	"github.com/stockade-run/stockade/internal/agent"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// Config says where to connect and what this machine allows.
type Config struct {
	// URL of the hub, ws or wss; DaemonID and Token as the hub knows them.
	URL      string
	DaemonID string
	Token    string
	// ReconnectDelay is the time between two connections; 0 leaves it to Limits.
	ReconnectDelay time.Duration
	// Metadata is told to the hub beside the process number, directory and platform.
	Metadata map[string]any

	// AllowWorkspace lists the directories in and below which agents may start;
	// the first is the default. Empty: the working directory.
	AllowWorkspace []string
	// AllowCommand lists the programs that a payload may name: names found on PATH,
	// or absolute paths. "*" allows any. Empty: claude, codex, and the commands of
	// the known ACP providers.
	AllowCommand []string
	// AllowEnv lists more names of this program's variables that every agent gets.
	AllowEnv []string
	// Keeper and CgroupParent are as in osproc.Config.
	Keeper       []string
	CgroupParent string

	// Runner runs the jobs; nil runs the agents.
	Runner Runner

	Limits relaywire.Limits
	Logger *slog.Logger // nil: nothing is logged
}

// Runner runs one job. It must not return before everything it started has ended;
// when it cannot prove that, it returns an [*UnconfirmedError], however it was
// stopped. ctx ends when the job is to stop. emit takes one event, a JSON object,
// and waits while the hub takes none; its error says that nobody will read it.
type Runner interface {
	Run(ctx context.Context, jobID string, payload json.RawMessage, emit func(event json.RawMessage) error, mcp MCP) error
}

// MCP is where the agent of one job reaches the host's tools.
type MCP struct {
	agent.MCP
	timeout func(time.Duration)
}

// SetCallTimeout changes how long one tool call may take.
func (m MCP) SetCallTimeout(d time.Duration) {
	if d > 0 && m.timeout != nil {
		m.timeout(d)
	}
}

// UnconfirmedError says that something of a job may still be running.
type UnconfirmedError struct{ Why string }

// Error says what is known.
func (e *UnconfirmedError) Error() string {
	return "the end of a job is not confirmed: " + e.Why
}

// Causes of a job's end.
var (
	errCancelled = errors.New("the hub cancelled the job")
	errStopping  = errors.New("this program stops")
	errLost      = errors.New("the connection to the hub was lost")
)

// protocolError drops the connection: what the hub does makes no sense.
type protocolError string

func (e protocolError) Error() string { return string(e) }

// Run connects and serves until ctx ends, then ends every job, tells the hub, and
// returns nil. It returns an indeterminate error, and has closed the connection
// with 1011, when the end of a job could not be confirmed; whoever calls must not
// call again before a person has looked. An invalid configuration is refused at
// once. Everything else, a hub that refuses included, is tried again after the
// delay, for ever.
func Run(ctx context.Context, cfg Config) error {
	c, err := newClient(cfg)
	if err != nil {
		return err
	}
	defer c.runnerDone()
	for {
		s := &session{client: c}
		err := s.serve(ctx)
		if u := s.unconfirmed(); u != nil {
			return errdefs.Wrap(u, errdefs.Indeterminate, "this machine takes no more jobs: %v", u).
				WithNext("look for processes that are left, end them, lift the fence at the hub, and start the client again")
		}
		if ctx.Err() != nil {
			return nil
		}
		c.log.Warn("not connected to the hub", "error", err, "again_in", c.limits.ReconnectDelay)
		t := time.NewTimer(c.limits.ReconnectDelay)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
	}
}

// client is what all connections of one Run share. It is not changed.
type client struct {
	cfg        Config
	limits     relaywire.Limits
	runner     Runner
	runnerDone func()
	log        *slog.Logger
	hello      []byte
}

func newClient(cfg Config) (*client, error) {
	if err := cfg.Limits.Check(); err != nil {
		return nil, err
	}
	c := &client{cfg: cfg, limits: cfg.Limits.WithDefaults(), runner: cfg.Runner, log: cfg.Logger, runnerDone: func() {}}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if cfg.ReconnectDelay > 0 {
		c.limits.ReconnectDelay = cfg.ReconnectDelay
	}
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || u.Scheme != "ws" && u.Scheme != "wss" {
		return nil, errdefs.New(errdefs.Invalid, "the hub's address is not a ws:// or wss:// URL")
	}
	if u.User != nil {
		return nil, errdefs.New(errdefs.Invalid, "the hub's address holds a password").WithNext("the token is enough")
	}
	if n := len([]rune(cfg.DaemonID)); n == 0 || n > c.limits.IDRunes {
		return nil, errdefs.New(errdefs.Invalid, "the daemon id has %d characters, it needs 1 to %d", n, c.limits.IDRunes)
	}
	cwd, err := os.Getwd()
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the working directory is not known")
	}
	meta := map[string]any{}
	for k, v := range cfg.Metadata {
		meta[k] = v
	}
	meta["pid"], meta["cwd"], meta["platform"] = os.Getpid(), cwd, runtime.GOOS
	raw, err := json.Marshal(meta)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the metadata cannot be written as JSON")
	}
	c.hello = relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Hello, DaemonID: cfg.DaemonID,
		Protocol: relaywire.Protocol, Token: cfg.Token, Metadata: raw})
	if c.runner == nil {
		a, err := newAgents(cfg, c.limits, cwd, c.log)
		if err != nil {
			return nil, err
		}
		c.runner, c.runnerDone = a, a.close
	}
	return c, nil
}
