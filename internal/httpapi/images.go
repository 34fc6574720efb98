package httpapi

import (
	"context"
	"errors"
	"net/http"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (h *Handler) registerImages(b *builder) {
	type TargetIn struct {
		Target string `query:"target" maxLength:"128" doc:"Default: the local box target."`
	}
	jsonOp(b, spec{id: "list-images", method: http.MethodGet, path: "/v1/images", action: authz.ImageRead, tag: "images",
		summary: "List images", description: "The images a target has.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *TargetIn) (*answer[api.List[api.Image]], error) {
			return replyList(h.cfg.Boxes.Images(ctx, p, in.Target))
		})
	type removeIn struct {
		TargetIn
		Ref string `query:"ref" required:"true" minLength:"1" maxLength:"512" doc:"The image's digest, or one of its names."`
	}
	jsonOp(b, spec{id: "remove-image", method: http.MethodDelete, path: "/v1/images", action: authz.ImageRemove, tag: "images",
		summary: "Remove an image", description: "A conflict while a box uses it.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Indeterminate}},
		func(ctx context.Context, p authz.Principal, in *removeIn) (*nothing, error) {
			return nil, h.cfg.Boxes.RemoveImage(ctx, p, in.Target, in.Ref)
		})
}

func asMaxBytes(err error) (int64, bool) {
	m, ok := errors.AsType[*http.MaxBytesError](err)
	if !ok {
		return 0, false
	}
	return m.Limit, true
}
