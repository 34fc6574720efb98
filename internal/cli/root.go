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
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"

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
	refused error        // a subcommand that does not exist was named
	silent  atomic.Int64 // when it was last said that the server does not answer, in s
	raw     atomic.Bool  // the terminal is raw: a line begins where it is told to
}

// exitError carries the exit status of a command that has said all there is to say.
type exitError struct{ code int }

func (e exitError) Error() string { return fmt.Sprintf("exit status %d", e.code) }

// Main runs the command line and returns the exit status.
func Main(ctx context.Context, env Env, args []string) int {
	// A reader that has gone is an error of the write, as in head(1), and no reason
	// to die in the middle: there may be a process to stop, and a box to remove.
	// Not ignored, which programs started here would inherit.
	gone := make(chan os.Signal, 1)
	signal.Notify(gone, syscall.SIGPIPE)
	defer signal.Stop(gone)
	a := &app{Env: env}
	root := a.root()
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd(args...)
	a.explain(root)
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		err = a.refused
	}
	if err == nil {
		return 0
	}
	if exit, ok := errors.AsType[exitError](err); ok {
		return exit.code
	}
	_, explained := errors.AsType[*errdefs.Error](err)
	if errors.Is(err, syscall.EPIPE) && (!explained || errors.Is(err, errOutput)) { // not a server's connection
		return exitSignalBase + int(syscall.SIGPIPE) // and silent, as every filter is
	}
	if !explained {
		err = plain(root, err)
	}
	if before, _, _ := strings.Cut(strings.Join(args, "\n")+"\n", "\n--\n"); slices.Contains(strings.Split(before, "\n"), "--json") {
		a.json = true // also when the flags could not be read to their end
	}
	a.complain(err)
	if standsForChild(cmd) {
		return exitOurs
	}
	return exitCode(err)
}

// plain makes an error for people of one that is none yet: what cobra says of a
// command that is not there, or what the system says of a file.
func plain(root *cobra.Command, err error) error {
	var name string
	if _, scanErr := fmt.Sscanf(err.Error(), "unknown command %q", &name); scanErr == nil {
		return unknownCommand(root, name)
	}
	if pe, ok := errors.AsType[*fs.PathError](err); ok && pe.Op == "write" {
		return errdefs.New(errdefs.Internal, "the output cannot be written: %v", pe.Err)
	}
	return errdefs.New(errdefs.Internal, "%v", err)
}

func unknownCommand(c *cobra.Command, name string) error {
	next := "see " + c.CommandPath() + " --help"
	if like := c.SuggestionsFor(name); len(like) > 0 {
		next = "did you mean " + strings.Join(like, " or ") + "? " + next
	}
	return errdefs.New(errdefs.Invalid, "there is no command %q in %s", name, c.CommandPath()).WithNext("%s", next)
}

// standsForChild tells the commands whose exit status is another command's.
func standsForChild(c *cobra.Command) bool {
	return c.Parent() == c.Root() && (c.Name() == "run" || c.Name() == "attach")
}

// explain makes what a person mistypes an error that says what to type: wrong numbers
// of arguments, and subcommands that do not exist, for which cobra shows the help and
// is content.
func (a *app) explain(c *cobra.Command) {
	c.SuggestionsMinimumDistance = 2
	if args := c.Args; args != nil {
		c.Args = func(c *cobra.Command, given []string) error {
			if args(c, given) == nil {
				return nil
			}
			return wrongArguments(c, given)
		}
	}
	if !c.Runnable() && c.HasParent() {
		help := c.HelpFunc()
		c.SetHelpFunc(func(c *cobra.Command, args []string) {
			if given := c.Flags().Args(); !c.Runnable() && len(given) > 0 && !c.Flags().Changed("help") {
				a.refused = unknownCommand(c, given[0])
				return
			}
			help(c, args)
		})
	}
	for _, sub := range c.Commands() {
		a.explain(sub)
	}
}

func wrongArguments(c *cobra.Command, given []string) error {
	_, takes, _ := strings.Cut(strings.NewReplacer("[flags] ", "", "-- ", "").Replace(c.Use), " ")
	switch {
	case takes == "" && c.HasSubCommands():
		return unknownCommand(c, given[0])
	case takes == "":
		return errdefs.New(errdefs.Invalid, "%s takes no argument, it got %q", c.CommandPath(), given[0]).WithNext("see %s --help", c.CommandPath())
	default:
		return errdefs.New(errdefs.Invalid, "%s takes %s; %d given", c.CommandPath(), takes, len(given)).WithNext("see %s --help", c.CommandPath())
	}
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
		SilenceErrors: true, SilenceUsage: true, DisableSuggestions: true, Version: a.Version,
		CompletionOptions: cobra.CompletionOptions{HiddenDefaultCmd: false},
	}
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetVersionTemplate("stockade {{.Version}}\n")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return errdefs.New(errdefs.Invalid, "%v", err).WithNext("see %s --help", c.CommandPath())
	})
	pf := root.PersistentFlags()
	pf.BoolVar(&a.json, "json", false, "print JSON")
	pf.StringVar(&a.url, "url", os.Getenv("STOCKADE_URL"), "address of the server (STOCKADE_URL; default: the server of STOCKADE_STATE_DIR)")
	pf.StringVar(&a.keyFile, "key-file", os.Getenv("STOCKADE_KEY_FILE"), "file with the key to use (STOCKADE_KEY_FILE, or the key itself in STOCKADE_KEY; default: that of STOCKADE_STATE_DIR)")
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
