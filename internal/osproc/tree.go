package osproc

import (
	"bytes"
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// descendants returns the processes below root, in no order, by one walk over
// /proc. Zombies are among them. The walk is no snapshot: a process whose parent
// ends meanwhile may be missed, and is found by the walk after that end.
func descendants(root int) ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	below := map[int][]int{}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if ppid, ok := parentOf(pid); ok {
			below[ppid] = append(below[ppid], pid)
		}
	}
	var all []int
	for next := []int{root}; len(next) > 0; {
		pid := next[len(next)-1]
		next = append(next[:len(next)-1], below[pid]...)
		all = append(all, below[pid]...)
		delete(below, pid) // a torn walk must not go round in circles
	}
	return all, nil
}

// parentOf reads the fourth field of /proc/PID/stat. The second is the name of
// the program in brackets and may hold anything, so fields count from the last
// bracket (proc_pid_stat(5)).
func parentOf(pid int) (int, bool) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, false
	}
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, false
	}
	f := bytes.Fields(b[i+1:])
	if len(f) < 2 {
		return 0, false
	}
	ppid, err := strconv.Atoi(string(f[1]))
	return ppid, err == nil
}

// signalBelow sends sig to everything below root. Process numbers are used again
// by the kernel: each is held by a pidfd and signalled only if it is still below
// root after that. It returns the first error that is not "no such process";
// the others are signalled all the same.
func signalBelow(root int, sig unix.Signal, send func(pidfd int, sig unix.Signal) error) error {
	pids, first := descendants(root)
	held := make(map[int]int, len(pids))
	defer func() {
		for _, fd := range held {
			_ = unix.Close(fd)
		}
	}()
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		switch {
		case err == nil:
			held[pid] = fd
		case errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL): // gone
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE):
			// These now; their ends bring the next pass.
		case first == nil:
			first = err
		}
		if err != nil && (errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)) {
			break
		}
	}
	pids, err := descendants(root)
	if first == nil {
		first = err
	}
	for _, pid := range pids {
		fd, ok := held[pid]
		if !ok {
			continue
		}
		if err := send(fd, sig); err != nil && !errors.Is(err, unix.ESRCH) && first == nil {
			first = &signalError{pid: pid, err: err}
		}
	}
	return first
}

// signalError says which process could not be signalled.
type signalError struct {
	pid int
	err error
}

func (e *signalError) Error() string {
	return "process " + strconv.Itoa(e.pid) + " cannot be signalled: " + e.err.Error()
}
func (e *signalError) Unwrap() error { return e.err }

func pidfdSignal(fd int, sig unix.Signal) error { return unix.PidfdSendSignal(fd, sig, nil, 0) }
