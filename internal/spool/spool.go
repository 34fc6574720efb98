// Package spool keeps the output of one process on disk: an append-only log of
// checksummed frames in segments, written by one process (the shim) and read by
// many others directly from the files, at the same time.
//
//	log/00000000000000000000.seg   frame frame frame …
//	log/00000000000004192256.seg   frame frame …          ← appended to
//
// A frame on disk is a frame on the wire ([wire.Header] and payload), so a reader
// only checks and forwards. A segment is named by the cursor of its first byte.
// A cursor is a position in the order of all output bytes of both streams;
// headers do not count, so every byte position is a valid cursor.
//
// Promises (P2, P10): an appended byte keeps its cursor for ever; reading changes
// nothing; what was deleted at the cap is reported as an exact gap; a damaged
// frame is reported with its place and is never skipped or taken for the end. The
// files never exceed the cap, unless the writer is told to lift it. Nothing is
// synced: the log survives the death of every process, not a power cut.
package spool

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Sizes in bytes. They count what is on disk, headers included.
const (
	// DefaultCap is how much of a log is kept when nobody said (DESIGN section 5).
	DefaultCap = 64 << 20
	// MinCap is the smallest cap; a smaller one is raised to it.
	MinCap = 64 << 10
	// DefaultSegmentBytes is the size at which a new segment begins.
	DefaultSegmentBytes = 4 << 20
	// maxSegmentFrames ends a segment of tiny records early, because a reader that
	// begins in the middle has to walk over the headers before it: 8,192 take
	// well under a millisecond.
	maxSegmentFrames = 8192
	// capSegments is how many whole segments a cap must hold at least, so that
	// dropping one never drops most of the log.
	capSegments = 4
)

// Config says where a log is and how large it may grow.
type Config struct {
	Dir          string       // made if missing
	Cap          int64        // 0: DefaultCap; raised to MinCap
	SegmentBytes int64        // 0: DefaultSegmentBytes; at most a quarter of Cap
	Overflow     api.Overflow // "": block
}

// withDefaults fills the zero fields and refuses what makes no sense.
func (c Config) withDefaults() (Config, error) {
	if c.Dir == "" {
		return c, errdefs.New(errdefs.Internal, "a log needs a directory")
	}
	if c.Cap < 0 || c.SegmentBytes < 0 {
		return c, errdefs.New(errdefs.Invalid, "the cap of a log and its segment size may not be negative")
	}
	if c.Cap == 0 {
		c.Cap = DefaultCap
	}
	c.Cap = max(c.Cap, MinCap)
	if c.SegmentBytes == 0 {
		c.SegmentBytes = DefaultSegmentBytes
	}
	c.SegmentBytes = max(min(c.SegmentBytes, c.Cap/capSegments), 2*wire.HeaderSize)
	switch c.Overflow {
	case "":
		c.Overflow = api.OverflowBlock
	case api.OverflowBlock, api.OverflowDropOldest:
	default:
		return c, errdefs.New(errdefs.Invalid, "unknown overflow policy %q", c.Overflow).WithNext("use %q or %q", api.OverflowBlock, api.OverflowDropOldest)
	}
	return c, nil
}

const (
	segmentDigits = 20
	segmentSuffix = ".seg"
)

func segmentName(base int64) string {
	return fmt.Sprintf("%0*d%s", segmentDigits, base, segmentSuffix)
}

// parseSegmentName returns the first cursor of a segment, or false for any other file.
func parseSegmentName(name string) (int64, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != segmentDigits {
		return 0, false
	}
	for _, c := range []byte(digits) {
		if c < '0' || c > '9' {
			return 0, false
		}
	}
	base, err := strconv.ParseInt(digits, 10, 64)
	return base, err == nil && base <= api.MaxOffset
}

// listSegments returns the first cursors of all segments in a directory, ascending.
func listSegments(dir string) ([]int64, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	bases := make([]int64, 0, len(names))
	for _, name := range names {
		if base, ok := parseSegmentName(name); ok {
			bases = append(bases, base)
		}
	}
	slices.Sort(bases)
	return bases, nil
}

func segmentPath(dir string, base int64) string { return filepath.Join(dir, segmentName(base)) }

// damage is the error for a log that does not hold what it should: nobody can
// say what the bytes at this place were.
func damage(base, position, cursor int64, format string, args ...any) error {
	return errdefs.New(errdefs.Indeterminate, "the log is damaged in segment %s at byte %d (cursor %d): %s",
		segmentName(base), position, cursor, fmt.Sprintf(format, args...)).
		WithNext("read what is before cursor %d, or on from the next segment", cursor).
		With("segment", segmentName(base)).
		With("position", strconv.FormatInt(position, 10)).
		With("cursor", strconv.FormatInt(cursor, 10))
}

// readFailure is the error for a disk that does not answer.
func readFailure(err error, what string) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.Wrap(err, errdefs.NotFound, "there is no log there: %s", what)
	}
	return errdefs.Wrap(err, errdefs.Unavailable, "the log cannot be read: %s: %v", what, err)
}
