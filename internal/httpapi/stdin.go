package httpapi

import (
	"net/http"
	"reflect"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func (h *Handler) registerInput(b *builder) {
	op, rt := b.operation(spec{id: "write-input", method: http.MethodPut, path: "/v1/processes/{handle}/stdin", action: authz.ProcessWrite, tag: "processes",
		summary: "Write input",
		description: "Writes the body at an offset of the process's input, and with eof=true the end of the input after it. Answers how far input was " +
			"accepted, which may be less than was sent: send the rest again. What was accepted before is skipped, so repeating is harmless; an offset beyond " +
			"the accepted one is a conflict. `exhausted` (429) says that the child does not read now; `facts.window_bytes` is what fits.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Cancelling, errdefs.Exhausted, errdefs.Indeterminate}})
	op.Parameters = []*huma.Param{pathParam("handle", "The process's handle."),
		intParam("offset", "Offset of the body's first byte in the input.", api.MaxOffset, true),
		boolParam("eof", "The input ends after this body.")}
	op.RequestBody = &huma.RequestBody{Description: "The bytes. May be empty with eof=true.",
		Content: map[string]*huma.MediaType{byteMedia: {Schema: &huma.Schema{Type: "string", Format: "binary"}}}}
	op.Responses["200"] = &huma.Response{Description: "How far the input was accepted.",
		Content: map[string]*huma.MediaType{jsonMedia: {Schema: b.schema(reflect.TypeFor[api.StdinState]())}}}
	b.errorResponse(op, http.StatusRequestEntityTooLarge, "`invalid`")
	rt.media, rt.maxBody = byteMedia, broker.MaxWrite
	rawOp(b, op, rt, func(w http.ResponseWriter, r *http.Request) error {
		q := query{r: r}
		offset, eof := q.number("offset", api.MaxOffset, true), q.flag("eof")
		if q.err != nil {
			return q.err
		}
		data := bodyOf(r)
		if len(data) == 0 && !eof {
			return errdefs.New(errdefs.Invalid, "there is nothing to write").WithNext("send bytes, or eof=true, or both")
		}
		st, err := h.cfg.Broker.Write(r.Context(), principalOf(r.Context()), r.PathValue("handle"), offset, data, eof)
		if err != nil {
			return withWindow(err)
		}
		h.cfg.Metrics.BytesIn(max(0, min(st.Accepted-offset, int64(len(data)))))
		return writeJSON(w, st)
	})
}

// withWindow makes sure that a refusal for want of room names the free window.
func withWindow(err error) error {
	if !errdefs.Is(err, errdefs.Exhausted) {
		return err
	}
	e := asError(err)
	if e.Detail["window_bytes"] == "" {
		e = e.With("window_bytes", strconv.Itoa(0))
	}
	return e
}
