package api

import (
	"errors"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// ProblemType is the media type of an error (RFC 9457).
const ProblemType = "application/problem+json"

// Problem is the body of every error answer (RFC 9457), with the stable code
// and the next step added.
type Problem struct {
	Type   string            `json:"type" doc:"urn:stockade:error:CODE"`
	Title  string            `json:"title" doc:"The code in words."`
	Status int               `json:"status"`
	Code   errdefs.Code      `json:"code" doc:"Stable; branch on this."`
	Detail string            `json:"detail" doc:"What was refused, and the limit or record it hit."`
	Next   string            `json:"next,omitempty" doc:"What to do now."`
	Facts  map[string]string `json:"facts,omitempty" doc:"The limits and records named in detail, for programs."`
}

// Status returns the HTTP status of a code (RFC 9110 section 15, RFC 4918
// section 11.3 for 423, RFC 6585 for 429).
func Status(code errdefs.Code) int {
	switch code {
	case errdefs.Invalid:
		return 400
	case errdefs.Unauthenticated:
		return 401
	case errdefs.Denied:
		return 403
	case errdefs.NotFound:
		return 404
	case errdefs.Conflict, errdefs.Cancelling:
		return 409
	case errdefs.Fenced:
		return 423
	case errdefs.Exhausted:
		return 429
	case errdefs.Unavailable:
		return 503
	case errdefs.Indeterminate:
		return 502
	default:
		return 500
	}
}

var titles = map[errdefs.Code]string{
	errdefs.Invalid:         "The request is not valid",
	errdefs.Unauthenticated: "No valid credential",
	errdefs.Denied:          "Not allowed with this credential",
	errdefs.NotFound:        "No such thing here",
	errdefs.Conflict:        "It clashes with what is recorded",
	errdefs.Fenced:          "Something may still be running there",
	errdefs.Cancelling:      "A stop is under way",
	errdefs.Exhausted:       "A limit was reached",
	errdefs.Unavailable:     "Not available now",
	errdefs.Indeterminate:   "It cannot be proven whether this happened",
	errdefs.Internal:        "A fault of the server",
}

// ProblemOf turns an error into what a caller may read. Of an error without a
// code only a fixed sentence and ref are shown, ref being what the server's log
// knows it by.
func ProblemOf(err error, ref string) Problem {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		e = errdefs.New(errdefs.Internal, "the server could not do this because of a fault of its own").
			WithNext("look for %q in the server's log", ref)
	}
	return Problem{
		Type: "urn:stockade:error:" + string(e.Code), Title: titles[e.Code], Status: Status(e.Code),
		Code: e.Code, Detail: e.Message, Next: e.Next, Facts: e.Detail,
	}
}

// Err turns a received problem back into an error that carries its code.
func (p Problem) Err() error {
	code := p.Code
	if _, ok := titles[code]; !ok {
		code = errdefs.Internal
	}
	return &errdefs.Error{Code: code, Message: p.Detail, Next: p.Next, Detail: p.Facts}
}
