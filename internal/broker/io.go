package broker

import (
	"context"
	"errors"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/store"
)

// Write writes input at an offset of the process's standard input, and its end
// after it if eof is set. It returns how far the input is accepted, which is less
// than offset+len(data) when the child does not read fast enough. Repeating a
// write is harmless. Errors: invalid (offset, size, no input), conflict (offset
// beyond what is accepted, after the end, after the exit), cancelling, exhausted
// (the window is full), unavailable (repeat the same write).
func (b *Broker) Write(ctx context.Context, p authz.Principal, handle string, offset int64, data []byte, eof bool) (api.StdinState, error) {
	if len(data) > MaxWrite {
		return api.StdinState{}, errdefs.New(errdefs.Invalid, "one write of %d bytes is over the limit of %d", len(data), MaxWrite).
			WithNext("write it in pieces").With("limit", decimal(MaxWrite))
	}
	if offset < 0 || offset > api.MaxOffset-int64(len(data)) {
		return api.StdinState{}, errdefs.New(errdefs.Invalid, "offset %d is outside 0 to 2^53", offset)
	}
	rec, o, err := b.find(ctx, p, authz.ProcessWrite, handle)
	if err != nil {
		return api.StdinState{}, err
	}
	spec, err := specOf(rec)
	if err != nil {
		return api.StdinState{}, err
	}
	if wasOpened(rec) && !spec.Stdin && spec.PTY == nil {
		return api.StdinState{}, errdefs.New(errdefs.Invalid, "%s has no input: it was opened without stdin", handle).
			WithNext("open it with \"stdin\": true")
	}
	rec, l, err := b.inputTo(ctx, rec, o)
	if err != nil {
		if done := offset + int64(len(data)); errdefs.Is(err, errdefs.Conflict) && done <= rec.Stdin.Accepted && (!eof || rec.Stdin.EOF && done == rec.Stdin.Accepted) {
			return rec.Stdin, nil // a repeat of what was accepted before the end
		}
		return api.StdinState{}, err
	}
	st, err := l.client.WriteStdin(ctx, handle, offset, data, eof)
	if err != nil {
		return api.StdinState{}, lostWrite(ctx, err, "repeat the same write at the same offset: what arrived is not written twice")
	}
	if st.Accepted < 0 || st.Accepted > api.MaxOffset || st.Window < 0 || st.Window > api.MaxOffset {
		return api.StdinState{}, errdefs.New(errdefs.Internal, "the host program acknowledged input that makes no sense")
	}
	return st, nil
}

// inputTo returns the host of a process that takes input and signals now. It
// waits for a start that is under way, as long as ctx allows.
func (b *Broker) inputTo(ctx context.Context, rec store.Process, o *owner) (store.Process, *link, error) {
	if o != nil && !lifeOf(rec).Acked() {
		bounded, cancel := context.WithTimeout(ctx, b.cfg.Limits.OpenWait)
		defer cancel()
		v, err := o.wait(bounded, func(v *view) bool {
			return lifeOf(v.rec).Acked() || v.rec.CloseAsked != nil || v.rec.State == api.StateFenced
		})
		if err != nil {
			return rec, nil, errdefs.Wrap(err, errdefs.Unavailable, "%s has not started yet", rec.Handle).WithNext("try again")
		}
		rec = v.rec
	}
	switch rec.State {
	case api.StateClosing:
		return rec, nil, errdefs.New(errdefs.Cancelling, "%s is being closed and takes nothing more", rec.Handle)
	case api.StateFenced:
		return rec, nil, errdefs.New(errdefs.Fenced, "%s is fenced and takes nothing more", rec.Handle).With("fence", rec.Fence)
	case api.StateClosed:
		return rec, nil, errdefs.New(errdefs.Conflict, "%s has ended", rec.Handle)
	case api.StateNeverStarted:
		return rec, nil, errdefs.New(errdefs.Conflict, "%s never started", rec.Handle)
	}
	l, err := b.linkTo(rec)
	return rec, l, err
}

// lostWrite turns what is not known into what to do.
func lostWrite(ctx context.Context, err error, next string) error {
	if !errors.Is(err, host.ErrAnswered) && ctx.Err() == nil && (errdefs.Is(err, errdefs.Indeterminate) || errdefs.Is(err, errdefs.Unavailable)) {
		return errdefs.Wrap(err, errdefs.Unavailable, "the connection to the host program broke before it answered").WithNext("%s", next)
	}
	return err
}

// Signal sends a polite signal to the child's process group. A signal is not
// idempotent: after indeterminate it may have been sent.
func (b *Broker) Signal(ctx context.Context, p authz.Principal, handle, signal string) error {
	switch signal {
	case "SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGCONT", "SIGTSTP":
	default:
		return errdefs.New(errdefs.Invalid, "the signal %q cannot be sent", cutTo(signal, 32)).
			WithNext("use SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT or SIGTSTP; to stop it for good use close")
	}
	rec, o, err := b.find(ctx, p, authz.ProcessSignal, handle)
	if err != nil {
		return err
	}
	_, l, err := b.inputTo(ctx, rec, o)
	if err != nil {
		return err
	}
	return l.client.Signal(ctx, handle, signal)
}

// Resize sets the size of a process's terminal; invalid if it has none.
func (b *Broker) Resize(ctx context.Context, p authz.Principal, handle string, size api.Winsize) error {
	if err := checkSize(size); err != nil {
		return err
	}
	rec, o, err := b.find(ctx, p, authz.ProcessResize, handle)
	if err != nil {
		return err
	}
	spec, err := specOf(rec)
	if err != nil {
		return err
	}
	if wasOpened(rec) && spec.PTY == nil {
		return errdefs.New(errdefs.Invalid, "%s has no terminal", handle).WithNext("open it with pty")
	}
	_, l, err := b.inputTo(ctx, rec, o)
	if err != nil {
		return err
	}
	return lostWrite(ctx, l.client.Resize(ctx, handle, size), "repeat it")
}

// Ack says that everything before cursor was taken and may be dropped at the
// log's cap. A cursor beyond the log's end is invalid.
func (b *Broker) Ack(ctx context.Context, p authz.Principal, handle, cursor string) error {
	rec, _, err := b.find(ctx, p, authz.ProcessAck, handle)
	if err != nil {
		return err
	}
	at, oldest, err := parseCursor(handle, cursor)
	if err != nil || oldest {
		return err
	}
	return b.ack(ctx, rec, at)
}

func (b *Broker) ack(ctx context.Context, rec store.Process, at int64) error {
	if at == 0 || rec.LogGone || rec.State == api.StateClosed || rec.State == api.StateNeverStarted {
		return nil // no room is needed any more
	}
	l, err := b.linkTo(rec)
	if err != nil {
		return err
	}
	return lostWrite(ctx, l.client.Ack(ctx, rec.Handle, at), "repeat it")
}
