package shim

import (
	"encoding/binary"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// clock counts time on CLOCK_BOOTTIME and shows it as a wall-clock time: the one
// of its making plus what has passed since. Setting the machine's clock does not
// move it, and sleep of the machine counts.
type clock struct {
	wall time.Time
	boot time.Duration
}

func newClock() clock {
	return clock{wall: time.Now().Round(0).UTC(), boot: bootTime()}
}

func (c clock) now() time.Time { return c.wall.Add(bootTime() - c.boot) }

// timer is one alarm on CLOCK_BOOTTIME (timerfd_create(2)).
type timer struct{ f *os.File }

func newTimer() (*timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	return &timer{os.NewFile(uintptr(fd), "timerfd")}, nil
}

// arm lets the timer go off after d, at once for d ≤ 0, instead of at any
// earlier set time.
func (t *timer) arm(d time.Duration) error { return t.set(max(d, 1)) }

// disarm lets it not go off.
func (t *timer) disarm() error { return t.set(0) }

func (t *timer) set(d time.Duration) error {
	raw, err := t.f.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	err = raw.Control(func(fd uintptr) {
		serr = unix.TimerfdSettime(int(fd), 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil)
	})
	if err != nil {
		return err
	}
	return serr
}

// wait returns when the timer has gone off; false when it was closed.
func (t *timer) wait() bool {
	var b [8]byte
	_, err := t.f.Read(b[:])
	return err == nil && binary.NativeEndian.Uint64(b[:]) > 0
}

func (t *timer) close() { t.f.Close() }
