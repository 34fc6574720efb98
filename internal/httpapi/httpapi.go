package httpapi

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"net/url"
	"path"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/metrics"
)

const (
	// maxURI bounds a request target: a path of a few ids and a query with one
	// file path (PATH_MAX is 4096, escaped three-fold) and one cursor.
	maxURI = 16 << 10
	// bodyTime is how long a JSON body or a piece of input may take to arrive, and a
	// body that nobody wants.
	bodyTime = 30 * time.Second
	// stallTime is how long an upload may send nothing, and a download take nothing.
	stallTime = 5 * time.Minute
)

const levelError = slog.LevelError

func attrRef(ref string) slog.Attr  { return slog.String("ref", ref) }
func attrError(err error) slog.Attr { return slog.Any("error", fullError{err}) }

// fullError logs an error with its causes, which callers do not see.
type fullError struct{ err error }

func (f fullError) LogValue() slog.Value {
	var parts []string
	for e := f.err; e != nil; e = errors.Unwrap(e) {
		if s := e.Error(); len(parts) == 0 || parts[len(parts)-1] != s {
			parts = append(parts, s)
		}
	}
	return slog.StringValue(strings.Join(parts, ": "))
}

// Config is what the API serves.
type Config struct {
	// Broker and Boxes may both be nil: then the API is that of a relay alone, which
	// asks Tenants nothing but who is calling.
	Broker  Broker
	Boxes   Boxes
	Tenants Tenants
	// Relay hands jobs to daemons; nil is a server that has none.
	Relay Relay
	// Metrics counts requests and is served at /v1/metrics; nil is neither.
	Metrics *metrics.Metrics
	// Version is what /v1/health says.
	Version string
	// Health says whether the server works: "ok", "starting" or "failing". nil is
	// always "ok". It must answer at once.
	Health func() string
	// Logger gets faults of the server; nil discards them.
	Logger *slog.Logger
	// Stream replaces Broker.Stream; nil does not. It exists for tests.
	Stream func(ctx context.Context, p authz.Principal, handle string, q StreamQuery) (LogStream, error)
}

// Handler is the API. It is an http.Handler; see Shutdown for how it ends.
type Handler struct {
	cfg     Config
	log     *slog.Logger
	mux     *http.ServeMux
	routes  map[string]*route // by ServeMux pattern
	order   []*route
	schemas map[string]*huma.Schema // the shapes of the document
	doc     []byte                  // the OpenAPI document
	page    []byte                  // the docs page

	recheck  time.Duration // recheckEvery, but in tests
	bodyTime time.Duration // bodyTime, but in tests
	budget   budget

	closing context.Context // ended by Shutdown
	close   context.CancelFunc

	socketsMu sync.Mutex     // orders enter and Shutdown
	sockets   sync.WaitGroup // attached sockets, which the http.Server does not wait for
}

// New builds the API. It fails only if an owner is missing or the API cannot be
// described, both faults of the program.
func New(cfg Config) (*Handler, error) {
	if cfg.Tenants == nil || (cfg.Broker == nil) != (cfg.Boxes == nil) || cfg.Broker == nil && cfg.Relay == nil {
		return nil, errdefs.New(errdefs.Internal, "the API needs tenants, and a broker with boxes or a relay")
	}
	h := &Handler{cfg: cfg, log: cfg.Logger, mux: http.NewServeMux(), routes: map[string]*route{}, recheck: recheckEvery, bodyTime: bodyTime, budget: budget{most: budgetBytes, held: map[string]int64{}}}
	if h.log == nil {
		h.log = slog.New(slog.DiscardHandler)
	}
	if h.cfg.Stream == nil {
		h.cfg.Stream = brokerStream(h.cfg.Broker)
	}
	h.closing, h.close = context.WithCancel(context.Background())
	b := newBuilder(h)
	h.register(b)
	h.schemas = b.api.OpenAPI().Components.Schemas.Map()
	var err error
	if h.doc, h.page, err = b.finish(); err != nil {
		return nil, errdefs.Wrap(err, errdefs.Internal, "the API cannot be described")
	}
	return h, nil
}

