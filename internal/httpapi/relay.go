package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/dispatch"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Relay is what the API needs of the relay (package dispatch).
type Relay interface {
	// MaxPayload is the largest payload in bytes.
	MaxPayload() int64
	Run(ctx context.Context, p authz.Principal, req api.RelayJobRequest) (RelayJob, error)
	Cancel(ctx context.Context, p authz.Principal, id string) (api.RelayOutcome, error)
	Daemons(ctx context.Context, p authz.Principal) (api.List[api.RelayDaemon], error)
	Jobs(ctx context.Context, p authz.Principal) (api.List[api.RelayJob], error)
	Fences(ctx context.Context, p authz.Principal) (api.List[api.RelayFence], error)
	Fence(ctx context.Context, p authz.Principal, id string) (api.RelayFence, error)
	ClearFence(ctx context.Context, p authz.Principal, id string, req api.ClearRelayFenceRequest) (api.RelayFence, error)
}

// RelayJob is what the API needs of *dispatch.Job.
type RelayJob interface {
	Info() api.RelayJob
	NextBatch(ctx context.Context) ([]json.RawMessage, error)
	Leave(ctx context.Context, cause string) (api.RelayOutcome, error)
}

const (
	linesMedia = "application/x-ndjson"
	sseMedia   = "text/event-stream"
	// relayFields is what the fields around a payload may take.
	relayFields = 16 << 10
	// aliveEvery keeps proxies from taking a silent job for a dead connection.
	aliveEvery = 15 * time.Second
	// batchBytes is how much of a burst of events is written at once.
	batchBytes = 256 << 10
)

const relayDoc = "Hands a payload to a daemon and answers with what it says, line by line, until the job is settled. " +
	"The lines are RelayLine objects: `started`, then `event` for each event, last `outcome`. With `Accept: " + sseMedia + "` each line is a server-sent " +
	"event of that name; else they are JSON lines (`" + linesMedia + "`). " +
	"Closing the connection cancels the job. Leaving is settling: the job's tools are revoked, the daemon is told, and either it acknowledges that the " +
	"job's processes are gone or a fence stands; `outcome` says which. A slow reader slows only its own job. Not safe to repeat: each call is a job."

