package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// How a session ends before its process: the person left with Ctrl-P Ctrl-Q, or with
// a third Ctrl-C; or there is nowhere to write the output to.
var (
	errDetached = errors.New("detached")
	errLeft     = errors.New("left")
	errOutput   = errors.New("the output cannot be written")
)

// outlet marks the errors of writing here, which are not the server's.
type outlet struct{ io.Writer }

func (o outlet) Write(p []byte) (int, error) {
	n, err := o.Writer.Write(p)
	if err != nil {
		err = fmt.Errorf("%w: %w", errOutput, err)
	}
	return n, err
}

// sessionOptions says how to be attached to a process.
type sessionOptions struct {
	cursor string
	stdin  bool
	offset int64 // of the next input byte
	tty    bool
	grace  time.Duration
}

// session forwards input, output, signals and terminal sizes until the process
// has ended, and returns how.
func (a *app) session(parent context.Context, proc *client.Process, sigs *signals, o sessionOptions) (api.Exit, error) {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	if o.tty {
		restore, err := a.rawTerminal()
		if err != nil {
			return api.Exit{}, err
		}
		defer restore()
	}
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel(nil) // before Wait
	helpers.Go(func() { a.forwardSignals(ctx, proc, sigs, o, func() { cancel(errLeft) }) })
	if o.stdin {
		// Not waited for: a read of the terminal cannot be interrupted.
		go a.forwardStdin(ctx, cancel, proc, o)
	}
	copied, err := proc.Copy(ctx, outlet{a.Stdout}, outlet{a.Stderr}, client.OutputOptions{Cursor: o.cursor, Ack: true, OnGap: func(g client.Gap) {
		a.say("stockade: %d bytes from cursor %s to %s are no longer kept", g.Bytes, g.From, g.To)
	}})
	end := api.Exit{}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errDetached):
		return end, errDetached
	case errors.Is(cause, errLeft):
		return end, errdefs.Wrap(errLeft, errdefs.Indeterminate, "left before it was known how the command ended").
			WithNext("see stockade get %s", proc.Handle())
	case errors.Is(err, errOutput):
		return end, outputError(err)
	case err == nil && copied.Exit != nil:
		return *copied.Exit, nil
	case err == nil:
		end, err = proc.Wait(ctx)
	}
	if client.IsCode(err, client.Unavailable) {
		e := errdefs.Wrap(err, errdefs.Unavailable, "%s", api.ProblemOf(err, "").Detail)
		return end, e.WithNext("the command may go on; come back with: stockade attach --since-cursor %s %s", copied.Cursor, proc.Handle())
	}
	return end, err
}

// outputError says why this command's own output could not be written.
func outputError(err error) error {
	reason := err
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		reason = pe.Err
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "%v: %v", errOutput, reason)
}

// forwardStdin copies this command's input to the process and its end after it.
// That the process stopped reading or ended is no failure of the session.
func (a *app) forwardStdin(ctx context.Context, cancel context.CancelCauseFunc, proc *client.Process, o sessionOptions) {
	in := io.Reader(a.Stdin)
	if o.tty {
		in = &detachReader{r: in, detach: func() { cancel(errDetached) }}
	}
	w := proc.StdinAt(ctx, o.offset)
	_, err := io.Copy(w, in)
	if err == nil {
		err = w.Close()
	}
	if err != nil && ctx.Err() == nil && !client.IsCode(err, client.Conflict) && !client.IsCode(err, client.Cancelling) {
		a.say("stockade: input is no longer forwarded: %v", err)
	}
}

// detachReader watches for Ctrl-P Ctrl-Q, docker's keys to leave a terminal.
type detachReader struct {
	r      io.Reader
	detach func()
	held   bool // a Ctrl-P was read and not passed on
}

const ctrlP, ctrlQ = 0x10, 0x11

// Read passes on what was read but for the keys to leave.
func (d *detachReader) Read(p []byte) (int, error) {
	buf := make([]byte, max(1, len(p)-1))
	for {
		n, err := d.r.Read(buf)
		out := p[:0]
		for _, c := range buf[:n] {
			if d.held {
				if c == ctrlQ {
					d.detach()
					return len(out), io.EOF
				}
				out = append(out, ctrlP)
				d.held = false
			}
			if c == ctrlP {
				d.held = true
				continue
			}
			out = append(out, c)
		}
		if len(out) > 0 || err != nil {
			return len(out), err
		}
	}
}

