package pluginhost

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/registration"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

// plan is one launch of a worker.
type plan struct {
	spec   worker.Spec
	grant  registration.Grant
	stderr *pluginlog.Buffer
	within time.Duration // until it is ready
	late   string        // what it did not do in that time
	ready  func()        // called once, when it is
}

func specOf(name, code, site string, d dirs, policy pluginwire.WorkerPolicy) worker.Spec {
	return worker.Spec{Name: name, Code: code, SitePackages: site, Private: d.private(), TransferDir: d.transfer, Policy: policy}
}

func grantOf(a artifact.Artifact, b pluginwire.Context, pool string, launch uint64) registration.Grant {
	return registration.Grant{Author: a.Manifest.Author, Name: a.Manifest.Name, Binding: b, Pool: pool, Launch: launch}
}

// run starts a worker and follows it until it ends, breaks its word or ctx is
// done; then everything of it is gone: its registration, its pending capability,
// its connection, its processes, both goroutines. It returns why.
func (m *Manager) run(ctx context.Context, p permit, l *link, pl plan) error {
	defer l.release()
	capability, err := m.pending.Issue(pl.grant, time.Now())
	if err != nil {
		return err
	}
	defer m.pending.Revoke(capability)
	pl.spec.Capability = capability
	proc, err := m.launcher.Start(ctx, pl.spec)
	if err != nil {
		return err
	}
	m.counter.started(l.kind)
	l.conn = rpc.New(rpc.Stdio(proc.Stdout, proc.Stdin, proc.Stdin.Close), l.config())
	var readers sync.WaitGroup
	readers.Go(func() {
		if err := l.conn.Run(context.WithoutCancel(ctx)); err != nil {
			m.log.Debug("a worker's connection ended", "worker", l.name, "err", err)
		}
		_, _ = io.Copy(io.Discard, proc.Stdout)
	})
	readers.Go(func() {
		_ = pl.stderr.Capture(proc.Stderr)
		_, _ = io.Copy(io.Discard, proc.Stderr)
	})
	err = m.follow(ctx, p, l, proc, pl)
	m.endWorker(l, proc, err)
	readers.Wait()
	return err
}

// follow waits for what happens to a started worker.
func (m *Manager) follow(ctx context.Context, p permit, l *link, proc *worker.Process, pl plan) error {
	timer := time.NewTimer(pl.within)
	defer timer.Stop()
	select {
	case <-l.ready:
	case err := <-l.refused:
		// The worker is told why before it loses its connection.
		settle(ctx, proc)
		return err
	case <-proc.Exited():
		return l.refusal(exitError(proc, "before it was ready"))
	case <-l.conn.Done():
		return l.refusal(brokenError(ctx, proc, l, "before it was ready"))
	case <-timer.C:
		m.counter.late(l.kind)
		return errdefs.New(errdefs.Unavailable, "the plugin worker %s within %s", pl.late, pl.within).
			WithNext("look at the plugin's log")
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	p.ready()
	pl.ready()
	var stable <-chan time.Time
	if p.probe() {
		t := time.NewTimer(StableAfter)
		defer t.Stop()
		stable = t.C
	}
	for {
		select {
		case <-stable:
			p.stable()
			stable = nil
		case <-proc.Exited():
			return exitError(proc, "")
		case <-l.conn.Done():
			return brokenError(ctx, proc, l, "")
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// endWorker ends a worker in the order peers rely on: its requests are cancelled,
// it is told to shut down, its connection is closed, its process is waited for
// and in the end killed.
func (m *Manager) endWorker(l *link, proc *worker.Process, cause error) {
	registered := l.unregister(cause)
	l.conn.CancelInbound()
	select {
	case <-proc.Exited():
	case <-l.conn.Done():
	default:
		if registered {
			ctx, cancel := context.WithTimeout(context.Background(), ShutdownWithin)
			_, err := l.conn.Call(ctx, pluginwire.ActionShutdown, struct{}{}, rpc.CallOptions{Context: l.shutdownContext(), Timeout: ShutdownWithin})
			cancel()
			if err != nil {
				m.log.Debug("a worker did not acknowledge shutdown", "worker", l.name, "err", err)
			}
		}
	}
	l.conn.Close(nil)
	if out := proc.Stop(0); out.Err != nil {
		m.log.Error("processes of a plugin worker could not be ended", "worker", l.name, "pid", proc.PID(), "err", out.Err)
	}
}

// settleTime is how long a worker that was refused, or whose connection broke,
// may take to end by itself, so that it reads its answer and we its exit.
const settleTime = time.Second

func settle(ctx context.Context, proc *worker.Process) {
	timer := time.NewTimer(settleTime)
	defer timer.Stop()
	select {
	case <-proc.Exited():
	case <-timer.C:
	case <-ctx.Done():
	}
}

func exitError(proc *worker.Process, when string) error {
	text, _ := proc.Exit()
	if when != "" {
		when = " " + when
	}
	return errdefs.New(errdefs.Unavailable, "the plugin worker ended%s: %s", when, text).WithNext("look at the plugin's log")
}

func brokenError(ctx context.Context, proc *worker.Process, l *link, when string) error {
	settle(ctx, proc)
	cause := rpc.Cause(l.conn.Err())
	// What the worker wrote and may not write is the reason, and its exit follows from
	// it. Any other error follows from its exit.
	wrong, ours := errors.AsType[*errdefs.Error](cause)
	select {
	case <-proc.Exited():
		if !ours {
			return exitError(proc, when)
		}
	default:
	}
	if when != "" {
		when = " " + when
	}
	if ours {
		return errdefs.Wrap(cause, errdefs.Unavailable, "the plugin worker broke its connection%s: %s", when, wrong.Message)
	}
	return errdefs.New(errdefs.Unavailable, "the plugin worker broke its connection%s", when)
}

func joinClose(err error, l worker.Launcher) error { return errors.Join(err, l.Close()) }
