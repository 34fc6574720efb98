package worker

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/boxhost"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
)

// User ids of workers' boxes: the last of the ranges that the core takes boxes'
// user ids from, lowest first (package boxhost).
const (
	firstUID = 0x60000000
	maxSlots = 0x10000000 / oci.IDRange
)

// slot is a range of user ids that no other running box of this launcher has.
type slot int

func (s slot) base() uint32 { return firstUID + uint32(s)*oci.IDRange }

// agent is the user outside that is the worker inside.
func (s slot) agent() int { return int(s.base()) + oci.AgentID }

// slotOf is the slot whose worker has this user id; -1 if it is none of ours.
func slotOf(uid uint32) slot {
	if uid < firstUID+oci.AgentID || (uid-firstUID)%oci.IDRange != oci.AgentID || (uid-firstUID)/oci.IDRange >= maxSlots {
		return -1
	}
	return slot((uid - firstUID) / oci.IDRange)
}

type slots struct {
	mu   sync.Mutex
	used map[slot]bool
}

// take returns the slot that owns the worker's directories already, so that they
// need not be given away again; else one that the name is likely to get next time.
func (s *slots) take(name string, owner slot) (slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.used == nil {
		s.used = map[slot]bool{}
	}
	if len(s.used) >= maxSlots {
		return 0, errdefs.New(errdefs.Exhausted, "all %d ranges of user ids for workers are taken", maxSlots)
	}
	if owner < 0 || s.used[owner] {
		h := fnv.New32a()
		h.Write([]byte(name))
		for owner = slot(h.Sum32() % maxSlots); s.used[owner]; owner = (owner + 1) % maxSlots {
		}
	}
	s.used[owner] = true
	return owner, nil
}

func (s *slots) free(n slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.used, n)
}

// ownerOf is the slot that the first of the directories belongs to.
func ownerOf(own []oci.Bind) slot {
	if len(own) == 0 {
		return -1
	}
	var st unix.Stat_t
	if unix.Lstat(own[0].Source, &st) != nil {
		return -1
	}
	return slotOf(st.Uid)
}

// giveTree makes a directory private to a user, with all that is in it. The
// directory itself is last, so that what was interrupted begins again. Nobody may
// use the tree meanwhile.
func giveTree(ctx context.Context, dir string, uid int) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return errors.New("it is not a directory")
	}
	if int(st.Uid) != uid || int(st.Gid) != uid {
		if err := ownAll(ctx, dir, uid); err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o700)
}

// ownAll changes the owner of everything in dir, then of dir. It never leaves it.
func ownAll(ctx context.Context, dir string, uid int) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), ".", func(p string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil || p == "." {
			return err
		}
		return root.Lchown(p, uid, uid)
	})
	if err != nil {
		return err
	}
	return root.Chown(".", uid, uid)
}

// mountPoint makes the directories of rest in dir, as the worker's own. What is
// there must be directories: a link is not followed.
func mountPoint(dir, rest string, uid int) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	at := "."
	for part := range strings.SplitSeq(rest, "/") {
		at = path.Join(at, part)
		st, err := root.Lstat(at)
		switch {
		case err == nil && st.IsDir():
			continue
		case err == nil:
			return fmt.Errorf("%s is not a directory", at)
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
		if err := root.Mkdir(at, 0o755); err != nil {
			return err
		}
		if err := root.Lchown(at, uid, uid); err != nil {
			return err
		}
	}
	return nil
}

// below returns the part of p strictly below dir.
func below(p, dir string) (string, bool) {
	return strings.CutPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

func within(p, dir string) bool {
	_, ok := below(p, dir)
	return ok || p == dir
}

// reserved are paths of a box that are its own.
var reserved = []string{"/proc", "/dev", "/sys", "/etc", "/run", "/.stockade", codeDir, treeDir, installDir}

// shownDirs are the directories of the interpreter that a box must show besides
// the system's. They are named as the interpreter names them.
func shownDirs(i Interpreter, dataDir string) ([]string, error) {
	data, err := filepath.Abs(dataDir)
	if err != nil {
		return nil, err
	}
	if real, err := filepath.EvalSymlinks(data); err == nil {
		data = real
	}
	var shown []string
	for _, d := range []string{i.Prefix, i.BasePrefix, i.ImportRoot} {
		if d == "" || ofSystem(d) || slices.ContainsFunc(shown, func(s string) bool { return within(d, s) }) {
			continue
		}
		real, err := filepath.EvalSymlinks(d)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "the interpreter's directory %s cannot be found: %v", d, err)
		}
		for _, r := range reserved {
			if within(d, r) || within(r, d) {
				return nil, errdefs.New(errdefs.Invalid, "the interpreter's directory %s cannot be shown in a box, which has its own", d).
					WithNext("install the interpreter somewhere else, such as /opt")
			}
		}
		for _, top := range []string{"/", "/root", "/home", "/tmp", "/var", "/data", "/srv", "/mnt"} {
			if d == top || real == top {
				return nil, errdefs.New(errdefs.Invalid, "the interpreter's directory %s holds more than an interpreter and is not shown to plugins", d).
					WithNext("install the interpreter into a directory of its own")
			}
		}
		if within(data, real) || within(data, d) || within(real, data) {
			return nil, errdefs.New(errdefs.Invalid, "the interpreter's directory %s and the data directory %s lie one in the other: plugins would see each other's files", d, data).
				WithNext("move one of them")
		}
		shown = slices.DeleteFunc(shown, func(s string) bool { return within(s, d) })
		shown = append(shown, d)
	}
	slices.Sort(shown)
	return shown, checkReachable(i.Path, shown)
}

