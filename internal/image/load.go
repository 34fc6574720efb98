package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/tartree"
	"github.com/stockade-run/stockade/internal/wire"
)

// Load reads an archive to its end and unpacks every image in it for this
// machine's architecture: the tar of an OCI image layout, or what docker save
// writes; either may be compressed with gzip or zstd. Names in the archive are kept;
// name, if not "", is one more for an archive with a single image. A name that
// another image has moves. Loading what is there again only adds names.
//
// A damaged, cut-off or falsified archive is invalid, and leaves nothing.
func (s *Store) Load(ctx context.Context, name string, r io.Reader) ([]wire.ImageInfo, error) {
	if name != "" {
		if err := CheckName(name); err != nil {
			return nil, err
		}
	}
	s.loading.Lock()
	defer s.loading.Unlock()
	tmp, err := os.MkdirTemp(s.dir, ".tmp-load-")
	if err != nil {
		return nil, fmt.Errorf("make room for an image: %w", err)
	}
	defer func() {
		if err := os.RemoveAll(tmp); err != nil {
			s.log.Warn("a load's temporary files are still there until the next start", "error", err)
		}
	}()
	found, err := s.receive(ctx, tmp, r)
	if err != nil {
		return nil, explain(err)
	}
	if name != "" {
		if len(found) != 1 {
			return nil, errdefs.New(errdefs.Invalid, "the archive holds %d images, so a name for one of them is ambiguous", len(found)).
				WithNext("load it without a name; the names in it are kept")
		}
		found[0].names = append(found[0].names, name)
	}
	infos := make([]wire.ImageInfo, 0, len(found))
	for i, f := range found {
		info, err := s.unpack(ctx, filepath.Join(tmp, fmt.Sprint("image", i)), f)
		if err != nil {
			return infos, explain(err)
		}
		infos = append(infos, info)
	}
	return infos, nil
}

// candidate is an image of an archive whose documents were checked. Its layers
// are checked as they are unpacked.
type candidate struct {
	digest string
	names  []string
	config config
	layers []opener // uncompressed, lowest first; as many as config has diff ids
}

type opener func() (io.ReadCloser, error)

