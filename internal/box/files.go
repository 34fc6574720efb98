package box

import (
	"context"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// at returns a ready box and its host, and keeps the box from being found idle
// until done is called, once.
func (s *Service) at(ctx context.Context, p authz.Principal, action authz.Action, id, where string) (b store.Box, h Host, done func(), err error) {
	notReady := func() error {
		return errdefs.New(errdefs.Conflict, "the box %s is %s", b.ID, b.State).WithNext("acquire it first")
	}
	if b, err = s.find(ctx, p, action, id); err != nil {
		return b, nil, nil, err
	}
	if err := checkPath(where); err != nil {
		return b, nil, nil, err
	}
	if b.State != api.BoxReady {
		return b, nil, nil, notReady()
	}
	if h, err = s.cfg.Hosts(b.Target); err != nil {
		return b, nil, nil, err
	}
	free, err := s.take(ctx, b.ID)
	if err != nil {
		return b, nil, nil, err
	}
	defer free()
	if b, err = s.touched(ctx, b.ID); err != nil {
		return b, nil, nil, err
	}
	if b.State != api.BoxReady { // while its turn was waited for
		return b, nil, nil, notReady()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.using[b.ID]++
	return b, h, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hostTime)
		defer cancel()
		if err := s.cfg.Store.TouchBox(ctx, b.ID, now()); err != nil && !errdefs.Is(err, errdefs.NotFound) {
			s.complain(ctx, "the use of a box was not recorded", err, "box", b.ID)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.using[b.ID]--; s.using[b.ID] == 0 {
			delete(s.using, b.ID)
		}
	}, nil
}

// workspaceDir is where the workspace is, as seen inside a box.
const workspaceDir = "/workspace"

// insidePath makes of a checked path what a host wants: absolute, as seen inside
// the box. A relative one is below the workspace.
func insidePath(p string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	return path.Join(workspaceDir, p)
}

// checkPath refuses what is wrong by its text alone. Which volumes there are, and
// where links lead, is the host's business.
func checkPath(p string) error {
	refuse := func(why string) error {
		return errdefs.New(errdefs.Invalid, "path %s", why).WithNext("give a path relative to the workspace, or one below /workspace or /home/agent")
	}
	switch {
	case len(p) > 4096:
		return refuse("has more than 4096 bytes")
	case strings.IndexByte(p, 0) >= 0:
		return refuse("holds a NUL byte")
	case slices.Contains(strings.Split(p, "/"), ".."):
		return refuse("holds ..")
	}
	return nil
}

// PutFiles unpacks a tar below at, a path relative to the box's workspace. After an error some
// of the files may have been written. More than Limits.Files bytes are refused
// (exhausted).
func (s *Service) PutFiles(ctx context.Context, p authz.Principal, id, at string, tar io.Reader) error {
	b, h, done, err := s.at(ctx, p, authz.BoxFilesPut, id, at)
	if err != nil {
		return err
	}
	defer done()
	in := &bounded{r: tar, left: s.cfg.Limits.Files, limit: s.cfg.Limits.Files, what: "the archive of files"}
	err = h.PutFiles(ctx, b.ID, insidePath(at), in)
	if in.err != nil {
		return in.err
	}
	return err
}

// GetFiles writes the file or directory at, named as for PutFiles, to w as a
// tar whose names begin with its last element, or with "/." at its end with what
// is in it. A whole archive ends with tar's end marker.
func (s *Service) GetFiles(ctx context.Context, p authz.Principal, id, at string, w io.Writer) error {
	b, h, done, err := s.at(ctx, p, authz.BoxFilesGet, id, at)
	if err != nil {
		return err
	}
	defer done()
	out := &boundedWriter{w: w, left: s.cfg.Limits.Files, limit: s.cfg.Limits.Files}
	inside := insidePath(at)
	if strings.HasSuffix(at, "/.") { // the content of a directory, as the host has it
		inside += "/."
	}
	err = h.GetFiles(ctx, b.ID, inside, out)
	if out.err != nil {
		return out.err
	}
	return err
}

// LoadImage loads an image from a tar, in OCI layout or docker-save form, onto a
// target ("" is the default). name is given to an image that brings none.
func (s *Service) LoadImage(ctx context.Context, p authz.Principal, target, name string, tar io.Reader) ([]api.Image, error) {
	h, err := s.on(p, authz.ImageLoad, target)
	if err != nil {
		return nil, err
	}
	if len(name) > 255 || strings.ContainsAny(name, "\x00\n\r\t ") {
		return nil, errdefs.New(errdefs.Invalid, "the name of an image has at most 255 characters and no space")
	}
	in := &bounded{r: tar, left: s.cfg.Limits.Image, limit: s.cfg.Limits.Image, what: "the image archive"}
	loaded, err := h.LoadImage(ctx, name, in)
	if in.err != nil {
		return nil, in.err
	}
	if err != nil {
		return nil, err
	}
	var out []api.Image
	for _, i := range loaded {
		out = append(out, imageOf(i, nil))
	}
	return out, s.audit(ctx, p.String(), "", authz.ImageLoad, s.target(target), map[string]string{"name": name})
}

// Images lists the images of a target ("" is the default).
func (s *Service) Images(ctx context.Context, p authz.Principal, target string) (api.List[api.Image], error) {
	out := api.List[api.Image]{Items: []api.Image{}}
	h, err := s.on(p, authz.ImageRead, target)
	if err != nil {
		return out, err
	}
	images, err := h.Images(ctx)
	if err != nil {
		return out, err
	}
	used := map[string]int{}
	for page := (store.Page{Limit: 1000}); ; {
		boxes, err := s.cfg.Store.Boxes(ctx, p.Scope(), page)
		if err != nil {
			return out, err
		}
		for _, b := range boxes {
			if b.Target == s.target(target) {
				used[b.Image]++
			}
		}
		if len(boxes) < page.Limit {
			break
		}
		page.After = boxes[len(boxes)-1].ID
	}
	for _, i := range images {
		out.Items = append(out.Items, imageOf(i, used))
	}
	return out, nil
}

// RemoveImage removes an image by digest or name; conflict while a box uses it.
func (s *Service) RemoveImage(ctx context.Context, p authz.Principal, target, ref string) error {
	h, err := s.on(p, authz.ImageRemove, target)
	if err != nil {
		return err
	}
	if ref == "" {
		return errdefs.New(errdefs.Invalid, "no image is named")
	}
	digest, err := resolve(ctx, h, ref)
	if err != nil {
		return err
	}
	if err := h.RemoveImage(ctx, digest); err != nil {
		return err
	}
	return s.audit(ctx, p.String(), "", authz.ImageRemove, s.target(target), map[string]string{"digest": digest})
}

func (s *Service) target(name string) string {
	if name == "" {
		return s.cfg.Target
	}
	return name
}

func (s *Service) on(p authz.Principal, action authz.Action, target string) (Host, error) {
	if err := authz.Check(p, action); err != nil {
		return nil, err
	}
	return s.cfg.Hosts(s.target(target))
}

func imageOf(i wire.ImageInfo, used map[string]int) api.Image {
	return api.Image{Digest: i.Digest, Names: i.Names, Size: i.Size, CreatedAt: i.Created, Boxes: used[i.Digest]}
}

// bounded reads at most limit bytes; more is an error, which it keeps.
type bounded struct {
	r           io.Reader
	left, limit int64
	what        string
	err         error
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left == 0 {
		// Only a further byte is too much: the end may be right here.
		var one [1]byte
		n, err := b.r.Read(one[:])
		if n == 0 {
			return 0, err
		}
		b.err = tooMuch(b.what, b.limit)
		return 0, b.err
	}
	if int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.r.Read(p)
	b.left -= int64(n)
	return n, err
}

type boundedWriter struct {
	w           io.Writer
	left, limit int64
	err         error
}

func (b *boundedWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > b.left {
		b.err = tooMuch("the archive of files", b.limit)
		return 0, b.err
	}
	n, err := b.w.Write(p)
	b.left -= int64(n)
	return n, err
}

func tooMuch(what string, limit int64) error {
	e := errdefs.New(errdefs.Exhausted, "%s has more than %d bytes, which is the limit", what, limit)
	return e.WithNext("move it in parts")
}
