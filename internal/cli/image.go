package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (a *app) imageCommand() *cobra.Command {
	c := &cobra.Command{Use: "image", Short: "Load, list and remove images", Args: cobra.NoArgs}
	var name, target string
	load := &cobra.Command{
		Use: "load PATH", Short: "Load an OCI layout (folder or tar) or a docker-save tar", Args: cobra.ExactArgs(1),
		Long:    "Loads an image into a target. PATH is an OCI image layout as a folder or a tar, a tar of docker save, or - for a tar on standard input.",
		Example: "  docker save debian:12 | stockade image load -\n  stockade image load ./layout --name tools",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			r, err := a.imageTar(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer r.Close()
			done := a.progress("loading " + args[0])
			images, err := cl.LoadImage(cmd.Context(), target, name, r)
			done()
			if err != nil {
				return err
			}
			return a.showImages(images)
		},
	}
	load.Flags().StringVar(&name, "name", "", "a name for the image, besides those in the file")
	ls := &cobra.Command{
		Use: "ls", Short: "List images", Args: cobra.NoArgs, Example: "  stockade image ls",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			images, err := cl.Images(cmd.Context(), target)
			if err != nil {
				return err
			}
			return a.showImages(images)
		},
	}
	rm := &cobra.Command{
		Use: "rm IMAGE…", Short: "Remove images by digest or name", Args: cobra.MinimumNArgs(1), Example: "  stockade image rm tools",
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.connect(operatorKey)
			if err != nil {
				return err
			}
			for _, ref := range args {
				if err := cl.RemoveImage(cmd.Context(), target, ref); err != nil {
					return err
				}
				if err := a.removed(ref); err != nil {
					return err
				}
			}
			return nil
		},
	}
	c.PersistentFlags().StringVar(&target, "target", "", "target that keeps the image (default: the local one)")
	c.AddCommand(load, ls, rm)
	return c
}

// imageTar opens what image load was given as one tar stream.
func (a *app) imageTar(ctx context.Context, path string) (io.ReadCloser, error) {
	if path == "-" {
		return io.NopCloser(a.Stdin), nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.NotFound, "%s cannot be read: %v", path, fsReason(err))
	}
	if !info.IsDir() {
		f, err := os.Open(path)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Denied, "%s cannot be read: %v", path, fsReason(err))
		}
		return f, nil
	}
	if _, err := os.Stat(filepath.Join(path, "oci-layout")); err != nil {
		return nil, errdefs.New(errdefs.Invalid, "%s is not an OCI image layout: it has no file oci-layout", path)
	}
	return tarOf(ctx, strings.TrimRight(path, "/")+"/.", "")
}

func (a *app) showImages(images []api.Image) error {
	return show(a, images, []string{"DIGEST", "NAMES", "SIZE", "AGE", "BOXES"}, func(i api.Image, now time.Time) []string {
		return []string{i.Digest, strings.Join(i.Names, " "), size(i.Size), age(now, i.CreatedAt), fmt.Sprint(i.Boxes)}
	})
}
