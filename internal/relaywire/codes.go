package relaywire

import (
	"errors"
	"fmt"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// The close codes of RFC 6455 that coding-relay-v1 uses.
const (
	CloseGoingAway = 1001 // the hub stops, every job settled before
	CloseRefused   = 1008 // a handshake that failed, with one of the reasons below
	CloseTooBig    = 1009 // a message beyond the limit
	CloseHalted    = 1011 // a client that could not confirm a clean-up
)

// The reasons that go with a close code. A WebSocket reason has at most 123 bytes.
const (
	ReasonHello    = "hello required"
	ReasonID       = "daemon_id required, 1 to 128 characters"
	ReasonToken    = "invalid token"
	ReasonProtocol = "protocol coding-relay-v1 required: upgrade daemon.py together with pkg"
	ReasonTaken    = "daemon_id is connected or fenced: verify its cleanup first"
	ReasonStopping = "hub stopped"
	ReasonHalted   = "cleanup unconfirmed: daemon halted"
)

// Code is the part of a relay error code after the hub's prefix, as in
// "relay.daemon_fenced". Stable: callers branch on it.
type Code string

// The codes of a hub.
const (
	CodeTokenRequired   Code = "daemon_token_required"
	CodeHubConflict     Code = "daemon_hub_conflict"
	CodeBindFailed      Code = "daemon_bind_failed"
	CodeNotStarted      Code = "daemon_hub_not_started"
	CodeOffline         Code = "daemon_offline"
	CodeFenced          Code = "daemon_fenced"
	CodeCancelling      Code = "daemon_cancelling"
	CodeBusy            Code = "daemon_busy"
	CodeDisconnected    Code = "daemon_disconnected"
	CodeTimeout         Code = "daemon_timeout"
	CodeCancelled       Code = "daemon_cancelled"
	CodeUnexpected      Code = "daemon_unexpected"
	CodeIDInvalid       Code = "daemon_id_invalid"
	CodeStateFailed     Code = "daemon_state_failed"
	CodePayloadInvalid  Code = "payload_invalid"
	CodePayloadTooLarge Code = "payload_too_large"
	CodeOverflow        Code = "job_overflow"
	CodeEventTooLarge   Code = "event_too_large"
)

// kinds gives each relay code the closed code that says what a caller can do.
var kinds = map[Code]errdefs.Code{
	CodeTokenRequired:   errdefs.Invalid,
	CodeHubConflict:     errdefs.Conflict,
	CodeBindFailed:      errdefs.Unavailable,
	CodeNotStarted:      errdefs.Unavailable,
	CodeOffline:         errdefs.Unavailable,
	CodeFenced:          errdefs.Fenced,
	CodeCancelling:      errdefs.Cancelling,
	CodeBusy:            errdefs.Exhausted,
	CodeDisconnected:    errdefs.Indeterminate,
	CodeTimeout:         errdefs.Exhausted,
	CodeCancelled:       errdefs.Conflict,
	CodeUnexpected:      errdefs.Internal,
	CodeIDInvalid:       errdefs.Invalid,
	CodeStateFailed:     errdefs.Unavailable,
	CodePayloadInvalid:  errdefs.Invalid,
	CodePayloadTooLarge: errdefs.Exhausted,
	CodeOverflow:        errdefs.Exhausted,
	CodeEventTooLarge:   errdefs.Exhausted,
}

// detailCode is the key of an error's detail that carries the relay code.
const detailCode = "relay_code"

// Errorf makes the error of a relay code: its errdefs code is the one that says
// what a caller can do, its detail "relay_code" is "<prefix>.<code>".
func Errorf(prefix string, code Code, format string, args ...any) *errdefs.Error {
	kind, ok := kinds[code]
	if !ok {
		kind = errdefs.Internal
	}
	return errdefs.New(kind, "%s", fmt.Sprintf(format, args...)).With(detailCode, prefix+"."+string(code))
}

// CodeOf returns the relay code of an error made by [Errorf], with its prefix,
// or "".
func CodeOf(err error) string {
	if e, ok := asError(err); ok {
		return e.Detail[detailCode]
	}
	return ""
}

// Is reports whether err carries the relay code, whatever its prefix.
func Is(err error, code Code) bool {
	full := CodeOf(err)
	n := len(full) - len(code)
	return n > 0 && full[n-1] == '.' && full[n:] == string(code)
}

func asError(err error) (*errdefs.Error, bool) {
	for err != nil {
		if e, ok := errors.AsType[*errdefs.Error](err); ok {
			if _, has := e.Detail[detailCode]; has {
				return e, true
			}
			err = e.Unwrap()
			continue
		}
		return nil, false
	}
	return nil, false
}
