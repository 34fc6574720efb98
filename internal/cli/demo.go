package cli

import (
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/demo"
)

func (a *app) demoCommand() *cobra.Command {
	cfg := demo.Config{}
	c := &cobra.Command{
		Use: "demo", Short: "Watch an agent work in a box while the server dies", Args: cobra.NoArgs,
		Long: `Starts a server of its own, lets a coding agent mend a small program in a box, kills the server
half-way, starts it again, compares what the agent wrote with what was read, stops a process that
does not want to stop, and leaves nothing behind. Needs root.

The agent is testagent (ours, scripted), codex or claude. The vendors' CLIs use your own key from
OPENAI_API_KEY or ANTHROPIC_API_KEY if there is one, else a scripted model on this machine.`,
		Example: "  stockade demo\n  stockade demo --agent codex",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			cfg.Out = a.Stdout
			return demo.Run(ctx, cfg)
		},
	}
	f := c.Flags()
	f.StringVar(&cfg.Agent, "agent", demo.Agents()[0], "testagent, codex or claude")
	f.StringVar(&cfg.StateDir, "state-dir", "", "state directory to use instead of a temporary one")
	f.BoolVar(&cfg.Keep, "keep", false, "keep the state directory with its logs")
	f.StringVar(&cfg.HostBinary, "host-program", "", "path of stockade-host (default: beside this program)")
	f.StringVar(&cfg.TestAgent, "testagent", "", "path of the testagent program (default: beside this program)")
	f.StringVar(&cfg.AgentsDir, "agents-dir", "", "directory with the vendors' CLIs (default: found or made below the checkout)")
	return c
}
