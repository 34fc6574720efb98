package cli

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/bench"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// measuring is what every bench gets from the command line.
type measuring struct {
	stockade string // this program
	dir      string // a directory of its own, removed afterwards
	progress func(string)
}

// measure runs a bench, which Ctrl-C ends, and prints its report. in is where its
// directory is made; empty is the system's temporary directory.
func (a *app) measure(cmd *cobra.Command, in string, run func(context.Context, measuring) (bench.Report, error)) error {
	exe, err := os.Executable()
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the path of this program is not known: %v", err)
	}
	dir, err := os.MkdirTemp(in, "stockade-bench-")
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "no directory can be made: %v", fsReason(err))
	}
	defer os.RemoveAll(dir)
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	report, err := run(ctx, measuring{exe, dir, func(what string) { a.say("measuring %s …", what) }})
	if err != nil {
		return err
	}
	if a.json {
		return a.printJSON(report)
	}
	return report.Print(a.Stdout)
}

func (a *app) benchCommand() *cobra.Command {
	cfg := bench.Config{Version: a.Version}
	var dir string
	c := &cobra.Command{
		Use: "bench", Short: "Measure this machine against the targets", Args: cobra.NoArgs,
		Long: `Measures what the promises cost here, each figure beside a baseline measured in the same run:
latency of an open, first byte, output throughput, close to receipt, memory. Takes a few
minutes, starts its own servers in a new directory and leaves nothing behind. Needs root.`,
		Example: "  stockade bench\n  stockade bench --json > bench.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.measure(cmd, dir, func(ctx context.Context, m measuring) (bench.Report, error) {
				cfg.Stockade, cfg.Dir, cfg.Progress = m.stockade, m.dir, m.progress
				return bench.Run(ctx, cfg)
			})
		},
	}
	c.AddCommand(a.benchRelayCommand(), a.benchRelayHubCommand(), a.benchRuntimeCommand())
	f := c.Flags()
	f.StringVar(&dir, "dir", "", "where to measure (default: the system's temporary directory)")
	f.IntVar(&cfg.Idle, "idle", 5000, "idle attached processes")
	f.IntVar(&cfg.Opens, "opens", 200, "opens to time one after the other")
	f.IntVar(&cfg.Callers, "callers", 64, "callers that open at once")
	f.IntVar(&cfg.Starts, "starts", 20, "processes started and closed in a box")
	f.Int64Var(&cfg.Bytes, "bytes", 1<<30, "bytes of output to stream")
	return c
}
