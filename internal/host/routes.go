package host

import (
	"context"
	"net/http"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// handler routes the host API. The list is the one in package wire.
func (s *server) handler() http.Handler {
	mux := http.NewServeMux()
	// Only Info may be asked without a generation: whoever starts host programs
	// needs it to know whether one is there.
	mux.Handle("GET /v1/info", s.admit(false, s.getInfo))
	mux.Handle("PUT /v1/lease", s.handle(s.putLease))
	mux.Handle("POST /v1/shutdown", s.handle(s.shutdown))

	mux.Handle("PUT /v1/boxes/{box}", s.handle(s.putBox))
	mux.Handle("GET /v1/boxes", s.handle(s.listBoxes))
	mux.Handle("GET /v1/boxes/{box}", s.handle(s.getBox))
	mux.Handle("DELETE /v1/boxes/{box}", s.handle(s.removeBox))
	mux.Handle("PUT /v1/boxes/{box}/files", s.handle(s.putFiles))
	mux.Handle("GET /v1/boxes/{box}/files", s.handle(s.getFiles))
	mux.Handle("PUT /v1/images", s.handle(s.loadImage))
	mux.Handle("GET /v1/images", s.handle(s.listImages))
	mux.Handle("DELETE /v1/images/{digest}", s.handle(s.removeImage))

	mux.Handle("PUT /v1/procs/{proc}", s.handle(s.putProc))
	mux.Handle("GET /v1/procs", s.handle(s.listProcs))
	mux.Handle("GET /v1/procs/{proc}", s.handle(s.getProc))
	mux.Handle("DELETE /v1/procs/{proc}", s.handle(s.forgetProc))
	mux.Handle("GET /v1/watch", s.handle(s.watch))
	mux.Handle("GET /v1/procs/{proc}/log", s.handle(s.readLog))
	mux.Handle("POST /v1/procs/{proc}/ack", s.handle(s.ack))
	mux.Handle("PUT /v1/procs/{proc}/stdin", s.handle(s.putStdin))
	mux.Handle("POST /v1/procs/{proc}/signal", s.handle(s.signal))
	mux.Handle("POST /v1/procs/{proc}/resize", s.handle(s.resize))
	mux.Handle("POST /v1/procs/{proc}/close", s.handle(s.closeProc))
	mux.Handle("/", s.handle(func(context.Context, *request) error {
		return errdefs.New(errdefs.NotFound, "this host program has no such operation").
			WithNext("check that its version matches the server's")
	}))
	return mux
}

func (s *server) getInfo(_ context.Context, r *request) error { return r.answer(s.info) }

func (s *server) putLease(_ context.Context, r *request) error {
	var l wire.Lease
	if err := r.decode(maxSmallBody, &l); err != nil {
		return err
	}
	d := time.Duration(l.Millis) * time.Millisecond
	if l.Millis <= 0 || l.Millis > maxLease.Milliseconds() {
		return errdefs.New(errdefs.Invalid, "a lease lasts from 1 ms to %v", maxLease)
	}
	if err := s.gate.commit(r.generation, func() error { return s.lease.set(d) }); err != nil {
		return err
	}
	return r.done()
}

func (s *server) shutdown(_ context.Context, r *request) error {
	keep, err := r.flag("keep")
	if err != nil {
		return err
	}
	if err := s.gate.commit(r.generation, func() error { return s.reg.close(keep) }); err != nil {
		return err
	}
	defer s.stopOnce.Do(func() { close(s.stopped) })
	return r.done()
}

func (s *server) putProc(ctx context.Context, r *request) error {
	var spec wire.ProcSpec
	if err := r.decode(maxSpec, &spec); err != nil {
		return err
	}
	if err := checkSpec(r.PathValue("proc"), spec); err != nil {
		return err
	}
	var p *proc
	err := s.gate.commit(r.generation, func() error {
		err := s.lease.grant()
		if err == nil {
			p, err = s.reg.start(ctx, spec)
		}
		return err
	})
	if err != nil {
		return err
	}
	return r.answer(p.state())
}

func (s *server) listProcs(_ context.Context, r *request) error {
	ps := s.reg.all()
	states := make([]wire.ProcState, len(ps))
	for i, p := range ps {
		states[i] = p.state()
	}
	return r.answer(states)
}

func (s *server) getProc(ctx context.Context, r *request) error {
	p, err := s.reg.find(r.PathValue("proc"))
	if err != nil {
		return err
	}
	return r.answer(p.refresh(ctx))
}

func (s *server) forgetProc(ctx context.Context, r *request) error {
	id := r.PathValue("proc")
	p, err := s.reg.find(id)
	if err != nil {
		return r.done() // forgotten already
	}
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	if err := p.release(ctx); err != nil {
		return err
	}
	if err := s.gate.commit(r.generation, func() error { return s.reg.forget(id) }); err != nil {
		return err
	}
	return r.done()
}

// living returns a process and waits until its shim answers, which takes
// milliseconds after its start.
func (s *server) living(ctx context.Context, r *request) (*proc, error) {
	p, err := s.reg.find(r.PathValue("proc"))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	return p, p.ready(ctx)
}

// readyTime bounds the wait for a shim that is just being started.
const readyTime = 20 * time.Second

// shimTime bounds one question to a shim.
const shimTime = 20 * time.Second

func (s *server) ack(ctx context.Context, r *request) error {
	cursor, err := r.number("cursor", -1, 0, api.MaxOffset)
	if err != nil {
		return err
	}
	if cursor < 0 {
		return errdefs.New(errdefs.Invalid, "there is no cursor to acknowledge")
	}
	p, err := s.living(ctx, r)
	if err != nil {
		return err
	}
	if st := p.state(); st.Phase == wire.PhaseEnded {
		if cursor > st.Log.Next {
			return errdefs.New(errdefs.Invalid, "cursor %d is beyond the log, which ends at %d", cursor, st.Log.Next)
		}
		return r.done() // nothing needs room any more
	}
	err = p.ask(ctx, shimTime, func(ctx context.Context) error { return p.client.Ack(ctx, cursor) })
	if err != nil && !p.ended() {
		return err
	}
	return r.done()
}

func (s *server) putStdin(ctx context.Context, r *request) error {
	offset, err := r.number("offset", -1, 0, api.MaxOffset)
	if err != nil {
		return err
	}
	if offset < 0 {
		return errdefs.New(errdefs.Invalid, "there is no offset to write the input at")
	}
	eof, err := r.flag("eof")
	if err != nil {
		return err
	}
	data, err := r.body(MaxStdinBody)
	if err != nil {
		return err
	}
	p, err := s.living(ctx, r)
	if err != nil {
		return err
	}
	if st := p.state(); st.Phase == wire.PhaseEnded {
		in, err := endedStdin(st, offset, len(data), eof)
		if err != nil {
			return err
		}
		return r.answer(in)
	}
	var in api.StdinState
	err = p.ask(ctx, shimTime, func(ctx context.Context) (err error) {
		in, err = p.client.WriteStdin(ctx, offset, data, eof)
		return err
	})
	if err != nil {
		return err
	}
	return r.answer(in)
}

func (s *server) signal(ctx context.Context, r *request) error {
	var sig wire.Signal
	if err := r.decode(maxSmallBody, &sig); err != nil {
		return err
	}
	return s.toLiving(ctx, r, func(ctx context.Context, p *proc) error { return p.client.Signal(ctx, sig.Signal) })
}

func (s *server) resize(ctx context.Context, r *request) error {
	var size api.Winsize
	if err := r.decode(maxSmallBody, &size); err != nil {
		return err
	}
	if size.Rows < 1 || size.Cols < 1 || size.Rows > 4096 || size.Cols > 4096 {
		return errdefs.New(errdefs.Invalid, "a terminal has 1 to 4096 rows and columns")
	}
	return s.toLiving(ctx, r, func(ctx context.Context, p *proc) error { return p.client.Resize(ctx, size) })
}

// toLiving asks the shim of a process that must not have ended.
func (s *server) toLiving(ctx context.Context, r *request, f func(context.Context, *proc) error) error {
	p, err := s.living(ctx, r)
	if err != nil {
		return err
	}
	if p.ended() {
		return errdefs.New(errdefs.Conflict, "the process has ended")
	}
	if err := p.ask(ctx, shimTime, func(ctx context.Context) error { return f(ctx, p) }); err != nil {
		return err
	}
	return r.done()
}
