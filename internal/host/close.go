package host

import (
	"context"
	"errors"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/wire"
)

// maxGrace is the longest grace a close may give; the public API's limit.
const maxGrace = 10 * time.Minute

// closeTime is how long a close may take beyond the grace: the keeper's own
// bounds for killing, draining and proving, and some for a loaded machine.
const closeTime = process.KeepProof + process.KeepDrain + 10*time.Second

// closeProc ends a process and answers when its tree is empty or the bounded
// time for proving it has passed. Of an unknown id it records that it must never
// start. What was asked of the shim goes on if the caller leaves.
func (s *server) closeProc(ctx context.Context, r *request) error {
	var req wire.Close
	if err := r.decode(maxSmallBody, &req); err != nil {
		return err
	}
	if req.GraceMillis < 0 || req.GraceMillis > maxGrace.Milliseconds() {
		return errdefs.New(errdefs.Invalid, "the grace is from 0 to %d ms", maxGrace.Milliseconds())
	}
	id := r.PathValue("proc")
	if !ident.Valid(ident.Process, id) {
		return errdefs.New(errdefs.Invalid, "the process id is not one")
	}
	p, err := s.reg.find(id)
	if err != nil {
		err = s.gate.commit(r.generation, func() (err error) {
			p, err = s.reg.forbid(ctx, id, req.Reason)
			return err
		})
		if err != nil {
			return err
		}
	}
	limit := time.Duration(req.GraceMillis)*time.Millisecond + closeTime
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	st := p.close(ctx, req)
	if st.Phase != wire.PhaseEnded && st.Unproven == "" {
		st.Unproven = "the process did not end in the bounded time for it"
	}
	return r.answer(st)
}

// closeAsk is how long one question of a close stays with the shim. A shim
// serves few connections, so the wait for the end is not held there but shared
// with everybody who follows the state; asking again is harmless.
const closeAsk = time.Second

// close returns when the process has ended with proof, when its keeper says why
// it cannot prove that for now, or when ctx has ended.
func (p *proc) close(ctx context.Context, req wire.Close) wire.ProcState {
	if p.ready(ctx) != nil {
		return p.state()
	}
	select {
	case p.poke <- struct{}{}: // an unproven end is looked at again at once
	default:
	}
	over := func() bool { return p.st.Phase == wire.PhaseEnded || p.st.Unproven != "" }
	for !p.ended() && ctx.Err() == nil {
		err := p.ask(ctx, closeAsk, func(ctx context.Context) error {
			_, err := p.client.Close(ctx, req)
			return err
		})
		wait := 5 * closeAsk
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			// The shim died, which its owner settles, or was not up to it.
			wait = closeAsk / 5
		}
		short, cancel := context.WithTimeout(ctx, wait)
		done := p.await(short, over) == nil
		cancel()
		if done {
			break
		}
	}
	if !p.ended() {
		return p.state()
	}
	// Ended without proof: the owner is trying; give it the time of one attempt.
	short, cancel := context.WithTimeout(ctx, proofTime)
	defer cancel()
	_ = p.await(short, func() bool { return p.st.Proof != nil })
	return p.state()
}
