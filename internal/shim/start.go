package shim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

const (
	// startShimPatience bounds the start of a shim; it takes 10 ms.
	startShimPatience = 30 * time.Second
	// logTail is how much of shim.log goes into an error.
	logTail = 1 << 10
	// logMost is the size from which shim.log begins anew.
	logMost = 1 << 20
)

// Start spawns the shim of a process directory, `exe shim --dir dir`, and
// returns when its socket answers. The shim has its own session, an empty
// environment, no open file of this process, and outlives it; it begins to start
// the container at once. keep.json must be there, see [WriteConfig].
//
// If a shim keeps the directory already, Start returns nil as soon as that one
// answers: two calls start one child. If the process was started before and its
// shim is gone it is errdefs.Conflict, for ever.
func Start(ctx context.Context, exe, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the process directory %q: %v", dir, err)
	}
	ctx, cancel := context.WithTimeout(ctx, startShimPatience)
	defer cancel()
	pid, ready, err := spawn(exe, dir)
	if err != nil {
		return err
	}
	defer ready.Close()
	defer context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })()
	said, rerr := io.ReadAll(io.LimitReader(ready, logTail))
	if string(said) == readyLine {
		return nil
	}
	if rerr != nil { // not even an end: it hangs
		_ = unix.Kill(pid, unix.SIGKILL)
		reapChild(pid)
		return errdefs.Wrap(errors.Join(rerr, ctx.Err()), errdefs.Unavailable, "the shim did not start in time%s", tail(dir))
	}
	ws := reapChild(pid)
	switch {
	case ws.Exited() && ws.ExitStatus() == exitBusy:
		return await(ctx, dir)
	case ws.Exited() && ws.ExitStatus() == exitSpent:
		return errdefs.New(errdefs.Conflict, "%s", reasonSaid(said))
	case len(said) > 0:
		return errdefs.New(errdefs.Unavailable, "the shim could not start: %s", reasonSaid(said))
	}
	return errdefs.New(errdefs.Unavailable, "the shim ended while it started%s", tail(dir))
}

func reasonSaid(line []byte) string {
	return strings.TrimSpace(strings.TrimPrefix(string(line), "failed: "))
}

// spawn forks the shim and returns the pipe on which it says that it is ready.
func spawn(exe, dir string) (int, *os.File, error) {
	path := filepath.Join(dir, logFile)
	flags := unix.O_WRONLY | unix.O_CREAT | unix.O_APPEND | unix.O_CLOEXEC
	if fi, err := os.Stat(path); err == nil && fi.Size() > logMost {
		flags |= unix.O_TRUNC
	}
	logFD, err := unix.Open(path, flags, 0o600)
	if err != nil {
		return 0, nil, diskError(err, "open %s", logFile)
	}
	defer unix.Close(logFD)
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, nil, errdefs.Wrap(err, errdefs.Internal, "open /dev/null: %v", err)
	}
	defer unix.Close(null)
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return 0, nil, errdefs.Wrap(err, errdefs.Unavailable, "make a pipe: %v", err)
	}
	defer unix.Close(p[1])
	pid, err := syscall.ForkExec(exe, []string{exe, "shim", "--dir", dir}, &syscall.ProcAttr{
		Dir: "/",
		// GOMAXPROCS is set before the Go runtime makes room for every processor.
		Env:   []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=" + strconv.Itoa(shimProcs), readyEnv + "=3"},
		Files: []uintptr{uintptr(null), uintptr(logFD), uintptr(logFD), uintptr(p[1])},
		Sys:   &syscall.SysProcAttr{Setsid: true},
	})
	if err != nil {
		unix.Close(p[0])
		return 0, nil, errdefs.Wrap(err, errdefs.Unavailable, "the shim %s cannot be executed: %v", exe, err)
	}
	_ = unix.SetNonblock(p[0], true)
	return pid, os.NewFile(uintptr(p[0]), "ready"), nil
}

// reapChild waits for a child that has ended or is about to.
func reapChild(pid int) syscall.WaitStatus {
	var ws syscall.WaitStatus
	for {
		if _, err := syscall.Wait4(pid, &ws, 0, nil); err != syscall.EINTR {
			return ws
		}
	}
}

// await waits until the shim that another call started answers.
func await(ctx context.Context, dir string) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := DialUnix(ctx, filepath.Join(dir, socketFile))
		if err == nil {
			c.Close()
			return nil
		}
		held, lerr := locked(dir)
		if lerr == nil && !held {
			return errdefs.Wrap(err, errdefs.Unavailable, "the shim that was starting ended%s", tail(dir))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errdefs.Wrap(ctx.Err(), errdefs.Unavailable, "the shim that holds the directory does not answer%s", tail(dir))
		}
	}
}

// tail returns the end of shim.log, for an error.
func tail(dir string) string {
	f, err := os.Open(filepath.Join(dir, logFile))
	if err != nil {
		return ""
	}
	defer f.Close()
	if fi, err := f.Stat(); err == nil && fi.Size() > logTail {
		_, _ = f.Seek(-logTail, io.SeekEnd)
	}
	b, _ := io.ReadAll(io.LimitReader(f, logTail))
	if b = bytes.TrimSpace(b); len(b) == 0 {
		return ""
	}
	return fmt.Sprintf("; its log ends with %q", b)
}
