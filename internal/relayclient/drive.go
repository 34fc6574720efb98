package relayclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/stockade-run/stockade/internal/agent"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/osproc"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// politeBound is how long an agent that was asked to cancel may take before
// SIGTERM. With the grace times after it the whole stays well below the ten
// seconds that a hub waits.
const politeBound = time.Second

// output is one line, or the end.
type output struct {
	line []byte
	err  error
}

// drive takes the agent through its run and returns when nothing of it is left.
func (r *run) drive(ctx context.Context, emit func(json.RawMessage) error) (err error) {
	lines, quit := make(chan output), make(chan struct{})
	reader := make(chan struct{})
	go func() {
		defer close(reader)
		r.read(lines, quit)
	}()
	defer func() {
		// Whatever happened: nothing is left, or the hub is not told that.
		if o := r.proc.Stop(); !o.Confirmed {
			err = &UnconfirmedError{Why: o.Why}
		}
		close(quit)
		<-reader
	}()
	d := &driver{run: r, lines: lines, emit: emit}
	d.exited = r.proc.Exited()
	if err := d.apply(r.codec.Start(r.where)); err != nil {
		return err
	}
	if err := d.loop(ctx); err != nil {
		return err
	}
	if ctx.Err() != nil {
		d.cancel()
		return context.Cause(ctx)
	}
	return d.finish(ctx)
}

// read hands out lines until the end or until nobody wants them.
func (r *run) read(lines chan<- output, quit <-chan struct{}) {
	for {
		line, err := r.proc.ReadLine()
		select {
		case lines <- output{bytes.Clone(line), err}:
		case <-quit:
		}
		if err != nil {
			return
		}
	}
}

// driver is owned by drive.
type driver struct {
	*run
	lines  <-chan output
	exited <-chan struct{} // nil once seen
	emit   func(json.RawMessage) error
	exit   agent.Exit
	done   bool // the codec said so
	eof    bool
}

func timer(d time.Duration) <-chan time.Time {
	if d <= 0 {
		return nil
	}
	return time.After(d)
}

// loop runs until the agent has ended, is to be ended, or the job is to stop. An
// error means that nobody takes the events.
func (d *driver) loop(ctx context.Context) error {
	all, first := timer(d.launch.Timeout), timer(d.launch.StartTimeout)
	var linger <-chan time.Time
	for {
		lines := d.lines
		if d.eof {
			lines = nil // it let its output go; its end comes
		}
		select {
		case <-ctx.Done():
			return nil
		case o := <-lines:
			first = nil
			if err := d.take(o); err != nil {
				return err
			}
			if d.exit.Overflow != "" {
				return d.stop()
			}
			if d.done && linger == nil {
				linger = time.After(d.launch.Linger)
			}
		case <-d.exited:
			d.exited = nil
			// What it left behind may hold its output: that ends now, and what was
			// written before is still there to be read.
			if d.proc.Stop().Confirmed {
				return d.drain()
			}
			return nil
		case <-linger:
			return d.stop()
		case <-first:
			d.exit.TimedOut = true
			return d.stop()
		case <-all:
			d.exit.TimedOut = !d.done
			return d.stop()
		}
	}
}

// stop ends the agent and takes what it said until then.
func (d *driver) stop() error {
	d.exit.Stopped = true
	if !d.proc.Stop().Confirmed {
		return nil // told by drive
	}
	return d.drain()
}

func (d *driver) drain() error {
	for !d.eof {
		if err := d.take(<-d.lines); err != nil {
			return err
		}
	}
	return nil
}

// take feeds one line to the codec.
func (d *driver) take(o output) error {
	switch {
	case o.err == nil && d.exit.Overflow == "":
		return d.apply(d.codec.Feed(o.line))
	case o.err == nil:
		return nil
	case !errors.Is(o.err, io.EOF) && d.exit.Overflow == "":
		d.exit.Overflow = o.err.Error()
	}
	d.eof = true
	return nil
}

// apply does what the codec wants.
func (d *driver) apply(s agent.Step) error {
	for _, e := range s.Events {
		if err := d.emit(d.redact(e)); err != nil {
			if errdefs.Is(err, errdefs.Exhausted) && d.exit.Overflow == "" { // too large to be sent
				d.exit.Overflow = err.Error()
				continue
			}
			return err
		}
	}
	if len(s.Write) > 0 {
		if err := d.proc.Write(s.Write); err != nil && d.exit.Overflow == "" {
			d.exit.Overflow = err.Error()
		}
	}
	if s.CloseInput {
		d.proc.CloseInput()
	}
	d.done = d.done || s.Done
	return nil
}

// redact takes secrets out of a failure: agents repeat in their errors what they
// were given. What the assistant says is its own.
func (d *driver) redact(event json.RawMessage) json.RawMessage {
	if !bytes.HasPrefix(event, []byte(`{"type":"run.failed"`)) {
		return event
	}
	var e struct {
		Data struct {
			Error     string `json:"error"`
			Code      string `json:"code"`
			Retryable bool   `json:"retryable"`
		} `json:"data"`
	}
	if json.Unmarshal(event, &e) != nil {
		return event
	}
	return relaywire.FailedEvent(e.Data.Code, osproc.Redact(e.Data.Error, d.cfg.Secrets...), e.Data.Retryable)
}

// cancel asks the agent to stop, waits a moment, and leaves the rest to Stop. What
// it says meanwhile is read, so that it does not hang on its output, and dropped.
func (d *driver) cancel() {
	d.emit = func(json.RawMessage) error { return nil }
	s := d.codec.Cancel()
	if d.apply(s) != nil || s.Done || d.exited == nil {
		return
	}
	polite := time.NewTimer(politeBound)
	defer polite.Stop()
	for !d.done && !d.eof {
		select {
		case o := <-d.lines:
			if d.take(o) != nil {
				return
			}
		case <-d.exited:
			return
		case <-polite.C:
			return
		}
	}
}

// finish gives the last events.
func (d *driver) finish(ctx context.Context) error {
	if o := d.proc.Stop(); !o.Confirmed {
		return &UnconfirmedError{Why: o.Why}
	}
	e := d.proc.Exit()
	d.exit.Code, d.exit.Signal, d.exit.Stderr = e.Code, e.Signal, d.proc.Stderr()
	for _, ev := range d.codec.Finish(d.exit) {
		err := d.emit(d.redact(ev))
		if errdefs.Is(err, errdefs.Exhausted) {
			f := &agent.Failure{Code: d.prefix + ".output_too_large", Message: err.Error()}
			return d.emit(f.Event())
		}
		if err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}
