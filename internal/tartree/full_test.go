package tartree

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestFullDisk(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	need.Disk(t, p.dir, "size=256k")
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
