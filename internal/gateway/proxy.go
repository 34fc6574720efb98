package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Methods that may go to a provider. TRACE would answer with the key, CONNECT is
// another protocol.
var methods = []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions}

// What a client could send as a credential, or as a way to be recognised: never
// passed on. The names come from the APIs of the vendors and their clouds.
var (
	credentialHeaders = []string{"Authorization", "Proxy-Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Ocp-Apim-Subscription-Key", "Cookie", "Cookie2", "Forwarded", "X-Real-Ip", "Via"}
	credentialQueries = []string{"key", "api_key", "api-key", "apikey", "access_token"}
)

// ctxKey carries the checked target path from admission to the rewrite.
type ctxKey struct{}

type target struct {
	escaped, decoded string
	call             *call
}

// call is one request in flight.
type call struct {
	route    *route
	dog      *watchdog
	tooLarge atomic.Bool
}

// admit decides whether and where a request may go. A nil route without an error
// is a HEAD or GET of the root, which clients use to ask whether anything is
// there. status 0 is the usual one of the error's code.
func (r *run) admit(req *http.Request) (rt *route, status int, refusal *errdefs.Error) {
	if !slices.Contains(methods, req.Method) {
		return nil, http.StatusMethodNotAllowed, errdefs.New(errdefs.Denied, "the gateway does not serve the method %s", printable(req.Method))
	}
	if req.URL.Host != "" || req.URL.Scheme != "" {
		return nil, 0, errdefs.New(errdefs.Denied, "this is not a proxy: the model routes lead to configured providers only").WithNext("%s", r.granted())
	}
	if req.Header.Get("Upgrade") != "" {
		return nil, 0, errdefs.New(errdefs.Denied, "model routes do not change protocols").WithNext("use plain HTTP with server-sent events")
	}
	escaped := req.URL.EscapedPath()
	if escaped == "/" && (req.Method == http.MethodHead || req.Method == http.MethodGet) {
		return nil, 0, nil
	}
	name, restEscaped, rest, ok, err := splitRoute(escaped)
	if err != nil {
		e, _ := errors.AsType[*errdefs.Error](err)
		return nil, 0, e
	}
	if !ok {
		return nil, 0, errdefs.New(errdefs.NotFound, "nothing is served at this path").WithNext("%s", r.granted())
	}
	rt, ok = r.routes[name]
	if !ok {
		return nil, 0, errdefs.New(errdefs.NotFound, "the run was not granted a model provider %s", printable(name)).WithNext("%s", r.granted())
	}
	if limit := r.gw.cfg.MaxBody; req.ContentLength > limit {
		return nil, http.StatusRequestEntityTooLarge, tooLarge(limit)
	}
	*req = *req.WithContext(context.WithValue(req.Context(), ctxKey{}, &target{escaped: restEscaped, decoded: rest, call: &call{route: rt}}))
	return rt, 0, nil
}

func (r *run) granted() string {
	names := make([]string, 0, len(r.routes))
	for n := range r.routes {
		names = append(names, prefix+n+"/")
	}
	slices.Sort(names)
	return listed("granted", names)
}

func tooLarge(limit int64) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, "the request body is larger than the gateway's limit of %d bytes", limit).
		With("limit", strconv.FormatInt(limit, 10)).WithNext("send less context")
}

// printable bounds what of a request is repeated in an answer.
func printable(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return strconv.QuoteToASCII(s)
}

