package tartree

import (
	"archive/tar"
	"bytes"
	"os"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// TestACutArchiveIsNotWhole cuts an archive at every byte: nothing but the whole of it,
// or it without the padding after its end marker, is taken for whole.
func TestACutArchiveIsNotWhole(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range []string{"a", "b"} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: 600, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, 600)); err != nil { // zeros, as the marker has
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	root, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	opt := ExtractOptions{UID: os.Geteuid(), GID: os.Getegid()}
	for n := range b.Len() {
		if _, err := Extract(t.Context(), root, bytes.NewReader(b.Bytes()[:n]), opt); !errdefs.Is(err, errdefs.Invalid) {
			t.Fatalf("cut after %d of %d bytes: %v", n, b.Len(), err)
		}
	}
	if _, err := Extract(t.Context(), root, &b, opt); err != nil {
		t.Fatal(err)
	}
}