// receive stores the archive and finds the images in it.
func (s *Store) receive(ctx context.Context, tmp string, r io.Reader) ([]candidate, error) {
	in, stop, err := decompress(&ctxReader{ctx, r})
	if err != nil {
		return nil, err
	}
	defer stop()
	layout := filepath.Join(tmp, "layout")
	if err := os.Mkdir(layout, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(layout)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	seen, err := s.store(tar.NewReader(in), root)
	if err != nil {
		return nil, err
	}
	// Docker 25 and later save both forms in one archive; the layout has digests
	// for everything.
	switch {
	case seen["index.json"] && seen["oci-layout"]:
		return fromLayout(layout)
	case seen["manifest.json"]:
		return fromDocker(layout)
	}
	return nil, errdefs.New(errdefs.Invalid, "the archive is neither an OCI image layout nor the output of docker save").
		WithNext("make one with: docker save IMAGE, or skopeo copy … oci:DIR")
}

// store writes the archive's files below root. Of a blob, name and content must
// agree.
func (s *Store) store(tr *tar.Reader, root *os.Root) (map[string]bool, error) {
	seen := map[string]bool{}
	var total int64
	for entries := 0; ; entries++ {
		h, err := tr.Next()
		if err == io.EOF {
			return seen, nil
		}
		if err != nil {
			return nil, err
		}
		if entries > 16*maxLayers*maxImages {
			return nil, errdefs.New(errdefs.Exhausted, "the image archive has too many entries")
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "/"))
		if !fs.ValidPath(name) || len(name) > 512 {
			return nil, errdefs.New(errdefs.Invalid, "the image archive holds the unusable name %q", clip(h.Name))
		}
		switch h.Typeflag {
		case tar.TypeReg:
		case tar.TypeSymlink:
			// docker save before 25 makes a layer that stands twice a link.
			if err := saveLink(root, name, h.Linkname); err != nil {
				return nil, err
			}
			continue
		case tar.TypeLink, tar.TypeChar, tar.TypeBlock, tar.TypeDir, tar.TypeFifo:
			continue // they have no content, whatever their size says
		}
		// What is thrown away counts as well: it must be decompressed.
		if total += h.Size; total > s.limits.Bytes {
			return nil, errdefs.New(errdefs.Exhausted, "the image archive has more than %d bytes, the limit", s.limits.Bytes)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := save(root, name, tr); err != nil {
			return nil, err
		}
		seen[name] = true
	}
}

func saveLink(root *os.Root, name, target string) error {
	target = path.Join(path.Dir(name), target)
	if !fs.ValidPath(target) || path.Base(name) != "layer.tar" || strings.HasPrefix(name, "blobs/") {
		return errdefs.New(errdefs.Invalid, "the image archive holds a link that leads out of it or stands for something else than a layer")
	}
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	rel, err := filepath.Rel(path.Dir(name), target)
	if err != nil {
		return err
	}
	// Whatever this leads to: layers are opened by os.Root.
	return root.Symlink(rel, name)
}

func save(root *os.Root, name string, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		if errors.Is(err, fs.ErrExist) {
			return errdefs.New(errdefs.Invalid, "the image archive holds %q twice", clip(name))
		}
		return err
	}
	h := sha256.New()
	_, err = io.Copy(io.MultiWriter(f, h), r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if want, ok := strings.CutPrefix(name, "blobs/sha256/"); ok && want != hex.EncodeToString(h.Sum(nil)) {
		return errdefs.New(errdefs.Invalid, "a blob of the image archive does not have the digest in its name: sha256:%s", clip(want)).
			WithNext("the archive was damaged or changed; make it again")
	}
	return nil
}

// unpack makes an image from a candidate, unless it is there.
func (s *Store) unpack(ctx context.Context, tmp string, c candidate) (wire.ImageInfo, error) {
	dir := folder(c.digest)
	if dir == "" {
		return wire.ImageInfo{}, errdefs.New(errdefs.Invalid, "the image has the digest %q; only sha256 is supported", clip(c.digest))
	}
	for _, n := range c.names {
		if err := CheckName(n); err != nil {
			return wire.ImageInfo{}, err
		}
	}
	if _, err := s.Get(c.digest); errdefs.Is(err, errdefs.NotFound) {
		if err := s.make(ctx, tmp, dir, c); err != nil {
			return wire.ImageInfo{}, err
		}
	} else if err != nil {
		return wire.ImageInfo{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.name(c.digest, c.names)
	if err != nil {
		return wire.ImageInfo{}, err
	}
	return s.image(r).ImageInfo, nil
}

func (s *Store) make(ctx context.Context, tmp, dir string, c candidate) error {
	rootfs := filepath.Join(tmp, "rootfs")
	if err := os.MkdirAll(rootfs, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(rootfs)
	if err != nil {
		return err
	}
	defer root.Close()
	limits, size := s.limits, int64(0)
	for i := range c.layers {
		st, err := unpackLayer(ctx, root, c, i, limits)
		if err != nil {
			return err
		}
		size += st.Bytes
		// At least one of each is left: 0 would mean the default.
		limits.Bytes, limits.Entries = max(limits.Bytes-st.Bytes, 1), max(limits.Entries-st.Entries, 1)
	}
	if err := root.Chmod(".", 0o755); err != nil {
		return err
	}
	rec := record{Digest: c.digest, Size: size, Created: time.Now().UTC().Truncate(time.Second), Path: pathOf(c.config)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := os.Chmod(tmp, 0o711); err != nil {
		return err
	}
	if err := s.write(strings.TrimPrefix(tmp, s.dir+"/"), rec); err != nil {
		return err
	}
	// The files must be on disk before the name that says they are complete.
	d, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("write an image to disk: %w", err)
	}
	if err := os.Rename(tmp, filepath.Join(s.dir, dir)); err != nil {
		return fmt.Errorf("put an image in place: %w", err)
	}
	return d.Sync()
}

// perm gives what the image's own user 1000 may read to everybody: inside a box
// the image's files belong to nobody, and the tenant is the only one who sees
// them. Nobody may write them: the root is read-only.
func perm(h *tar.Header) fs.FileMode {
	m := fs.FileMode(h.Mode) & 0o777
	if h.Uid == 1000 {
		m |= m >> 6 & 0o005
	}
	if h.Gid == 1000 {
		m |= m >> 3 & 0o005
	}
	return m
}

func pathOf(cfg config) string {
	for _, kv := range cfg.Config.Env {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok && len(v) <= 4096 && !strings.ContainsRune(v, 0) {
			return v
		}
	}
	return ""
}

// unpackLayer puts a layer over those below it, and compares what it read with
// the diff id that the configuration, whose own digest is known, states.
func unpackLayer(ctx context.Context, root *os.Root, c candidate, i int, limits tartree.Limits) (tartree.Stats, error) {
	rc, err := c.layers[i]()
	if err != nil {
		return tartree.Stats{}, err
	}
	defer rc.Close()
	h := sha256.New()
	// A tar archive is larger than its files: headers, padding, an empty end. What
	// goes on beyond that is a bomb.
	most := limits.Bytes + int64(limits.Entries)*4096 + 1<<20
	r := &io.LimitedReader{R: io.TeeReader(&ctxReader{ctx, rc}, h), N: most}
	st, err := tartree.Extract(ctx, root, r, tartree.ExtractOptions{Limits: limits, Image: true, Perm: perm})
	if err != nil {
		return st, err
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		return st, err
	}
	if r.N == 0 {
		return st, errdefs.New(errdefs.Exhausted, "layer %d of the image has more than %d bytes unpacked, the limit", i+1, most)
	}
	if want := c.config.RootFS.DiffIDs[i]; want != "sha256:"+hex.EncodeToString(h.Sum(nil)) {
		return st, errdefs.New(errdefs.Invalid, "layer %d of the image does not have the digest its configuration states (%s)", i+1, clip(want)).
			WithNext("the archive was damaged or changed; make it again")
	}
	return st, nil
}

// explain makes errors of foreign decoders invalid: the archive is to blame.
// What the file system or the caller did keeps its meaning.
func explain(err error) error {
	if _, ok := errors.AsType[*errdefs.Error](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errdefs.Wrap(err, errdefs.Exhausted, "no space is left for the image").WithNext("free space or remove images")
	}
	if _, ok := errors.AsType[unix.Errno](err); ok && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("unpack an image: %w", err)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return errdefs.Wrap(err, errdefs.Invalid, "the image archive is cut off")
	}
	return errdefs.Wrap(err, errdefs.Invalid, "the image archive is not valid: %s", clip(err.Error()))
}

// ctxReader makes reading end when ctx does.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
