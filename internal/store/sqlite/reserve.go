package sqlite

import (
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	// reserveBytes is the space that the ledger has for itself, once in its file
	// (see prepareFile) and once in the write-ahead log: enough for thousands of
	// changes after the disk is full. Less than walKept, so that it is never cut
	// away.
	reserveBytes = 8 << 20
	// spareBytes is the free space of the file system under which nothing new is
	// recorded, so that the reserve is left for what must still end.
	spareBytes = 1 << 20
)

// reserve takes the space for the write-ahead log before somebody else fills the
// disk: whatever a full disk is full of, processes can still be closed, fenced
// and found gone. Without it, where the file system cannot or has too little
// room, everything works the same until the disk is full.
func (s *Store) reserve() error {
	f, err := os.OpenFile(s.path+"-wal", os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	// SQLite's own locks are not on this file, so closing it drops none of them.
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, reserveBytes); err != nil {
		return err
	}
	s.reserved = true
	return nil
}

// roomy refuses what is new while the disk is as good as full.
func (s *Store) roomy(what string) error {
	if !s.reserved {
		return nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(s.path), &st); err != nil || st.Bavail*uint64(st.Bsize) >= spareBytes {
		return nil // the write itself will tell
	}
	return full(unix.ENOSPC, s.path, what)
}