// forward carries one admitted call to its end.
func (r *run) forward(w http.ResponseWriter, req *http.Request, rt *route) {
	t, _ := req.Context().Value(ctxKey{}).(*target)
	ctx, cancel := context.WithCancelCause(req.Context())
	defer cancel(nil)
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // from here on the watchdog counts
	t.call.dog = newWatchdog(r.gw.cfg.Idle, func() {
		cancel(errIdle)
		// A client that does not read blocks a write, which no context ends. An
		// answer that has not begun still gets a moment to say why.
		_ = rc.SetWriteDeadline(time.Now().Add(5 * time.Second))
		_ = rc.SetReadDeadline(time.Now())
	})
	defer t.call.dog.stop()
	if req.Body != nil && req.Body != http.NoBody {
		req.Body = &upBody{ReadCloser: http.MaxBytesReader(w, req.Body, r.gw.cfg.MaxBody), call: t.call}
	}
	rt.proxy.ServeHTTP(lastAnswer{w}, req.WithContext(ctx))
}

// lastAnswer keeps informational answers (103 and the like) from the run: nobody
// looks into their headers.
type lastAnswer struct{ http.ResponseWriter }

func (w lastAnswer) WriteHeader(code int) {
	if code >= http.StatusOK {
		w.ResponseWriter.WriteHeader(code)
	}
}

// Unwrap lets http.ResponseController reach the connection.
func (w lastAnswer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// upBody counts what goes up and notices when it is too much.
type upBody struct {
	io.ReadCloser
	call *call
}

func (b *upBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.call.route.up.Add(int64(n))
	if n > 0 {
		b.call.dog.moved()
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		b.call.tooLarge.Store(true)
	}
	return n, err
}

// downBody counts what comes down, behind the redactor, which looks at what is
// behind the body too.
type downBody struct {
	io.Reader
	io.Closer
	call *call
	res  *http.Response
}

func (b *downBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.call.route.down.Add(int64(n))
	if n > 0 {
		b.call.dog.moved()
	}
	if err == io.EOF {
		withoutKey(b.res.Trailer, b.call.route.provider)
	}
	return n, err
}

func (r *run) newProxy(rt *route) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport:      r.gw.transport,
		FlushInterval:  -1,
		ErrorLog:       slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
		Rewrite:        func(pr *httputil.ProxyRequest) { rewrite(pr, rt.provider) },
		ModifyResponse: func(res *http.Response) error { return r.modify(res, rt.provider) },
		ErrorHandler:   func(w http.ResponseWriter, req *http.Request, err error) { r.failed(w, req, rt.provider, err) },
	}
}

// rewrite makes the request that goes up: to the provider's base and nowhere
// else, without what the client claims to be, with the real key.
func rewrite(pr *httputil.ProxyRequest, p *provider) {
	t, _ := pr.In.Context().Value(ctxKey{}).(*target)
	u := *p.base
	u.Path = p.base.Path + t.decoded
	u.RawPath = p.base.EscapedPath() + t.escaped
	u.RawQuery = withoutCredentials(pr.Out.URL.RawQuery)
	pr.Out.URL, pr.Out.Host = &u, p.base.Host
	for _, h := range credentialHeaders {
		pr.Out.Header.Del(h)
	}
	for h := range pr.Out.Header {
		if strings.HasPrefix(h, "X-Forwarded-") {
			delete(pr.Out.Header, h)
		}
	}
	if p.key == "" {
		return
	}
	pr.Out.Header.Set("Accept-Encoding", "identity") // what is packed cannot be looked into
	switch p.style {
	case StyleAnthropic:
		pr.Out.Header.Set("X-Api-Key", p.key)
	default:
		pr.Out.Header.Set("Authorization", "Bearer "+p.key)
	}
}

// withoutCredentials drops the parameters that carry a key and leaves the others
// as they were written.
func withoutCredentials(raw string) string {
	if raw == "" {
		return ""
	}
	parts := strings.Split(raw, "&")
	parts = slices.DeleteFunc(parts, func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		name, err := url.QueryUnescape(name)
		return err != nil || slices.Contains(credentialQueries, strings.ToLower(name))
	})
	return strings.Join(parts, "&")
}

// answerError is an answer of a provider that is replaced by one of our own.
type answerError struct {
	status  int
	problem *errdefs.Error
}

func (e *answerError) Error() string { return e.problem.Error() }