// registerRelay registers the relay's operations, also on a server without a
// relay: which routes there are does not depend on configuration.
func (h *Handler) registerRelay(b *builder) {
	relay := h.cfg.Relay
	if relay == nil {
		relay = noRelay{}
	}
	op, rt := b.operation(spec{id: "run-relay-job", method: http.MethodPost, path: "/v1/relay/jobs", action: authz.RelayJobRun, tag: "relay",
		summary: "Run a job on a daemon", description: relayDoc,
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Fenced, errdefs.Cancelling, errdefs.Exhausted}})
	rt.media, rt.maxBody, rt.streamed = jsonMedia, relay.MaxPayload()+relayFields, true
	request := b.schema(reflect.TypeFor[api.RelayJobRequest]())
	op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{jsonMedia: {Schema: request}}}
	b.errorResponse(op, http.StatusRequestEntityTooLarge, "`invalid`")
	b.errorResponse(op, http.StatusUnsupportedMediaType, "`invalid`")
	line := b.schema(reflect.TypeFor[api.RelayLine]())
	op.Responses["200"] = &huma.Response{Description: "The job was sent. Lines follow, the last of them an outcome.", Content: map[string]*huma.MediaType{
		linesMedia: {Schema: line}, sseMedia: {Schema: &huma.Schema{Type: "string", Description: "Events named after the line's type, whose data is a RelayLine."}},
	}}
	rawOp(b, op, rt, func(w http.ResponseWriter, r *http.Request) error { return h.runRelayJob(w, r, relay) })

	jsonOp(b, spec{id: "list-relay-jobs", method: http.MethodGet, path: "/v1/relay/jobs", action: authz.RelayJobRead, tag: "relay",
		summary: "List jobs", description: "The jobs that are not settled, oldest first.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, _ *nothing) (*answer[api.List[api.RelayJob]], error) {
			return replyList(relay.Jobs(ctx, p))
		})
	jsonOp(b, spec{id: "cancel-relay-job", method: http.MethodDelete, path: "/v1/relay/jobs/{id}", action: authz.RelayJobCancel, tag: "relay",
		summary: "Cancel a job",
		description: "Answers when the daemon acknowledged that the job's processes are gone, or a fence stands; the outcome says which. " +
			"The cancel goes on if the caller goes away. Repeated while the cancel is under way it answers the same; a settled job is not found.",
		errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *IDIn) (*answer[api.RelayOutcome], error) {
			return reply(relay.Cancel(ctx, p, in.ID))
		})
	jsonOp(b, spec{id: "list-relay-daemons", method: http.MethodGet, path: "/v1/relay/daemons", action: authz.RelayDaemonRead, tag: "relay",
		summary: "List daemons", description: "The daemons that are connected, by id.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, _ *nothing) (*answer[api.List[api.RelayDaemon]], error) {
			return replyList(relay.Daemons(ctx, p))
		})
	jsonOp(b, spec{id: "list-relay-fences", method: http.MethodGet, path: "/v1/relay/fences", action: authz.RelayFenceRead, tag: "relay",
		summary: "List the relay's fences", description: "Daemons on whose machines something may still be running, with the evidence, oldest first.",
		errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, _ *nothing) (*answer[api.List[api.RelayFence]], error) {
			return replyList(relay.Fences(ctx, p))
		})
	type DaemonIn struct {
		Daemon string `path:"daemon" maxLength:"2048" doc:"The daemon's id, or the fence's key."`
	}
	jsonOp(b, spec{id: "get-relay-fence", method: http.MethodGet, path: "/v1/relay/fences/{daemon}", action: authz.RelayFenceRead, tag: "relay",
		summary: "Get a fence of the relay", description: "One fence with its evidence.", errors: []errdefs.Code{errdefs.NotFound}},
		func(ctx context.Context, p authz.Principal, in *DaemonIn) (*answer[api.RelayFence], error) {
			return reply(relay.Fence(ctx, p, in.Daemon))
		})
	type clearIn struct {
		DaemonIn
		Body api.ClearRelayFenceRequest
	}
	jsonOp(b, spec{id: "clear-relay-fence", method: http.MethodPost, path: "/v1/relay/fences/{daemon}/clear", action: authz.RelayFenceClear, tag: "relay",
		summary: "Clear a fence of the relay",
		description: "An operator's statement, kept in the audit record, that nothing runs on the daemon's machine any more. Look at the evidence first: " +
			"the request names the fence that was seen, and one that stands since is a `conflict`.",
		errors: []errdefs.Code{errdefs.NotFound, errdefs.Conflict, errdefs.Cancelling}},
		func(ctx context.Context, p authz.Principal, in *clearIn) (*answer[api.RelayFence], error) {
			return reply(relay.ClearFence(ctx, p, in.Daemon, in.Body))
		})
}

// noRelay is the relay of a server that has none.
type noRelay struct{}

func (noRelay) MaxPayload() int64 { return maxJSON }
func (noRelay) Run(context.Context, authz.Principal, api.RelayJobRequest) (RelayJob, error) {
	return nil, dispatch.ErrNone()
}
func (noRelay) Cancel(context.Context, authz.Principal, string) (api.RelayOutcome, error) {
	return api.RelayOutcome{}, dispatch.ErrNone()
}
func (noRelay) Daemons(context.Context, authz.Principal) (api.List[api.RelayDaemon], error) {
	return api.List[api.RelayDaemon]{}, dispatch.ErrNone()
}
func (noRelay) Jobs(context.Context, authz.Principal) (api.List[api.RelayJob], error) {
	return api.List[api.RelayJob]{}, dispatch.ErrNone()
}
func (noRelay) Fences(context.Context, authz.Principal) (api.List[api.RelayFence], error) {
	return api.List[api.RelayFence]{}, dispatch.ErrNone()
}
func (noRelay) Fence(context.Context, authz.Principal, string) (api.RelayFence, error) {
	return api.RelayFence{}, dispatch.ErrNone()
}
func (noRelay) ClearFence(context.Context, authz.Principal, string, api.ClearRelayFenceRequest) (api.RelayFence, error) {
	return api.RelayFence{}, dispatch.ErrNone()
}

