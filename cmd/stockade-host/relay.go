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
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/osproc"
	"github.com/stockade-run/stockade/internal/relayclient"
	"github.com/stockade-run/stockade/internal/secret"
)

// exitUnconfirmed says that a job's processes may still be running: whoever starts
// programs again must not start this one before a person has looked.
const exitUnconfirmed = 3

// relayCgroup is below which every agent gets a control group, where that is
// possible.
const relayCgroup = "/stockade-relay"

func relayConfig(args []string, stderr io.Writer) (relayclient.Config, error) {
	cfg := relayclient.Config{Metadata: map[string]any{"client": "stockade-host", "version": Version(), "kinds": []string{"acp", "claude-code", "codex"}}}
	var workspaces, commands, names list
	var tokenFile string
	level := slog.LevelInfo
	f := flag.NewFlagSet("stockade-host relay-connect", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&cfg.URL, "url", "", "the hub's `address`, ws://HOST:PORT or wss://… (required)")
	f.StringVar(&cfg.DaemonID, "daemon-id", "", "the `name` by which the hub knows this machine (required)")
	f.StringVar(&tokenFile, "token-file", "", "`file` with the hub's token, readable by its owner only (required)")
	f.DurationVar(&cfg.ReconnectDelay, "reconnect-delay", 0, "`time` between two connections (default 5s)")
	f.Var(&workspaces, "allow-workspace", "`directory` in and below which agents may start; repeatable, the first is the default (default: the working directory)")
	f.Var(&commands, "allow-command", "program, by `name` or absolute path, that a job may run, * for any; repeatable (default: claude, codex, and the known ACP agents)")
	f.Var(&names, "allow-env", "one more environment `variable` that agents get, also with a final *; repeatable")
	f.StringVar(&cfg.CgroupParent, "cgroup-parent", defaultRelayCgroup(), "control `group` to make the agents' groups in; empty for none")
	f.TextVar(&level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	if err := f.Parse(args); err != nil {
		return cfg, err
	}
	if f.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	for _, need := range [][2]string{{"--url", cfg.URL}, {"--daemon-id", cfg.DaemonID}, {"--token-file", tokenFile}} {
		if need[1] == "" {
			return cfg, fmt.Errorf("%s is required", need[0])
		}
	}
	cfg.AllowWorkspace, cfg.AllowCommand, cfg.AllowEnv = workspaces, commands, names
	cfg.Logger = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: level}))
	token, err := secret.ReadFile0600(tokenFile)
	if err != nil {
		return cfg, err
	}
	// Editors end a file with a line's end; a token has none.
	if cfg.Token = strings.TrimRight(string(token), "\r\n"); cfg.Token == "" {
		return cfg, errdefs.New(errdefs.Invalid, "the token file %s is empty", tokenFile)
	}
	return cfg, nil
}

func defaultRelayCgroup() string {
	if os.Geteuid() == 0 {
		return relayCgroup
	}
	return ""
}

func runRelay(args []string, stderr io.Writer) int {
	cfg, err := relayConfig(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(stderr, "stockade-host relay-connect:", err)
		return exitUsage
	}
	if err := osproc.KeepInherited(); err != nil {
		fmt.Fprintln(stderr, "stockade-host relay-connect:", err)
		return exitFailed
	}
	// The agents are the same user's: they must not reach into this program, which
	// says what has ended (PR_SET_DUMPABLE in prctl(2)).
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		fmt.Fprintln(stderr, "stockade-host relay-connect:", err)
		return exitFailed
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := relayclient.Run(ctx, cfg); err != nil {
		cfg.Logger.Error("the relay client ends", "error", err)
		switch errdefs.CodeOf(err) {
		case errdefs.Indeterminate:
			return exitUnconfirmed
		case errdefs.Invalid:
			return exitUsage
		}
		return exitFailed
	}
	return 0
}
