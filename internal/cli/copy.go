package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/tartree"
)

// splitBoxPath tells BOX:PATH from a path of this machine, as docker cp does: a
// colon before any slash makes it a box's.
func splitBoxPath(arg string) (box, inside string, ok bool) {
	box, inside, ok = strings.Cut(arg, ":")
	if !ok || box == "" || strings.ContainsAny(box, "/.") {
		return "", arg, false
	}
	if !path.IsAbs(inside) {
		inside = "/workspace/" + inside
	}
	return box, inside, true
}

// copyIn sends src, or a tar stream, into the directory dst of a box.
func (a *app) copyIn(ctx context.Context, cl *client.Client, src, box, dst string) error {
	if src == "-" {
		return cl.PutFiles(ctx, box, path.Clean(dst), a.Stdin)
	}
	r, err := tarOf(ctx, src)
	if err != nil {
		return err
	}
	defer r.Close()
	return cl.PutFiles(ctx, box, path.Clean(dst), r)
}

// tarOf streams a file or directory as a tar. The entries start with its name,
// or, where the path ends in "/.", are relative to it.
func tarOf(ctx context.Context, src string) (io.ReadCloser, error) {
	info, err := os.Stat(src)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.NotFound, "%s cannot be read: %v", src, fsReason(err))
	}
	content := src == "." || strings.HasSuffix(src, "/.")
	abs, err := filepath.Abs(src)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "%s is not a path", src)
	}
	dir, name, as := filepath.Dir(abs), filepath.Base(abs), filepath.Base(abs)
	if info.IsDir() {
		// Open the directory itself, so that a link as SRC is followed.
		dir, name = abs, "."
		if content {
			as = ""
		}
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Denied, "%s cannot be opened: %v", dir, fsReason(err))
	}
	r, w := io.Pipe()
	go func() {
		defer root.Close()
		w.CloseWithError(tartree.Write(ctx, root, name, w, tartree.WriteOptions{As: as, UID: 1000, GID: 1000}))
	}()
	return r, nil
}

// copyOut writes src of a box into the directory dst, or as a tar to standard output.
func (a *app) copyOut(ctx context.Context, cl *client.Client, box, src, dst string) error {
	r, err := cl.GetFiles(ctx, box, path.Clean(src))
	if err != nil {
		return err
	}
	defer r.Close()
	if dst == "-" {
		if _, tty := terminal(a.Stdout); tty {
			return errdefs.New(errdefs.Invalid, "a tar stream does not go to a terminal").WithNext("redirect it, or name a directory")
		}
		_, err := io.Copy(a.Stdout, r)
		return err
	}
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return errdefs.Wrap(err, errdefs.Denied, "%s cannot be made: %v", dst, fsReason(err))
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Denied, "%s cannot be opened: %v", dst, fsReason(err))
	}
	defer root.Close()
	_, err = tartree.Extract(ctx, root, r, tartree.ExtractOptions{UID: os.Geteuid(), GID: os.Getegid()})
	if errors.Is(err, context.Canceled) {
		return errdefs.Wrap(err, errdefs.Indeterminate, "the copy was interrupted; what arrived before stays in %s", dst)
	}
	return err
}
