package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Group is one path in every hierarchy of the machine. It is a value; methods
// may be called from any goroutine, and nothing is cached: a group that somebody
// else made or removed is seen as it is.
type Group struct {
	root string
	path string
}

// New names a group by its path below the hierarchies' roots, such as
// /stockade/x/box. root "" is [DefaultRoot]. Nothing is made; a path that is not
// absolute and clean, or is the root itself, is refused by every method.
func New(root, path string) Group { return Group{root: root, path: path} }

// Path returns the path the group was named by.
func (g Group) Path() string { return g.path }

// hierarchies finds the machine's hierarchies, after refusing a bad path: every
// method begins with it, so that none can ever kill or remove above its group.
func (g Group) hierarchies() ([]hierarchy, error) {
	if !path.IsAbs(g.path) || path.Clean(g.path) != g.path || g.path == "/" || strings.ContainsRune(g.path, 0) {
		return nil, errdefs.New(errdefs.Internal, "%q is not the path of a control group", g.path)
	}
	return hierarchies(g.root)
}

func (g Group) in(h hierarchy) string { return filepath.Join(h.dir, g.path) }

// cpuPeriod is the period of the processor limit in microseconds, the kernel's
// default (sched-bwc.rst); minQuota is the smallest quota it takes.
const (
	cpuPeriod = 100_000
	minQuota  = 1_000
)

// createTries bounds how often Create begins again when a parent vanished.
const createTries = 100

// vanished reports whether a group was removed under a step: its name is gone, or
// a file of it was open already (kernfs answers ENODEV then).
func vanished(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

// Create makes the group in every hierarchy, with its parents, and sets limits;
// a zero field sets none. It may be repeated, also with other limits. A limit
// for which the machine has no controller is an errdefs.Unavailable error
// ([Mode.Enforceable] takes such limits away). What was made before an error
// stays; Remove takes it away.
func (g Group) Create(limits api.BoxLimits) error {
	hs, err := g.hierarchies()
	if err != nil {
		return err
	}
	for _, h := range hs {
		make := g.createV1
		if h.unified {
			make = g.createUnified
		}
		if err := again(h, make); err != nil {
			return err
		}
	}
	for _, l := range []struct {
		controller string
		value      int64
		set        func(h hierarchy, dir string, value int64) error
	}{{CPU, limits.CPUMillis, setCPU}, {Memory, limits.MemoryBytes, setMemory}, {Pids, limits.Pids, setPids}} {
		if l.value <= 0 {
			continue
		}
		i := slices.IndexFunc(hs, func(h hierarchy) bool { return h.has(l.controller) })
		if i < 0 {
			return errdefs.New(errdefs.Unavailable, "%s of a box cannot be limited: the machine has no cgroup controller %s", l.controller, l.controller).
				WithNext("enable the controller in the kernel, or run without that limit")
		}
		if err := l.set(hs[i], g.in(hs[i]), l.value); err != nil {
			return errdefs.Wrap(err, errdefs.Unavailable, "the %s limit of control group %s cannot be set to %d: %v", l.controller, g.path, l.value, err)
		}
	}
	return nil
}

// Track makes the group only to know its processes by. It is made without the
// controller cpu where that can be: the scheduler weighs a group like one process,
// however many are in it, so on a busy machine they would all share the time that one
// would have alone. A second Create gives it all controllers.
func (g Group) Track() error {
	hs, err := g.hierarchies()
	if err != nil {
		return err
	}
	if some := slices.DeleteFunc(slices.Clone(hs), func(h hierarchy) bool { return !h.unified && h.has(CPU) }); len(some) > 0 {
		hs = some
	}
	for _, h := range hs {
		make := g.createV1
		if h.unified {
			make = g.createPlain
		}
		if err := again(h, make); err != nil {
			return err
		}
	}
	return nil
}

// again makes a group in one hierarchy. A parent that nobody uses may be removed by
// somebody else (RemoveUnused) between two steps; it is made again.
func again(h hierarchy, make func(hierarchy) error) error {
	err := make(h)
	for tries := 1; tries < createTries && vanished(err); tries++ {
		err = make(h)
	}
	return err
}

// createPlain makes the group in the v2 hierarchy and enables nothing.
func (g Group) createPlain(h hierarchy) error {
	for _, p := range g.parents() {
		if err := mkdir(filepath.Join(h.dir, p)); err != nil {
			return err
		}
	}
	return nil
}

// parents returns the group's path and every one above it, from the top down.
func (g Group) parents() []string {
	var paths []string
	for p := g.path; p != "/"; p = path.Dir(p) {
		paths = append(paths, p)
	}
	slices.Reverse(paths)
	return paths
}

// createV1 makes the group in a v1 hierarchy. A new cpuset group has no
// processors and no memory nodes and accepts no process until it is given some
// (cpusets.rst, 1.6), so it gets its parent's.
func (g Group) createV1(h hierarchy) error {
	for _, p := range g.parents() {
		dir := filepath.Join(h.dir, p)
		if err := mkdir(dir); err != nil {
			return err
		}
		if !h.has("cpuset") {
			continue
		}
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
			own, err := readWords(filepath.Join(dir, name))
			if err != nil || len(own) > 0 {
				continue
			}
			parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
			if err == nil {
				err = write(filepath.Join(dir, name), strings.TrimSpace(string(parent)))
			}
			if err != nil {
				return errdefs.Wrap(err, errdefs.Unavailable, "control group %s cannot get %s from its parent: %v", p, name, err)
			}
		}
	}
	return nil
}

