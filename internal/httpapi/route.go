package httpapi

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Actions that are not in authz's table.
const (
	public authz.Action = ""       // no credential at all
	anyone authz.Action = "anyone" // any valid credential
)

// Bounds of bodies. The largest JSON request is open: argv and env, which the
// kernel bounds at 128 KiB per string and 2 MiB in all (execve(2)).
const (
	maxJSON  = 64 << 10
	maxMount = 512 << 10 // a box's list of mounts: 64 pairs of paths
	maxOpen  = 3 << 20
	maxFiles = 64 << 30 // the box service has the limit that counts, by bytes unpacked
)

// route is one operation.
type route struct {
	op       *huma.Operation
	action   authz.Action
	basic    bool     // HTTP Basic is accepted as well
	query    []string // known query parameters
	media    string   // of the body
	maxBody  int64    // 0: takes no body
	streamed bool     // the operation reads the body itself
	reads    bool     // the operation answers with output, as JSON if not as frames
	sockets  bool     // the operation opens a socket
}

// spec is how an operation is described where it is registered.
type spec struct {
	id, method, path string
	action           authz.Action
	tag              string
	summary          string
	description      string
	errors           []errdefs.Code // beyond those every operation has
	created          bool           // answers 201
	maxBody          int64          // of a JSON body; 0 is maxJSON
	basic            bool
}

// builder registers operations.
type builder struct {
	h      *Handler
	api    huma.API
	errRef *huma.Schema
}

func newBuilder(h *Handler) *builder {
	// Not huma's default configuration: that serves pages which load scripts from
	// elsewhere, and adds a schema link to every answer.
	format := huma.Format{
		Marshal: func(w io.Writer, v any) error {
			e := json.NewEncoder(w)
			e.SetEscapeHTML(false)
			return e.Encode(v)
		},
		Unmarshal: json.Unmarshal,
	}
	version := h.cfg.Version
	if version == "" {
		version = "dev"
	}
	cfg := huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI: "3.1.0",
			Info: &huma.Info{Title: "Stockade", Version: version, Description: intro,
				License: &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}},
			Servers: []*huma.Server{{URL: "/"}},
			Tags:    tags(),
			Components: &huma.Components{
				Schemas: huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer),
				SecuritySchemes: map[string]*huma.SecurityScheme{
					"bearer": {Type: "http", Scheme: "bearer", Description: "An admin key, a workspace key or a run token."},
					"basic":  {Type: "http", Scheme: "basic", Description: "Any name, the key as the password. Only for this document and its page."},
				},
			},
		},
		Formats:       map[string]huma.Format{"application/json": format, "json": format},
		DefaultFormat: "application/json",
		Transformers:  []huma.Transformer{transform},
	}
	b := &builder{h: h, api: humago.New(h.mux, cfg)}
	b.errRef = b.schema(reflect.TypeFor[api.Problem]())
	b.api.UseMiddleware(func(ctx huma.Context, next func(huma.Context)) { next(validationContext{ctx}) })
	return b
}

func (b *builder) schema(t reflect.Type) *huma.Schema {
	return b.api.OpenAPI().Components.Schemas.Schema(t, true, "")
}

// transform turns huma's own errors into problems.
func transform(_ huma.Context, _ string, v any) (any, error) {
	if m, ok := v.(*huma.ErrorModel); ok {
		return fromValidation(m).Problem, nil
	}
	return v, nil
}

// validationContext gives huma's validation errors the status of an invalid
// request: huma has fixed 422 before it asks transform.
type validationContext struct{ humaContext }

// humaContext embeds a huma.Context, which has a method of its own name.
type humaContext huma.Context

func (c validationContext) Unwrap() huma.Context { return c.humaContext }

func (c validationContext) SetStatus(code int) {
	if code == http.StatusUnprocessableEntity {
		code = http.StatusBadRequest
	}
	c.humaContext.SetStatus(code)
}

// always are the codes every operation with a credential may answer.
var always = [...]errdefs.Code{errdefs.Invalid, errdefs.Unauthenticated, errdefs.Denied, errdefs.Exhausted, errdefs.Unavailable, errdefs.Internal}

// operation makes the description of an operation and its route.
func (b *builder) operation(s spec) (*huma.Operation, *route) {
	codes := append([]errdefs.Code{}, s.errors...)
	if s.action == public {
		codes = []errdefs.Code{errdefs.Invalid, errdefs.Internal}
	} else {
		codes = append(codes, always[:]...)
	}
	op := &huma.Operation{
		OperationID: s.id, Method: s.method, Path: s.path, Summary: s.summary, Tags: []string{s.tag},
		Description: s.description + rights(s.action), Responses: map[string]*huma.Response{},
		BodyReadTimeout: -1, MaxBodyBytes: maxOpen + 1, // admit has read the body
		RejectUnknownQueryParameters: true,
		Security:                     []map[string][]string{{"bearer": {}}},
	}
	if s.created {
		op.DefaultStatus = http.StatusCreated
	}
	switch {
	case s.action == public:
		op.Security = []map[string][]string{}
	case s.basic:
		op.Security = append(op.Security, map[string][]string{"basic": {}})
	}
	byStatus := map[int]string{}
	for _, c := range errdefs.Codes() {
		if !slices.Contains(codes, c) {
			continue
		}
		st := api.Status(c)
		if byStatus[st] != "" {
			byStatus[st] += " or "
		}
		byStatus[st] += "`" + string(c) + "`"
	}
	for st, names := range byStatus {
		b.errorResponse(op, st, names)
	}
	rt := &route{op: op, action: s.action, basic: s.basic}
	b.h.routes[s.method+" "+s.path] = rt
	b.h.order = append(b.h.order, rt)
	return op, rt
}

