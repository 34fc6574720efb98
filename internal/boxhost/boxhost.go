package boxhost

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/image"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/tartree"
	"github.com/stockade-run/stockade/internal/wire"
)

// DefaultCgroup is the control group that holds one group per host program of
// the machine, unless the operator names another. It goes with the last of them.
const DefaultCgroup = "/stockade"

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
	// LimitsOptional lets boxes exist on a machine that cannot enforce every limit;
	// those it cannot are then left out. Without it such a machine has no boxes.
	LimitsOptional bool
	// Live says how many processes live in a box. Required. It is called with the
	// box locked, so it must not call the Manager; a process must count before
	// Bundle is called for it.
	Live func(box string) int
	// MaxFileBytes and MaxFileEntries bound one PutFiles or GetFiles and one image;
	// 0 is 4 GiB and 1,000,000.
	MaxFileBytes   int64
	MaxFileEntries int
	// Logger may be nil.
	Logger *slog.Logger
}

// Manager owns the boxes and images below one directory. It is safe for
// concurrent use; only one may be open on a directory.
type Manager struct {
	cfg     Config
	log     *slog.Logger
	limits  tartree.Limits
	profile []bindSource
	path    string // PATH of the host profile
	allowed []allowedDir
	images  *image.Store
	mode    cgroup.Mode
	seccomp *specs.LinuxSeccomp
	deepRO  bool
	swap    bool   // swap can be limited
	files   uint64 // open files a process may have
	spare   uint64 // spareBytes, but in tests
	public  string // publicRoots, but in tests
	roots   string // holds root directories by box id; "" keeps them in the box's own directory

	mu    sync.Mutex
	boxes map[string]*box
}

// box is one box; mu is held while its files change.
type box struct {
	id string
	mu sync.Mutex
	// rec is set once under Manager.mu, before the box is visible. Its field
	// Removing changes under both locks.
	rec record
	// gone is set under mu when the box was removed, for those who waited.
	gone bool
	// files is held shared while files go in or out.
	files sync.RWMutex
	// plan is what ensure computed; nil until the first use.
	plan *plan
}

// publicRoots is where root directories are kept when Dir cannot be entered by
// everybody. Box ids are unique, so host programs can share it.
const publicRoots = "/run/stockade"

// Open reads the boxes that are there. Errors: invalid for a configuration that
// cannot work, unavailable when the machine lacks what boxes need.
func Open(cfg Config) (*Manager, error) {
	m := &Manager{cfg: cfg, log: cfg.Logger, boxes: map[string]*box{}, spare: spareBytes, public: publicRoots}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	m.limits = tartree.Limits{Bytes: cfg.MaxFileBytes, Entries: cfg.MaxFileEntries}
	for name, p := range map[string]string{"Dir": cfg.Dir, "InitPath": cfg.InitPath, "CgroupParent": cfg.CgroupParent} {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return nil, errdefs.New(errdefs.Invalid, "boxhost: %s is %q and must be an absolute, clean path", name, p)
		}
	}
	if cfg.Live == nil {
		return nil, errdefs.New(errdefs.Invalid, "boxhost: Live is not set")
	}
	if st, err := os.Stat(cfg.InitPath); err != nil || !st.Mode().IsRegular() || st.Mode()&0o001 == 0 {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the program %s is shown as PID 1 of every container and must be a file that everybody may execute", cfg.InitPath).
			WithNext("chmod 755 %s", cfg.InitPath)
	}
	var err error
	if m.mode, err = cgroup.Detect(cfg.CgroupRoot); err != nil {
		return nil, err
	}
	if missing, ok := m.mode.Enforces(); !ok && !cfg.LimitsOptional {
		return nil, errdefs.New(errdefs.Unavailable, "this machine cannot hold a box to its limits: the control group controllers %s are missing", strings.Join(missing, ", ")).
			WithNext("enable them (stockade doctor says how), or accept boxes without these limits with host.require_hard_limits=false")
	}
	m.swap = swapLimit(cfg.CgroupRoot)
	if m.files, err = openFiles(); err != nil {
		return nil, err
	}
	if m.seccomp, err = oci.Seccomp(); err != nil {
		return nil, err
	}
	m.deepRO = cfg.Runtime.RecursiveReadOnly(context.Background())
	if m.profile, m.path, err = hostProfile(cfg.Profile, cfg.Tools); err != nil {
		return nil, err
	}
	if m.allowed, err = openAllowed(cfg.AllowMounts); err != nil {
		return nil, err
	}
	for _, d := range []string{cfg.Dir, m.boxesDir()} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			return nil, fmt.Errorf("make the directory of boxes: %w", err)
		}
	}
	if !enterable(m.boxesDir()) {
		m.roots = m.public
	}
	if m.images, err = image.Open(image.Config{Dir: filepath.Join(cfg.Dir, "images"), Limits: m.limits, Logger: m.log}); err != nil {
		return nil, err
	}
	return m, m.load()
}

