package host

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

const generationFile = "generation"

var errSuperseded = errdefs.New(errdefs.Denied, "a newer server has taken over this host").
	WithNext("this server must not act on it any more")

// gate holds the highest generation of a server this host has seen (P7). The
// number is durable before it is obeyed, so a restart cannot let an old server
// in again.
type gate struct {
	dir  string
	root context.Context // the server's; every epoch ends with it

	// mu is held for reading by every request while it changes something, so that
	// after a new generation was answered no request of an old one changes anything.
	mu      sync.RWMutex
	highest int64
	// epoch ends when a higher generation comes; requests end with it.
	epoch context.Context
	end   context.CancelCauseFunc
}

// openGate reads the highest generation. A file that cannot be read is an error:
// going on with 0 would let an old server in.
func openGate(ctx context.Context, dir string) (*gate, error) {
	g := &gate{dir: dir, root: ctx}
	g.epoch, g.end = context.WithCancelCause(ctx)
	b, err := os.ReadFile(filepath.Join(dir, generationFile))
	if errors.Is(err, fs.ErrNotExist) {
		return g, nil
	}
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the host's generation cannot be read: %v", err)
	}
	g.highest, err = strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil || g.highest < 0 || g.highest > api.MaxOffset {
		return nil, errdefs.New(errdefs.Internal, "the file %s is damaged", filepath.Join(dir, generationFile)).
			WithNext("write the server's present generation into it as a decimal number")
	}
	return g, nil
}

// admit lets a request of a generation in, raising the highest if it is higher.
// The context it returns ends when the request's does or a newer generation
// comes; release must be called at the request's end.
func (g *gate) admit(ctx context.Context, generation int64) (_ context.Context, release func(), _ error) {
	g.mu.RLock()
	highest, epoch := g.highest, g.epoch
	g.mu.RUnlock()
	if generation > highest {
		if err := g.raise(generation); err != nil {
			return nil, nil, err
		}
		g.mu.RLock()
		highest, epoch = g.highest, g.epoch
		g.mu.RUnlock()
	}
	if generation < highest {
		return nil, nil, older(generation, highest)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(epoch, func() { cancel(context.Cause(epoch)) })
	return ctx, func() { stop(); cancel(nil) }, nil
}

func older(generation, highest int64) error {
	return errdefs.New(errdefs.Denied, "the request comes from an older server generation, %d; this host obeys %d", generation, highest).
		WithNext("this server must not act on the host any more").
		With("generation", strconv.FormatInt(highest, 10))
}

func (g *gate) raise(generation int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if generation <= g.highest {
		return nil
	}
	if err := writeDurable(g.dir, generationFile, strconv.AppendInt(nil, generation, 10)); err != nil {
		return err
	}
	g.highest = generation
	g.end(errSuperseded)
	g.epoch, g.end = context.WithCancelCause(g.root)
	return nil
}

// commit runs fn, which changes something, unless a newer generation has come.
func (g *gate) commit(generation int64, fn func() error) error {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if generation < g.highest {
		return older(generation, g.highest)
	}
	return fn()
}
