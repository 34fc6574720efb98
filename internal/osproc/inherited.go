package osproc

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// KeepInherited sees to it that the files this program was started with, besides
// its standard streams, go no further than this program: what it starts may live
// longer, and belongs to others. A starter may have left a lock, a pipe or a
// terminal open. It is called first in main, and not by a program that is handed
// files on purpose.
func KeepInherited() error {
	const own = "/proc/self/fd"
	entries, err := os.ReadDir(own)
	if err != nil {
		return fmt.Errorf("look for inherited files: %w", err)
	}
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}
