package worker

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/stockade-run/stockade/internal/boxhost"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/deptree"
	"github.com/stockade-run/stockade/internal/errdefs"
)

func logger(l *slog.Logger) *slog.Logger {
	if l == nil {
		return slog.New(slog.DiscardHandler)
	}
	return l
}

func checkInterp(i Interpreter) error {
	if i.SDK == "" || i.ImportRoot == "" {
		return errdefs.New(errdefs.Unavailable, "the plugin SDK is not installed for the interpreter %s", i.Path).
			WithNext("install langbot-plugin there, or name another interpreter")
	}
	if !filepath.IsAbs(i.Path) || !filepath.IsAbs(i.Prefix) || !filepath.IsAbs(i.ImportRoot) {
		return errdefs.New(errdefs.Invalid, "the interpreter was not probed: its paths are not absolute")
	}
	return nil
}

// key names what belongs to a data directory. The runtime's lock on that
// directory is what makes it safe to end what is found under the name.
func key(dataDir string) (string, error) {
	if dataDir == "" {
		return "", errdefs.New(errdefs.Invalid, "the launcher has no data directory")
	}
	abs, err := filepath.Abs(dataDir)
	if err == nil {
		if real, err := filepath.EvalSymlinks(abs); err == nil {
			abs = real
		}
	}
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Invalid, "the data directory cannot be named: %v", err)
	}
	sum := sha256.Sum256([]byte(abs))
	return hex.EncodeToString(sum[:8]), nil
}

// directGroup and boxGroup are the control groups of all workers of a data
// directory, by its key.
func directGroup(key string) string { return boxhost.DefaultCgroup + "/direct-" + key }

func boxGroup(key string) string { return boxhost.DefaultCgroup + "/workers-" + key }

// maxName is how much of a worker's name goes into the name of its group.
const maxName = 48

// newID names one start: what people know the worker by, and random digits.
func newID(name string) string {
	clean := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '-', r == '_':
			return r
		}
		return '-'
	}, name)
	return "w-" + clean[:min(len(clean), maxName)] + "-" + strings.ToLower(rand.Text()[:10])
}

// endGroup kills what is in a control group and removes it, and the group that
// all share where that is unused then.
func endGroup(root, path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), killTime)
	defer cancel()
	g := cgroup.New(root, path)
	if err := g.Kill(ctx); err != nil && !errdefs.Is(err, errdefs.Unavailable) {
		return err
	}
	if err := g.Remove(ctx); err != nil && !errdefs.Is(err, errdefs.Unavailable) {
		return err
	}
	cgroup.New(root, boxhost.DefaultCgroup).RemoveUnused()
	return nil
}

// live is the processes of a launcher.
type live struct {
	mu       sync.Mutex
	procs    map[*Process]struct{}
	closed   bool
	starts   sync.WaitGroup // one per start, and per installation, under way
	ends     sync.WaitGroup // one per process in procs
	installs map[*context.CancelCauseFunc]struct{}
}

// begin holds the launcher open while something is started, until the returned
// function is called.
func (l *live) begin() (done func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errClosed()
	}
	l.starts.Add(1)
	return l.starts.Done, nil
}

// install is begin for an installation, whose context it is: closing the launcher ends
// that, and waits until what the installation made on the machine is gone.
func (l *live) install(ctx context.Context) (_ context.Context, done func(), err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, nil, errClosed()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	if l.installs == nil {
		l.installs = map[*context.CancelCauseFunc]struct{}{}
	}
	l.installs[&cancel] = struct{}{}
	l.starts.Add(1)
	return ctx, func() {
		cancel(nil)
		l.mu.Lock()
		delete(l.installs, &cancel)
		l.mu.Unlock()
		l.starts.Done()
	}, nil
}

// add takes a process in until it has ended. It is called between begin and done.
func (l *live) add(p *Process) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.procs == nil {
		l.procs = map[*Process]struct{}{}
	}
	l.procs[p] = struct{}{}
	l.ends.Go(func() {
		<-p.Exited()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.procs, p)
	})
}

// close refuses new processes and ends all there are, together. again says that
// somebody has closed it before. It returns what could not be proven gone.
func (l *live) close() (again bool, err error) {
	l.mu.Lock()
	again, l.closed = l.closed, true
	for cancel := range l.installs {
		(*cancel)(errClosed())
	}
	l.mu.Unlock()
	if again {
		return true, nil
	}
	l.starts.Wait()
	l.mu.Lock()
	procs := slices.Collect(maps.Keys(l.procs))
	l.mu.Unlock()
	errs := make([]error, len(procs))
	var wg sync.WaitGroup
	for i, p := range procs {
		wg.Go(func() { errs[i] = p.Stop(0).Err })
	}
	wg.Wait()
	for _, p := range procs {
		select {
		case <-p.Exited():
		default: // it cannot be waited for
			return false, errors.Join(errs...)
		}
	}
	l.ends.Wait()
	return false, errors.Join(errs...)
}

func errClosed() error {
	return errdefs.New(errdefs.Unavailable, "the launcher is closed")
}

// outputTail is how much of an installer's output is kept.
const outputTail = 4 << 10

// runInstaller waits for an installer, or ends it with ctx.
func runInstaller(ctx context.Context, p *Process) error {
	var said tail
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(&said, p.Stdout) })
	wg.Go(func() { _, _ = io.Copy(&said, p.Stderr) })
	defer wg.Wait()
	select {
	case <-p.Exited():
	case <-ctx.Done():
		// It has nothing to tidy up: it is killed at once.
		if err := p.end(); err != nil {
			return errors.Join(context.Cause(ctx), err)
		}
		return context.Cause(ctx)
	}
	wg.Wait()
	if err := p.Left(); err != nil {
		return err
	}
	if _, code := p.Exit(); code != 0 {
		return &deptree.InstallError{Exit: code, Output: said.String()}
	}
	return nil
}

// tail keeps the last outputTail bytes written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p[max(0, len(p)-outputTail):]...)
	if len(t.b) > outputTail {
		t.b = append(t.b[:0], t.b[len(t.b)-outputTail:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b)
}
