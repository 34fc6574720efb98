package netns

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

func create(t *testing.T) string {
	t.Helper()
	need.Root(t)
	path := filepath.Join(t.TempDir(), "netns")
	if err := Create(path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Remove(path); err != nil {
			t.Error(err)
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), path) {
			t.Errorf("the mount at %s is still there (%v)", path, err)
		}
	})
	return path
}

func TestOnlyLoopbackAndUp(t *testing.T) {
	t.Parallel()
	path := create(t)
	if !Exists(path) {
		t.Fatal("Exists is false after Create")
	}
	links, err := Links(path)
	if err != nil {
		t.Fatal(err)
	}
	// Kernels with tunnel modules built in add their fallback devices, down and
	// without an address, to every new namespace.
	if !slices.Contains(links, "lo") {
		t.Errorf("links = %v", links)
	}
	l, err := Listen(path, "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = io.WriteString(c, "hello")
			c.Close()
		}
		done <- err
	}()
	c, err := Dial(t.Context(), path, "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got, err := io.ReadAll(c)
	if err != nil || string(got) != "hello" {
		t.Errorf("read %q, %v", got, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	// From outside, the same address leads nowhere.
	if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
		c.Close()
		t.Error("a listener inside was reached from outside")
	}
	// From inside, nothing leads out: there is no route.
	if c, err := Dial(t.Context(), path, "tcp", "192.0.2.1:80"); err == nil {
		c.Close()
		t.Error("a route leads out")
	}
}

// The caller's own thread must never be the one that went inside.
func TestThisProcessStaysOutside(t *testing.T) {
	t.Parallel()
	path := create(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		l, err := Listen(path, "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	if now, _ := os.Readlink("/proc/thread-self/ns/net"); now != own {
		t.Errorf("this thread moved from %s to %s", own, now)
	}
	if main, _ := os.Readlink("/proc/self/ns/net"); main != own {
		t.Errorf("the main thread is in %s, not %s", main, own)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	path := create(t)
	if err := Create(path); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("Create over a live one: %v", err)
	}
	if !Exists(path) {
		t.Error("the refused Create destroyed the namespace")
	}
	none := filepath.Join(t.TempDir(), "none")
	if _, err := Listen(none, "tcp", "127.0.0.1:0"); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("Listen at nothing: %v", err)
	}
	if err := Remove(none); err != nil {
		t.Errorf("Remove of nothing: %v", err)
	}
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(plain, "tcp", "127.0.0.1:0"); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("Listen at a plain file: %v", err)
	}
	if Exists(plain) {
		t.Error("a plain file counts as a namespace")
	}
	// After a reboot the file is there and the namespace is not.
	if err := Create(plain); err != nil {
		t.Errorf("Create over a leftover file: %v", err)
	}
	if err := Remove(plain); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(plain); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
	if err := Create(filepath.Join(t.TempDir(), "no", "such")); err == nil {
		t.Error("Create in a missing directory succeeded")
	}
}

// Many creations leave no file descriptor and no thread behind.
func TestNothingLeft(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	count := func() int {
		ents, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(ents)
	}
	once := func() {
		path := filepath.Join(dir, "ns")
		if err := Create(path); err != nil {
			t.Fatal(err)
		}
		l, err := Listen(path, "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		if err := Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	once() // the poller and netlink open what they keep
	before := count()
	for range 30 {
		once()
	}
	if after := count(); after > before {
		t.Errorf("%d file descriptors before, %d after", before, after)
	}
	if ents, err := os.ReadDir(dir); err != nil || len(ents) != 0 {
		t.Errorf("left: %v, %v", ents, err)
	}
}
