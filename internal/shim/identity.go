package shim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// identity says which process a shim is. A PID alone is not enough: it is used
// again, within a boot and after it.
type identity struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"` // clock ticks after boot, field 22 of /proc/PID/stat (proc_pid_stat(5))
	BootID string `json:"boot_id"`
}

// bootID returns /proc/sys/kernel/random/boot_id, which is new with each boot.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Internal, "read the boot id: %v", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// startTime returns field 22 of /proc/PID/stat. The second field is the
// program's name in parentheses and may itself hold any character, so fields are
// counted from the last parenthesis.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, errors.New("no name in /proc/PID/stat")
	}
	fields := bytes.Fields(b[i+1:]) // from field 3 on
	if len(fields) < 20 {
		return 0, errors.New("too few fields in /proc/PID/stat")
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

func self() (identity, error) {
	boot, err := bootID()
	if err != nil {
		return identity{}, err
	}
	start, err := startTime(os.Getpid())
	if err != nil {
		return identity{}, errdefs.Wrap(err, errdefs.Internal, "read the own start time: %v", err)
	}
	return identity{PID: os.Getpid(), Start: start, BootID: boot}, nil
}

// writeIdentity writes shim.json. It is not synced, because it says nothing after
// the boot it was written in; which boot that was stands in the start marker, too.
func writeIdentity(dir string, id identity) error {
	b, err := json.Marshal(id)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "encode %s", identityFile)
	}
	return writeAtomic(dir, identityFile, b)
}

// readIdentity reads shim.json; false if it is not there, damaged or of another
// boot.
func readIdentity(dir string) (identity, bool) {
	b, err := os.ReadFile(filepath.Join(dir, identityFile))
	if err != nil {
		return identity{}, false
	}
	var id identity
	if json.Unmarshal(b, &id) != nil || id.PID <= 1 {
		return identity{}, false
	}
	boot, err := bootID()
	return id, err == nil && boot == id.BootID
}

// living reports whether the process that shim.json names lives.
func living(dir string) bool {
	id, ok := readIdentity(dir)
	if !ok {
		return false
	}
	start, err := startTime(id.PID)
	return err == nil && start == id.Start
}

// The lock is an open-file-description lock (fcntl_locking(2)) and not flock(2),
// because it can be asked for without being taken: a Find that took it for a
// moment could turn a starting shim away.

// lock takes the process directory for this process; it is held until the file
// is closed or the process ends. It returns errdefs.Conflict if another holds it.
func lock(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, diskError(err, "open %s", lockFile)
	}
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &lk); err != nil {
		f.Close()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
			return nil, errdefs.New(errdefs.Conflict, "another shim keeps %s", filepath.Base(dir))
		}
		return nil, errdefs.Wrap(err, errdefs.Internal, "lock %s: %v", lockFile, err)
	}
	return f, nil
}

// locked reports whether some process holds the lock.
func locked(dir string) (bool, error) {
	f, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, errdefs.Wrap(err, errdefs.Unavailable, "open %s: %v", lockFile, err)
	}
	defer f.Close()
	lk := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lk); err != nil {
		return false, errdefs.Wrap(err, errdefs.Internal, "ask for %s: %v", lockFile, err)
	}
	return lk.Type != unix.F_UNLCK, nil
}

// findPatience is how long Find gives a shim that holds the lock to say who it
// is; measured: under 1 ms.
const findPatience = 2 * time.Second

// Find reports whether the shim of a process directory lives: its lock is held,
// and the process named in shim.json is of this boot and has the start time that
// stands there. False with an error means that it cannot be told: something holds
// the lock and does not say who it is.
func Find(dir string) (alive bool, err error) {
	for end := time.Now().Add(findPatience); ; time.Sleep(2 * time.Millisecond) {
		held, err := locked(dir)
		if err != nil {
			return false, err
		}
		if !held {
			bury(dir)
			return false, nil
		}
		if living(dir) {
			return true, nil
		}
		if time.Now().After(end) {
			return false, errdefs.New(errdefs.Indeterminate, "something holds %s of %s and is not the shim named in %s", lockFile, filepath.Base(dir), identityFile)
		}
	}
}

// Tried reports whether the runtime was ever asked to start the process of this
// directory. If so, and no shim lives, it must never be asked again (P1).
func Tried(dir string) (bool, error) {
	_, err := os.Lstat(filepath.Join(dir, markerFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, errdefs.Wrap(err, errdefs.Unavailable, "look for the start marker: %v", err)
	}
	return true, nil
}

// TriedIn returns the boot in which the runtime was asked to start the process of
// this directory; "" if that cannot be told. Of all that says so it alone survives
// a power cut, because nothing is started before it is durable.
func TriedIn(dir string) string {
	b, err := os.ReadFile(filepath.Join(dir, markerFile))
	if lines := strings.Split(string(b), "\n"); err == nil && len(lines) == 3 {
		return lines[1]
	}
	return ""
}