// Shutdown ends long polls, followed logs and attached sockets, and waits for
// the sockets, until ctx ends. Call it before http.Server.Shutdown, which would
// otherwise wait for the first two. Calling it again is harmless.
func (h *Handler) Shutdown(ctx context.Context) error {
	h.socketsMu.Lock()
	h.close()
	h.socketsMu.Unlock()
	done := make(chan struct{})
	go func() { h.sockets.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "attached sockets did not end in time")
	}
}

// RequestHeader carries, in every answer, the name that the server's log knows
// the request by.
const RequestHeader = "Stockade-Request"

type ctxKey int

const (
	keyRef ctxKey = iota
	keyPrincipal
	keyCredential
	keyGuard
)

// refOf is the reference a request has in the log.
func refOf(ctx context.Context) string { s, _ := ctx.Value(keyRef).(string); return s }

// principalOf is who asks; the zero Principal if nobody was authenticated.
func principalOf(ctx context.Context) authz.Principal {
	p, _ := ctx.Value(keyPrincipal).(authz.Principal)
	return p
}

func newRef() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// ServeHTTP answers one request.
func (h *Handler) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	ref := newRef()
	w := &recorder{ResponseWriter: rw, c: http.NewResponseController(rw)}
	// What an earlier request on this connection has set holds no more.
	_ = w.c.SetWriteDeadline(time.Time{})
	if r.ContentLength != 0 {
		// What of a body is not read here the http.Server reads, before the answer
		// goes out, and waits for it as long as it takes: also for that of a stranger.
		_ = w.c.SetReadDeadline(time.Now().Add(h.bodyTime))
	}
	ctx := context.WithValue(r.Context(), keyRef, ref)
	rt, mismatch := h.match(r)
	operation, who := "none", authz.Principal{}
	if rt != nil {
		operation = rt.op.OperationID
	}
	count := h.cfg.Metrics.Begin(operation)
	start := time.Now()
	end := func(code int) {
		count(code)
		h.log.LogAttrs(ctx, slog.LevelDebug, "request", attrRef(ref), slog.String("operation", operation), slog.Int("status", code),
			slog.String("by", who.String()), slog.Duration("took", time.Since(start)))
	}
	defer func() {
		if v := recover(); v != nil {
			if v == http.ErrAbortHandler {
				end(w.code())
				panic(v) // asked for: cut the connection, so that nobody takes half an answer for a whole
			}
			h.log.LogAttrs(ctx, levelError, "request panicked", attrRef(ref), slog.String("operation", operation),
				slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
			if w.wrote {
				end(w.code())
				panic(http.ErrAbortHandler)
			}
			writeFailure(w, h.fail(ctx, errors.New("panic"))) // logged above, with its stack
		}
		end(w.code())
	}()
	defer func() {
		if w.hold != nil {
			w.hold.give()
		}
	}()
	head := w.Header()
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Cache-Control", "no-store")
	head.Set(RequestHeader, ref)
	r, err := h.admit(w, r.WithContext(ctx), rt, mismatch)
	if err != nil {
		writeFailure(w, h.fail(ctx, err))
		return
	}
	who = principalOf(r.Context())
	r, over := h.guarded(r)
	defer over()
	h.mux.ServeHTTP(w, r)
}