// createUnified makes the group in the v2 hierarchy and enables the controllers
// in every parent, which is what gives it its limits (cgroup-v2.rst, "Enabling
// and Disabling"). Who makes groups in it, such as the runtime, does the same.
func (g Group) createUnified(h hierarchy) error {
	above := "/"
	for _, p := range g.parents() {
		if err := delegate(filepath.Join(h.dir, above)); err != nil {
			return undelegated(err, filepath.Join(h.dir, above), above)
		}
		if err := mkdir(filepath.Join(h.dir, p)); err != nil {
			return err
		}
		above = p
	}
	return nil
}

// undelegated says what helps against an error of delegate. A privileged container
// on a v2 machine has all its processes in what it sees as the root, which the kernel
// then refuses (cgroup-v2.rst, "No Internal Process Constraint").
func undelegated(err error, dir, group string) error {
	e := errdefs.Wrap(err, errdefs.Unavailable, "controllers cannot be enabled in control group %s: %v", group, err)
	if errors.Is(err, unix.EBUSY) {
		return e.WithNext("no process may be in that group itself; in a container, move them first: "+
			"mkdir -p %[1]s/init && xargs -rn1 < %[1]s/cgroup.procs > %[1]s/init/cgroup.procs", dir)
	}
	return e.WithNext("let this program write to %s; in a container: mount it read-write", dir)
}

// delegate enables the wanted controllers for the groups below dir.
func delegate(dir string) error {
	offered, err := readWords(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	enabled, err := readWords(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil {
		return err
	}
	var add []string
	for _, c := range []string{CPU, Memory, Pids} {
		if slices.Contains(offered, c) && !slices.Contains(enabled, c) {
			add = append(add, "+"+c)
		}
	}
	if len(add) == 0 {
		return nil
	}
	return write(filepath.Join(dir, "cgroup.subtree_control"), strings.Join(add, " "))
}

func mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return errdefs.Wrap(err, errdefs.Unavailable, "the control group %s cannot be made: %v", dir, err)
	}
	return nil
}

func setCPU(h hierarchy, dir string, millis int64) error {
	quota := max(millis*(cpuPeriod/1000), minQuota)
	if h.unified {
		return write(filepath.Join(dir, "cpu.max"), itoa(quota)+" "+itoa(cpuPeriod))
	}
	if err := write(filepath.Join(dir, "cpu.cfs_period_us"), itoa(cpuPeriod)); err != nil {
		return err
	}
	return write(filepath.Join(dir, "cpu.cfs_quota_us"), itoa(quota))
}

// setMemory limits memory and allows no swap on top, so that the limit is the
// limit on any machine. Without swap accounting the swap files do not exist.
func setMemory(h hierarchy, dir string, bytes int64) error {
	if h.unified {
		if err := write(filepath.Join(dir, "memory.max"), itoa(bytes)); err != nil {
			return err
		}
		return optional(write(filepath.Join(dir, "memory.swap.max"), "0"))
	}
	limit, both := filepath.Join(dir, "memory.limit_in_bytes"), filepath.Join(dir, "memory.memsw.limit_in_bytes")
	// The limit over both may never be below the one on memory (memory.rst,
	// 2.4): lowering begins with memory, raising with both.
	if err := write(limit, itoa(bytes)); err != nil {
		if err2 := write(both, itoa(bytes)); err2 != nil {
			return err
		}
		return write(limit, itoa(bytes))
	}
	return optional(write(both, itoa(bytes)))
}

func setPids(_ hierarchy, dir string, n int64) error {
	return write(filepath.Join(dir, "pids.max"), itoa(n))
}

