package cli

import (
	"archive/tar"
	"bytes"
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

// clean makes a path in a box plain, and keeps what says that the content of a
// directory is meant.
func clean(inside string) string {
	if strings.HasSuffix(inside, "/.") && path.Clean(inside) != "/" {
		return path.Clean(inside) + "/."
	}
	return path.Clean(inside)
}

// copyIn sends src, or a tar stream, into the directory dst of a box; a single file
// under the name dst, where that is no directory.
func (a *app) copyIn(ctx context.Context, cl *client.Client, src, box, dst string) error {
	if src == "-" {
		return cl.PutFiles(ctx, box, path.Clean(dst), a.Stdin)
	}
	info, err := os.Stat(src)
	if err != nil {
		return errdefs.Wrap(err, errdefs.NotFound, "%s cannot be read: %v", src, fsReason(err))
	}
	as := filepath.Base(src)
	if !info.IsDir() && !strings.HasSuffix(dst, "/") && path.Dir(path.Clean(dst)) != "/" { // where no file can be
		file, err := isBoxFile(ctx, cl, box, dst)
		if err != nil {
			return err
		}
		if file {
			dst, as = path.Split(path.Clean(dst))
		}
	}
	r, err := tarOf(ctx, src, as)
	if err != nil {
		return err
	}
	defer r.Close()
	return cl.PutFiles(ctx, box, path.Clean(dst), r)
}

// isBoxFile asks whether a path in a box is a file or free for one, and neither a
// directory nor a link, by beginning to read it.
func isBoxFile(ctx context.Context, cl *client.Client, box, at string) (bool, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := cl.GetFiles(ctx, box, path.Clean(at))
	if client.IsCode(err, client.NotFound) {
		return true, nil // the copy says so itself if the box is not there
	}
	if err != nil {
		return false, err
	}
	defer r.Close()
	h, err := tar.NewReader(r).Next()
	if err != nil {
		return false, errdefs.Wrap(err, errdefs.Unavailable, "what the box has at %s cannot be read: %v", at, err)
	}
	cancel() // the rest is not wanted
	return h.Typeflag == tar.TypeReg, nil
}

// tarOf streams a file or directory as a tar. The entries start with its name, which is
// as for a file, or, where the path ends in "/.", are relative to it.
func tarOf(ctx context.Context, src, as string) (io.ReadCloser, error) {
	info, err := os.Stat(src)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.NotFound, "%s cannot be read: %v", src, fsReason(err))
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return nil, errdefs.New(errdefs.Invalid, "%s is neither a file nor a directory", src)
	}
	content := src == "." || strings.HasSuffix(src, "/.")
	abs, err := filepath.Abs(src)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "%s is not a path", src)
	}
	dir, name := filepath.Dir(abs), filepath.Base(abs)
	if info.IsDir() {
		// Open the directory itself, so that a link as SRC is followed.
		dir, name, as = abs, ".", filepath.Base(abs)
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

// copyOut writes src of a box into the directory dst, or as a tar to standard output; a
// single file under the name dst, where that is no directory.
func (a *app) copyOut(ctx context.Context, cl *client.Client, box, src, dst string) error {
	stream, err := cl.GetFiles(ctx, box, clean(src))
	if err != nil {
		return err
	}
	defer stream.Close()
	r := io.Reader(stream)
	if dst == "-" {
		if _, tty := terminal(a.Stdout); tty {
			return errdefs.New(errdefs.Invalid, "a tar stream does not go to a terminal").WithNext("redirect it, or name a directory")
		}
		_, err := io.Copy(a.Stdout, r)
		return err
	}
	content := strings.HasSuffix(clean(src), "/.")
	if info, err := os.Stat(dst); (err != nil || !info.IsDir()) && !content && !strings.HasSuffix(dst, "/") {
		var single bool
		if r, single, err = renamed(r, filepath.Base(dst)); err != nil {
			return err
		}
		if single {
			dst = filepath.Dir(dst)
		}
	}
	if c, ok := r.(io.Closer); ok {
		defer c.Close()
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

// renamed gives the file that an archive begins with another name. An archive that
// begins with anything else is returned as it is.
func renamed(r io.Reader, name string) (archive io.Reader, single bool, err error) {
	var seen bytes.Buffer
	in := tar.NewReader(io.TeeReader(r, &seen))
	h, err := in.Next()
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, false, errdefs.Wrap(err, errdefs.Unavailable, "the files from the box cannot be read: %v", err)
	}
	if err != nil || h.Typeflag == tar.TypeDir || strings.Contains(h.Name, "/") {
		return io.MultiReader(&seen, r), false, nil
	}
	whole := tartree.NewReader(io.MultiReader(&seen, r))
	pr, pw := io.Pipe()
	go func() {
		out := tar.NewWriter(pw)
		h, err := whole.Next()
		if err == nil {
			h.Name = name
			err = out.WriteHeader(h)
		}
		if err == nil {
			_, err = io.Copy(out, whole)
		}
		if err == nil {
			if _, err = whole.Next(); errors.Is(err, io.EOF) { // whole, else its end is missing
				err = out.Close()
			}
		}
		pw.CloseWithError(err)
	}()
	return pr, true, nil
}
