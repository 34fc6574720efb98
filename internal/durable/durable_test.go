package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWriteReplacesWhole(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]func(dir, name string, b []byte) error{"Write": Write, "Atomic": Atomic} {
		dir := t.TempDir()
		for _, content := range []string{"one", "", "longer than before"} {
			if err := write(dir, "f", []byte(content)); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			got, err := os.ReadFile(filepath.Join(dir, "f"))
			if err != nil || string(got) != content {
				t.Errorf("%s: got %q, %v", name, got, err)
			}
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 {
			t.Errorf("%s left %v, %v", name, entries, err)
		}
		if info, err := os.Stat(filepath.Join(dir, "f")); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
}

func TestFailedWriteLeavesTheOld(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// A directory in the way of the name makes the rename fail.
	if err := os.MkdirAll(filepath.Join(dir, "f", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, "f", []byte("new")); err == nil {
		t.Fatal("a directory was replaced")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || !entries[0].IsDir() {
		t.Errorf("left %v, %v", entries, err)
	}
	if err := Write(filepath.Join(dir, "missing"), "f", nil); err == nil {
		t.Error("a missing directory was written to")
	}
	if err := SyncDir(filepath.Join(dir, "missing")); err == nil {
		t.Error("a missing directory was synced")
	}
}