func (m *Manager) boxesDir() string { return filepath.Join(m.cfg.Dir, "boxes") }

func (m *Manager) boxDir(id string) string { return filepath.Join(m.boxesDir(), id) }

// rootDir is the root directory of a box's containers.
func (m *Manager) rootDir(id string) string {
	if m.roots != "" {
		return filepath.Join(m.roots, id, "root")
	}
	return filepath.Join(m.boxDir(id), "root")
}

// NetNS returns the path that names a box's network namespace.
func (m *Manager) NetNS(id string) string { return filepath.Join(m.boxDir(id), "netns") }

func (m *Manager) group(id string) cgroup.Group {
	return cgroup.New(m.cfg.CgroupRoot, m.cfg.CgroupParent+"/"+id)
}

// enterable reports whether every user may enter dir and all above it.
func enterable(dir string) bool {
	for {
		st, err := os.Stat(dir)
		if err != nil || st.Mode()&0o001 == 0 {
			return false
		}
		if dir == "/" {
			return true
		}
		dir = filepath.Dir(dir)
	}
}

// swapLimit reports whether memory and swap can be limited together.
func swapLimit(root string) bool {
	if root == "" {
		root = cgroup.DefaultRoot
	}
	for _, f := range []string{"memory/memory.memsw.limit_in_bytes", "cgroup.controllers"} {
		if _, err := os.Stat(filepath.Join(root, f)); err == nil {
			return true
		}
	}
	return false
}

// openFiles is the limit of open files for tenants' processes. Raising a hard
// limit takes CAP_SYS_RESOURCE, which root in a container may lack, so it is
// never above our own.
func openFiles() (uint64, error) {
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	return min(own.Max, oci.MaxFiles), nil
}

