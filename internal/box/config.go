// Package box owns the records of boxes: it acquires, lists and removes them,
// reaps idle ones, and passes files and images to the host that has them.
//
// A box is recorded before its host is told (creating), and taken off the host
// before its record goes (removing), so that nothing can be forgotten half-way:
// the sweep finishes whatever a crash has cut short. One goroutine, the sweep,
// runs beside the callers; whoever changes a box holds its lock.
package box

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// Host is what the service needs of a host program; host.Client has it.
type Host interface {
	PutBox(ctx context.Context, spec wire.BoxSpec) (wire.BoxInfo, error)
	RemoveBox(ctx context.Context, id string) error
	PutFiles(ctx context.Context, id, path string, tar io.Reader) error
	GetFiles(ctx context.Context, id, path string, w io.Writer) error
	LoadImage(ctx context.Context, name string, tar io.Reader) ([]wire.ImageInfo, error)
	Images(ctx context.Context) ([]wire.ImageInfo, error)
	RemoveImage(ctx context.Context, digest string) error
}

// Config is what a service is made from.
type Config struct {
	// Store is the ledger. The service does not close it.
	Store store.Store
	// Hosts returns the host program of a target: not_found for an unknown
	// target, unavailable while it cannot be reached at all.
	Hosts func(target string) (Host, error)
	// Target is the default target.
	Target string
	// Limits bounds boxes; zero fields get their defaults.
	Limits Limits
	// Logger gets no secret; nil discards.
	Logger *slog.Logger
}

// Limits bounds boxes. Zero fields get the default named beside them.
type Limits struct {
	PerTarget, PerWorkspace int           // boxes: 64, 32
	Default                 api.BoxLimits // 2000 millis, 4 GiB, 1024 pids
	Max                     api.BoxLimits // zero fields: no bound but the machine
	Mounts                  int           // mounts of one box: 64
	Idle, MaxIdle           time.Duration // before it is removed: 30 min, 30 days
	Files                   int64         // bytes of one transfer of files: 4 GiB
	Image                   int64         // bytes of one image archive: 16 GiB
	Sweep                   time.Duration // how often idle boxes are looked for: 30 s
}

func (l Limits) withDefaults() Limits {
	set := func(v *int64, def int64) {
		if *v <= 0 {
			*v = def
		}
	}
	count := func(v *int, def int) {
		if *v <= 0 {
			*v = def
		}
	}
	count(&l.PerTarget, 64)
	count(&l.PerWorkspace, 32)
	count(&l.Mounts, 64)
	set(&l.Default.CPUMillis, 2000)
	set(&l.Default.MemoryBytes, 4<<30)
	set(&l.Default.Pids, 1024)
	set(&l.Files, 4<<30)
	set(&l.Image, 16<<30)
	set((*int64)(&l.Idle), int64(30*time.Minute))
	set((*int64)(&l.MaxIdle), int64(30*24*time.Hour))
	set((*int64)(&l.Sweep), int64(30*time.Second))
	l.Mounts = min(l.Mounts, store.MaxItems)
	l.MaxIdle = max(l.MaxIdle, l.Idle)
	return l
}

func (c Config) check() error {
	if c.Store == nil || c.Hosts == nil || c.Target == "" {
		return errdefs.New(errdefs.Internal, "the box service needs a ledger, hosts and a default target")
	}
	return nil
}
