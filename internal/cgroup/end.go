package cgroup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Bounds of the waits below. A killed process is gone within milliseconds unless
// it sleeps in the kernel; who knows more gives a context that ends earlier.
const (
	killBound   = 10 * time.Second
	removeBound = 5 * time.Second
	freezeBound = 500 * time.Millisecond
	minPause    = 200 * time.Microsecond
	maxPause    = 20 * time.Millisecond
)

// poll calls done until it says so, with growing pauses, until ctx ends; then it
// returns ctx's error.
func poll(ctx context.Context, done func() (bool, error)) error {
	pause := minPause
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
			pause = min(2*pause, maxPause)
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
	}
}

// Kill kills every process in the group and below it, in every hierarchy, and
// returns when none is left. It returns an errdefs.Indeterminate error when some
// are still there as ctx ends or after 10 seconds. A group that does not exist
// is empty.
//
// On v2 the kernel kills the tree at once (cgroup.kill, Linux 5.14). Elsewhere
// the tree is frozen while it is killed, so that it cannot fork faster than it
// is killed, and thawed to die (freezer-subsystem.rst); without a freezer it
// takes as many passes as it takes.
func (g Group) Kill(ctx context.Context) error {
	hs, err := g.hierarchies()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, killBound)
	defer cancel()
	err = poll(ctx, func() (bool, error) {
		some, err := g.Populated()
		if err != nil || !some {
			return err == nil, err
		}
		return false, g.killOnce(ctx, hs)
	})
	if err == nil || ctx.Err() == nil {
		return err
	}
	pids, _ := g.Procs()
	return errdefs.Wrap(err, errdefs.Indeterminate, "%d processes in control group %s are still there after SIGKILL", len(pids), g.path).
		WithNext("look at what they wait for in the kernel: /proc/PID/stack")
}

// killOnce sends SIGKILL to everything that is in the group now.
func (g Group) killOnce(ctx context.Context, hs []hierarchy) error {
	pids, err := g.Procs()
	if err != nil {
		return err
	}
	if slices.Contains(pids, os.Getpid()) {
		return errdefs.New(errdefs.Internal, "control group %s holds this process itself and is not killed", g.path)
	}
	frozen := ""
	for _, h := range hs {
		switch {
		case h.unified:
			// Absent before 5.14: then the signals below must do.
			if err := write(filepath.Join(g.in(h), "cgroup.kill"), "1"); err != nil && !gone(err) {
				return errdefs.Wrap(err, errdefs.Unavailable, "control group %s cannot be killed: %v", g.path, err)
			}
		case h.has(Freezer) && exists(g.in(h), "freezer.state"):
			frozen = filepath.Join(g.in(h), "freezer.state")
		}
	}
	if frozen != "" {
		freeze(ctx, frozen)
		// A frozen process cannot even die: it must be thawed whatever happens.
		defer func() { _ = write(frozen, "THAWED") }()
	}
	return g.signalAll()
}

// freeze stops the tree, or most of it: a process that sleeps in the kernel may
// keep it in FREEZING, which is waited for only briefly.
func freeze(ctx context.Context, state string) {
	if write(state, "FROZEN") != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, freezeBound)
	defer cancel()
	_ = poll(ctx, func() (bool, error) {
		b, err := os.ReadFile(state)
		return strings.TrimSpace(string(b)) == "FROZEN", err
	})
}

// signalAll sends SIGKILL to the group's processes. A process number may be
// another process's a moment later: each is held by a pidfd, and signalled only
// if its number is still in the group after that.
func (g Group) signalAll() error {
	pids, err := g.Procs()
	if err != nil {
		return err
	}
	held := make(map[int]int, len(pids))
	defer func() {
		for _, fd := range held {
			_ = unix.Close(fd)
		}
	}()
	for _, pid := range pids {
		if pid <= 0 {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			break // these now, the others in the next pass
		}
		if err == nil {
			held[pid] = fd
		}
	}
	if pids, err = g.Procs(); err != nil {
		return err
	}
	for _, pid := range pids {
		fd, ok := held[pid]
		if !ok {
			continue
		}
		if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return errdefs.Wrap(err, errdefs.Unavailable, "process %s in control group %s cannot be killed: %v", strconv.Itoa(pid), g.path, err)
		}
	}
	return nil
}

// Remove removes the group and the groups below it from every hierarchy; its
// parents stay. A group that does not exist is removed. The kernel answers EBUSY
// for a moment after the last process has gone, so it is tried until ctx ends or
// for 5 seconds; then, or with a process still in it, it is an
// errdefs.Conflict error.
func (g Group) Remove(ctx context.Context) error {
	hs, err := g.hierarchies()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, removeBound)
	defer cancel()
	for _, h := range hs {
		var busy error
		err := poll(ctx, func() (bool, error) {
			busy = rmdir(g.in(h))
			if errors.Is(busy, unix.EBUSY) || errors.Is(busy, unix.ENOTEMPTY) {
				return false, nil
			}
			return busy == nil, busy
		})
		if err != nil && busy != nil {
			return errdefs.Wrap(busy, errdefs.Conflict, "control group %s cannot be removed: %v", g.path, busy).WithNext("end the processes in it first")
		}
	}
	return nil
}

// RemoveUnused removes the group where it holds nothing, neither processes nor
// groups, and leaves it everywhere else: for a parent that several share.
func (g Group) RemoveUnused() {
	hs, err := g.hierarchies()
	if err != nil {
		return
	}
	for _, h := range hs {
		_ = unix.Rmdir(g.in(h)) // EBUSY and ENOTEMPTY: somebody uses it
	}
}

// rmdir removes a group and, before it, those below it. The files in it are the
// kernel's and go with it.
func rmdir(dir string) error {
	below, err := children(dir)
	if err != nil {
		return err
	}
	for _, d := range below {
		if err := rmdir(d); err != nil {
			return err
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}
