package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/preflight"
	"github.com/stockade-run/stockade/internal/server"
)

func (a *app) doctorCommand() *cobra.Command {
	var file, python string
	c := &cobra.Command{
		Use: "doctor", Short: "Check what this machine has and lacks for boxes", Args: cobra.NoArgs,
		Long: `Checks every kernel feature, tool and limit that boxes need, says what is missing, and the
command that brings it. Takes the settings of serve. The exit status is 0 when everything needed is there, else 17.
What only stockade runtime needs, Python with the plugin SDK, is looked at as well and not counted.`,
		Example: "  stockade doctor\n  stockade doctor --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(file, cmd.Flags())
			if err != nil {
				return err
			}
			done := a.progress("checking this machine")
			look := server.Preflight(cfg)
			look.Python = python
			checks := preflight.Run(cmd.Context(), look)
			done()
			missing := 0
			for _, c := range checks {
				if c.Needed && !c.OK {
					missing++
				}
			}
			if a.json {
				if err := a.printJSON(map[string]any{"ok": missing == 0, "checks": checks}); err != nil {
					return err
				}
			} else {
				for _, c := range checks {
					mark := "ok     "
					switch {
					case !c.OK && c.Needed:
						mark = "MISSING"
					case !c.OK:
						mark = "absent "
					}
					fmt.Fprintf(a.Stdout, "%s  %s: %s\n", mark, c.Name, printable(c.Found))
					if !c.OK && c.Fix != "" {
						fmt.Fprintf(a.Stdout, "         → %s\n", c.Fix)
					}
				}
				if missing == 0 {
					fmt.Fprintln(a.Stdout, "\nThis machine can run boxes.")
				} else {
					fmt.Fprintf(a.Stdout, "\n%d of the things boxes need are missing.\n", missing)
				}
			}
			if missing > 0 {
				return exitError{17}
			}
			return nil
		},
	}
	c.Flags().StringVar(&file, "config", "", "YAML file with settings")
	c.Flags().StringVar(&python, "python", "", "interpreter of stockade runtime's workers (default: the first on the PATH)")
	config.AddFlags(c.Flags())
	return c
}
