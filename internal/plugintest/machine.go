package plugintest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unsafe"
)

// Unlock lets a directory whose contents are read-only be removed at the end of the
// test by a user who is not root.
func Unlock(t testing.TB, dir string) {
	t.Cleanup(func() {
		_ = filepath.WalkDir(dir, func(p string, d fs.DirEntry, _ error) error {
			if d != nil && d.IsDir() {
				_ = os.Chmod(p, 0o700)
			}
			return nil
		})
	})
}

// Jump is what time.Now would have returned had the wall clock been set by d before:
// the monotonic reading is the same.
func Jump(t testing.TB, now time.Time, d time.Duration) time.Time {
	t.Helper()
	out := now
	// The first word of a time.Time with a monotonic reading holds the seconds of the
	// wall clock from bit 30 on.
	wall := (*uint64)(unsafe.Pointer(&out))
	*wall += uint64(d/time.Second) << 30
	if out.Sub(now) != 0 || out.Round(0).Sub(now.Round(0)) != d {
		t.Fatal("this Go keeps its time otherwise: Jump has to learn how")
	}
	return out
}
