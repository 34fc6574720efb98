package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/server"
)

func (a *app) operateCommands() []*cobra.Command {
	return []*cobra.Command{a.serveCommand(), a.runtimeCommand(), a.relayCommand(), a.artifactCommand(), a.doctorCommand(), a.workspaceCommand(), a.keyCommand(), a.auditCommand(), a.benchCommand(), a.demoCommand()}
}

func (a *app) serveCommand() *cobra.Command {
	var file string
	c := &cobra.Command{
		Use: "serve", Short: "Run the server", Args: cobra.NoArgs,
		Long: `Runs the server: ledger, HTTP API, broker. On first start it makes the state directory, an
admin key (admin.key) and a key of the workspace "default" (default.key), both readable by
their owner only. It starts the host program of this machine and finds it, and everything that
runs, again after any restart. SIGTERM or Ctrl-C stops it; processes in boxes go on.

Every setting is also an environment variable and a key of the --config file: see
docs/configuration.md.`,
		Example: "  stockade serve\n  stockade serve --state-dir ./state --listen 127.0.0.1:8000",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := config.Load(file, cmd.Flags())
			if err != nil {
				return err
			}
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			log := a.logger(cfg.Log.Level, cfg.Log.Format)
			for _, name := range config.Strays(os.Environ()) {
				log.Warn("an environment variable begins like a setting and is none; docs/configuration.md lists them", "name", name)
			}
			return server.Run(ctx, server.Options{Config: cfg, Version: a.Version, Logger: log})
		},
	}
	c.Flags().StringVar(&file, "config", "", "YAML file with settings")
	config.AddFlags(c.Flags())
	return c
}

func (a *app) workspaceCommand() *cobra.Command {
	c := &cobra.Command{Use: "workspace", Short: "Create and list workspaces (tenants)", Args: cobra.NoArgs}
	c.AddCommand(&cobra.Command{
		Use: "create NAME", Short: "Create a workspace", Args: cobra.ExactArgs(1), Example: "  stockade workspace create acme",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			w, err := cl.CreateWorkspace(cmd.Context(), api.WorkspaceRequest{Name: args[0]})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(w)
			}
			_, err = fmt.Fprintln(a.Stdout, w.Name)
			return err
		},
	}, &cobra.Command{
		Use: "ls", Short: "List workspaces", Args: cobra.NoArgs, Example: "  stockade workspace ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			all, err := pages(cmd.Context(), func(w api.Workspace) string { return w.Name }, cl.Workspaces)
			if err != nil {
				return err
			}
			return show(a, all, []string{"WORKSPACE", "AGE"}, func(w api.Workspace, now time.Time) []string {
				return []string{w.Name, age(now, w.CreatedAt)}
			})
		},
	})
	return c
}

func (a *app) keyCommand() *cobra.Command {
	c := &cobra.Command{Use: "key", Short: "Create, list and revoke keys", Args: cobra.NoArgs}
	var name string
	create := &cobra.Command{
		Use: "create WORKSPACE", Short: "Create a key of a workspace; it is shown once", Args: cobra.ExactArgs(1), Example: "  stockade key create acme --name ci > acme.key",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			k, err := cl.CreateKey(cmd.Context(), args[0], api.KeyRequest{Name: name})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(k)
			}
			a.say("key %s of workspace %s; it is not kept, and not shown again:", k.Key.ID, args[0])
			_, err = fmt.Fprintln(a.Stdout, k.Secret)
			return err
		},
	}
	create.Flags().StringVar(&name, "name", "", "what the key is for")
	ls := &cobra.Command{
		Use: "ls WORKSPACE", Short: "List keys of a workspace", Args: cobra.ExactArgs(1), Example: "  stockade key ls acme",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			all, err := pages(cmd.Context(), func(k api.Key) string { return k.ID }, func(ctx context.Context, p client.Page) (client.List[api.Key], error) {
				return cl.Keys(ctx, args[0], p)
			})
			if err != nil {
				return err
			}
			return show(a, all, []string{"KEY", "NAME", "AGE", "STATE"}, func(k api.Key, now time.Time) []string {
				state := "valid"
				if k.RevokedAt != nil {
					state = "revoked"
				}
				return []string{k.ID, k.Name, age(now, k.CreatedAt), state}
			})
		},
	}
	revoke := &cobra.Command{
		Use: "revoke KEY", Short: "Revoke a key by its id", Args: cobra.ExactArgs(1), Example: "  stockade key revoke key_…",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			k, err := cl.RevokeKey(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(k)
			}
			_, err = fmt.Fprintln(a.Stdout, k.ID)
			return err
		},
	}
	var state string
	reset := &cobra.Command{
		Use: "reset-admin", Short: "Make a new admin.key when the old one was lost (server stopped)", Args: cobra.NoArgs,
		Long:    "Makes a new admin key in the state directory and revokes the old ones. The server must not be running: whoever can write its state directory is its operator.",
		Example: "  stockade key reset-admin",
		RunE: func(cmd *cobra.Command, _ []string) error {
			k, err := server.ResetAdmin(cmd.Context(), state)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(k)
			}
			a.say("admin.key holds the new key %s; older admin keys are revoked", k.ID)
			return nil
		},
	}
	reset.Flags().StringVar(&state, "state-dir", config.DefaultStateDir(), "state directory of the server")
	c.AddCommand(create, ls, revoke, reset)
	return c
}

func (a *app) auditCommand() *cobra.Command {
	var workspace string
	var limit int
	c := &cobra.Command{
		Use: "audit", Short: "Show the audit record, newest first", Args: cobra.NoArgs, Example: "  stockade audit --limit 20",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			l, err := cl.Audit(cmd.Context(), workspace, client.Page{Limit: limit})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(l)
			}
			var rows [][]string
			for _, e := range l.Items {
				var detail []string
				for _, k := range sortedKeys(e.Detail) {
					detail = append(detail, k+"="+e.Detail[k])
				}
				rows = append(rows, []string{e.At.Local().Format(time.DateTime), e.Actor, e.Workspace, e.Action, e.Object, strings.Join(detail, " ")})
			}
			return a.table([]string{"TIME", "ACTOR", "WORKSPACE", "ACTION", "OBJECT", "DETAIL"}, rows)
		},
	}
	c.Flags().StringVar(&workspace, "workspace", "", "only this workspace")
	c.Flags().IntVar(&limit, "limit", 50, "most events, up to 1000")
	return c
}
