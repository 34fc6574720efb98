package runprocess

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// errNoRun is the answer for a run that was never there, has ended or is somebody
// else's: the three look alike.
func errNoRun(id string) error {
	const most = 64
	id = strings.ToValidUTF8(id, "?")
	if len(id) > most {
		id = strings.ToValidUTF8(id[:most], "") + "…"
	}
	return errdefs.New(errdefs.NotFound, "there is no active run %q of this installation", id)
}

// errBusy is unavailable and not exhausted: it is over as soon as a call returns.
func errBusy(format string, args ...any) error {
	return errdefs.New(errdefs.Unavailable, format, args...).WithNext("try again when one has returned")
}

func invalid(format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, format, args...)
}

// passes reports whether the same request may succeed later.
func passes(err error) bool {
	code := errdefs.CodeOf(err)
	return code == errdefs.Unavailable || code == errdefs.Exhausted || code == errdefs.Cancelling
}

func detail(err error, name string) string {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e.Detail[name]
	}
	return ""
}

// failure is the error of an action as the SDK's run API reads it.
type failure struct {
	Error struct {
		Code      errdefs.Code      `json:"code"`
		Message   string            `json:"message"`
		Retryable bool              `json:"retryable"`
		Details   map[string]string `json:"details"`
	} `json:"error"`
}

// told makes of an error the answer to an action, with its code as data.
func told(action string, err error) error {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		e = errdefs.New(errdefs.Internal, "the action failed inside the runtime; its log says why")
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			e = errdefs.New(errdefs.Unavailable, "the call was given up")
		}
	}
	var f failure
	f.Error.Code, f.Error.Message, f.Error.Retryable = e.Code, e.Error(), passes(e)
	f.Error.Details = e.Detail
	if f.Error.Details == nil {
		f.Error.Details = map[string]string{}
	}
	data, merr := json.Marshal(f)
	if merr != nil {
		return merr
	}
	return &rpc.PeerError{Action: action, Message: pluginwire.CutText(e.Error()), Data: data}
}

// ofBroker is what a plugin may know of an error of the broker. Its address and its
// credentials are the operator's, and a run that it does not know any more has ended.
func (r *Run) ofBroker(err error, begun bool) error {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		return err
	}
	switch {
	case e.Code == errdefs.Unauthenticated || e.Code == errdefs.Denied:
		if begun {
			return errNoRun(r.start.RunID)
		}
		return errdefs.New(errdefs.Denied, "the process broker refuses this plugin runtime").WithNext("tell its operator to look at the runtime's log")
	case e.Code == errdefs.Unavailable && e.Unwrap() != nil:
		return errdefs.Wrap(err, errdefs.Unavailable, "the process broker does not answer").WithNext("try again")
	case e.Code == errdefs.Internal:
		return errdefs.New(errdefs.Internal, "the process broker failed")
	}
	return err
}
