// Package tartree moves trees of files between tar archives and a directory
// that is never left: every path is resolved by os.Root, one component at a
// time, so neither a name, nor a symbolic or hard link, nor somebody who changes
// the tree meanwhile can make it touch anything outside.
//
// Both directions are bounded in bytes and entries.
package tartree

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Defaults of Limits.
const (
	DefaultBytes   = 4 << 30
	DefaultEntries = 1_000_000
)

// maxName bounds a path, as PATH_MAX of the kernel does.
const maxName = 4096

// maxDepth bounds how deep a tree may be.
const maxDepth = 256

// entryBytes is what an entry takes of the disk besides its content, about.
const entryBytes = 4096

// Limits bounds one archive.
type Limits struct {
	Bytes   int64 // content of all files; 0 is DefaultBytes
	Entries int   // directories that an archive only implies included; 0 is DefaultEntries
}

func (l Limits) filled() Limits {
	if l.Bytes == 0 {
		l.Bytes = DefaultBytes
	}
	if l.Entries == 0 {
		l.Entries = DefaultEntries
	}
	return l
}

// budget counts what is left of the limits.
type budget struct {
	limits  Limits
	bytes   int64
	entries int
	room    func(int64) error // see ExtractOptions; may be nil
}

func (b *budget) entry() error {
	if b.entries++; b.entries > b.limits.Entries {
		return errdefs.New(errdefs.Exhausted, "the archive has more than %d entries, the limit", b.limits.Entries).
			WithNext("send it in several parts")
	}
	return b.ask(entryBytes)
}

// ask asks whether there is room for n bytes more.
func (b *budget) ask(n int64) error {
	if b.room == nil {
		return nil
	}
	return b.room(n)
}

func (b *budget) add(n int64) error {
	if b.bytes += n; b.bytes > b.limits.Bytes {
		return errdefs.New(errdefs.Exhausted, "the files of the archive have more than %d bytes, the limit", b.limits.Bytes).
			WithNext("send it in several parts")
	}
	return nil
}

// copy copies n bytes and counts them; it looks at ctx between pieces.
func (b *budget) copy(ctx context.Context, w io.Writer, r io.Reader, n int64) error {
	if n > b.limits.Bytes-b.bytes {
		return b.add(n)
	}
	for n > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		piece := min(n, 1<<20)
		if err := b.ask(piece); err != nil {
			return err
		}
		k, err := io.CopyN(w, r, piece)
		b.bytes += k
		n -= k
		if err != nil {
			return err
		}
	}
	return nil
}

// cleanName turns an entry's name into a path relative to the root: "." for the
// root itself. A leading "/" means the root, as for tar and docker cp; a ".."
// component is refused.
func cleanName(name string) (string, error) {
	if len(name) > maxName {
		return "", errdefs.New(errdefs.Invalid, "a name in the archive has %d bytes, the limit is %d", len(name), maxName)
	}
	if strings.ContainsRune(name, 0) {
		return "", errdefs.New(errdefs.Invalid, "a name in the archive holds a NUL byte")
	}
	var parts []string
	for p := range strings.SplitSeq(name, "/") {
		switch p {
		case "", ".":
		case "..":
			return "", errdefs.New(errdefs.Invalid, "the name %q in the archive leads out of its directory", clip(name)).
				WithNext("make the archive without '..' in names")
		default:
			parts = append(parts, p)
		}
	}
	if len(parts) == 0 {
		return ".", nil
	}
	if len(parts) > maxDepth {
		return "", errdefs.New(errdefs.Invalid, "the name %q in the archive is deeper than %d directories, the limit", clip(name), maxDepth)
	}
	return strings.Join(parts, "/"), nil
}

// explain turns what the file system said about one path into an error for
// people. Errors with a code stay.
func explain(err error, what, name string) error {
	if _, ok := errors.AsType[*errdefs.Error](err); ok || err == nil ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	name = clip(name)
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errdefs.Wrap(err, errdefs.Exhausted, "no space is left to %s %q", what, name).WithNext("free space or remove boxes")
	case errors.Is(err, fs.ErrNotExist):
		return errdefs.Wrap(err, errdefs.NotFound, "cannot %s %q: no such file or directory", what, name)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG),
		errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EMLINK),
		errors.Is(err, fs.ErrExist), errors.Is(err, fs.ErrInvalid), escapes(err):
		return errdefs.Wrap(err, errdefs.Invalid, "cannot %s %q: %s", what, name, reason(err))
	}
	return errdefs.Wrap(err, errdefs.Internal, "cannot %s %q", what, name)
}

// escapes reports os.Root's refusal to leave the root, which has no exported
// value to compare with.
func escapes(err error) bool {
	return strings.Contains(err.Error(), "path escapes from parent")
}

func reason(err error) string {
	if escapes(err) {
		return "it leads out of its directory through a symbolic link"
	}
	if e, ok := errors.AsType[unix.Errno](err); ok {
		return e.Error()
	}
	return "the path is not valid"
}

func clip(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > 200 {
		return strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}
