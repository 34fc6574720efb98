package cli

import (
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/bench"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (a *app) benchRelayCommand() *cobra.Command {
	cfg := bench.RelayConfig{Version: a.Version}
	var dir string
	c := &cobra.Command{
		Use: "relay", Short: "Measure the relay's hub beside a plain one in Python", Args: cobra.NoArgs,
		Long: `Measures the relay's hub beside a hub written in Python with the websockets library, each in a
process of its own on one processor, with the same client. Takes a few minutes. Without the
library (apt-get install python3-websockets) it measures ours alone.`,
		Example: "  stockade bench relay --json > relay.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			exe, err := os.Executable()
			if err != nil {
				return errdefs.Wrap(err, errdefs.Unavailable, "the path of this program is not known: %v", err)
			}
			cfg.Stockade = exe
			if cfg.Dir, err = os.MkdirTemp(dir, "stockade-bench-"); err != nil {
				return errdefs.Wrap(err, errdefs.Unavailable, "no directory can be made: %v", fsReason(err))
			}
			defer os.RemoveAll(cfg.Dir)
			cfg.Progress = func(what string) { a.say("measuring the %s …", what) }
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			report, err := bench.RunRelay(ctx, cfg)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(report)
			}
			return report.Print(a.Stdout)
		},
	}
	f := c.Flags()
	f.StringVar(&dir, "dir", "", "where to measure (default: the system's temporary directory)")
	f.StringVar(&cfg.Python, "python", "python3", "interpreter for the baseline")
	f.IntVar(&cfg.Events, "events", 400_000, "events of 200 B; a tenth of 16 KiB")
	f.IntVar(&cfg.Daemons, "daemons", 100, "daemons with one job each")
	f.IntVar(&cfg.Idle, "idle", 5000, "idle daemons")
	f.IntVar(&cfg.Empty, "empty", 2000, "empty jobs")
	f.Int64Var(&cfg.Stalled, "stalled", 500<<20, "bytes for a consumer that stops reading")
	f.DurationVar(&cfg.ToolTime, "tool-time", 12*time.Second, "time of a slow tool call")
	return c
}

// benchRelayHubCommand is the process that bench relay measures.
func (a *app) benchRelayHubCommand() *cobra.Command {
	var cfg bench.RelayHubConfig
	var toolTime float64
	c := &cobra.Command{
		Use: "relay-hub", Hidden: true, Short: "The hub that bench relay measures", Args: cobra.NoArgs, Example: "  stockade bench relay-hub",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.ToolTime = time.Duration(toolTime * float64(time.Second))
			return bench.ServeRelayHub(cmd.Context(), cfg, a.Stdin, a.Stdout)
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Token, "token", "", "what daemons say")
	f.StringVar(&cfg.StateDir, "state", "", "directory of the markers")
	f.Float64Var(&toolTime, "tool-time", 12, "seconds of a tool call")
	return c
}
