package host_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/wire"
)

// full makes a directory of the host one of a file system without room.
func full(t *testing.T, h *hosttest.Host, dir string) (free func()) {
	t.Helper()
	at := filepath.Join(h.Dir, dir)
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "nr_inodes=1,mode=0711"); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}
}

// A full disk is a limit that was reached, and not a fault of the host.
func TestAFullDiskIsNamed(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	ctx := context.Background()
	want := func(what string, err error) {
		t.Helper()
		if !errdefs.Is(err, errdefs.Exhausted) {
			t.Errorf("%s: %v", what, err)
		}
	}
	free := full(t, h, "procs")
	_, err := h.Client().Start(ctx, hosttest.Sh(box, "true"))
	want("a process", err)
	free()
	free = full(t, h, "boxes")
	_, err = h.Client().PutBox(ctx, wire.BoxSpec{ID: hosttest.NewID(ident.Box), Limits: api.BoxLimits{Pids: 100}})
	want("a box", err)
	free()
	free = full(t, h, "images")
	_, err = h.Client().LoadImage(ctx, "", strings.NewReader("x"))
	want("an image", err)
	free()
	h.Run(hosttest.Sh(box, "true"))
}
