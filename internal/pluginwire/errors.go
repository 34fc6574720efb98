package pluginwire

import (
	"errors"
	"strings"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// The Python classes that error texts begin with.
const (
	ClassValue      = "ValueError"
	ClassKey        = "KeyError"
	ClassPermission = "PermissionError"
	ClassRuntime    = "RuntimeError"
	ClassTimeout    = "ActionCallTimeoutError"
	ClassClosed     = "ConnectionClosedError"
	ClassValidation = "ValidationError"
)

// truncated ends a text that was cut.
const truncated = "… [truncated]"

// CutText returns s, or its first [ErrorText] characters and a mark.
func CutText(s string) string {
	if len(s) <= ErrorText {
		return s
	}
	n := 0
	for i := range s {
		if n == ErrorText {
			return s[:i] + truncated
		}
		n++
	}
	return s
}

// ErrorMessage returns "class: text" as a Python peer writes a raised error, the
// text cut at [ErrorText] characters.
func ErrorMessage(class, text string) string { return class + ": " + CutText(text) }

// classed is an error that says which Python class it is.
type classed struct {
	class string
	err   error
}

func (c *classed) Error() string     { return c.err.Error() }
func (c *classed) Unwrap() error     { return c.err }
func (c *classed) WireClass() string { return c.class }

// WithClass returns err with the Python class its text shall begin with.
func WithClass(class string, err error) error { return &classed{class, err} }

// UnknownAction is what a connection answers to an action it does not know.
func UnknownAction(action string) error {
	return WithClass(ClassValue, errdefs.New(errdefs.NotFound, "Action %s not found", clip(action)))
}

// MissingKey is the error for a payload without a key: KeyError: 'key'.
func MissingKey(key string) error {
	return WithClass(ClassKey, errdefs.New(errdefs.Invalid, "'%s'", clip(key)))
}

// FromError returns the text that tells a peer of err: the class the error says it is
// (see [WithClass]) or that of its code, and its text. An error without a code is not
// ours to show: its text stays out.
func FromError(err error) string {
	class := ""
	var c interface{ WireClass() string }
	if errors.As(err, &c) {
		class = c.WireClass()
	}
	if _, ok := errors.AsType[*errdefs.Error](err); !ok && class == "" {
		return ErrorMessage(ClassRuntime, "the action failed inside the runtime; its log says why")
	}
	if class == "" {
		switch errdefs.CodeOf(err) {
		case errdefs.Invalid, errdefs.NotFound, errdefs.Conflict:
			class = ClassValue
		case errdefs.Denied, errdefs.Unauthenticated, errdefs.Fenced:
			class = ClassPermission
		default:
			class = ClassRuntime
		}
	}
	return ErrorMessage(class, err.Error())
}

// clip bounds a foreign name inside a text.
func clip(s string) string {
	const most = 128
	if len(s) <= most {
		return strings.ToValidUTF8(s, "\uFFFD")
	}
	n := most
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return strings.ToValidUTF8(s[:n], "\uFFFD") + "…"
}