// match finds the route. If there is none, the second result is the answer that
// an authenticated caller gets.
func (h *Handler) match(r *http.Request) (*route, *failure) {
	if len(r.RequestURI) > maxURI {
		return nil, status(http.StatusRequestURITooLong, "the request target has %d bytes, the limit is %d", len(r.RequestURI), maxURI)
	}
	none := statusOf(http.StatusNotFound, errdefs.New(errdefs.NotFound, "there is no %s here", printable(r.URL.Path, 200)).
		WithNext("see /docs for what there is"))
	// The mux would redirect a path that is not clean; the API has one name for
	// each thing.
	if p := r.URL.Path; p == "" || p[0] != '/' || path.Clean(p) != p || r.Method == http.MethodConnect {
		return nil, none
	}
	if _, pattern := h.mux.Handler(r); pattern != "" {
		if rt := h.routes[pattern]; rt != nil && rt.op.Method == r.Method {
			return rt, nil
		}
	}
	var allow []string
	for _, m := range []string{"DELETE", "GET", "PATCH", "POST", "PUT"} {
		r2 := *r
		r2.Method = m
		if _, pattern := h.mux.Handler(&r2); h.routes[pattern] != nil {
			allow = append(allow, m)
		}
	}
	if len(allow) == 0 {
		return nil, none
	}
	f := status(http.StatusMethodNotAllowed, "%s is not possible here, only %s", printable(r.Method, 20), strings.Join(allow, ", "))
	f.header.Set("Allow", strings.Join(allow, ", "))
	return nil, f
}

// admit does every check that comes before an operation, in the order of the
// package comment, and returns the request with its principal and, for small
// bodies, with the body read.
func (h *Handler) admit(w *recorder, r *http.Request, rt *route, mismatch *failure) (*http.Request, error) {
	if rt == nil || rt.action != public {
		p, credential, err := h.authenticate(r, rt)
		if err != nil {
			return nil, err
		}
		if rt == nil {
			return nil, mismatch
		}
		if rt.action != anyone {
			if err := authz.Check(p, rt.action); err != nil {
				return nil, err
			}
		}
		who, n := payer(p), weight(r, rt)
		if err := h.budget.take(who, n); err != nil {
			return nil, err
		}
		w.hold = &hold{&h.budget, who, n}
		ctx := context.WithValue(r.Context(), keyCredential, credential)
		r = r.WithContext(context.WithValue(ctx, keyPrincipal, p))
	}
	if err := checkQuery(r, rt); err != nil {
		return nil, err
	}
	return r, h.admitBody(w, r, rt)
}

// checkQuery refuses a query that cannot be read, an unknown parameter and one
// that is given twice.
func checkQuery(r *http.Request, rt *route) error {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return errdefs.New(errdefs.Invalid, "the query of the request cannot be read")
	}
	for name, values := range q {
		if !slices.Contains(rt.query, name) {
			e := errdefs.New(errdefs.Invalid, "there is no query parameter %q here", printable(name, 100))
			if len(rt.query) > 0 {
				return e.WithNext("this operation knows %s", strings.Join(rt.query, ", "))
			}
			return e
		}
		if len(values) > 1 {
			return errdefs.New(errdefs.Invalid, "the query parameter %q is given %d times", name, len(values))
		}
	}
	return nil
}

// admitBody checks the body's media type and size, and reads it if the operation
// wants it in memory.
func (h *Handler) admitBody(w http.ResponseWriter, r *http.Request, rt *route) error {
	if rt.maxBody == 0 {
		if r.ContentLength != 0 {
			return status(http.StatusBadRequest, "this operation takes no body")
		}
		return nil
	}
	if r.Header.Get("Content-Encoding") != "" {
		return status(http.StatusUnsupportedMediaType, "a body must not be encoded (Content-Encoding)")
	}
	if err := checkMediaType(r, rt.media); err != nil {
		return err
	}
	if r.ContentLength > rt.maxBody {
		return tooLarge(rt.maxBody)
	}
	if rt.streamed { // who reads it moves the deadline
		r.Body = http.MaxBytesReader(w, r.Body, rt.maxBody)
		return nil
	}
	b, err := h.readBody(w, r, rt.maxBody)
	if err != nil {
		return err
	}
	if rt.media == jsonMedia && len(b) > 0 {
		if err := h.checkJSONBody(rt, b); err != nil {
			return errdefs.New(errdefs.Invalid, "%v", err).WithNext("see /docs for what this operation takes")
		}
	}
	r.Body = &memory{Reader: bytes.NewReader(b), b: b}
	r.ContentLength = int64(len(b))
	return nil
}

