// Command stockade-host is what goes onto a machine where processes run. It is
// three programs in one: serve, the host program; shim, the keeper beside one
// process; and init, PID 1 inside every container. join becomes a runtime inside
// a control group. Nobody needs to call shim, init or join by hand.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/osproc"
	"github.com/stockade-run/stockade/internal/shim"
)

// version is set by the linker (-X main.version=…); a build without it takes the
// version the module was built from.
var version string

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// Exit codes: 0 done, 1 it failed, 2 the command line is wrong, host.ExitBusy
// another host program has the directory.
const (
	exitFailed = 1
	exitUsage  = 2
)

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		usage(stderr)
		return exitUsage
	}
	// init, shim and join come first and touch nothing of the rest: one of them stands
	// beside, and one inside, every process.
	switch args[0] {
	case "init":
		return shim.InitMain(args[1:])
	case "shim":
		return runShim(args[1:], stderr)
	case oci.JoinCommand:
		return oci.JoinMain(args[1:])
	case osproc.KeeperCommand:
		return osproc.KeeperMain()
	case "serve":
		return runServe(args[1:], stderr)
	case "relay-connect":
		return runRelay(args[1:], stderr)
	case "version", "--version":
		fmt.Fprintln(stdout, Version())
		return 0
	case "help", "-h", "--help":
		usage(stdout)
		return 0
	}
	fmt.Fprintf(stderr, "stockade-host: there is no command %q\n", args[0])
	usage(stderr)
	return exitUsage
}

func usage(w io.Writer) {
	fmt.Fprint(w, `stockade-host runs processes for a Stockade server on this machine.

  stockade-host serve --dir DIR [options]   the host program; see serve --help
  stockade-host relay-connect [options]     run agents for a relay hub; see relay-connect --help
  stockade-host version                     print the version
`)
}

// Version is the version this program was built as.
func Version() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

func runShim(args []string, stderr io.Writer) int {
	if len(args) != 2 || args[0] != "--dir" {
		fmt.Fprintln(stderr, "stockade-host shim --dir DIR is started by the host program")
		return exitUsage
	}
	return shim.Main(args[1])
}

// list is a flag that may be given many times.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

func serveConfig(args []string, stderr io.Writer) (host.Config, error) {
	cfg := host.Config{Version: Version(), Tools: map[string]string{}}
	var profile, tools, mounts list
	level := slog.LevelInfo
	f := flag.NewFlagSet("stockade-host serve", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&cfg.Dir, "dir", "", "the host's `directory` (required)")
	f.StringVar(&cfg.Runtime, "runtime", "", "OCI runtime, by `name` or path (default: the first of runc, crun, runsc)")
	f.StringVar(&cfg.CgroupRoot, "cgroup-root", "", "where control groups are mounted (default /sys/fs/cgroup)")
	f.StringVar(&cfg.CgroupParent, "cgroup-parent", "", "control `group` to make the boxes' groups in (default /stockade)")
	f.StringVar(&cfg.Digest, "digest", "", "what the starter knows this program and its options by")
	f.Var(&profile, "profile-dir", "one more `directory` that every box shows read-only; repeatable")
	f.Var(&tools, "tool", "`NAME=DIR` shown in every box as /opt/NAME; repeatable")
	f.Var(&mounts, "allow-mount", "`directory` below which boxes may ask for mounts; repeatable")
	f.BoolVar(&cfg.LimitsOptional, "limits-optional", false, "have boxes also where not every limit can be enforced")
	f.TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		return cfg, err
	}
	if f.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if cfg.Dir == "" {
		return cfg, errors.New("--dir is required")
	}
	for _, t := range tools {
		name, dir, ok := strings.Cut(t, "=")
		if !ok || name == "" || !filepath.IsAbs(dir) {
			return cfg, fmt.Errorf("--tool %q is not NAME=DIR with an absolute DIR", t)
		}
		cfg.Tools[name] = dir
	}
	cfg.Profile, cfg.AllowMounts = profile, mounts
	cfg.Logger = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return cfg, err
	}
	// Not the link the program was found by: an upgrade may turn that elsewhere
	// while this one still starts shims.
	cfg.Exe, err = os.Executable()
	return cfg, err
}

func runServe(args []string, stderr io.Writer) int {
	cfg, err := serveConfig(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(stderr, "stockade-host serve:", err)
		return exitUsage
	}
	if err := osproc.KeepInherited(); err != nil {
		fmt.Fprintln(stderr, "stockade-host serve:", err)
		return exitFailed
	}
	// What is private says so itself; the roots of boxes must be open to the boxes'
	// users, whatever umask the starter has.
	syscall.Umask(0o022)
	// Processes and shims go on when the host program ends, however it ends.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
	if err := host.Serve(ctx, cfg); err != nil {
		cfg.Logger.Error("host program ends", "error", err)
		if errdefs.Is(err, errdefs.Conflict) {
			return host.ExitBusy
		}
		return exitFailed
	}
	return 0
}
