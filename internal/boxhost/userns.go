package boxhost

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
)

// userNamespace returns a user namespace for an idmapped mount that shows users
// and groups of the file system (ContainerID) as others (HostID).
//
// A user namespace can only be had from a process in it. This one is stopped
// before its first instruction and killed again; it never runs.
func userNamespace(uids, gids []syscall.SysProcIDMap) (*os.File, error) {
	type result struct {
		f   *os.File
		err error
	}
	done := make(chan result, 1)
	go func() {
		// The stopped process is traced by a thread: this one, to the end.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		f, err := stoppedNamespace(uids, gids)
		done <- result{f, err}
	}()
	r := <-done
	return r.f, r.err
}

func stoppedNamespace(uids, gids []syscall.SysProcIDMap) (*os.File, error) {
	p, err := os.StartProcess("/proc/self/exe", []string{"stockade-userns"}, &os.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: uids,
			GidMappings: gids,
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
