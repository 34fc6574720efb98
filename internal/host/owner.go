package host

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// Pauses of an owner. They bound how often it tries what failed.
const (
	firstPause = 20 * time.Millisecond
	lastPause  = 5 * time.Second
	// launchTries is how often a shim is started before the process is given up
	// as one that could not be started.
	launchTries = 4
	// launchTime bounds one start of a shim; measured: 5 to 10 ms.
	launchTime = 30 * time.Second
)

// What an owner finds.
type finding int

const (
	foundNothing finding = iota // accepted, never tried: start it (the intent is durable)
	foundAlive                  // a shim keeps it
	foundEnded                  // an exit record
	foundDamaged                // an exit record that cannot be read
	foundDead                   // it was tried, and neither a shim nor an exit record is there
)

// look says where a process stands, from the directory alone. The order matters:
// a shim writes its exit record before it ends, so the record is asked for only
// after the shim was found dead.
func (p *proc) look() (finding, wire.ProcState, error) {
	alive, err := shim.Find(p.dir)
	if err != nil {
		return 0, wire.ProcState{}, err
	}
	if alive {
		return foundAlive, wire.ProcState{}, nil
	}
	st, err := shim.ReadExit(p.dir)
	switch {
	case err == nil && (st.ID != p.id || p.box != "" && st.Box != p.box):
		return foundDamaged, wire.ProcState{}, nil
	case err == nil:
		return foundEnded, st, nil
	case errdefs.Is(err, errdefs.Indeterminate):
		return foundDamaged, wire.ProcState{}, nil
	case !errdefs.Is(err, errdefs.NotFound):
		return 0, wire.ProcState{}, err
	}
	tried, err := shim.Tried(p.dir)
	switch {
	case err != nil:
		return 0, wire.ProcState{}, err
	case tried || p.text == nil:
		return foundDead, wire.ProcState{}, nil
	}
	return foundNothing, wire.ProcState{}, nil
}

// own is the owner: it returns when the process has ended and its tree is proven
// empty, or when the host ends. accepted says that this host has just accepted
// the process, so that nothing needs to be looked for.
func (p *proc) own(ctx context.Context, accepted bool) {
	defer close(p.owned)
	wait, tries := firstPause, 0
	for ctx.Err() == nil {
		found, st, err := foundNothing, wire.ProcState{}, error(nil)
		if !accepted {
			found, st, err = p.look()
		}
		if err == nil {
			switch found {
			case foundNothing:
				err = p.launch(ctx, accepted)
				if tries++; err != nil && tries >= launchTries {
					err = p.neverStarted(err)
				}
			case foundAlive:
				var done bool
				if done, err = p.follow(ctx); done {
					return
				}
			case foundEnded:
				p.publish(st)
				if st.Proof != nil {
					return
				}
				err = p.prove(ctx, st)
			case foundDamaged, foundDead:
				err = p.settle(ctx, found)
			}
		}
		accepted = false
		if err == nil {
			wait = firstPause
			continue
		}
		if ctx.Err() != nil {
			return
		}
		p.reg.log.Warn("a process needs another try", "proc", p.id, "error", err)
		select {
		case <-p.poke:
		default:
			p.pokedPause(ctx, wait)
		}
		wait = min(2*wait, lastPause)
	}
}

func (p *proc) pokedPause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.poke:
	case <-t.C:
	case <-ctx.Done():
	}
}

// launch starts the shim. fresh says that the bundle was made just now; of an
// adopted process it may be half-written and is made again.
func (p *proc) launch(ctx context.Context, fresh bool) error {
	p.publish(p.withPhase(wire.PhaseStarting))
	if !fresh {
		if err := p.reg.prepare(ctx, p.spec, p.dir); err != nil {
			if errdefs.Is(err, errdefs.Unavailable) || errdefs.Is(err, errdefs.Exhausted) {
				return err
			}
			return p.neverStarted(err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, launchTime)
	defer cancel()
	return shim.Start(ctx, p.reg.exe, p.dir)
}

func (p *proc) withPhase(phase wire.Phase) wire.ProcState {
	st := p.state()
	st.Phase = phase
	return st
}

// follow keeps the state of a process with a living shim. It returns true when
// the process has ended and is proven gone; false sends the owner to look again.
func (p *proc) follow(ctx context.Context) (bool, error) {
	st, err := p.client.State(ctx)
	if err != nil {
		return false, err
	}
	for {
		if st.ID != p.id {
			return false, errdefs.New(errdefs.Internal, "the shim of %s speaks of another process", p.id)
		}
		if st.Phase == wire.PhaseEnded {
			return p.retire(ctx, st)
		}
		p.publish(st)
		p.setUp()
		if st, err = p.client.Wait(ctx, st.Rev, -1); err != nil {
			return false, p.lost(ctx, err)
		}
	}
}

// lost says whether a broken long poll means anything: if the shim is dead the
// owner looks again at once.
func (p *proc) lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if alive, ferr := shim.Find(p.dir); ferr == nil && !alive {
		return nil
	}
	return err
}

// retire takes over an ended process from its shim, which then may go: all that
// it knows is on disk.
func (p *proc) retire(ctx context.Context, st wire.ProcState) (bool, error) {
	if _, err := shim.ReadExit(p.dir); err != nil {
		// The living shim knows better than a record that cannot be read.
		if err := shim.WriteExit(p.dir, st); err != nil {
			return false, err
		}
	}
	p.publish(st)
	// Also when the host is just ending: otherwise the shim would linger until the
	// next one, which may never come.
	forget, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := p.client.Forget(forget); err != nil {
		p.reg.log.Warn("a shim was not told that it may go", "proc", p.id, "error", err)
	}
	buryShim(forget, p.dir)
	p.client.CloseIdle()
	if st.Proof != nil {
		return true, nil
	}
	return false, errdefs.New(errdefs.Indeterminate, "the tree of %s is not proven gone: %s", p.id, st.Unproven)
}

// neverStarted ends a process whose shim cannot be started. Nothing was tried.
func (p *proc) neverStarted(why error) error {
	if found, _, err := p.look(); err != nil || found != foundNothing {
		return err // something is there after all: look again
	}
	now := time.Now().UTC()
	st := p.withPhase(wire.PhaseEnded)
	st.Rev, st.Ended = settledRev, &now
	st.Exit = &api.Exit{Kind: api.ExitSpawnFailed, Detail: "it could not be started: " + message(why)}
	st.Proof = &wire.Proof{Method: "never_started", BootID: p.reg.boot, EmptyAt: now}
	st.Log.EOF = true
	return shim.WriteExit(p.dir, st)
}

// message is what a caller may read of an error.
func message(err error) string { return api.ProblemOf(err, "").Detail }
