package host

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

// buryTime bounds the wait for a shim that has nothing more to do to be gone.
const buryTime = 5 * time.Second

// buryShim takes note of the death of the last shim of a directory if that was
// this process's child, so that no zombie stays. A shim outlives its host
// program; one that another started is not ours to bury.
func buryShim(ctx context.Context, dir string) {
	k := lastKeeper(dir)
	ctx, cancel := context.WithTimeout(ctx, buryTime)
	defer cancel()
	for wait := time.Millisecond; childSince(k); wait = min(2*wait, 50*time.Millisecond) {
		if pid, err := syscall.Wait4(k.PID, nil, syscall.WNOHANG, nil); pid == k.PID || err == syscall.ECHILD {
			return
		}
		if pause(ctx, wait); ctx.Err() != nil {
			return
		}
	}
}

// childSince reports whether the process is a child of this one that started at
// that time. The PID alone would not do: it may be another child's by now.
func childSince(k keeper) bool {
	if k.PID <= 1 {
		return false
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", k.PID))
	if err != nil {
		return false
	}
	// Field 4 is the parent, 22 the start time. The second, a name in parentheses,
	// may hold anything, so fields count from the last parenthesis (proc_pid_stat(5)).
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	return len(f) > 19 && string(f[1]) == strconv.Itoa(os.Getpid()) && string(f[19]) == strconv.FormatUint(k.Start, 10)
}
