package httpapi

import (
	"io"
	"net/http"
	"reflect"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func binaryBody(media, doc string) map[string]*huma.MediaType {
	return map[string]*huma.MediaType{media: {Schema: &huma.Schema{Type: "string", Format: "binary", Description: doc}}}
}

// maxPath is PATH_MAX of Linux (limits.h).
const maxPath = 4096

func (h *Handler) registerFiles(b *builder) {
	path := stringParam("path", "Relative to the box's workspace; empty is the workspace itself.", false)
	target := stringParam("target", "Default: the local box target.", false)
	const filesPath = "/v1/boxes/{id}/files"

	op, rt := b.operation(spec{id: "put-files", method: http.MethodPut, path: filesPath, action: authz.BoxFilesPut, tag: "boxes",
		summary:     "Put files into a box",
		description: "Unpacks a tar stream below path. Nothing is written outside of it, whatever names and links the stream holds. A stream without the end-of-archive marker was cut off and is refused; what came before it stays.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Exhausted, errdefs.Indeterminate}})
	op.Parameters = []*huma.Param{pathParam("id", "The box's id."), path}
	op.RequestBody = &huma.RequestBody{Required: true, Content: binaryBody(tarMedia, "A tar stream, not compressed.")}
	op.Responses["204"] = &huma.Response{Description: "Everything was unpacked."}
	b.errorResponse(op, http.StatusRequestEntityTooLarge, "`invalid`")
	b.errorResponse(op, http.StatusUnsupportedMediaType, "`invalid`")
	rt.media, rt.maxBody, rt.streamed = tarMedia, maxFiles, true
	rawOp(b, op, rt, func(w http.ResponseWriter, r *http.Request) error {
		q := query{r: r}
		dest := q.text("path", maxPath)
		if q.err != nil {
			return q.err
		}
		if err := h.cfg.Boxes.PutFiles(r.Context(), principalOf(r.Context()), r.PathValue("id"), dest, newUpload(w, r)); err != nil {
			return uploadError(err)
		}
		w.WriteHeader(http.StatusNoContent)
		return nil
	})

	op, rt = b.operation(spec{id: "get-files", method: http.MethodGet, path: filesPath, action: authz.BoxFilesGet, tag: "boxes",
		summary:     "Get files out of a box",
		description: "Packs path, a file or a directory, as a tar stream whose names begin with its last element; with a path that ends in /. they are relative to that directory. An answer that breaks off, also after 200, lacks the end-of-archive marker.",
		errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Exhausted}})
	op.Parameters = []*huma.Param{pathParam("id", "The box's id."), path}
	op.Responses["200"] = &huma.Response{Description: "A tar stream.", Content: binaryBody(tarMedia, "A tar stream.")}
	rawOp(b, op, rt, func(w http.ResponseWriter, r *http.Request) error {
		q := query{r: r}
		src := q.text("path", maxPath)
		if q.err != nil {
			return q.err
		}
		return h.cfg.Boxes.GetFiles(r.Context(), principalOf(r.Context()), r.PathValue("id"), src, &download{w: w, media: tarMedia})
	})

	load := func(id, method, summary string) {
		op, rt := b.operation(spec{id: id, method: method, path: "/v1/images", action: authz.ImageLoad, tag: "images",
			summary:     summary,
			description: "A tar of an OCI image layout, or what docker save writes. Every layer is checked against its digest. Loading an image again changes nothing.",
			errors:      []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Exhausted, errdefs.Indeterminate}})
		op.Parameters = []*huma.Param{target, stringParam("name", "A name for the image; default: the names in the archive.", false)}
		op.RequestBody = &huma.RequestBody{Required: true, Content: binaryBody(tarMedia, "A tar stream, not compressed as a whole.")}
		op.Responses["200"] = &huma.Response{Description: "The images that were in the archive.",
			Content: map[string]*huma.MediaType{jsonMedia: {Schema: b.schema(reflect.TypeFor[api.List[api.Image]]())}}}
		b.errorResponse(op, http.StatusRequestEntityTooLarge, "`invalid`")
		b.errorResponse(op, http.StatusUnsupportedMediaType, "`invalid`")
		rt.media, rt.maxBody, rt.streamed = tarMedia, maxFiles, true
		rawOp(b, op, rt, func(w http.ResponseWriter, r *http.Request) error {
			q := query{r: r}
			name, on := q.text("name", 512), q.text("target", 128)
			if q.err != nil {
				return q.err
			}
			images, err := h.cfg.Boxes.LoadImage(r.Context(), principalOf(r.Context()), on, name, newUpload(w, r))
			if err != nil {
				return uploadError(err)
			}
			if images == nil {
				images = []api.Image{}
			}
			return writeJSON(w, api.List[api.Image]{Items: images})
		})
	}
	load("load-image", http.MethodPut, "Load an image")
	load("upload-image", http.MethodPost, "Load an image (for tools that cannot PUT)")
	h.registerImages(b)
}

// upload is the body of a request, which may take as long as it moves.
type upload struct {
	r       io.Reader
	c       *http.ResponseController
	renewed time.Time
}

func newUpload(w http.ResponseWriter, r *http.Request) *upload {
	return &upload{r: r.Body, c: http.NewResponseController(w)}
}

func (u *upload) Read(p []byte) (int, error) {
	if now := time.Now(); now.Sub(u.renewed) > time.Second {
		u.renewed = now
		_ = u.c.SetReadDeadline(now.Add(stallTime))
	}
	n, err := u.r.Read(p)
	if err == io.EOF {
		// Else the deadline would end the request's context while the rest is done.
		_ = u.c.SetReadDeadline(time.Time{})
	}
	return n, err
}

// uploadError names the body's limit where it was hit, whatever the reader of
// the body made of it.
func uploadError(err error) error {
	if m, ok := asMaxBytes(err); ok {
		return tooLarge(m)
	}
	return err
}

// download gives a stream its media type with the first byte, so that an error
// before it is still answered as a problem.
type download struct {
	w     http.ResponseWriter
	media string
}

func (d *download) Write(p []byte) (int, error) {
	if d.media != "" {
		d.w.Header().Set("Content-Type", d.media)
		d.media = ""
	}
	return d.w.Write(p)
}