func optional(err error) error {
	if missing(err) {
		return nil
	}
	return err
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// Add moves a process into the group, in every hierarchy where the group exists.
func (g Group) Add(pid int) error {
	hs, err := g.hierarchies()
	if err != nil {
		return err
	}
	added := false
	for _, h := range hs {
		switch err := write(filepath.Join(g.in(h), "cgroup.procs"), strconv.Itoa(pid)); {
		case missing(err):
		case err != nil:
			return errdefs.Wrap(err, errdefs.Unavailable, "process %d cannot be moved into control group %s: %v", pid, g.path, err)
		default:
			added = true
		}
	}
	if !added {
		return errdefs.New(errdefs.NotFound, "there is no control group %s", g.path)
	}
	return nil
}

// Populated reports whether any process is in the group or below it, in any
// hierarchy. A group that does not exist is empty. A process that has ended and
// was not waited for does not count.
func (g Group) Populated() (bool, error) {
	hs, err := g.hierarchies()
	if err != nil {
		return false, err
	}
	for _, h := range hs {
		some, err := populated(h, g.in(h))
		if some || err != nil {
			return some, err
		}
	}
	return false, nil
}

func populated(h hierarchy, dir string) (bool, error) {
	if !h.unified {
		pids, err := tree(dir, nil)
		return len(pids) > 0, err
	}
	// "populated" is 1 if the group or one below it has a live process
	// (cgroup-v2.rst, cgroup.events).
	n, ok, err := field(filepath.Join(dir, "cgroup.events"), "populated")
	if gone(err) {
		return false, nil
	}
	if err == nil && !ok {
		err = errors.New("cgroup.events has no field populated")
	}
	if err != nil {
		return false, unreadable(err, dir)
	}
	return n != 0, nil
}

// Procs returns the processes in the group and below it, over all hierarchies,
// ascending. A process of another PID namespace counts as 0.
func (g Group) Procs() ([]int, error) {
	hs, err := g.hierarchies()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, h := range hs {
		if pids, err = tree(g.in(h), pids); err != nil {
			return nil, err
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// tree adds the processes in dir and below it to pids.
func tree(dir string, pids []int) ([]int, error) {
	words, err := readWords(filepath.Join(dir, "cgroup.procs"))
	if gone(err) {
		return pids, nil
	}
	if err != nil {
		return pids, unreadable(err, dir)
	}
	for _, w := range words {
		pid, err := strconv.Atoi(w)
		if err != nil {
			return pids, unreadable(err, dir)
		}
		pids = append(pids, pid)
	}
	below, err := children(dir)
	for _, d := range below {
		if pids, err = tree(d, pids); err != nil {
			return pids, err
		}
	}
	return pids, err
}

// children returns the groups directly in dir.
func children(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, unreadable(err, dir)
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, filepath.Join(dir, e.Name()))
		}
	}
	return dirs, nil
}

// gone reports whether a group was removed: its files answer ENODEV when they
// were open, else they are not there.
func gone(err error) bool { return missing(err) || errors.Is(err, unix.ENODEV) }

func unreadable(err error, dir string) error {
	return errdefs.Wrap(err, errdefs.Unavailable, "control group %s cannot be read: %v", dir, err)
}

// OOMKills returns how many processes of the group and the groups below it the
// kernel has killed for lack of memory since they were made, whoever's limit it
// was. Without a memory controller it is an errdefs.Unavailable error, without
// the group errdefs.NotFound.
//
// On v2 the count is that of memory.events, which includes the groups below. On
// v1 memory.oom_control counts the group's own processes, so those below are
// added here.
func (g Group) OOMKills() (int64, error) {
	hs, err := g.hierarchies()
	if err != nil {
		return 0, err
	}
	i := slices.IndexFunc(hs, func(h hierarchy) bool { return h.has(Memory) })
	if i < 0 {
		return 0, errdefs.New(errdefs.Unavailable, "whether the kernel killed for memory cannot be told: the machine has no cgroup controller memory")
	}
	dir := g.in(hs[i])
	if _, err := os.Stat(dir); missing(err) {
		return 0, errdefs.New(errdefs.NotFound, "there is no control group %s", g.path)
	}
	if !hs[i].unified {
		return oomKillsV1(dir)
	}
	n, _, err := field(filepath.Join(dir, "memory.events"), "oom_kill")
	if err != nil {
		return 0, unreadable(err, dir)
	}
	return n, nil
}

func oomKillsV1(dir string) (int64, error) {
	total, _, err := field(filepath.Join(dir, "memory.oom_control"), "oom_kill")
	if err != nil && !gone(err) {
		return 0, unreadable(err, dir)
	}
	below, err := children(dir)
	if err != nil {
		return 0, err
	}
	for _, d := range below {
		n, err := oomKillsV1(d)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return total, nil
}

// field reads a number from a file of lines "name number".
func field(file, name string) (n int64, ok bool, err error) {
	words, err := readWords(file)
	if err != nil {
		return 0, false, err
	}
	for i := 0; i+1 < len(words); i += 2 {
		if words[i] == name {
			n, err := strconv.ParseInt(words[i+1], 10, 64)
			return n, err == nil, err
		}
	}
	return 0, false, nil
}
