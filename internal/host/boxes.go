package host

import (
	"context"
	"net/http"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

const tarType = "application/x-tar"

func (s *server) putBox(ctx context.Context, r *request) error {
	var spec wire.BoxSpec
	if err := r.decode(maxSmallBody, &spec); err != nil {
		return err
	}
	if spec.ID != r.PathValue("box") {
		return errdefs.New(errdefs.Invalid, "the spec is of another box than the path says")
	}
	var info wire.BoxInfo
	err := s.gate.commit(r.generation, func() (err error) {
		// Half a box is worse than a late one: the caller leaving changes nothing.
		info, err = s.reg.boxes.Put(context.WithoutCancel(ctx), spec)
		return limitError(err, "make the box")
	})
	if err != nil {
		return err
	}
	return r.answer(info)
}

func (s *server) getBox(ctx context.Context, r *request) error {
	info, err := s.reg.boxes.Get(ctx, r.PathValue("box"))
	if err != nil {
		return err
	}
	return r.answer(info)
}

func (s *server) listBoxes(ctx context.Context, r *request) error {
	infos, err := s.reg.boxes.List(ctx)
	if err != nil {
		return err
	}
	if infos == nil {
		infos = []wire.BoxInfo{}
	}
	return r.answer(infos)
}

func (s *server) removeBox(ctx context.Context, r *request) error {
	id := r.PathValue("box")
	err := s.gate.commit(r.generation, func() error { return s.reg.boxes.Retire(id) })
	if err == nil {
		// What was begun is finished whoever asked for it, and not in the commit: a new
		// server would wait for all the files of a tenant.
		err = s.reg.boxes.Remove(context.WithoutCancel(ctx), id)
	}
	if err != nil {
		return limitError(err, "remove the box")
	}
	return r.done()
}

func (s *server) putFiles(ctx context.Context, r *request) error {
	if err := s.reg.boxes.PutFiles(ctx, r.PathValue("box"), r.URL.Query().Get("path"), slowBody{r}); err != nil {
		return limitError(err, "take the files")
	}
	return r.done()
}

func (s *server) getFiles(ctx context.Context, r *request) error {
	out := &slowAnswer{r: r, kind: tarType}
	err := s.reg.boxes.GetFiles(ctx, r.PathValue("box"), r.URL.Query().Get("path"), out)
	if err != nil && out.begun {
		s.log.Warn("files were not read to the end", "box", r.PathValue("box"), "error", err)
		return http.ErrAbortHandler
	}
	return limitError(err, "read the files")
}

func (s *server) loadImage(ctx context.Context, r *request) error {
	infos, err := s.reg.boxes.LoadImage(ctx, r.URL.Query().Get("name"), slowBody{r})
	if err != nil {
		return limitError(err, "load the image")
	}
	return r.answer(infos)
}

func (s *server) listImages(ctx context.Context, r *request) error {
	infos, err := s.reg.boxes.Images(ctx)
	if err != nil {
		return err
	}
	if infos == nil {
		infos = []wire.ImageInfo{}
	}
	return r.answer(infos)
}

func (s *server) removeImage(ctx context.Context, r *request) error {
	var clean func()
	err := s.gate.commit(r.generation, func() (err error) {
		clean, err = s.reg.boxes.RemoveImage(context.WithoutCancel(ctx), r.PathValue("digest"))
		return err
	})
	if err != nil {
		return limitError(err, "remove the image")
	}
	clean() // not in the commit, as for a box
	return r.done()
}
