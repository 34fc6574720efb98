package demo

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// cleanup ends everything the demo began and checks that nothing is left. It goes
// on after a failure.
func (s *story) cleanup(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	s.say.chapter("Leaving nothing behind")
	var errs []error
	try := func(err error) {
		if err != nil {
			s.say.trouble("%v", err)
			errs = append(errs, err)
		}
	}
	if s.server != nil && s.server.PID() == 0 && s.box.ID != "" { // killed, not started again
		s.say.step("Starting the server again, to clean up")
		try(s.server.Start(ctx))
	}
	if s.server != nil && s.server.PID() != 0 {
		if s.run.ID != "" {
			s.say.step("Finishing the run: its rights end first, then its processes")
			try(s.finish(ctx))
		}
		if s.box.ID != "" {
			s.say.step("Removing the box")
			try(s.tenant.RemoveBox(ctx, s.box.ID))
		}
		s.say.step("Stopping the server and its host program")
		try(s.server.Stop(ctx))
	}
	if s.tenant != nil {
		s.tenant.CloseIdle()
	}
	if s.model != nil && s.model.scripted != nil {
		s.model.scripted.Close()
	}
	s.say.step("Looking for leftovers: processes, mounts, network namespaces, control groups")
	// The host program keeps its own, empty, control group for its next start. The
	// demo throws the host's directory away, so there is none.
	if left := findLeftovers(s.dir, s.box.ID, ""); len(left) == 0 {
		for _, g := range groupsNamed(s.hostGroup()) {
			_ = os.Remove(g) // only an empty one can be removed; what stays is found below
		}
	}
	switch left := s.leftovers(ctx); {
	case len(left) > 0: // its directory may be in use, or have something mounted
		try(errdefs.New(errdefs.Internal, "something is left:\n  %s", strings.Join(left, "\n  ")).
			WithNext("end it, then delete %s", s.dir))
	case s.cfg.Keep:
		s.say.proven("nothing is left")
		s.say.note("kept, as asked: %s", s.dir)
	default:
		s.say.proven("nothing is left")
		s.removeStateDir()
	}
	return errors.Join(errs...)
}

func (s *story) finish(ctx context.Context) error {
	zero := int64(0)
	res, err := s.tenant.FinishRun(ctx, s.run.ID, client.FinishRequest{Reason: "the demo is over", GraceMillis: &zero})
	if err != nil {
		return err
	}
	if !res.Quiescent {
		return errdefs.New(errdefs.Internal, "not every process of the run was proven gone")
	}
	s.say.note("%d processes, all proven gone", len(res.Processes))
	for _, m := range res.Run.Models {
		s.say.note("model %s: %d requests, %s up, %s down", m.Provider, m.Requests, size(m.BytesUp), size(m.BytesDown))
		if m.Requests == 0 {
			return errdefs.New(errdefs.Internal, "the use of the model was not counted")
		}
	}
	return nil
}

// leftovers looks until nothing is left or the time is up.
func (s *story) leftovers(ctx context.Context) []string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		left := findLeftovers(s.dir, s.box.ID, s.hostGroup())
		if len(left) == 0 {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return left
		}
	}
}

// findLeftovers lists what of the machine still belongs to a server on the state
// directory dir: processes that name it or are in a control group of the box or
// hold a file open below it, mounts below it (a pinned network namespace is one),
// and control groups of the box or of the host program. Empty names are not looked
// for.
func findLeftovers(dir, box, host string) []string {
	var left []string
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range procs {
		if p == fmt.Sprintf("/proc/%d", os.Getpid()) {
			continue
		}
		cmdline, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		groups, _ := os.ReadFile(filepath.Join(p, "cgroup"))
		if bytes.Contains(cmdline, []byte(dir)) || box != "" && bytes.Contains(groups, []byte(box)) || opens(p, dir) {
			left = append(left, fmt.Sprintf("process %s: %s", filepath.Base(p), bytes.ReplaceAll(bytes.TrimRight(cmdline, "\x00"), []byte{0}, []byte{' '})))
		}
	}
	if mounts, err := os.Open("/proc/self/mountinfo"); err == nil {
		defer mounts.Close()
		for sc := bufio.NewScanner(mounts); sc.Scan(); {
			if fields := strings.Fields(sc.Text()); len(fields) > 4 && strings.HasPrefix(fields[4]+"/", dir+"/") {
				left = append(left, "mount "+fields[4])
			}
		}
	}
	for _, name := range []string{box, host} {
		for _, g := range groupsNamed(name) {
			left = append(left, "control group "+g)
		}
	}
	return left
}

// groupsNamed lists the control groups of a name, in every hierarchy.
func groupsNamed(name string) []string {
	if name == "" {
		return nil
	}
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return fs.SkipDir // gone, or not ours to see
		}
		if d.IsDir() && d.Name() == name {
			found = append(found, path)
			return fs.SkipDir
		}
		return nil
	})
	return found
}

// hostGroup is the name of the host program's control group: its id without the
// kind.
func (s *story) hostGroup() string {
	_, name, _ := strings.Cut(s.host, "_")
	return name
}

// opens reports whether a process has its working directory or an open file below
// dir.
func opens(proc, dir string) bool {
	links, _ := filepath.Glob(filepath.Join(proc, "fd", "*"))
	for _, l := range append(links, filepath.Join(proc, "cwd"), filepath.Join(proc, "root")) {
		if t, err := os.Readlink(l); err == nil && strings.HasPrefix(t+"/", dir+"/") {
			return true
		}
	}
	return false
}

// summary ends the story.
func (s *story) summary() {
	s.say.chapter("In short")
	s.say.note("%s worked in a box without a network and mended a program;", s.cfg.Agent)
	s.say.note("the server was killed half-way and nobody lost a byte;")
	s.say.note("a process that would not end was ended, with proof;")
	s.say.note("nothing is left. It took %s.", time.Since(s.started).Round(100*time.Millisecond))
}
