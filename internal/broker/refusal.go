package broker

import (
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/store"
)

// A start that a host definitely refused is an answer like any other: it is kept
// as the reason of a record that never started, and repeating the open gives the
// same error again. The form is "refused (CODE): text"; no caller's own reason
// stands in a record that was told to a host and never started without a close.

const refusedPrefix = "refused ("

// refusal reports whether a start's error is a lasting refusal that proves that
// this request started nothing. Other answers are no refusals: conflict says that
// the id is taken, denied that another server has taken over, and unavailable
// that it may work later, so the host is asked and told again.
func refusal(err error) bool {
	return err != nil && host.Refused(err) && slices.Contains([]errdefs.Code{
		errdefs.Invalid, errdefs.NotFound, errdefs.Exhausted,
	}, errdefs.CodeOf(err))
}

func isRefusal(reason string) bool { return strings.HasPrefix(reason, refusedPrefix) }

func refusalText(err error) string {
	return cut(refusedPrefix + string(errdefs.CodeOf(err)) + "): " + err.Error())
}

// refusedError returns the error that a host refused this process with, or nil.
func refusedError(p store.Process) error {
	if p.State != api.StateNeverStarted || p.HostID == "" {
		return nil
	}
	rest, ok := strings.CutPrefix(p.Reason, refusedPrefix)
	code, text, ok2 := strings.Cut(rest, "): ")
	if !ok || !ok2 || !slices.Contains(errdefs.Codes(), errdefs.Code(code)) {
		return nil
	}
	return errdefs.New(errdefs.Code(code), "%s", text).
		WithNext("it started nothing; open again with a new request_id").With("handle", p.Handle)
}
