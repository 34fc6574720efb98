package broker

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "run only this seed of the simulation")
	simSeeds = flag.Int("sim.seeds", 24, "how many seeds of the simulation to run")
)

// TestSim runs random schedules of callers, crashes, restarts, reboots, lost
// messages and failing saves against a whole server. Its time and its faults are
// virtual; the interleaving of goroutines is the scheduler's. A failure names its seed.
func TestSim(t *testing.T) {
	t.Parallel()
	seeds := []uint64{*simSeed}
	if *simSeed == 0 {
		seeds = nil
		for i := range *simSeeds {
			seeds = append(seeds, uint64(i)+1)
		}
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			inBubble(t, Limits{PerRun: 1000, ProofWait: 20 * time.Second, OpenWait: 5 * time.Second}, func(r *rig) {
				s := &sim{rig: r, rand: rand.New(rand.NewPCG(seed, 7)), names: map[string]string{}, boot: 1}
				s.play(120)
				s.settle()
			})
		})
	}
}

type sim struct {
	*rig
	rand  *rand.Rand
	calls sync.WaitGroup
	mu    sync.Mutex
	names map[string]string // request id -> handle, as callers learned it
	n     int
	boot  int
}

func (s *sim) play(steps int) {
	faults := rand.New(rand.NewPCG(s.rand.Uint64(), 1)) // used under the host's lock
	s.host.set(func() {
		s.host.fault = func(op, _ string) fault {
			switch op {
			case "start", "close", "ask", "stdin", "log":
			default:
				return none
			}
			switch x := faults.IntN(100); {
			case x < 8:
				return loseFirst
			case x < 18:
				return loseAfter
			case x < 22 && op == "start":
				return late
			case x < 26:
				return busy
			case x < 28 && op == "start":
				return refuse
			}
			return none
		}
	})
	saves := rand.New(rand.NewPCG(s.rand.Uint64(), 2)) // used under the ledger's lock
	failing := func(int, store.Process) error {
		if saves.IntN(100) < 4 {
			return errdefs.New(errdefs.Unavailable, "the disk is full")
		}
		return nil
	}
	s.ledger.set(failing)
	for range steps {
		switch x := s.rand.IntN(100); {
		case x < 34:
			s.n++
			id := fmt.Sprintf("r%d", s.n)
			s.call(func(ctx context.Context) { s.openOne(ctx, id) })
		case x < 44 && s.n > 0:
			id := fmt.Sprintf("r%d", s.rand.IntN(s.n)+1)
			s.call(func(ctx context.Context) { s.openOne(ctx, id) })
		case x < 62 && s.n > 0:
			id := fmt.Sprintf("r%d", s.rand.IntN(s.n+1)+1) // perhaps one that is not opened yet
			grace := millis(int64(s.rand.IntN(3)) * 1000)
			s.call(func(ctx context.Context) {
				c, err := s.b.CloseByRequest(ctx, s.run, api.CloseByRequest{RequestID: id, CloseRequest: api.CloseRequest{GraceMillis: grace}})
				if err == nil && !c.Quiescent && c.Fence == nil {
					s.t.Errorf("%s: a close that is neither proven nor fenced: %+v", id, c)
				}
			})
		case x < 74:
			if alive := s.host.alive(); len(alive) > 0 {
				s.host.exit(alive[s.rand.IntN(len(alive))], s.rand.IntN(256))
			}
		case x < 80:
			if alive := s.host.alive(); len(alive) > 0 {
				h := alive[s.rand.IntN(len(alive))]
				s.call(func(ctx context.Context) { _, _ = s.b.Get(ctx, s.run, h) })
			}
		case x < 87:
			s.host.stop()
			s.pause(3000)
			s.host.start()
		case x < 95:
			s.calls.Wait() // calls that are under way hold the old server
			s.restart()
			s.ledger.set(failing)
		case x < 97:
			s.boot++
			s.host.reboot(fmt.Sprintf("boot-%d", s.boot))
		default:
			s.host.set(func() { s.host.unproven = !s.host.unproven })
		}
		s.pause(400)
	}
}

func (s *sim) pause(most int) { time.Sleep(time.Duration(s.rand.IntN(most)) * time.Millisecond) }

// call runs one caller, who may lose patience.
func (s *sim) call(f func(context.Context)) {
	patience := time.Duration(s.rand.IntN(4000)) * time.Millisecond
	s.calls.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, patience)
		defer cancel()
		f(ctx)
	})
}

func (s *sim) openOne(ctx context.Context, id string) {
	p, err := s.b.Open(ctx, s.run, request(id, "work", id))
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.names[id]; old != "" && old != p.Handle {
		s.t.Errorf("request %s had the handle %s and now has %s", id, old, p.Handle)
	}
	s.names[id] = p.Handle
}

// settle ends all faults, closes everything, and checks the promises.
func (s *sim) settle() {
	s.calls.Wait()
	s.host.set(func() { s.host.fault, s.host.unproven = nil, false })
	s.ledger.set(nil)
	s.host.start()
	s.host.late.Wait()
	for _, p := range s.all() {
		s.eventually("a close of "+p.Handle+" ends", func() bool {
			c, err := s.b.Close(s.ctx, s.key, p.Handle, api.CloseRequest{GraceMillis: millis(0)})
			return err == nil && (c.Quiescent || c.Fence != nil)
		})
	}
	for _, p := range s.host.procs { // whoever would not die at first does so in the end
		if p.state.Phase == "ended" && p.state.Proof == nil {
			s.host.prove(p.state.ID)
		}
	}
	s.eventually("every process is final", func() bool {
		for _, p := range s.all() {
			if p.State != api.StateClosed && p.State != api.StateNeverStarted {
				return false
			}
		}
		return true
	})
	if a := s.host.alive(); len(a) != 0 {
		s.t.Errorf("alive at the end: %v", a)
	}
	states := map[api.ProcessState]int{}
	for _, p := range s.all() {
		states[p.State]++
		n := s.host.ran(p.Handle)
		if n > 1 {
			s.t.Errorf("P1: %s was executed %d times", p.RequestID, n)
		}
		if n > 0 && p.State == api.StateNeverStarted {
			s.t.Errorf("P3: %s was executed and is recorded as never started", p.RequestID)
		}
		if p.Cleanup == api.CleanupQuiescent && p.Receipt == "" && p.Digest != [32]byte{} {
			s.t.Errorf("P4: %s is quiescent without a receipt", p.RequestID)
		}
		if p.Exit != nil && p.Exit.Kind == api.ExitExited && n != 1 {
			s.t.Errorf("P3: %s has an exit code and was executed %d times", p.RequestID, n)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, h := range s.names {
		p, err := s.ledger.ProcessByRequest(s.ctx, everything(), s.run.Run, id)
		if err != nil || p.Handle != h {
			s.t.Errorf("P1: request %s was answered with %s, recorded is %s (%v)", id, h, p.Handle, err)
		}
	}
	s.t.Logf("%d requests, %d boots: %v", s.n, s.boot, states)
}

func (s *sim) all() []store.Process {
	s.t.Helper()
	ps, err := s.ledger.Processes(s.ctx, everything(), store.ProcessFilter{Page: store.Page{Limit: 1000}})
	s.ok(err)
	return ps
}