// relayRequest reads the body of a job. The payload is kept as its bytes: large
// ones are neither built into values nor written anew.
func (h *Handler) relayRequest(w http.ResponseWriter, r *http.Request, limit int64) (api.RelayJobRequest, error) {
	b, err := h.readBody(w, r, limit)
	if err != nil {
		return api.RelayJobRequest{}, err
	}
	bad := func(format string, args ...any) (api.RelayJobRequest, error) {
		return api.RelayJobRequest{}, errdefs.New(errdefs.Invalid, format, args...).WithNext("see /docs for what this operation takes")
	}
	if !utf8.Valid(b) {
		return bad("the body is not valid UTF-8")
	}
	fields, err := topFields(b)
	if err != nil {
		return bad("%v", err)
	}
	var req api.RelayJobRequest
	into := map[string]any{"daemon_id": &req.DaemonID, "payload": &req.Payload, "timeout_ms": &req.TimeoutMillis, "wait_ms": &req.WaitMillis, "tools": &req.Tools}
	for name, raw := range fields {
		to, ok := into[name]
		if !ok {
			return bad("there is no field %q", printable(name, 100))
		}
		if json.Unmarshal(raw, to) != nil {
			return bad("the field %s is not of its type", name)
		}
	}
	switch {
	case req.DaemonID == "" || len(req.DaemonID) > 512:
		return bad("daemon_id has %d bytes, allowed is 1 to 512", len(req.DaemonID))
	case len(req.Payload) == 0 || req.Payload[0] != '{':
		return bad("payload is missing or not a JSON object")
	}
	return req, nil
}

// topFields cuts an object into its members without looking into their values,
// beyond their being JSON. A member given twice is refused.
func topFields(b []byte) (map[string]json.RawMessage, error) {
	if !json.Valid(b) {
		return nil, errors.New("the body is not one JSON value")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("the body is not a JSON object")
	}
	fields := map[string]json.RawMessage{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, errors.New("the body is not JSON")
		}
		name, _ := t.(string)
		if _, twice := fields[name]; twice {
			return nil, errors.New("the field " + printable(name, 100) + " is given twice")
		}
		if len(fields) == 16 {
			return nil, errors.New("the body has more fields than there are")
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, errors.New("the body is not JSON")
		}
		fields[name] = raw
	}
	return fields, nil
}

func (h *Handler) runRelayJob(w http.ResponseWriter, r *http.Request, relay Relay) error {
	sse, err := relayForm(r)
	if err != nil {
		return err
	}
	req, err := h.relayRequest(w, r, relay.MaxPayload()+relayFields)
	if err != nil {
		return err
	}
	ctx, stop := h.untilClosing(r.Context())
	defer stop()
	job, err := relay.Run(ctx, principalOf(r.Context()), req)
	if err != nil {
		return h.closingError(ctx, r, err)
	}
	// Whatever happens below, a panic included, the job is settled before the
	// request is over. Leaving twice is leaving once.
	defer func() { _, _ = job.Leave(ctx, "the request ended") }()
	req.Payload = nil // it was sent, and is not held here for the hours the job may take
	if rec, ok := w.(*recorder); ok && rec.hold != nil {
		rec.hold.give()
	}
	return h.sendRelayJob(ctx, w, r, job, sse)
}

