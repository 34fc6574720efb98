package lockdir

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestOneAtATime(t *testing.T) {
	t.Parallel()
	w := Words{Program: "server", Kind: "state directory", Flag: "--state-dir", Lock: "own/.lock"}
	path := filepath.Join(t.TempDir(), "a", "b")
	d, err := Take(path, w)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(filepath.Join(path, "own")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}
	want := fmt.Sprintf("another server (process %d) uses the state directory %s", os.Getpid(), path)
	if _, err := Take(path, w); errdefs.CodeOf(err) != errdefs.Conflict || !strings.Contains(err.Error(), want) {
		t.Errorf("%v", err)
	}
	d.Close()
	again, err := Take(path, w)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	w := Words{Program: "server", Kind: "state directory", Flag: "--state-dir", Lock: "own/.lock", Private: true}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Take(file, w); errdefs.CodeOf(err) != errdefs.Unavailable {
		t.Errorf("a file: %v", err)
	}
	open := t.TempDir()
	if err := os.Mkdir(filepath.Join(open, "own"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(open, "own"), 0o770); err != nil {
		t.Fatal(err)
	}
	if _, err := Take(open, w); errdefs.CodeOf(err) != errdefs.Denied {
		t.Errorf("open to others: %v", err)
	}
	linked := t.TempDir()
	w.Lock = ".lock"
	if err := os.Symlink(file, filepath.Join(linked, ".lock")); err != nil {
		t.Fatal(err)
	}
	if _, err := Take(linked, w); errdefs.CodeOf(err) != errdefs.Unavailable {
		t.Errorf("a link: %v", err)
	}
}
