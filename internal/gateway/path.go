package gateway

import (
	"net/url"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// prefix is where the model routes live.
const prefix = "/model/"

// cleanPath checks an escaped path, which must start with a slash, and returns it
// decoded. It refuses everything that some server on the way could read as a way
// up or as another host: dot segments however written, empty segments, escaped
// slashes, backslashes, escaped percent signs (which decode twice into the
// former) and control characters. One slash at the end is fine.
func cleanPath(escaped string) (string, error) {
	rest, ok := strings.CutPrefix(escaped, "/")
	if !ok {
		return "", errdefs.New(errdefs.Invalid, "the request path does not start with a slash")
	}
	segments := strings.Split(rest, "/")
	for i, s := range segments {
		decoded, err := url.PathUnescape(s)
		if err != nil {
			return "", errdefs.New(errdefs.Invalid, "the request path holds a broken percent escape")
		}
		if decoded == "" && i < len(segments)-1 {
			return "", errdefs.New(errdefs.Invalid, "the request path holds an empty segment")
		}
		if strings.ContainsAny(decoded, `/\%?#`) || strings.ContainsFunc(decoded, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
			return "", errdefs.New(errdefs.Invalid, "the request path holds an escaped separator or control character")
		}
		// Some servers cut parameters off a segment before they look at it.
		bare, _, _ := strings.Cut(decoded, ";")
		if strings.Trim(bare, ".") == "" && bare != "" || bare == "" && decoded != "" {
			return "", errdefs.New(errdefs.Invalid, "the request path holds a dot segment")
		}
		segments[i] = decoded
	}
	return "/" + strings.Join(segments, "/"), nil
}

// splitRoute takes an escaped request path apart into the provider's name and
// what goes to the provider, escaped and decoded; rest may be empty. ok is false
// for a path that is no model route at all.
func splitRoute(escaped string) (name, restEscaped, rest string, ok bool, err error) {
	tail, found := strings.CutPrefix(escaped, prefix)
	if !found {
		return "", "", "", false, nil
	}
	name, restEscaped, _ = strings.Cut(tail, "/")
	if strings.Contains(tail, "/") {
		restEscaped = "/" + restEscaped
	}
	if restEscaped != "" {
		if rest, err = cleanPath(restEscaped); err != nil {
			return "", "", "", true, err
		}
	}
	return name, restEscaped, rest, true, nil
}