func (b *builder) errorResponse(op *huma.Operation, st int, codes string) {
	op.Responses[strconv.Itoa(st)] = &huma.Response{
		Description: "A problem with code " + codes + ".",
		Content:     map[string]*huma.MediaType{api.ProblemType: {Schema: b.errRef}},
	}
}

// rights says in words which credential an action takes.
func rights(a authz.Action) string {
	switch a {
	case public:
		return "\n\nNeeds no credential."
	case anyone:
		return "\n\nAllowed with every credential."
	}
	text := ""
	for _, k := range authz.Kinds() {
		if authz.Allowed(k, a) {
			if text != "" {
				text += ", "
			}
			text += map[authz.Kind]string{authz.Admin: "an admin key", authz.Workspace: "a workspace key", authz.Run: "a run token"}[k]
		}
	}
	return fmt.Sprintf("\n\nAllowed with: %s (`%s`).", text, a)
}

// jsonOp registers an operation that exchanges JSON.
func jsonOp[I, O any](b *builder, s spec, do func(ctx context.Context, p authz.Principal, in *I) (*O, error)) {
	op, rt := b.operation(s)
	if _, ok := reflect.TypeFor[I]().FieldByName("Body"); ok {
		rt.media, rt.maxBody = jsonMedia, max(maxJSON, s.maxBody)
		b.errorResponse(op, http.StatusRequestEntityTooLarge, "`invalid`")
		b.errorResponse(op, http.StatusUnsupportedMediaType, "`invalid`")
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[I]()) {
		if name := f.Tag.Get("query"); name != "" {
			rt.query = append(rt.query, name)
		}
	}
	h := b.h
	huma.Register(b.api, *op, func(ctx context.Context, in *I) (*O, error) {
		out, err := do(ctx, principalOf(ctx), in)
		if err != nil {
			return nil, h.fail(ctx, err)
		}
		return out, nil
	})
	rt.op = b.find(op.Method, op.Path)
}

// rawOp registers an operation that handles the request itself. An error it
// returns is answered as a problem if nothing was written yet; otherwise the
// connection is cut, so that nobody takes half an answer for a whole one.
func rawOp(b *builder, op *huma.Operation, rt *route, do func(w http.ResponseWriter, r *http.Request) error) {
	for _, p := range op.Parameters {
		if p.In == "query" {
			rt.query = append(rt.query, p.Name)
		}
	}
	h := b.h
	b.api.OpenAPI().AddOperation(op)
	h.mux.HandleFunc(op.Method+" "+op.Path, func(w http.ResponseWriter, r *http.Request) {
		err := do(w, r)
		if err == nil {
			return
		}
		f := h.fail(r.Context(), err)
		if rec, ok := w.(*recorder); ok && rec.wrote {
			panic(http.ErrAbortHandler)
		}
		writeFailure(w, f)
	})
}

// find returns the operation as huma keeps it, with everything it derived.
func (b *builder) find(method, path string) *huma.Operation {
	item := b.api.OpenAPI().Paths[path]
	switch method {
	case http.MethodGet:
		return item.Get
	case http.MethodPut:
		return item.Put
	case http.MethodPost:
		return item.Post
	case http.MethodPatch:
		return item.Patch
	default:
		return item.Delete
	}
}

// finish makes the document and its page.
func (b *builder) finish() (doc, page []byte, err error) {
	o := b.api.OpenAPI()
	schemas := o.Components.Schemas.Map()
	// huma's own error shape; ours is Problem.
	delete(schemas, "ErrorModel")
	delete(schemas, "ErrorDetail")
	asked := map[string]bool{}
	for _, rt := range b.h.order {
		if rt.op.RequestBody != nil {
			for _, m := range rt.op.RequestBody.Content {
				mark(schemas, m.Schema, asked)
			}
		}
	}
	for name, s := range schemas {
		notNull(s)
		if !asked[name] {
			s.AdditionalProperties = nil // answers may grow
		}
	}
	if doc, err = json.MarshalIndent(o, "", "  "); err != nil {
		return nil, nil, err
	}
	if page, err = renderDocs(o); err != nil {
		return nil, nil, err
	}
	return append(doc, '\n'), page, nil
}

// mark notes the shapes that s is made of.
func mark(schemas map[string]*huma.Schema, s *huma.Schema, seen map[string]bool) {
	if s == nil {
		return
	}
	if name := refName(s); name != "" && !seen[name] {
		seen[name] = true
		mark(schemas, schemas[name], seen)
	}
	mark(schemas, s.Items, seen)
	for _, p := range s.Properties {
		mark(schemas, p, seen)
	}
	if m, ok := s.AdditionalProperties.(*huma.Schema); ok {
		mark(schemas, m, seen)
	}
}

// notNull takes back that every list may be null, which huma assumes.
func notNull(s *huma.Schema) {
	if s == nil {
		return
	}
	if s.Type == huma.TypeArray {
		s.Nullable = false
	}
	for _, p := range s.Properties {
		notNull(p)
	}
	notNull(s.Items)
	if m, ok := s.AdditionalProperties.(*huma.Schema); ok {
		notNull(m)
	}
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }
