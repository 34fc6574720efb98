// Package cgroup makes, limits, watches, kills and removes control groups on
// cgroup v1, v2 and hybrid machines behind one small type.
//
// It works with the kernel's files and nothing else, because the shim links it
// and must stay small. The names and formats come from the kernel's
// documentation: admin-guide/cgroup-v2.rst, admin-guide/cgroup-v1/{cgroups,
// memory,pids,cpusets,freezer-subsystem}.rst and scheduler/sched-bwc.rst.
//
// A path such as /stockade/x/box means that directory in every hierarchy of the
// machine: one on v2, one per mounted controller on v1, and both kinds on a
// hybrid machine, where a process may sit in any of them.
package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// DefaultRoot is where every distribution mounts the hierarchies.
const DefaultRoot = "/sys/fs/cgroup"

// Kind says how a machine's hierarchies are laid out.
type Kind string

// The kinds. A hybrid machine has v1 hierarchies and a v2 one, mostly without
// controllers, in the directory "unified".
const (
	V1     Kind = "v1"
	V2     Kind = "v2"
	Hybrid Kind = "hybrid"
)

// Controllers that Stockade limits with. Freezer matters on v1 only, where
// nothing else can stop a tree from forking while it is killed.
const (
	CPU     = "cpu"
	Memory  = "memory"
	Pids    = "pids"
	Freezer = "freezer"
)

// Mode is what a machine's control groups can do.
type Mode struct {
	Kind Kind
	// Controllers are all there are, sorted.
	Controllers []string
	// Missing names what Stockade wants and the machine lacks, for people: a
	// controller, and what it means that it is missing.
	Missing []string
}

// Has reports whether the machine has a controller.
func (m Mode) Has(controller string) bool { return slices.Contains(m.Controllers, controller) }

// Enforces reports whether the machine can hold boxes to every kind of limit.
// If not, it says which it cannot, for people.
func (m Mode) Enforces() (missing []string, ok bool) {
	for _, c := range []string{CPU, Memory, Pids} {
		if !m.Has(c) {
			missing = append(missing, c)
		}
	}
	return missing, len(missing) == 0
}

// Enforceable returns limits without those the machine has no controller for.
func (m Mode) Enforceable(limits api.BoxLimits) api.BoxLimits {
	if !m.Has(CPU) {
		limits.CPUMillis = 0
	}
	if !m.Has(Memory) {
		limits.MemoryBytes = 0
	}
	if !m.Has(Pids) {
		limits.Pids = 0
	}
	return limits
}

// Detect looks at the hierarchies below root; "" is [DefaultRoot]. A machine
// without any is an errdefs.Unavailable error; one that lacks controllers is not
// an error, see [Mode].Missing.
func Detect(root string) (Mode, error) {
	hs, err := hierarchies(root)
	if err != nil {
		return Mode{}, err
	}
	var m Mode
	for _, h := range hs {
		m.Controllers = append(m.Controllers, h.controllers...)
		switch {
		case m.Kind == "" && h.unified:
			m.Kind = V2
		case m.Kind == "":
			m.Kind = V1
		case h.unified != (m.Kind == V2):
			m.Kind = Hybrid
		}
	}
	slices.Sort(m.Controllers)
	m.Controllers = slices.Compact(m.Controllers)
	for _, want := range []struct{ controller, loss string }{
		{CPU, "processor time of boxes cannot be limited"},
		{Memory, "memory of boxes cannot be limited, and an end for lack of memory cannot be told"},
		{Pids, "the number of processes in boxes cannot be limited"},
		{Freezer, "a tree that forks while it is killed is killed in several passes"},
	} {
		if !m.Has(want.controller) && (want.controller != Freezer || m.Kind != V2) {
			m.Missing = append(m.Missing, "the cgroup controller "+want.controller+" is missing: "+want.loss)
		}
	}
	return m, nil
}

// hierarchy is one mounted tree of control groups.
type hierarchy struct {
	dir         string
	unified     bool     // v2
	controllers []string // of v1: those it was mounted with; of v2: those its root offers
	names       []string // of v1: also names such as "systemd"
}

func (h hierarchy) has(controller string) bool { return slices.Contains(h.controllers, controller) }

// hierarchies finds every hierarchy below root. On v2 that is root itself. On v1
// each is a directory named by its controllers ("cpu,cpuacct"), with symbolic
// links for the single names; a hybrid machine has a v2 tree among them.
func hierarchies(root string) ([]hierarchy, error) {
	if root == "" {
		root = DefaultRoot
	}
	if h, ok := unified(root); ok {
		return []hierarchy{h}, nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "there are no control groups: %s cannot be read", root).WithNext("mount the cgroup2 file system there")
	}
	var hs []hierarchy
	for _, e := range entries {
		if !e.IsDir() { // links repeat a directory
			continue
		}
		dir := filepath.Join(root, e.Name())
		if h, ok := unified(dir); ok {
			hs = append(hs, h)
			continue
		}
		if !exists(dir, "cgroup.procs") {
			continue
		}
		h := hierarchy{dir: dir}
		for name := range strings.SplitSeq(e.Name(), ",") {
			if strings.HasPrefix(name, "name=") || name == "systemd" {
				h.names = append(h.names, name)
			} else {
				h.controllers = append(h.controllers, name)
			}
		}
		hs = append(hs, h)
	}
	if len(hs) == 0 {
		return nil, errdefs.New(errdefs.Unavailable, "there are no control groups below %s", root).WithNext("mount the cgroup2 file system there")
	}
	return hs, nil
}

// unified reads a directory as the root of a v2 tree: only those have the file
// cgroup.controllers.
func unified(dir string) (hierarchy, bool) {
	words, err := readWords(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return hierarchy{}, false
	}
	return hierarchy{dir: dir, unified: true, controllers: words}, true
}

func exists(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

func readWords(path string) ([]string, error) {
	b, err := os.ReadFile(path)
	return strings.Fields(string(b)), err
}

// write writes to a file of the kernel's; it never makes one.
func write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) }
