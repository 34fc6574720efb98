package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
)

func (a *app) lookCommands() []*cobra.Command {
	return []*cobra.Command{a.psCommand(), a.getCommand(), a.logsCommand(), a.boxCommand(), a.targetCommand(), a.fenceCommand(), a.imageCommand()}
}

func (a *app) psCommand() *cobra.Command {
	var all bool
	var box string
	c := &cobra.Command{
		Use: "ps", Short: "List processes", Args: cobra.NoArgs,
		Long:    "Lists live processes of the workspace, or all that are still recorded.",
		Example: "  stockade ps\n  stockade ps --all --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			if box != "" {
				if box, err = a.findBox(cmd.Context(), cl, box); err != nil {
					return err
				}
			}
			procs, err := a.processes(cmd.Context(), cl, client.ProcessFilter{Live: !all, Box: box})
			if err != nil {
				return err
			}
			return show(a, procs, []string{"HANDLE", "BOX", "COMMAND", "AGE", "STATUS", "OUTPUT"}, func(p api.Process, now time.Time) []string {
				return []string{p.Handle, p.Box, short(strings.Join(p.Argv, " "), 36), age(now, p.CreatedAt), short(status(p), 60), size(p.Log.Next)}
			})
		},
	}
	c.Flags().BoolVarP(&all, "all", "a", false, "also those that ended")
	c.Flags().StringVar(&box, "box", "", "only those in this box, by id or key")
	return c
}

func (a *app) processes(ctx context.Context, cl *client.Client, f client.ProcessFilter) ([]api.Process, error) {
	return pages(ctx, func(p api.Process) string { return p.Handle }, func(ctx context.Context, page client.Page) (client.List[api.Process], error) {
		f.Page = page
		return cl.Processes(ctx, f)
	})
}

// process finds a process by its handle, a part of it, or its request id.
func (a *app) process(ctx context.Context, cl *client.Client, text string) (*client.Process, error) {
	if ident.Valid(ident.Process, text) {
		return cl.Process(text), nil
	}
	procs, err := a.processes(ctx, cl, client.ProcessFilter{})
	if err != nil {
		return nil, err
	}
	for _, p := range procs {
		if p.RequestID == text {
			return cl.Process(p.Handle), nil
		}
	}
	handle, err := resolve("process", "stockade ps --all", text, procs, func(p api.Process) string { return p.Handle })
	if err != nil {
		return nil, err
	}
	return cl.Process(handle), nil
}

// short cuts what is too long for a table.
func short(s string, most int) string {
	if r := []rune(s); len(r) > most {
		s = string(r[:most-1]) + "…"
	}
	return s
}

// status says where a process is in its life, in a few words.
func status(p api.Process) string {
	s := string(p.State)
	switch {
	case p.State == api.StateFenced:
		return "FENCED, see stockade fence show " + p.Fence
	case p.Exit != nil:
		s = outcome(*p.Exit)
		if p.Cleanup == api.CleanupUnproven {
			s += ", not proven gone"
		}
	case p.Log.Blocked:
		s += ", waits for a reader"
	}
	return s
}

// outcome says how a process ended.
func outcome(e api.Exit) string {
	switch e.Kind {
	case api.ExitExited:
		if e.Code != nil {
			return fmt.Sprintf("exited %d", *e.Code)
		}
		return "exited"
	case api.ExitSignalled:
		return "killed by " + e.Signal
	case api.ExitOOM:
		return "killed: out of memory"
	case api.ExitDeadline:
		return "killed at its deadline"
	case api.ExitSpawnFailed:
		return "could not be started: " + e.Detail
	default:
		if e.Detail != "" {
			return "unknown: " + e.Detail
		}
		return "unknown"
	}
}

