package worker

import (
	"os"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// spawner starts processes that die with this one. The kernel sends the parent
// death signal when the thread that forked ends (prctl(2), PR_SET_PDEATHSIG), so
// all are forked by one thread that ends with the launcher and not before.
type spawner struct {
	asks chan ask
	done chan struct{}
}

type ask struct {
	c      command
	files  []*os.File
	answer chan<- spawned
}

type spawned struct {
	proc  *os.Process
	pidfd int
	err   error
}

func newSpawner() *spawner {
	s := &spawner{asks: make(chan ask), done: make(chan struct{})}
	go s.run()
	return s
}

func (s *spawner) run() {
	runtime.LockOSThread()
	defer close(s.done)
	// Unlocked before it returns, so the thread itself lives on.
	defer runtime.UnlockOSThread()
	for a := range s.asks {
		pidfd := -1
		proc, err := os.StartProcess(a.c.path, a.c.argv, &os.ProcAttr{
			Dir: a.c.dir, Env: a.c.env, Files: a.files,
			Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, PidFD: &pidfd},
		})
		a.answer <- spawned{proc, pidfd, err}
	}
}

// start forks and executes. It must not be called after close.
func (s *spawner) start(c command, e *ends) (*os.Process, *os.File, error) {
	answer := make(chan spawned, 1)
	s.asks <- ask{c: c, files: e.child(), answer: answer}
	got := <-answer
	if got.err != nil {
		return nil, nil, got.err
	}
	fd, err := pollable(got.pidfd)
	if err != nil {
		_ = got.proc.Kill()
		_, _ = got.proc.Wait()
		return nil, nil, err
	}
	return got.proc, fd, nil
}

func (s *spawner) close() {
	close(s.asks)
	<-s.done
}

// pollable makes a pidfd one that a goroutine waits for without a thread.
func pollable(pidfd int) (*os.File, error) {
	if pidfd < 0 {
		return nil, unix.ENOSYS // before Linux 5.3
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		_ = unix.Close(pidfd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(pidfd), "pidfd"), nil
}

// awaitPidfd returns when the process has ended, whether or not it was waited
// for (pidfd_open(2): it becomes readable then).
func awaitPidfd(f *os.File) {
	if c, err := f.SyscallConn(); err == nil {
		err = c.Read(func(fd uintptr) bool {
			return ended(int(fd), 0)
		})
		if err == nil {
			return
		}
	}
	// Not pollable: this goroutine takes a thread.
	for !ended(int(f.Fd()), -1) {
	}
}

func ended(pidfd, timeout int) bool {
	ps := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(ps, timeout)
	return n > 0 && ps[0].Revents != 0 || err != nil && err != unix.EINTR && err != unix.EAGAIN
}
