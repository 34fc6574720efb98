package cli

import (
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/bench"
	"github.com/stockade-run/stockade/internal/errdefs"
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
			exe, err := os.Executable()
			if err != nil {
				return errdefs.Wrap(err, errdefs.Unavailable, "the path of this program is not known: %v", err)
			}
			cfg.Stockade = exe
			if cfg.Dir, err = os.MkdirTemp(dir, "stockade-bench-"); err != nil {
				return errdefs.Wrap(err, errdefs.Unavailable, "no directory can be made: %v", fsReason(err))
			}
			defer os.RemoveAll(cfg.Dir)
			cfg.Progress = func(what string) { a.say("measuring %s …", what) }
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			report, err := bench.RunRuntime(ctx, cfg)
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
	f.StringVar(&cfg.Python, "python", "python3", "interpreter with LangBot's SDK")
	f.IntVar(&cfg.Calls, "calls", 2000, "tool calls one after the other")
	f.IntVar(&cfg.Dedicated, "installations", 50, "installations with a process each")
	f.IntVar(&cfg.Slots, "slots", 200, "installations in one process")
	f.IntVar(&cfg.Events, "events", 40, "events to each installation")
	f.IntVar(&cfg.Frames, "frames", 20_000, "frames of a stream")
	f.IntVar(&cfg.FileBytes, "file-bytes", 32<<20, "bytes of a file")
	return c
}
