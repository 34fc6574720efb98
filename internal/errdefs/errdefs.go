// Package errdefs holds the closed set of error codes that every part of
// Stockade speaks, and the one error type that carries them.
//
// The set may only grow. Only the edges (the HTTP API, the host API and the
// command line) turn a code into a status or an exit code; everything between
// them wraps with %w and asks with [CodeOf] or errors.Is.
package errdefs

import (
	"errors"
	"fmt"
	"maps"
)

// Code says what kind of refusal or failure an error is. It is stable: clients
// may branch on it.
type Code string

// The codes, from DESIGN section 4.
const (
	// Invalid: the request itself is wrong and will be wrong again.
	Invalid Code = "invalid"
	// Unauthenticated: no credential, or one that is unknown, expired or revoked.
	Unauthenticated Code = "unauthenticated"
	// Denied: a known credential without the right to do this.
	Denied Code = "denied"
	// NotFound: no such thing, or it belongs to somebody else (P6: the two look alike).
	NotFound Code = "not_found"
	// Conflict: it clashes with what is already recorded, for example another
	// open with the same request_id and other arguments.
	Conflict Code = "conflict"
	// Fenced: something may still be running there, so nothing new may start.
	Fenced Code = "fenced"
	// Cancelling: a stop is under way and has not been proven yet.
	Cancelling Code = "cancelling"
	// Exhausted: a limit was reached; the message names it.
	Exhausted Code = "exhausted"
	// Unavailable: the part that could do it does not answer; try again.
	Unavailable Code = "unavailable"
	// Indeterminate: it cannot be proven whether it happened.
	Indeterminate Code = "indeterminate"
	// Internal: a fault of Stockade itself.
	Internal Code = "internal"
)

// Codes lists every code, in the order above.
func Codes() []Code {
	return []Code{Invalid, Unauthenticated, Denied, NotFound, Conflict, Fenced,
		Cancelling, Exhausted, Unavailable, Indeterminate, Internal}
}

// Error is an error a person can act on: what was refused and why (Message),
// what to do next (Next), and the facts it hit (Detail). None of them may hold
// a secret.
type Error struct {
	Code    Code
	Message string
	Next    string
	Detail  map[string]string
	cause   error
}

// Error returns the message, then the next step if there is one.
func (e *Error) Error() string {
	if e.Next != "" {
		return e.Message + "; " + e.Next
	}
	return e.Message
}

// Unwrap returns the cause given to [Wrap], or nil.
func (e *Error) Unwrap() error { return e.cause }

// Is makes errors.Is compare codes: errors.Is(err, &Error{Code: NotFound}) holds
// for every not_found error. See also [Is].
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && t.Message == ""
}

// New makes an error of a code. The format is for people: it names what was
// refused and the limit or record it hit.
func New(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Wrap makes an error of a code that keeps err as its cause. The message does
// not repeat the cause: causes are for the log, messages for the caller.
func Wrap(err error, code Code, format string, args ...any) *Error {
	e := New(code, format, args...)
	e.cause = err
	return e
}

// WithNext returns a copy that tells the reader what to do next.
func (e *Error) WithNext(format string, args ...any) *Error {
	c := *e
	c.Next = fmt.Sprintf(format, args...)
	return &c
}

// With returns a copy with one more detail, such as the limit that was hit.
func (e *Error) With(key, value string) *Error {
	c := *e
	c.Detail = maps.Clone(e.Detail)
	if c.Detail == nil {
		c.Detail = map[string]string{}
	}
	c.Detail[key] = value
	return &c
}

// CodeOf returns the code of the first *Error in err's chain, Internal for any
// other error, and "" for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return Internal
}

// Is reports whether err carries the code.
func Is(err error, code Code) bool { return err != nil && CodeOf(err) == code }
