package cli

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

func (a *app) boxCommand() *cobra.Command {
	c := &cobra.Command{Use: "box", Short: "List, remove and fill boxes", Args: cobra.NoArgs}
	c.AddCommand(a.boxLsCommand(), a.boxRmCommand(), a.boxCpCommand())
	return c
}

func (a *app) boxes(ctx context.Context, cl *client.Client) ([]api.Box, error) {
	return pages(ctx, func(b api.Box) string { return b.ID }, cl.Boxes)
}

// findBox finds a box by its id, a part of it, or its key.
func (a *app) findBox(ctx context.Context, cl *client.Client, text string) (string, error) {
	if ident.Valid(ident.Box, text) {
		return text, nil
	}
	boxes, err := a.boxes(ctx, cl)
	if err != nil {
		return "", err
	}
	for _, b := range boxes {
		if b.Key == text {
			return b.ID, nil
		}
	}
	return resolve("box", "stockade box ls", text, boxes, func(b api.Box) string { return b.ID })
}

func (a *app) boxLsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List boxes", Args: cobra.NoArgs, Example: "  stockade box ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			boxes, err := a.boxes(cmd.Context(), cl)
			if err != nil {
				return err
			}
			return show(a, boxes, []string{"BOX", "KEY", "TARGET", "STATE", "IMAGE", "LIMITS", "PROCESSES", "AGE", "IDLE"}, func(b api.Box, now time.Time) []string {
				state := string(b.State)
				if b.Fence != "" {
					state = "FENCED"
				}
				image := b.Image
				if image == "" {
					image = "host profile"
				} else if len(image) > 19 {
					image = image[:19]
				}
				return []string{b.ID, b.Key, b.Target, state, image,
					fmt.Sprintf("%.1f cpu, %s, %d pids", float64(b.Limits.CPUMillis)/1000, size(b.Limits.MemoryBytes), b.Limits.Pids),
					fmt.Sprint(b.Processes), age(now, b.CreatedAt), age(now, b.UsedAt)}
			})
		},
	}
}

func (a *app) boxRmCommand() *cobra.Command {
	var all bool
	c := &cobra.Command{
		Use: "rm BOX…", Short: "Remove boxes with their workspace, home and cache",
		Long:    "Removes boxes, named by id, a unique part of it, or reuse key. A box with a live process or an active run is refused.",
		Example: "  stockade box rm dev\n  stockade box rm --all",
		RunE: func(cmd *cobra.Command, args []string) error {
			if all == (len(args) > 0) {
				return errdefs.New(errdefs.Invalid, "name the boxes to remove, or give --all")
			}
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			var ids []string
			if all {
				boxes, err := a.boxes(cmd.Context(), cl)
				if err != nil {
					return err
				}
				for _, b := range boxes {
					ids = append(ids, b.ID)
				}
			}
			for _, arg := range args {
				id, err := a.findBox(cmd.Context(), cl, arg)
				if err != nil {
					return err
				}
				ids = append(ids, id)
			}
			var failed error
			for _, id := range ids {
				done := a.progress("removing " + id)
				err := cl.RemoveBox(cmd.Context(), id)
				done()
				if err != nil {
					a.complain(err)
					failed = exitError{exitCode(err)}
					continue
				}
				if err := a.removed(id); err != nil {
					return err
				}
			}
			return failed
		},
	}
	c.Flags().BoolVar(&all, "all", false, "every box of the workspace")
	return c
}

func (a *app) boxCpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "cp SRC DST", Short: "Copy files into a box or out of it", Args: cobra.ExactArgs(2),
		Long: `Copies a file or a directory. One of the two sides is BOX:PATH, the box named by id, a unique
part of it, or reuse key; PATH lies below /workspace or /home/agent, and a relative one below /workspace.
The other side is a path here, or "-" for a tar stream on standard input or output.

A directory keeps its name below the directory DST, which is made if it is missing; a trailing "/."
on SRC copies its content instead. A file is copied into DST if that is a directory or ends in "/",
else under that name. Links stay links; owners become the box's.`,
		Example: "  stockade box cp ./repo/. dev:/workspace\n  stockade box cp dev:/workspace/report.txt .\n  tar -c src | stockade box cp - dev:",
		RunE: func(cmd *cobra.Command, args []string) error {
			srcBox, srcPath, fromBox := splitBoxPath(args[0])
			dstBox, dstPath, intoBox := splitBoxPath(args[1])
			if fromBox == intoBox {
				return errdefs.New(errdefs.Invalid, "exactly one side must be BOX:PATH").WithNext("see stockade box cp --help")
			}
			cl, err := a.connect(tenantKey)
			if err != nil {
				return err
			}
			if intoBox {
				id, err := a.findBox(cmd.Context(), cl, dstBox)
				if err != nil {
					return err
				}
				defer a.progress("copying into " + dstBox)()
				return a.copyIn(cmd.Context(), cl, args[0], id, dstPath)
			}
			id, err := a.findBox(cmd.Context(), cl, srcBox)
			if err != nil {
				return err
			}
			defer a.progress("copying out of " + srcBox)()
			return a.copyOut(cmd.Context(), cl, id, srcPath, args[1])
		},
	}
}