// signals are those a session forwards, caught from its very beginning.
type signals struct {
	ch chan os.Signal
}

func catchSignals(tty bool) *signals {
	s := &signals{ch: make(chan os.Signal, 8)}
	signal.Notify(s.ch, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	if tty {
		signal.Notify(s.ch, syscall.SIGWINCH)
	}
	return s
}

func (s *signals) stop() { signal.Stop(s.ch) }

// cancelling returns a context that the next signal ends, until release is
// called; then the signals are the session's.
func (s *signals) cancelling(parent context.Context) (ctx context.Context, release func()) {
	ctx, cancel := context.WithCancel(parent)
	released, joined := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(joined)
		for {
			select {
			case <-released:
				return
			case sig := <-s.ch:
				if sig != syscall.SIGWINCH {
					cancel()
					return
				}
			}
		}
	}()
	return ctx, sync.OnceFunc(func() {
		close(released)
		<-joined
		cancel()
	})
}

// forwardSignals makes the first SIGINT or SIGTERM a polite close, the second a kill
// and the third, when not even that is answered, a leave; and it keeps the size of the
// process's terminal.
func (a *app) forwardSignals(ctx context.Context, proc *client.Process, sigs *signals, o sessionOptions, leave func()) {
	if o.tty { // the size may have changed since it was opened
		if size, err := a.terminalSize(); err == nil {
			_ = proc.Resize(ctx, *size)
		}
	}
	var closing sync.WaitGroup
	// A close goes on when the session is over: it must not be taken back.
	patient, giveUp := context.WithCancel(context.WithoutCancel(ctx))
	defer giveUp()
	defer closing.Wait() // before giveUp
	asked := 0
	for {
		select {
		case <-ctx.Done():
			return
		case s := <-sigs.ch:
			if s == syscall.SIGWINCH {
				if size, err := a.terminalSize(); err == nil {
					_ = proc.Resize(ctx, *size)
				}
				continue
			}
			asked++
			grace := o.grace
			switch {
			case s == syscall.SIGHUP: // the terminal is gone; nobody can press twice
			case asked == 1:
				a.say("\nstockade: asking the command to stop; once more to kill it")
			case asked == 2:
				a.say("\nstockade: killing it; once more to leave without waiting")
				grace = 0
			default:
				giveUp()
				leave()
				continue
			}
			ms := grace.Milliseconds()
			closing.Go(func() {
				reason := fmt.Sprintf("%v at the command line", s)
				cctx, stop := context.WithTimeout(patient, grace+time.Minute)
				defer stop()
				_, err := proc.Close(cctx, api.CloseRequest{Reason: reason, GraceMillis: &ms})
				if err != nil && patient.Err() == nil && !client.IsCode(err, client.Conflict) {
					a.say("stockade: the command could not be stopped: %v", err)
				}
			})
		}
	}
}

// interruptible ends the context at the first Ctrl-C, for commands that only look.
func interruptible(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
}

func (a *app) terminalSize() (*api.Winsize, error) {
	f, ok := terminal(a.Stdin)
	if !ok {
		return nil, errdefs.New(errdefs.Invalid, "-t needs a terminal as standard input").WithNext("leave -t out")
	}
	cols, rows, err := term.GetSize(int(f.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		cols, rows = 80, 24
	}
	return &api.Winsize{Rows: uint16(min(rows, 4096)), Cols: uint16(min(cols, 4096))}, nil
}

func (a *app) rawTerminal() (restore func(), err error) {
	f, ok := terminal(a.Stdin)
	if !ok {
		return nil, errdefs.New(errdefs.Invalid, "-t needs a terminal as standard input").WithNext("leave -t out")
	}
	old, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the terminal cannot be made raw: %v", err)
	}
	a.raw.Store(true)
	return func() {
		_ = term.Restore(int(f.Fd()), old)
		a.raw.Store(false)
	}, nil
}
