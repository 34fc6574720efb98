// Package netns makes network namespaces that hold nothing but loopback, pins
// them to a file so that they live without a process, and listens inside them
// from this process.
//
// A thread that has been in another network namespace is never given back to
// the Go scheduler: the goroutine ends with the thread locked, and the runtime
// ends the thread.
package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// nsfsMagic is NSFS_MAGIC of linux/magic.h; statfs of a pinned namespace
// returns it.
const nsfsMagic = 0x6e736673

// Create makes a network namespace with only a loopback interface, up, and pins
// it to a file at path, whose directory must exist. A live namespace already
// pinned there is a conflict; a leftover file without a namespace (after a
// reboot) is taken over. It needs CAP_SYS_ADMIN.
func Create(path string) error {
	if Exists(path) {
		return errdefs.New(errdefs.Conflict, "a network namespace is already pinned at %s", path)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return fmt.Errorf("make the file to pin a network namespace to: %w", err)
	}
	f.Close()
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return refused(err, "make a network namespace")
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find the loopback interface: %w", err)
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return fmt.Errorf("bring the loopback interface up: %w", err)
		}
		self := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		if err := unix.Mount(self, path, "", unix.MS_BIND, ""); err != nil {
			return refused(err, "pin a network namespace")
		}
		return nil
	})
	if err != nil {
		os.Remove(path)
	}
	return err
}

func refused(err error, what string) error {
	if errors.Is(err, unix.EPERM) {
		return errdefs.Wrap(err, errdefs.Denied, "the kernel does not let this process %s", what).
			WithNext("run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN")
	}
	return fmt.Errorf("%s: %w", what, err)
}

// Exists reports whether a live network namespace is pinned at path.
func Exists(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == nsfsMagic
}

// Remove takes the pin away and deletes the file. The namespace itself ends when
// the last process or socket leaves it. Nothing at path is not an error.
func Remove(path string) error {
	for Exists(path) {
		if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return refused(err, "unpin a network namespace")
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete %s: %w", filepath.Base(path), err)
	}
	return nil
}

// Listen opens a listening socket inside the network namespace pinned at path.
// The socket stays in that namespace and may be used by any goroutine of this
// process; closing it is the caller's. network and addr are those of net.Listen.
func Listen(path, network, addr string) (net.Listener, error) {
	var l net.Listener
	err := inside(path, func() error {
		var err error
		l, err = (&net.ListenConfig{}).Listen(context.Background(), network, addr)
		return err
	})
	return l, err
}

// Dial connects from inside the network namespace pinned at path.
func Dial(ctx context.Context, path, network, addr string) (net.Conn, error) {
	var c net.Conn
	err := inside(path, func() error {
		// Without its own dialer setting, a dual-stack name would be dialed by
		// goroutines on other threads, outside the namespace.
		d := net.Dialer{FallbackDelay: -1}
		var err error
		c, err = d.DialContext(ctx, network, addr)
		return err
	})
	return c, err
}

// Links returns the names of the interfaces in the namespace pinned at path.
func Links(path string) ([]string, error) {
	var names []string
	err := inside(path, func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			names = append(names, l.Attrs().Name)
		}
		return err
	})
	return names, err
}

// inside runs fn on a thread that is in the namespace pinned at path.
func inside(path string, fn func() error) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return errdefs.Wrap(err, errdefs.NotFound, "no network namespace is pinned at %s", path)
		}
		return fmt.Errorf("open a pinned network namespace: %w", err)
	}
	defer f.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil || st.Type != nsfsMagic {
		return errdefs.New(errdefs.NotFound, "the file %s pins no network namespace", path).
			WithNext("it is made again when the box is used next")
	}
	return onThread(func() error {
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			return refused(err, "enter a network namespace")
		}
		return fn()
	})
}

// onThread runs fn on an operating system thread of its own, which ends with it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread cannot end: it would stay in the other namespace, keep
			// it alive, and show it as the namespace of the whole process. While this
			// goroutine holds it, the next one gets another.
			done <- onThread(fn)
			runtime.UnlockOSThread()
			return
		}
		// Never unlocked: the runtime ends the thread when the goroutine returns,
		// so nothing else ever runs in the other namespace.
		done <- fn()
	}()
	return <-done
}
