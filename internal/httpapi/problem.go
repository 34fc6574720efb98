package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// failure is an error on its way to the caller: a problem and the headers that
// go with its status. It satisfies huma's interfaces for errors.
type failure struct {
	api.Problem
	header http.Header
}

func (f *failure) Error() string             { return f.Detail }
func (f *failure) GetStatus() int            { return f.Status }
func (f *failure) GetHeaders() http.Header   { return f.header }
func (f *failure) ContentType(string) string { return api.ProblemType }

// MarshalJSON makes the body exactly an api.Problem.
func (f *failure) MarshalJSON() ([]byte, error) { return json.Marshal(f.Problem) }

// fail turns any error into a failure. Errors without a code are faults of the
// server: they are logged here, with the request's reference, and the caller
// sees only that reference.
func (h *Handler) fail(ctx context.Context, err error) *failure {
	if f, ok := errors.AsType[*failure](err); ok {
		return f
	}
	if refusal := refusalOf(ctx); refusal != nil {
		err = refusal
	}
	// A caller that went away gets no answer; what is written here is for the
	// count by status only.
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)) {
		err = errdefs.Wrap(err, errdefs.Unavailable, "the request was given up before it was answered")
	}
	ref := refOf(ctx)
	if errdefs.Is(err, errdefs.Internal) {
		h.log.LogAttrs(ctx, levelError, "request failed", attrRef(ref), attrError(err))
	}
	f := &failure{Problem: api.ProblemOf(err, ref), header: http.Header{}}
	switch f.Code {
	case errdefs.Unauthenticated:
		f.header.Set("WWW-Authenticate", `Bearer realm="stockade"`)
	case errdefs.Exhausted, errdefs.Unavailable:
		f.header.Set("Retry-After", retryAfter(f.Facts))
	}
	return f
}

// retryAfter is in whole seconds, the only unit the header has.
func retryAfter(facts map[string]string) string {
	if s, err := strconv.Atoi(facts["retry_after_seconds"]); err == nil && s > 0 {
		return strconv.Itoa(s)
	}
	return "1"
}

// status makes an error whose HTTP status says more than its code alone: 405,
// 413, 415 and so on. They are all requests that will be wrong again.
func status(code int, format string, args ...any) *failure {
	return statusOf(code, errdefs.New(errdefs.Invalid, format, args...))
}

func statusOf(code int, e *errdefs.Error) *failure {
	f := &failure{Problem: api.ProblemOf(e, ""), header: http.Header{}}
	f.Status = code
	return f
}

// writeFailure answers with a problem.
func writeFailure(w http.ResponseWriter, f *failure) {
	b, err := json.Marshal(f.Problem)
	if err != nil { // strings only; cannot happen
		b = []byte(`{"code":"internal"}`)
	}
	head := w.Header()
	for k, v := range f.header {
		head[k] = v
	}
	head.Set("Content-Type", api.ProblemType)
	head.Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(f.Status)
	_, _ = w.Write(b)
}

// maxFindings bounds how many faults of one body are named.
const maxFindings = 8

// fromValidation turns huma's list of findings into a problem. The values found
// are not repeated: they may hold what must not be logged.
func fromValidation(m *huma.ErrorModel) *failure {
	e := errdefs.New(errdefs.Invalid, "the request is not valid").
		WithNext("see /docs for what this operation takes")
	var says []string
	for i, d := range m.Errors {
		if i == maxFindings {
			says = append(says, fmt.Sprintf("and %d more", len(m.Errors)-i))
			break
		}
		if d == nil {
			continue
		}
		place := printable(d.Location, 200)
		if place == "" {
			place = "request"
		}
		text := printable(d.Message, 300)
		says = append(says, place+": "+text)
		e = e.With(place, text)
	}
	if len(says) == 0 && m.Detail != "" {
		says = append(says, printable(m.Detail, 300))
	}
	if len(says) > 0 {
		e.Message += ": " + strings.Join(says, "; ")
	}
	code := http.StatusBadRequest
	switch m.Status {
	case http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType, http.StatusRequestTimeout, http.StatusNotAcceptable:
		code = m.Status
	}
	if m.Status == http.StatusInternalServerError {
		e = errdefs.New(errdefs.Internal, "the answer could not be made")
		code = m.Status
	}
	return statusOf(code, e)
}

// printable cuts text that may hold a caller's bytes and makes it one line.
func printable(s string, most int) string {
	s = strings.ToValidUTF8(s, "?")
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return '?'
		}
		return r
	}, s)
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}
