package boxhost

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
)

// userNamespace returns a user namespace for an idmapped mount that shows one
// user and group of the file system as another: uid and gid as to and to.
//
// A user namespace can only be had from a process in it. This one is stopped
// before its first instruction and killed again; it never runs.
func userNamespace(uid, gid, to int) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		// The stopped process is traced by a thread: this one, to the end.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		f, err := stoppedNamespace(uid, gid, to)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

func stoppedNamespace(uid, gid, to int) (*os.File, error) {
	p, err := os.StartProcess("/proc/self/exe", []string{"stockade-userns"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: to, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: to, Size: 1}},
			Ptrace:      true,
			Pdeathsig:   syscall.SIGKILL,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("make a user namespace: %w", err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
	p.Kill()
	p.Wait()
	return f, err
}