// modify checks what came down before the run sees it.
func (r *run) modify(res *http.Response, p *provider) error {
	switch res.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		// Providers like to repeat the key here, in whole or in part.
		r.log.Warn("a model provider refused the key", "provider", p.name, "status", res.StatusCode)
		return &answerError{res.StatusCode, errdefs.New(errdefs.Denied, "the model provider %q refused the operator's key with status %d", p.name, res.StatusCode).
			WithNext("ask the operator to check key_file of the provider")}
	case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
		return &answerError{http.StatusBadGateway, errdefs.New(errdefs.Unavailable, "the model provider %q answered with a redirect, which the gateway does not follow", p.name).
			WithNext("ask the operator to check base_url of the provider")}
	case http.StatusSwitchingProtocols:
		return &answerError{http.StatusBadGateway, errdefs.New(errdefs.Unavailable, "the model provider %q tried to change the protocol", p.name)}
	}
	if e := res.Header.Get("Content-Encoding"); p.key != "" && e != "" && !strings.EqualFold(e, "identity") {
		return &answerError{http.StatusBadGateway, errdefs.New(errdefs.Unavailable, "the model provider %q answered in the encoding %s, which was not asked for and in which the gateway cannot look for the key", p.name, printable(e)).
			WithNext("ask the operator for a provider that answers plainly")}
	}
	delete(res.Header, "Set-Cookie")
	delete(res.Header, "Set-Cookie2")
	withoutKey(res.Header, p)
	t, _ := res.Request.Context().Value(ctxKey{}).(*target)
	t.call.dog.moved()
	res.Body = &downBody{Reader: newRedactor(res.Body, p.key), Closer: res.Body, call: t.call, res: res}
	return nil
}

// withoutKey drops the fields that hold the provider's key.
func withoutKey(h http.Header, p *provider) {
	for name, values := range h {
		if p.key != "" && slices.ContainsFunc(values, func(v string) bool { return strings.Contains(v, p.key) }) {
			delete(h, name)
		}
	}
}

// failed answers a call that got no usable answer from its provider.
func (r *run) failed(w http.ResponseWriter, req *http.Request, p *provider, err error) {
	t, _ := req.Context().Value(ctxKey{}).(*target)
	cause := context.Cause(req.Context())
	answer, isAnswer := errors.AsType[*answerError](err)
	switch {
	case isAnswer:
		writeProblem(w, answer.status, answer.problem)
	case t.call.tooLarge.Load():
		writeProblem(w, http.StatusRequestEntityTooLarge, tooLarge(r.gw.cfg.MaxBody))
	case errors.Is(cause, errIdle):
		writeProblem(w, http.StatusGatewayTimeout, errdefs.New(errdefs.Unavailable, "nothing moved between the run and the model provider %q for %s, which is the gateway's limit", p.name, r.gw.cfg.Idle).
			With("limit", r.gw.cfg.Idle.String()).WithNext("try again"))
	case cause != nil: // the run was closed, or the client went away
		panic(http.ErrAbortHandler)
	default:
		// The cause goes to the log; without the URL around it, which net/http adds.
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err
		}
		r.log.Warn("a model provider did not answer", "provider", p.name, "error", err)
		writeProblem(w, http.StatusBadGateway, errdefs.New(errdefs.Unavailable, "the model provider %q cannot be reached: %s", p.name, kindOf(err)).
			WithNext("try again; if it stays so, ask the operator to check base_url of the provider and the server's network"))
	}
}

// kindOf says in fixed words what went wrong, so that nothing of the machine's
// network is told to the run.
func kindOf(err error) string {
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return "its name could not be resolved"
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "its certificate could not be verified"
	}
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		return "it did not answer in time"
	}
	if e, ok := errors.AsType[*net.OpError](err); ok && e.Op == "dial" {
		return "the connection was refused or has no route"
	}
	return "the connection broke"
}
