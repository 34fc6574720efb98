package worker

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// StopStep is how long [Process.Stop] waits after each step, as the published SDK
// 0.6.3 and 0.7 do.
const StopStep = 2 * time.Second

const (
	// killTime bounds the proof that a killed tree is gone. It takes milliseconds
	// unless a process sleeps in the kernel.
	killTime = 10 * time.Second
	// drainTime is how long the output of an ended worker may still be read. With
	// the tree gone the pipes are at their end; only a process that has left the
	// tree, where the machine cannot hold it, may keep them open.
	drainTime = 2 * time.Second
)

// Process is a worker that was started. Stdin, Stdout and Stderr are the raw
// pipes; Stdout and Stderr end when the tree has gone and must be read until
// then. Methods may be called from any goroutine.
type Process struct {
	Stdin  io.WriteCloser
	Stdout io.Reader
	Stderr io.Reader

	tree   Tree
	log    *slog.Logger
	exited chan struct{} // closed after exit and proof are set
	mu     sync.Mutex    // guards Stop against itself
	exit   Exit
	proof  error // what stayed of the tree
}

// Outcome says how a worker was stopped.
type Outcome struct {
	How How
	// Err is set when it could not be proven that the whole tree is gone. The
	// worker must then be reported, and cannot be waited for.
	Err error
}

// How is the step that ended a worker.
type How string

// The steps, in the order they are taken.
const (
	EndedBefore How = "ended before" // it had ended by itself
	Graceful    How = "graceful"     // after its input was closed
	Terminated  How = "terminated"   // after SIGTERM
	Killed      How = "killed"       // after SIGKILL
	Unreaped    How = "unreaped"     // it is still there
)

// NewProcess takes over a tree that runs. The launchers use it; tests of others
// use it with trees and pipes of their own. log may be nil.
func NewProcess(tree Tree, in io.WriteCloser, out, err io.ReadCloser, log *slog.Logger) *Process {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	o, e := &stream{r: out}, &stream{r: err}
	p := &Process{Stdin: in, Stdout: o, Stderr: e, tree: tree, log: log, exited: make(chan struct{})}
	go p.watch(o, e)
	return p
}

// watch waits for the worker's end, then ends the rest of the tree.
func (p *Process) watch(streams ...*stream) {
	exit := p.tree.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), killTime)
	defer cancel()
	err := p.tree.Kill(ctx)
	p.exit, p.proof = exit, err
	_ = p.Stdin.Close()
	time.AfterFunc(drainTime, func() {
		for _, s := range streams {
			_ = s.close()
		}
	})
	close(p.exited)
}

// PID is the process number of the worker, for people.
func (p *Process) PID() int { return p.tree.PID() }

// Exited is closed when the worker has ended and nothing is left of its tree, or
// what is left could not be ended within 10 seconds.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Exit says how the worker ended. Before Exited is closed it is "running", -1.
func (p *Process) Exit() (text string, code int) {
	select {
	case <-p.exited:
		return p.exit.Text, p.exit.Code
	default:
		return "running", -1
	}
}

// Left returns what could not be proven gone of the tree after Exited; nil if
// nothing is left.
func (p *Process) Left() error {
	select {
	case <-p.exited:
		return p.proof
	default:
		return nil
	}
}

// Stop ends the worker and returns when it is gone or cannot be ended: it closes
// Stdin and waits for one step, sends SIGTERM and waits, kills the whole tree and
// waits. step 0 is [StopStep]. It takes at most three steps; calls at the same
// time end it together.
func (p *Process) Stop(step time.Duration) Outcome {
	if step <= 0 {
		step = StopStep
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.within(0) {
		return Outcome{How: EndedBefore, Err: p.proof}
	}
	_ = p.Stdin.Close()
	if p.within(step) {
		return Outcome{How: Graceful, Err: p.proof}
	}
	p.tree.Terminate()
	if p.within(step) {
		return Outcome{How: Terminated, Err: p.proof}
	}
	ctx, cancel := context.WithTimeout(context.Background(), step)
	defer cancel()
	err := p.tree.Kill(ctx)
	if p.within(step) {
		return Outcome{How: Killed, Err: p.proof}
	}
	if err == nil {
		err = errUnreaped
	}
	p.log.Warn("a worker cannot be ended", "pid", p.tree.PID(), "error", err)
	return Outcome{How: Unreaped, Err: err}
}

// end kills the whole tree at once and returns when it is gone.
func (p *Process) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), killTime)
	defer cancel()
	err := p.tree.Kill(ctx)
	if p.within(killTime) {
		return p.proof
	}
	if err == nil {
		err = errUnreaped
	}
	return err
}

func (p *Process) within(d time.Duration) bool {
	select {
	case <-p.exited:
		return true
	default:
	}
	if d <= 0 {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.exited:
		return true
	case <-t.C:
		return false
	}
}

// stream is one output of a worker. It closes itself at its end.
type stream struct {
	r    io.ReadCloser
	once sync.Once
}

func (s *stream) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	if err != nil {
		_ = s.close()
		err = io.EOF // also when it was closed under the read: it is the end
	}
	return n, err
}

func (s *stream) close() (err error) {
	s.once.Do(func() { err = s.r.Close() })
	return err
}

var errUnreaped = errdefs.New(errdefs.Indeterminate, "the worker is still there after SIGKILL").
	WithNext("look at what it waits for in the kernel: /proc/PID/stack")
