package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/bench"
)

func (a *app) benchRuntimeCommand() *cobra.Command {
	cfg := bench.RuntimeConfig{Version: a.Version}
	var dir string
	c := &cobra.Command{
		Use: "runtime", Short: "Measure the Plugin Runtime beside that of LangBot's Python SDK", Args: cobra.NoArgs,
		Long: `Measures "stockade runtime" beside "lbp rt" of the Python SDK that --python has, each in a process
of its own, with the same plugin, the same worker and the same client in the place of LangBot.
Takes a few minutes and about 3 GiB of memory, most of it the plugins'.`,
		Example: "  stockade bench runtime --python ./venv/bin/python --json > runtime.json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.measure(cmd, dir, func(ctx context.Context, m measuring) (bench.Report, error) {
				cfg.Stockade, cfg.Dir, cfg.Progress = m.stockade, m.dir, m.progress
				return bench.RunRuntime(ctx, cfg)
			})
		},
	}
	f := c.Flags()
	f.StringVar(&dir, "dir", "", "where to measure (default: the system's temporary directory)")
	f.StringVar(&cfg.Python, "python", "python3", "interpreter with LangBot's SDK")
	f.IntVar(&cfg.Calls, "calls", 2000, "tool calls one after the other")
	f.IntVar(&cfg.Dedicated, "installations", 50, "installations with a process each")
	f.IntVar(&cfg.Slots, "slots", 200, "installations in one process")
	f.IntVar(&cfg.Events, "events", 40, "events to each installation")
	f.IntVar(&cfg.Frames, "frames", 20_000, "frames of a stream")
	f.IntVar(&cfg.FileBytes, "file-bytes", 32<<20, "bytes of a file")
	return c
}
