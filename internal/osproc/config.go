package osproc

import (
	"log/slog"
	"os"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Defaults of [Config]. The grace times are those of the daemons in use, so that
// an agent that cleans up on SIGTERM has as long as it has today.
const (
	DefaultGrace      = time.Second
	DefaultKillWait   = 2 * time.Second
	DefaultMaxLine    = 16 << 20
	DefaultMaxOutput  = 1 << 30
	DefaultMaxPending = 32 << 20
	DefaultStderrTail = 20_000
)

// answerSlack is how much longer than the grace times the caller waits for the
// keeper to tell the outcome: time for a loaded machine, not for the tree.
const answerSlack = 3 * time.Second

// startBound is how long a program may take to be loaded, from however slow a
// disk.
const startBound = 30 * time.Second

// Config says what to run and within what bounds.
type Config struct {
	// Argv is the program, by absolute path, and its arguments.
	Argv []string
	// Env is the whole environment, as NAME=VALUE.
	Env []string
	// Dir is the open directory to start in, as from [OpenWorkspace]; it may be
	// closed when Start has returned.
	Dir *os.File

	// Keeper starts a program that calls [KeeperMain]. Empty: this program with
	// the argument [KeeperCommand].
	Keeper []string

	// CgroupRoot is where control groups are mounted; "" is the usual place.
	// CgroupParent is the group below which each tree gets its own, for example
	// "/stockade-relay"; "" makes none. Where it cannot be made, there is none.
	CgroupRoot, CgroupParent string

	// Grace is the time between SIGTERM and SIGKILL, KillWait the time after it
	// in which the tree must be gone. 0: the defaults.
	Grace, KillWait time.Duration

	// MaxLine bounds one line of output, MaxOutput all of it, both in bytes;
	// StderrTail is how much of the end of stderr is kept; MaxPending bounds what
	// is written and not yet taken by the agent. 0: the defaults.
	MaxLine    int
	MaxOutput  int64
	MaxPending int
	StderrTail int

	// Secrets are values that are taken out of everything that is told of stderr.
	Secrets []string

	Logger *slog.Logger // nil: nothing is logged
}

func (c *Config) complete() error {
	if len(c.Argv) == 0 || len(c.Argv[0]) == 0 || c.Argv[0][0] != '/' {
		return errdefs.New(errdefs.Internal, "a program is started by its absolute path")
	}
	if c.Dir == nil {
		return errdefs.New(errdefs.Internal, "a program is started in a directory that the caller has opened")
	}
	if len(c.Keeper) == 0 {
		exe, err := os.Executable()
		if err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "this program cannot find its own file to start a keeper from")
		}
		c.Keeper = []string{exe, KeeperCommand}
	}
	def(&c.Grace, DefaultGrace)
	def(&c.KillWait, DefaultKillWait)
	def(&c.MaxLine, DefaultMaxLine)
	def(&c.MaxOutput, DefaultMaxOutput)
	def(&c.MaxPending, DefaultMaxPending)
	def(&c.StderrTail, DefaultStderrTail)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

func def[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}
