package boxhost

import (
	"context"
	"io"
	"log/slog"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/wire"
)

// Config says what boxes of this machine are made of.
type Config struct {
	// Dir is the host program's directory; boxes/ and images/ below it are this
	// package's. Required, absolute.
	Dir string
	// Profile lists more directories of this machine that every box of the host
	// profile shows read-only at the same path. They must exist.
	Profile []string
	// Tools maps a name to a directory that every box shows read-only at
	// /opt/NAME; /opt/NAME/bin and /opt/NAME/node_modules/.bin join the PATH if
	// they exist.
	Tools map[string]string
	// AllowMounts lists the directories below which a box may ask for mounts.
	// Empty: none.
	AllowMounts []string
	// InitPath is the program shown as PID 1 of every container (the host program
	// itself). Required, absolute.
	InitPath string
	// Runtime is the OCI runtime; only its answer about features is used. Required.
	Runtime oci.Runtime
	// CgroupParent is the control group, below every hierarchy, that holds one
	// group per box, such as "/stockade/abc123". Required, absolute.
	CgroupParent string
	// CgroupRoot is where the hierarchies are mounted; "" is /sys/fs/cgroup.
	CgroupRoot string
	// Live says how many processes live in a box. Required. It is called with the
	// box locked, so it must not call the Manager.
	Live func(box string) int
	// MaxFileBytes and MaxFileEntries bound one PutFiles and one image; 0 is 4 GiB
	// and 1,000,000.
	MaxFileBytes   int64
	MaxFileEntries int
	// Logger may be nil.
	Logger *slog.Logger
}

// Launch is what a keeper must know of a bundle.
type Launch struct {
	Container string // container id
	Cgroup    string // control group of the process, below every hierarchy
}

// Manager owns the boxes and images below one directory.
type Manager struct{}

var errTodo = errdefs.New(errdefs.Internal, "not written yet")

func Open(cfg Config) (*Manager, error) { return nil, errTodo }
func (m *Manager) Put(ctx context.Context, spec wire.BoxSpec) (wire.BoxInfo, error) {
	return wire.BoxInfo{}, errTodo
}
func (m *Manager) Get(ctx context.Context, id string) (wire.BoxInfo, error) {
	return wire.BoxInfo{}, errTodo
}
func (m *Manager) List(ctx context.Context) ([]wire.BoxInfo, error)                 { return nil, errTodo }
func (m *Manager) Remove(ctx context.Context, id string) error                      { return errTodo }
func (m *Manager) PutFiles(ctx context.Context, id, path string, r io.Reader) error { return errTodo }
func (m *Manager) GetFiles(ctx context.Context, id, path string, w io.Writer) error { return errTodo }
func (m *Manager) LoadImage(ctx context.Context, name string, r io.Reader) ([]wire.ImageInfo, error) {
	return nil, errTodo
}
func (m *Manager) Images(ctx context.Context) ([]wire.ImageInfo, error) { return nil, errTodo }
func (m *Manager) RemoveImage(ctx context.Context, digest string) error { return errTodo }
func (m *Manager) Bundle(ctx context.Context, spec wire.ProcSpec, dir string) (Launch, error) {
	return Launch{}, errTodo
}