func (h *Handler) checkJSONBody(rt *route, b []byte) error {
	if err := checkJSON(b); err != nil {
		return err
	}
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		return fmt.Errorf("the body is not JSON: %w", err)
	}
	return checkNames(h.schemas, rt.op.RequestBody.Content[jsonMedia].Schema, v)
}

// memory is a body that was read already.
type memory struct {
	*bytes.Reader
	b []byte
}

func (m *memory) Close() error { return nil }

// bodyOf returns the body that admit has read.
func bodyOf(r *http.Request) []byte {
	if m, ok := r.Body.(*memory); ok {
		return m.b
	}
	return nil
}

func tooLarge(limit int64) error {
	return statusOf(http.StatusRequestEntityTooLarge, errdefs.New(errdefs.Invalid, "the body is larger than %d bytes", limit).
		With("limit_bytes", itoa(limit)))
}

// readBody reads the whole body within bodyTime. The deadline is lifted again when it is
// there: it would otherwise end the request's context while the operation runs. Of a body
// that is refused the http.Server still reads the rest.
func (h *Handler) readBody(w http.ResponseWriter, r *http.Request, limit int64) ([]byte, error) {
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(h.bodyTime))
	body := http.MaxBytesReader(w, r.Body, limit)
	var b []byte
	var err error
	if n := r.ContentLength; n > 0 {
		b = make([]byte, n)
		var got int
		got, err = io.ReadFull(body, b)
		b = b[:got]
	} else {
		b, err = io.ReadAll(body)
	}
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, tooLarge(limit)
		}
		f := statusOf(http.StatusBadRequest, errdefs.Wrap(err, errdefs.Invalid, "the body of the request did not arrive whole"))
		f.header.Set("Connection", "close")
		return nil, f
	}
	_ = c.SetReadDeadline(time.Time{})
	return b, nil
}

const (
	jsonMedia = "application/json"
	tarMedia  = "application/x-tar"
	byteMedia = "application/octet-stream"
)

func checkMediaType(r *http.Request, want string) error {
	values := r.Header.Values("Content-Type")
	if len(values) == 0 || want == "" {
		return nil
	}
	if len(values) == 1 {
		got, params, err := mime.ParseMediaType(values[0])
		if err == nil && (got == want || want == tarMedia && got == byteMedia || want == byteMedia) {
			if cs := params["charset"]; cs == "" || strings.EqualFold(cs, "utf-8") {
				return nil
			}
		}
	}
	return status(http.StatusUnsupportedMediaType, "the body must be %s", want)
}

// recorder remembers what was answered, and lets every answer take as long as
// the other side takes it: a write fails once nothing was taken for stallTime.
type recorder struct {
	http.ResponseWriter
	c       *http.ResponseController
	wrote   bool
	status  int
	renewed time.Time
	hold    *hold // given back at the end, if set
}

func (w *recorder) WriteHeader(code int) {
	if !w.wrote && code >= 200 || code == http.StatusSwitchingProtocols {
		w.wrote, w.status = true, code
	}
	w.renew()
	w.ResponseWriter.WriteHeader(code)
}

func (w *recorder) Write(b []byte) (int, error) {
	if !w.wrote {
		w.wrote, w.status = true, http.StatusOK
	}
	w.renew()
	return w.ResponseWriter.Write(b)
}

// renew moves the deadline of writing, at most once in a second.
func (w *recorder) renew() {
	if now := time.Now(); now.Sub(w.renewed) > time.Second {
		w.renewed = now
		_ = w.c.SetWriteDeadline(now.Add(stallTime)) // what is no connection has no deadline
	}
}

// Unwrap lets http.ResponseController reach the connection.
func (w *recorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *recorder) code() int {
	if w.status == 0 {
		return http.StatusOK
	}
	return w.status
}

var _ huma.StatusError = (*failure)(nil)
