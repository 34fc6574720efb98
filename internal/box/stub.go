// Package box owns the records of boxes: it acquires, lists and removes them,
// reaps idle ones, and passes files and images to the host that has them.
package box

import (
	"context"
	"io"
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
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

// Service owns the records of boxes.
type Service struct{}

func todo() error { return errdefs.New(errdefs.Internal, "not built yet") }

// New makes a service.
func New(cfg Config) (*Service, error) { return &Service{}, nil }

// Start begins to heal and reap.
func (s *Service) Start(ctx context.Context) error { return todo() }

// Stop ends that.
func (s *Service) Stop(ctx context.Context) error { return todo() }

// Acquire returns the box with a key or makes one.
func (s *Service) Acquire(ctx context.Context, p authz.Principal, req api.BoxRequest) (api.Box, error) {
	return api.Box{}, todo()
}

// Get returns a box.
func (s *Service) Get(ctx context.Context, p authz.Principal, id string) (api.Box, error) {
	return api.Box{}, todo()
}

// List lists boxes.
func (s *Service) List(ctx context.Context, p authz.Principal, page store.Page) (api.List[api.Box], error) {
	return api.List[api.Box]{}, todo()
}

// Remove removes a box.
func (s *Service) Remove(ctx context.Context, p authz.Principal, id string) error { return todo() }

// PutFiles unpacks a tar into a box.
func (s *Service) PutFiles(ctx context.Context, p authz.Principal, id, path string, tar io.Reader) error {
	return todo()
}

// GetFiles packs files of a box as a tar.
func (s *Service) GetFiles(ctx context.Context, p authz.Principal, id, path string, w io.Writer) error {
	return todo()
}

// LoadImage loads an image; target "" is the default.
func (s *Service) LoadImage(ctx context.Context, p authz.Principal, target, name string, tar io.Reader) ([]api.Image, error) {
	return nil, todo()
}

// Images lists the images of a target.
func (s *Service) Images(ctx context.Context, p authz.Principal, target string) (api.List[api.Image], error) {
	return api.List[api.Image]{}, todo()
}

// RemoveImage removes an image by digest or name.
func (s *Service) RemoveImage(ctx context.Context, p authz.Principal, target, ref string) error {
	return todo()
}
