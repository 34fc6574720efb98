package tartree

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestFullDisk(t *testing.T) {
	t.Parallel()
	need.Root(t)
	p := newPlace(t)
	if err := unix.Mount("tmpfs", p.dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(p.dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	full, err := os.OpenRoot(p.dir) // what is mounted there
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	_, err = Extract(t.Context(), full, bytes.NewReader(archiveOf(t, entry{name: "small", content: "s"}, entry{name: "large", content: strings.Repeat("x", 1<<20)})), ExtractOptions{})
	if !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "no space") {
		t.Errorf("a full disk: %v", err)
	}
	if _, err := full.Stat("large"); err == nil {
		t.Error("half a file was left")
	}
	if _, err := full.Stat("small"); err != nil {
		t.Errorf("what was complete is gone: %v", err)
	}
}