// sendRelayJob writes the lines of a job, then settles it and says how that went.
func (h *Handler) sendRelayJob(ctx context.Context, w http.ResponseWriter, r *http.Request, job RelayJob, sse bool) error {
	out := &relayLines{w: w, c: http.NewResponseController(w), sse: sse, count: h.cfg.Metrics.BytesOut}
	w.Header().Set("X-Accel-Buffering", "no") // a proxy must not hold lines back
	media := linesMedia
	if sse {
		media = sseMedia
	}
	w.Header().Set("Content-Type", media)
	info := job.Info()
	err := out.line(api.RelayLine{Type: "started", Job: &info})
	cause := "the job is over"
	for err == nil {
		var events []json.RawMessage
		wait, cancel := context.WithTimeout(ctx, aliveEvery)
		events, err = job.NextBatch(wait)
		silent := err != nil && wait.Err() != nil && ctx.Err() == nil
		cancel()
		switch {
		case err == nil:
			err = out.events(events)
		case silent:
			err = out.alive()
		}
	}
	switch {
	case errors.Is(err, io.EOF):
	case h.closing.Err() != nil && r.Context().Err() == nil:
		cause = "the server is shutting down"
	case errdefs.CodeOf(err) != errdefs.Internal && r.Context().Err() == nil: // the relay's own words
		cause = err.Error()
	default:
		cause = "the caller left"
	}
	outcome, err := job.Leave(ctx, cause)
	if err != nil {
		return h.closingError(ctx, r, err) // the connection is cut: no line says that it ended well
	}
	_ = out.line(api.RelayLine{Type: "outcome", Outcome: &outcome}) // whoever left does not hear it; the fence does not need him
	return nil
}

// relayForm chooses between server-sent events and JSON lines. Whoever accepts
// neither is told so.
func relayForm(r *http.Request) (sse bool, err error) {
	values := r.Header.Values("Accept")
	if len(values) == 0 {
		return false, nil
	}
	lines := false
	for _, v := range values {
		for part := range strings.SplitSeq(v, ",") {
			mt, params, err := mime.ParseMediaType(part)
			if err != nil || params["q"] == "0" {
				continue
			}
			switch mt {
			case sseMedia:
				sse = true
			case linesMedia, jsonMedia, "application/*", "*/*":
				lines = true
			case "text/*":
				sse = true
			}
		}
	}
	if !sse && !lines {
		return false, status(http.StatusNotAcceptable, "the answer is %s or %s", linesMedia, sseMedia)
	}
	return sse, nil
}

// relayLines writes lines in one of the two forms and flushes each burst.
type relayLines struct {
	w     http.ResponseWriter
	c     *http.ResponseController
	sse   bool
	buf   []byte
	count func(int64)
}

// line writes one of our own lines.
func (l *relayLines) line(v api.RelayLine) error {
	b, err := json.Marshal(v)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "a line could not be encoded")
	}
	if l.sse {
		l.buf = append(append(append(l.buf, "event: "...), v.Type...), "\ndata: "...)
	}
	l.buf = append(l.buf, b...)
	return l.end(true)
}

// events writes each event as the bytes it is.
func (l *relayLines) events(events []json.RawMessage) error {
	for i, e := range events {
		if l.sse {
			l.buf = append(l.buf, "event: event\ndata: "...)
		}
		l.buf = append(l.buf, `{"type":"event","event":`...)
		at := len(l.buf)
		l.buf = append(l.buf, e...)
		// In valid JSON a line break is only ever space between values.
		spaceOut(l.buf[at:], '\n')
		spaceOut(l.buf[at:], '\r')
		l.buf = append(l.buf, '}')
		if err := l.end(i == len(events)-1); err != nil {
			return err
		}
	}
	return nil
}

func spaceOut(b []byte, c byte) {
	for {
		n := bytes.IndexByte(b, c)
		if n < 0 {
			return
		}
		b[n] = ' '
		b = b[n+1:]
	}
}

// alive says that there is nothing to say.
func (l *relayLines) alive() error {
	if l.sse {
		l.buf = append(l.buf, ": alive\n\n"...)
		return l.flush()
	}
	return l.line(api.RelayLine{Type: "alive"})
}

// end ends a line, and writes what there is when it is much or the last.
func (l *relayLines) end(last bool) error {
	l.buf = append(l.buf, '\n')
	if l.sse {
		l.buf = append(l.buf, '\n')
	}
	if last {
		return l.flush()
	}
	if len(l.buf) >= batchBytes {
		return l.write()
	}
	return nil
}

func (l *relayLines) write() error {
	n, err := l.w.Write(l.buf)
	l.count(int64(n))
	if l.buf = l.buf[:0]; cap(l.buf) > 4*batchBytes {
		l.buf = nil // one large event does not stay for the life of the job
	}
	return err
}

func (l *relayLines) flush() error {
	if err := l.write(); err != nil {
		return err
	}
	return l.c.Flush()
}
