package shim

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper is the one place of a shim that waits for children: its own and those
// it inherits as subreaper, the container's init above all. A status is kept
// until somebody asks for it. It goes on until the shim ends.
type reaper struct {
	sigs chan os.Signal

	mu      sync.Mutex // held over wait4 and over fork: no status can be missed
	waiting map[int]chan syscall.WaitStatus
	strays  map[int]syscall.WaitStatus
}

// maxStrays bounds the statuses nobody asked for yet. A shim inherits the
// container's init and, if a runtime dies half-way, what that left behind.
const maxStrays = 64

func newReaper() *reaper {
	r := &reaper{
		sigs:    make(chan os.Signal, 1),
		waiting: map[int]chan syscall.WaitStatus{}, strays: map[int]syscall.WaitStatus{},
	}
	signal.Notify(r.sigs, syscall.SIGCHLD)
	go r.run()
	return r
}

func (r *reaper) run() {
	for range r.sigs {
		r.reap()
	}
}

func (r *reaper) reap() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		if ch, ok := r.waiting[pid]; ok {
			delete(r.waiting, pid)
			ch <- ws
		} else if len(r.strays) < maxStrays {
			r.strays[pid] = ws
		}
	}
}

// start forks a child and returns the channel its status comes on.
func (r *reaper) start(path string, argv []string, attr *syscall.ProcAttr) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return 0, nil, err
	}
	ch := make(chan syscall.WaitStatus, 1)
	r.waiting[pid] = ch
	return pid, ch, nil
}

var errNotChild = errors.New("the container's init is not a child of this shim")

// adopt takes over a process that this shim inherited. It returns the channel
// its status comes on and a pidfd, -1 if it has ended already.
func (r *reaper) adopt(pid int) (int, <-chan syscall.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ch := make(chan syscall.WaitStatus, 1)
	if ws, ok := r.strays[pid]; ok {
		delete(r.strays, pid)
		ch <- ws
		return -1, ch, nil
	}
	// Nobody but this reaper can reap it and so free its number, so the pidfd is
	// of the process that was meant if it is a child at all.
	err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	if err != nil {
		return -1, nil, errNotChild
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, nil, err
	}
	r.waiting[pid] = ch
	return fd, ch, nil
}