// ofSystem reports whether a path lies in what every box shows.
func ofSystem(p string) bool {
	return slices.ContainsFunc(oci.SystemDirs(), func(s string) bool { return within(p, s) })
}

// maxLinks bounds the links from an interpreter's path to its program, as the
// kernel does.
const maxLinks = 40

// checkReachable follows the links from the interpreter's path to its program,
// each of which must be shown.
func checkReachable(python string, shown []string) error {
	at := python
	for range maxLinks {
		if !ofSystem(at) && !slices.ContainsFunc(shown, func(s string) bool { return within(at, s) }) {
			return errdefs.New(errdefs.Invalid, "the interpreter %s lies at %s, outside of its own prefix: it would be missing in a box", python, at).
				WithNext("make a virtual environment with the interpreter you want, and use that")
		}
		to, err := os.Readlink(at)
		if err != nil {
			if _, err := os.Stat(at); err != nil {
				return errdefs.Wrap(err, errdefs.Unavailable, "the interpreter %s cannot be found: %v", python, err)
			}
			return nil
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(filepath.Dir(at), to)
		}
		at = filepath.Clean(to)
	}
	return errdefs.New(errdefs.Invalid, "the interpreter %s is a chain of more than %d links", python, maxLinks)
}

// Shapes of root directories.
const (
	dedicatedShape = "dedicated"
	poolShape      = "pool"
	installShape   = "install"
)

// shape is a root directory that containers share, with what is bound in it.
type shape struct {
	root  string
	binds []oci.Bind
	late  []string // shown directories that lie in a writable mount
}

// shape makes a root directory on first use.
func (b *box) shape(name string) (shape, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if sh, ok := b.shapes[name]; ok {
		return sh, nil
	}
	r := boxhost.Root{Dir: filepath.Join(b.dir, "root-"+name), Names: b.cfg.Network == NetworkHost}
	over := []string{"/tmp"}
	switch name {
	case dedicatedShape:
		over = []string{"/tmp", "/home", "/data"}
		r.Points = []string{codeDir, treeDir}
	case poolShape:
		r.Points = []string{codeDir, treeDir}
	case installShape:
		r.Points, r.FilePoints, r.Names = []string{installDir}, []string{uvPath}, false
	}
	sh := shape{root: r.Dir}
	for _, d := range b.shown {
		if slices.ContainsFunc(over, func(o string) bool { return within(d, o) }) {
			sh.late = append(sh.late, d)
		} else {
			r.Shown = append(r.Shown, d)
		}
	}
	r.Points = append(r.Points, over...)
	var err error
	if sh.binds, err = r.Make(); err != nil {
		return shape{}, errdefs.Wrap(err, errdefs.Unavailable, "the root directory of boxes cannot be made: %v", err)
	}
	b.shapes[name] = sh
	return sh, nil
}

// runDirs are where the directory of running boxes may lie by itself. In /dev/shm
// any user of the machine may take the name first, so it comes second.
func runDirs(key string) []string {
	return []string{"/run/stockade-workers-" + key, "/dev/shm/stockade-workers-" + key}
}

// runDir returns the directory of running boxes: dir, or the first of runDirs that
// is in memory and, with exec, not mounted noexec; else the first.
func runDir(dir, key string, exec bool) (string, error) {
	if dir == "" {
		dirs := runDirs(key)
		i := slices.IndexFunc(dirs, func(d string) bool {
			var st unix.Statfs_t
			return unix.Statfs(filepath.Dir(d), &st) == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC) &&
				!(exec && st.Flags&unix.ST_NOEXEC != 0)
		})
		dir = dirs[max(i, 0)]
	}
	if !filepath.IsAbs(dir) {
		return "", errdefs.New(errdefs.Invalid, "the directory of running boxes is %q and must be absolute", dir)
	}
	return dir, ours(dir)
}

// ours is nil for a directory that nobody else made or may write to, and for none.
func ours(dir string) error {
	var st unix.Stat_t
	err := unix.Lstat(dir, &st)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 {
		return errdefs.Wrap(err, errdefs.Denied, "%s is not a directory of this user alone", dir).WithNext("remove it")
	}
	return nil
}

func makeDir(dir string, mode os.FileMode) error {
	if err := os.Mkdir(dir, mode); err != nil {
		return err
	}
	return os.Chmod(dir, mode) // the umask
}

// sweepOthers sweeps what a runtime that was told otherwise has left in the
// directories of running boxes but the one that is used now.
func sweepOthers(groups, key, used string, log *slog.Logger) error {
	for _, dir := range runDirs(key) {
		if dir == used || ours(dir) != nil {
			continue
		}
		if err := sweepBoxes(groups, boxGroup(key), dir, nil, log); err != nil {
			return err
		}
	}
	return nil
}

// sweepBoxes ends and takes away whatever there is of the boxes of a data
// directory. Without a runtime what one keeps of its containers is deleted with
// the directory, which is all there is to runc's and crun's.
func sweepBoxes(groups, parent, dir string, rt *oci.Runtime, log *slog.Logger) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*killTime)
	defer cancel()
	if err := cgroup.New(groups, parent).Kill(ctx); err != nil {
		return err
	}
	root := filepath.Join(dir, "runtime")
	left, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("look for boxes that were left: %w", err)
	}
	for _, e := range left {
		if rt == nil {
			break
		}
		if err := rt.Delete(ctx, root, e.Name()); err != nil {
			log.Warn("a box that was left cannot be deleted by the runtime", "box", e.Name(), "error", err)
		}
	}
	if err := endGroup(groups, parent); err != nil {
		return err
	}
	if err := removeNetworks(filepath.Join(dir, "netns")); err != nil {
		return err
	}
	return boxhost.RemoveTree(dir)
}
