package shim

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// A socket's path may have 108 bytes (unix(7)), a state directory may be deeper.
// Both ends therefore name the socket through an open descriptor of its directory.

func short(path string) (dir *os.File, name string, err error) {
	fd, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, "", err
	}
	dir = os.NewFile(uintptr(fd), filepath.Dir(path))
	return dir, fmt.Sprintf("/proc/self/fd/%d/%s", fd, filepath.Base(path)), nil
}

// DialUnix connects to a Unix stream socket of any path length. The error wraps
// the system's, so errors.Is(err, fs.ErrNotExist) and ECONNREFUSED can be asked.
func DialUnix(ctx context.Context, path string) (net.Conn, error) {
	dir, name, err := short(path)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "connect to %s: %v", path, err)
	}
	defer dir.Close()
	c, err := new(net.Dialer).DialContext(ctx, "unix", name)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "nothing answers at %s", path)
	}
	return c, nil
}

// ListenUnix listens on a Unix stream socket of any path length, mode 0600 from
// its first moment on. A socket that is in the way is replaced, so the caller must
// hold the lock that makes it the only one to listen there. Closing the listener
// does not remove the socket's file.
func ListenUnix(path string) (net.Listener, error) {
	dir, name, err := short(path)
	if err != nil {
		return nil, diskError(err, "listen at %s", path)
	}
	defer dir.Close()
	if fi, err := os.Lstat(path); err == nil && fi.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, diskError(err, "listen at %s", path)
		}
	}
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var ferr error
		// The mode of the socket's own inode, less the umask, becomes the mode of
		// the file that bind makes.
		err := raw.Control(func(fd uintptr) { ferr = unix.Fchmod(int(fd), 0o600) })
		if err != nil {
			return err
		}
		return ferr
	}}
	l, err := lc.Listen(context.Background(), "unix", name)
	if err != nil {
		return nil, diskError(err, "listen at %s", path)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // its name dies with dir
	return l, nil
}
