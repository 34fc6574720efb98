package cli

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/bench"
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
			return a.measure(cmd, dir, func(ctx context.Context, m measuring) (bench.Report, error) {
				cfg.Stockade, cfg.Dir, cfg.Progress = m.stockade, m.dir, m.progress
				return bench.RunRelay(ctx, cfg)
			})
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
