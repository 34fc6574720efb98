// Package cli is every command a person types.
//
// The rules all commands keep: standard output carries only what was asked for,
// everything else goes to standard error; --json prints one JSON document (or
// one per line where the command streams) with the API's own shapes; no colour
// and no cursor movement when the output is not a terminal; an error says what
// was refused and what to do next; the exit status is a table (see [ExitCodes]).
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Env is what a command line runs with: the process's own streams, or a test's.
type Env struct {
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	Version        string
}

// app is the state all commands of one invocation share.
type app struct {
	Env
	json    bool
	url     string
	keyFile string
}

// exitError carries the exit status of a command that has said all there is to say.
type exitError struct{ code int }

func (e exitError) Error() string { return fmt.Sprintf("exit status %d", e.code) }

// Main runs the command line and returns the exit status.
func Main(ctx context.Context, env Env, args []string) int {
	a := &app{Env: env}
	root := a.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	if exit, ok := errors.AsType[exitError](err); ok {
		return exit.code
	}
	a.complain(err)
	return exitCode(err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "stockade",
		Short: "Run coding agents and plugins of many tenants, each inside its own authority",
		Long: `Stockade runs coding agents, and anything else, in boxes: sandboxed envelopes that
belong to one tenant. A process starts exactly once, its output loses nothing, and
a stop is proven by the kernel or says that it is not.

Start a server with "stockade serve", then try:

  stockade run -- uname -a
  stockade run --box dev -t -- bash
  stockade ps`,
		SilenceErrors: true, SilenceUsage: true,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
	}
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return errdefs.New(errdefs.Invalid, "%v", err).WithNext("see %s --help", c.CommandPath())
	})
	pf := root.PersistentFlags()
	pf.BoolVar(&a.json, "json", false, "print JSON")
	pf.StringVar(&a.url, "url", os.Getenv("STOCKADE_URL"), "address of the server (STOCKADE_URL; default: the server of the state directory)")
	pf.StringVar(&a.keyFile, "key-file", os.Getenv("STOCKADE_KEY_FILE"), "file with the key to use (STOCKADE_KEY_FILE, or the key itself in STOCKADE_KEY; default: the state directory's)")
	root.AddGroup(&cobra.Group{ID: "use", Title: "Running things:"}, &cobra.Group{ID: "look", Title: "Looking:"},
		&cobra.Group{ID: "operate", Title: "Operating a server:"})
	root.AddCommand(a.versionCommand())
	for _, group := range []struct {
		id   string
		cmds []*cobra.Command
	}{
		{"use", a.useCommands()},
		{"look", a.lookCommands()},
		{"operate", a.operateCommands()},
	} {
		for _, c := range group.cmds {
			c.GroupID = group.id
			root.AddCommand(c)
		}
	}
	return root
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Example: "  stockade version",
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return a.printJSON(map[string]string{"version": a.Version})
			}
			_, err := fmt.Fprintln(a.Stdout, "stockade", a.Version)
			return err
		},
	}
}

// logger writes the server's log to standard error.
func (a *app) logger(level, format string) *slog.Logger {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		l = slog.LevelInfo
	}
	opts := &slog.HandlerOptions{Level: l}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(a.Stderr, opts))
	}
	return slog.New(slog.NewTextHandler(a.Stderr, opts))
}