func (a *app) getCommand() *cobra.Command {
	return &cobra.Command{
		Use: "get PROCESS", Short: "Show everything known of a process", Args: cobra.ExactArgs(1),
		Long:    "Shows a process, named by its handle, a unique part of it, or its request id.",
		Example: "  stockade get proc_4x…\n  stockade get 4xkq --json",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			ref, err := a.process(cmd.Context(), cl, args[0])
			if err != nil {
				return err
			}
			p, err := ref.Get(cmd.Context())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(p)
			}
			return a.showProcess(p)
		},
	}
}

func (a *app) showProcess(p api.Process) error {
	stamp := func(t *time.Time) string {
		if t == nil {
			return "–"
		}
		return t.Local().Format(time.RFC3339)
	}
	rows := [][]string{
		{"handle", p.Handle}, {"status", status(p)}, {"state", string(p.State)}, {"command", strings.Join(p.Argv, " ")},
		{"directory", "/workspace/" + p.Cwd}, {"request id", p.RequestID}, {"workspace", p.Workspace},
		{"run", p.Run}, {"box", p.Box}, {"target", fmt.Sprintf("%s, generation %d", p.Target, p.Generation)},
		{"created", stamp(&p.CreatedAt)}, {"started", stamp(p.StartedAt)}, {"exited", stamp(p.ExitedAt)}, {"closed", stamp(p.ClosedAt)},
		{"stdout", fmt.Sprintf("%d bytes", p.Log.Stdout)}, {"stderr", fmt.Sprintf("%d bytes", p.Log.Stderr)},
		{"stdin", fmt.Sprintf("%d bytes accepted, end written: %v", p.Stdin.Accepted, p.Stdin.EOF)},
		{"cursor", p.Cursor}, {"clean-up", string(p.Cleanup)},
	}
	if p.Log.Failure != "" {
		rows = append(rows, []string{"log failure", p.Log.Failure})
	}
	if p.Reason != "" {
		rows = append(rows, []string{"closed because", p.Reason})
	}
	if r := p.Receipt; r != nil {
		rows = append(rows, []string{"receipt", fmt.Sprintf("%s: tree empty at %s (%s, boot %s)", r.ID, stamp(&r.EmptyAt), strings.ReplaceAll(r.Method, "_", " "), r.BootID)})
	}
	if p.Fence != "" {
		rows = append(rows, []string{"fence", p.Fence})
	}
	return a.pairs(rows)
}

// pairs prints labelled lines.
func (a *app) pairs(rows [][]string) error {
	width := 0
	for _, r := range rows {
		width = max(width, len([]rune(r[0])))
	}
	for _, r := range rows {
		if _, err := fmt.Fprintf(a.Stdout, "%-*s  %s\n", width, r[0], printable(r[1])); err != nil {
			return err
		}
	}
	return nil
}

func (a *app) targetCommand() *cobra.Command {
	c := &cobra.Command{Use: "target", Short: "Look at and switch targets", Args: cobra.NoArgs}
	c.AddCommand(&cobra.Command{
		Use: "ls", Short: "List targets", Args: cobra.NoArgs, Example: "  stockade target ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			targets, err := cl.Targets(cmd.Context())
			if err != nil {
				return err
			}
			return show(a, targets, []string{"NAME", "KIND", "STATE", "GENERATION", "BOXES", "PROCESSES", "FENCES"}, func(t api.Target, _ time.Time) []string {
				state := "up"
				switch {
				case !t.Enabled:
					state = "disabled"
				case !t.Up:
					state = "down: " + t.Problem
				}
				return []string{t.Name, t.Kind, state, fmt.Sprint(t.Generation), fmt.Sprintf("%d/%d", t.Boxes, t.MaxBoxes), fmt.Sprint(t.Processes), fmt.Sprint(t.Fences)}
			})
		},
	})
	for _, sw := range []struct {
		use, short string
		on         bool
	}{
		{"enable", "Let processes start on a target again", true},
		{"disable", "Let nothing new start on a target, and close what runs there", false},
	} {
		c.AddCommand(&cobra.Command{
			Use: sw.use + " NAME", Short: sw.short, Args: cobra.ExactArgs(1), Example: "  stockade target " + sw.use + " local",
			RunE: func(cmd *cobra.Command, args []string) error {
				cl, err := a.connect(operatorKey)
				if err != nil {
					return err
				}
				t, err := cl.UpdateTarget(cmd.Context(), args[0], api.TargetUpdate{Enabled: &sw.on})
				if err != nil {
					return err
				}
				if a.json {
					return a.printJSON(t)
				}
				a.say("target %s: enabled %v, generation %d", t.Name, t.Enabled, t.Generation)
				return nil
			},
		})
	}
	return c
}

