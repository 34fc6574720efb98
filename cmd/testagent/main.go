// Command testagent is a small coding agent that follows a script, for the demo
// and the tests: see internal/testagent. It speaks the Agent Client Protocol on
// its standard streams and ends with its input.
//
//	testagent [SCRIPT.json]
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/stockade-run/stockade/internal/testagent"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "testagent:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	cfg := testagent.Config{In: os.Stdin, Out: os.Stdout,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	switch len(args) {
	case 0:
	case 1:
		b, err := os.ReadFile(args[0])
		if err != nil {
			return err
		}
		s, err := testagent.ParseScript(b)
		if err != nil {
			return err
		}
		cfg.Script = &s
	default:
		return fmt.Errorf("usage: testagent [SCRIPT.json]")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	return testagent.Serve(ctx, cfg)
}