// load reads every box.json. A directory without one was never a box, because the
// record is written first, or is to be one no more (unmark), and goes. A damaged
// one is an error, because its user ids must not be given away again.
func (m *Manager) load() error {
	ents, err := os.ReadDir(m.boxesDir())
	if err != nil {
		return fmt.Errorf("read the directory of boxes: %w", err)
	}
	var strays []*box
	for _, e := range ents {
		rec, err := readRecord(m.boxDir(e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			strays = append(strays, &box{id: e.Name()})
			continue
		}
		if err != nil {
			return err
		}
		if rec.Spec.ID != e.Name() {
			return errdefs.New(errdefs.Internal, "the record in %s is that of box %s", m.boxDir(e.Name()), rec.Spec.ID)
		}
		for _, other := range m.boxes {
			if other.rec.Slot == rec.Slot {
				return errdefs.New(errdefs.Internal, "boxes %s and %s have the same user ids", other.id, rec.Spec.ID)
			}
		}
		m.boxes[e.Name()] = &box{id: e.Name(), rec: rec}
	}
	for _, b := range strays {
		if err := m.destroy(context.Background(), b); err != nil {
			return err
		}
	}
	return nil
}

// hold returns a box, locked. The caller unlocks it.
func (m *Manager) hold(id string) (*box, error) {
	m.mu.Lock()
	b := m.boxes[id]
	m.mu.Unlock()
	if b != nil {
		b.mu.Lock()
		if !b.gone {
			return b, nil
		}
		b.mu.Unlock()
	}
	return nil, errdefs.New(errdefs.NotFound, "no box %q is on this host", clip(id))
}

// use is hold of a box that is not being removed, which may take long: that it is
// is a conflict at once.
func (m *Manager) use(id string) (*box, error) {
	if m.retired(id) {
		return nil, removing(id)
	}
	b, err := m.hold(id)
	if err == nil && b.rec.Removing {
		b.mu.Unlock()
		return nil, removing(id)
	}
	return b, err
}

func removing(id string) *errdefs.Error {
	return errdefs.New(errdefs.Conflict, "box %s is being removed", id).WithNext("use another box")
}

func (m *Manager) info(b *box) wire.BoxInfo {
	return wire.BoxInfo{Spec: b.rec.Spec, NetNS: m.NetNS(b.id), Procs: m.cfg.Live(b.id)}
}

// Get returns a box as it is recorded; an unknown one is not_found.
func (m *Manager) Get(ctx context.Context, id string) (wire.BoxInfo, error) {
	m.mu.Lock()
	b := m.boxes[id]
	m.mu.Unlock()
	if b == nil {
		return wire.BoxInfo{}, errdefs.New(errdefs.NotFound, "no box %q is on this host", clip(id))
	}
	return m.info(b), nil
}

// List returns every box, by id. A box whose removal was interrupted is in it
// until Remove has finished.
func (m *Manager) List(ctx context.Context) ([]wire.BoxInfo, error) {
	m.mu.Lock()
	bs := make([]*box, 0, len(m.boxes))
	for _, b := range m.boxes {
		bs = append(bs, b)
	}
	m.mu.Unlock()
	slices.SortFunc(bs, func(a, b *box) int { return cmp.Compare(a.id, b.id) })
	infos := make([]wire.BoxInfo, 0, len(bs))
	for _, b := range bs {
		infos = append(infos, m.info(b))
	}
	return infos, nil
}

// Put makes a box, or finds it: the same id with an equal specification returns
// what is there, another one is a conflict. The record is durable before
// anything is made. When making it fails, nothing of it stays.
func (m *Manager) Put(ctx context.Context, spec wire.BoxSpec) (wire.BoxInfo, error) {
	if err := checkSpec(spec); err != nil {
		return wire.BoxInfo{}, err
	}
	b, fresh, err := m.claim(spec)
	for err == nil && !fresh {
		held, herr := m.hold(spec.ID)
		if herr == nil {
			b = held
			break
		}
		// It went away while this waited: another caller failed to make it.
		b, fresh, err = m.claim(spec)
	}
	if err != nil {
		return wire.BoxInfo{}, err
	}
	// A fresh box is locked since before it became visible.
	defer b.mu.Unlock()
	if b.rec.Removing {
		return wire.BoxInfo{}, removing(spec.ID)
	}
	if !reflect.DeepEqual(normal(b.rec.Spec), normal(spec)) {
		return wire.BoxInfo{}, errdefs.New(errdefs.Conflict, "box %s exists with another specification", spec.ID).WithNext("remove it, or use another id")
	}
	if fresh {
		err = m.record(b)
	}
	if err == nil {
		err = m.ensure(ctx, b)
	}
	if err != nil {
		if fresh {
			if uerr := m.destroy(context.WithoutCancel(ctx), b); uerr != nil {
				m.log.Warn("a box that could not be made could not be taken away either", "box", b.id, "error", uerr)
			}
		}
		return wire.BoxInfo{}, err
	}
	return m.info(b), nil
}

// claim returns the box of this id, or a new one, locked, with a slot of its own.
func (m *Manager) claim(spec wire.BoxSpec) (b *box, fresh bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.boxes[spec.ID]; b != nil {
		if b.rec.Removing { // not waited for
			return nil, false, removing(spec.ID)
		}
		return b, false, nil
	}
	used := map[int]bool{}
	for _, other := range m.boxes {
		used[other.rec.Slot] = true
	}
	slot := 0
	for used[slot] {
		slot++
	}
	if slot >= maxSlots {
		return nil, false, errdefs.New(errdefs.Exhausted, "all %d ranges of user ids are taken", maxSlots).WithNext("remove boxes")
	}
	b = &box{id: spec.ID, rec: record{Spec: spec, Slot: slot}}
	b.mu.Lock()
	m.boxes[spec.ID] = b
	return b, true, nil
}

func normal(s wire.BoxSpec) wire.BoxSpec {
	if len(s.Mounts) == 0 {
		s.Mounts = nil
	}
	return s
}

func checkSpec(s wire.BoxSpec) error {
	if err := ident.CheckName("the box's id", s.ID); err != nil {
		return err
	}
	if strings.ContainsRune(s.ID, ':') {
		return errdefs.New(errdefs.Invalid, "the box's id holds a colon")
	}
	if l := s.Limits; l.CPUMillis < 0 || l.MemoryBytes < 0 || l.Pids < 0 {
		return errdefs.New(errdefs.Invalid, "a limit of the box is negative")
	}
	if len(s.Mounts) > maxMounts {
		return errdefs.New(errdefs.Invalid, "the box asks for %d mounts, the limit is %d", len(s.Mounts), maxMounts)
	}
	return nil
}

// LoadImage unpacks the images of an archive; see image.Store.Load.
func (m *Manager) LoadImage(ctx context.Context, name string, r io.Reader) ([]wire.ImageInfo, error) {
	return m.images.Load(ctx, name, r)
}

// Images lists the images, oldest first.
func (m *Manager) Images(ctx context.Context) ([]wire.ImageInfo, error) { return m.images.List() }

// RemoveImage takes an image away, by digest or name; one that a box uses is a
// conflict. Its files are deleted by clean; see image.Store.Remove.
func (m *Manager) RemoveImage(ctx context.Context, ref string) (clean func(), err error) {
	return m.images.Remove(ref, func(digest string) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, b := range m.boxes {
			if b.rec.Spec.Image == digest {
				return errdefs.New(errdefs.Conflict, "box %s uses the image %s", b.id, digest).WithNext("remove the box first")
			}
		}
		return nil
	})
}

func clip(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > 200 {
		return strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}
