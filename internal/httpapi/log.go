package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/broker"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// maxCursor is longer than every cursor: six characters, a dot, 16 digits.
const maxCursor = 64

const framesDoc = `**Frames.** With ` + "`Accept: " + wire.FramesType + "`" + ` the answer is a sequence of frames instead of JSON. A frame is a header of 32 bytes, then the payload. The header is little-endian: magic ` + "`53 4B`" + `, kind (1 byte), zero (1), payload length (4, at most 1 MiB), cursor position of the first byte (8), offset of the first byte in its stream (8), CRC-32C of the payload (4), CRC-32C of the 28 bytes before (4). Kinds: 1 standard output, 2 standard error, 254 a gap (JSON: ` + "`from`, `to`" + ` are positions), 255 the status that ends the answer (JSON, StreamStatus). A position p is the cursor ` + "`TAIL.p`" + `, TAIL being the last six characters of the handle. Check the CRCs: the server passes payloads on as they come. An answer without a status frame was cut off: read on at the end of the last whole frame.`

func (h *Handler) registerLog(b *builder) {
	op, rt := b.operation(spec{id: "read-output", method: http.MethodGet, path: "/v1/processes/{handle}/log", action: authz.ProcessOutput, tag: "processes",
		summary: "Read output",
		description: "Reads the log from a cursor. Reading consumes nothing: the same cursor answers with the same bytes while they are kept. " +
			"A cursor older than what is kept answers with the exact gap first.\n\n" + framesDoc,
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Exhausted, errdefs.Indeterminate}})
	op.Parameters = []*huma.Param{pathParam("handle", "The process's handle."),
		stringParam("cursor", "Where to read from; empty is the oldest byte that is kept.", false),
		intParam("max_bytes", "Most output bytes in a JSON answer; 0 is 1 MiB. Frames have no such limit.", broker.MaxRead, false),
		intParam("wait_ms", "How long to wait if there is nothing at the cursor yet.", broker.MaxWait.Milliseconds(), false),
		boolParam("ack", "Also acknowledge everything before the cursor."),
		boolParam("follow", "Frames only: go on until the end of the log.")}
	status := b.schema(reflect.TypeFor[api.StreamStatus]())
	op.Responses["200"] = &huma.Response{Description: "Output.", Content: map[string]*huma.MediaType{
		jsonMedia:       {Schema: b.schema(reflect.TypeFor[api.ReadResponse]())},
		wire.FramesType: {Schema: &huma.Schema{Type: "string", Format: "binary", Description: "Frames, ending in a status frame: " + strings.TrimPrefix(status.Ref, "#/components/schemas/") + "."}},
	}}
	rt.reads = true
	rawOp(b, op, rt, h.readLog)
}

func (h *Handler) readLog(w http.ResponseWriter, r *http.Request) error {
	q := query{r: r}
	cursor := q.text("cursor", maxCursor)
	most := q.number("max_bytes", broker.MaxRead, false)
	wait := time.Duration(q.number("wait_ms", broker.MaxWait.Milliseconds(), false)) * time.Millisecond
	ack, follow := q.flag("ack"), q.flag("follow")
	frames := wantsFrames(r)
	if follow && !frames {
		q.fail("follow", "is for frames only: send 'Accept: %s'", wire.FramesType)
	}
	if most > 0 && frames {
		q.fail("max_bytes", "is for JSON answers only")
	}
	if q.err != nil {
		return q.err
	}
	p := principalOf(r.Context())
	if ack && !authz.Allowed(p.Kind, authz.ProcessAck) {
		return authz.Check(p, authz.ProcessAck)
	}
	ctx, stop := h.untilClosing(r.Context())
	defer stop()
	if !frames {
		v, err := h.cfg.Broker.Read(ctx, p, r.PathValue("handle"), ReadQuery{Cursor: cursor, MaxBytes: most, Wait: wait, Ack: ack})
		if err != nil {
			return h.closingError(ctx, r, err)
		}
		if v.Records == nil {
			v.Records = []api.Record{}
		}
		n := 0
		for _, rec := range v.Records {
			n += len(rec.Data)
		}
		h.cfg.Metrics.BytesOut(int64(n))
		return writeJSON(w, v)
	}
	s, err := h.cfg.Stream(ctx, p, r.PathValue("handle"), StreamQuery{Cursor: cursor, Follow: follow, Wait: wait, Ack: ack})
	if err != nil {
		return h.closingError(ctx, r, err)
	}
	defer s.Close()
	return h.sendFrames(ctx, w, r, s)
}

// sendFrames copies batches of frames as they are, one write and one flush each.
func (h *Handler) sendFrames(ctx context.Context, w http.ResponseWriter, r *http.Request, s LogStream) error {
	c := http.NewResponseController(w)
	w.Header().Set("Content-Type", wire.FramesType)
	w.Header().Set("X-Accel-Buffering", "no") // a proxy must not hold frames back
	started := false
	for {
		batch, err := s.Next()
		if len(batch) > 0 {
			if _, werr := w.Write(batch); werr != nil {
				return nil // the reader is gone, or took nothing for stallTime
			}
			if werr := c.Flush(); werr != nil {
				return nil
			}
			started = true
			h.cfg.Metrics.BytesOut(int64(len(batch)))
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && !started:
			return h.closingError(ctx, r, err)
		case err != nil:
			_, _ = w.Write(statusFrame(h.fail(r.Context(), h.closingError(ctx, r, err)).Problem))
			return nil
		case !started && len(batch) == 0:
			// Let a follower of a silent process see the header at once.
			_ = c.Flush()
			started = true
		}
	}
}

// statusFrame is the last frame of a stream that ends early.
func statusFrame(p api.Problem) []byte {
	payload, _ := json.Marshal(api.StreamStatus{Error: &p}) // strings and numbers only
	b := wire.AppendHeader(nil, wire.Header{Kind: wire.KindStatus, Length: len(payload), Sum: wire.Sum(payload)})
	return append(b, payload...)
}

// untilClosing returns a context that also ends when the server shuts down.
func (h *Handler) untilClosing(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(h.closing, cancel)
	return ctx, func() { stop(); cancel() }
}

// closingError is what a caller is told whose wait was ended by a shutdown.
func (h *Handler) closingError(ctx context.Context, r *http.Request, err error) error {
	if h.closing.Err() != nil && ctx.Err() != nil && r.Context().Err() == nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the server is shutting down").WithNext("try again at the same cursor")
	}
	return err
}

// wantsFrames reports whether the caller accepts frames, at any quality but 0.
func wantsFrames(r *http.Request) bool {
	for _, v := range r.Header.Values("Accept") {
		for part := range strings.SplitSeq(v, ",") {
			mt, params, err := mime.ParseMediaType(part)
			if err == nil && mt == wire.FramesType && params["q"] != "0" {
				return true
			}
		}
	}
	return false
}
