package shim

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
)

// consoleSocket is where the runtime sends the terminal's master to. It lies in
// the bundle, and is named without a directory, because a runtime's socket path
// is subject to the kernel's limit and a runtime works in its bundle.
const consoleSocket = "console.sock"

// console waits for the one connection of the runtime.
type console struct {
	l    *net.UnixListener
	path string
}

func listenConsole(bundle string) (*console, error) {
	path := filepath.Join(bundle, consoleSocket)
	l, err := ListenUnix(path)
	if err != nil {
		return nil, err
	}
	return &console{l: l.(*net.UnixListener), path: path}, nil
}

func (c *console) close() {
	c.l.Close()
	os.Remove(c.path)
}

// receive returns the terminal's master, which a runtime sends as SCM_RIGHTS.
func (c *console) receive(ctx context.Context) (int, error) {
	defer context.AfterFunc(ctx, func() { _ = c.l.SetDeadline(time.Unix(1, 0)) })()
	conn, err := c.l.AcceptUnix()
	if err != nil {
		return -1, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	name, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*8))
	_, n, flags, _, err := conn.ReadMsgUnix(name, oob)
	if err != nil {
		return -1, err
	}
	fds, err := rights(oob[:n])
	if err == nil && (len(fds) != 1 || flags&unix.MSG_CTRUNC != 0) {
		err = errors.New("the runtime sent something else than one terminal")
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return -1, err
	}
	unix.CloseOnExec(fds[0])
	return fds[0], nil
}

func rights(oob []byte) ([]int, error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var all []int
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return all, err
		}
		all = append(all, fds...)
	}
	return all, nil
}

// setSize sets a terminal's size; the kernel tells its foreground process group
// with SIGWINCH if it changed.
func setSize(fd int, size api.Winsize) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
}