func (a *app) fenceCommand() *cobra.Command {
	c := &cobra.Command{Use: "fence", Short: "Look at fences, and clear one with a reason", Args: cobra.NoArgs,
		Long: `A fence stands where it could not be proven that a stopped process is gone. Nothing new
starts in its scope until the proof arrives, or an operator who looked at the evidence
clears it and says what was checked.`}
	var all bool
	ls := &cobra.Command{
		Use: "ls", Short: "List standing fences", Args: cobra.NoArgs, Example: "  stockade fence ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			fences, err := cl.Fences(cmd.Context(), client.FenceFilter{Cleared: all})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(fences)
			}
			now := time.Now()
			var rows [][]string
			for _, f := range fences.Items {
				state := "STANDS"
				if f.ClearedAt != nil {
					state = "cleared by " + f.ClearedBy
				}
				rows = append(rows, []string{f.ID, f.Workspace, f.Target, f.Box, f.Handle, age(now, f.CreatedAt), state, f.Reason})
			}
			return a.table([]string{"FENCE", "WORKSPACE", "TARGET", "BOX", "PROCESS", "AGE", "STATE", "REASON"}, rows)
		},
	}
	ls.Flags().BoolVarP(&all, "all", "a", false, "also those that were cleared")
	show := &cobra.Command{
		Use: "show FENCE", Short: "Show the evidence of a fence", Args: cobra.ExactArgs(1), Example: "  stockade fence show fence_…",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			f, err := cl.Fence(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.showFence(f)
		},
	}
	var reason string
	clear := &cobra.Command{
		Use: "clear FENCE --reason TEXT", Short: "Clear a fence after you checked that nothing runs there", Args: cobra.ExactArgs(1),
		Long:    "Clears a fence. The reason says what you checked, is at least 8 characters long, and is kept in the audit record.",
		Example: `  stockade fence clear fence_… --reason "the machine was reinstalled"`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if reason == "" {
				return errdefs.New(errdefs.Invalid, "a fence is cleared only with a reason").WithNext("look at it with stockade fence show, then give --reason")
			}
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			f, err := cl.ClearFence(cmd.Context(), args[0], api.ClearFenceRequest{Reason: reason})
			if err != nil {
				return err
			}
			return a.showFence(f)
		},
	}
	clear.Flags().StringVar(&reason, "reason", "", "what you checked")
	c.AddCommand(ls, show, clear)
	return c
}

func (a *app) showFence(f api.Fence) error {
	if a.json {
		return a.printJSON(f)
	}
	rows := [][]string{{"fence", f.ID}, {"reason", f.Reason}, {"workspace", f.Workspace}, {"target", f.Target}, {"box", f.Box},
		{"process", f.Handle}, {"raised", f.CreatedAt.Local().Format(time.RFC3339)}}
	for _, k := range sortedKeys(f.Evidence) {
		rows = append(rows, []string{"evidence: " + k, f.Evidence[k]})
	}
	if f.ClearedAt != nil {
		rows = append(rows, []string{"cleared", f.ClearedAt.Local().Format(time.RFC3339) + " by " + f.ClearedBy + ": " + f.ClearReason})
	}
	return a.pairs(rows)
}
