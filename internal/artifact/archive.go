package artifact

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// DefaultLimits are those of the published SDK 0.6.3 and 0.7, but for Archive,
// which has none there: 64 MiB of stored files and room for 512 headers.
func DefaultLimits() Limits {
	return Limits{Archive: 80 << 20, Entries: 512, File: 16 << 20, Total: 64 << 20, Manifest: 1 << 20, Ratio: 100}
}

func (l Limits) withDefaults() Limits {
	d := DefaultLimits()
	for _, f := range []struct {
		v *int64
		d int64
	}{{&l.Archive, d.Archive}, {&l.File, d.File}, {&l.Total, d.Total}, {&l.Manifest, d.Manifest}, {&l.Ratio, d.Ratio}} {
		if *f.v == 0 {
			*f.v = f.d
		}
	}
	if l.Entries == 0 {
		l.Entries = d.Entries
	}
	return l
}

// Limits the published SDK does not have. Without them 512 entries could ask for
// half a million directories, and a small archive for much memory.
const (
	maxPath      = 1024    // bytes of a name
	maxSegment   = 255     // bytes of a part of it, NAME_MAX of Linux
	maxDepth     = 64      // parts of a name
	maxDirs      = 4096    // directories, also those only implied by names
	maxDirectory = 4 << 20 // bytes read to find the entries: the central directory
)

// shadow is what may not stand at the top: the worker imports the package of this
// name from the runtime, and a file beside the plugin's main module would be found first.
const shadow = "langbot_plugin"

// plan is what an archive holds after every check that its headers allow.
type plan struct {
	files    []file
	dirs     []string // named ones, parents before children where the archive has them so
	manifest Manifest
}

type file struct {
	zip  *zip.File
	path string // relative, slashes
	exec bool   // marked executable in the archive
}

func refuse(format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, "the plugin package is refused: "+format, args...)
}

func exceeds(format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Exhausted, "the plugin package is refused: "+format, args...)
}

// meter bounds what is read until it is lifted.
type meter struct {
	r    io.ReaderAt
	left int64 // < 0: no bound
}

var errDirectory = errors.New("central directory too large")

func (m *meter) ReadAt(p []byte, off int64) (int, error) {
	if m.left >= 0 {
		if m.left -= int64(len(p)); m.left < 0 {
			m.left = 0
			return 0, errDirectory
		}
	}
	return m.r.ReadAt(p, off)
}

// read checks an archive, all but the content of its files, and reads the manifest.
func read(archive []byte, lim Limits) (*plan, error) {
	if n := int64(len(archive)); n > lim.Archive {
		return nil, exceeds("it has %d bytes, the limit is %d", n, lim.Archive)
	}
	m := &meter{r: bytes.NewReader(archive), left: maxDirectory}
	z, err := zip.NewReader(m, int64(len(archive)))
	if errors.Is(err, errDirectory) {
		return nil, exceeds("its list of entries has more than %d bytes", maxDirectory)
	}
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) { // names are checked below
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the plugin package is refused: it is not a valid zip archive").
			WithNext("build it with lbp build")
	}
	m.left = -1
	p, err := check(z, lim)
	if err != nil {
		return nil, err
	}
	if err := p.readManifest(lim); err != nil {
		return nil, err
	}
	return p, nil
}

// check applies the rules for names, types and sizes.
func check(z *zip.Reader, lim Limits) (*plan, error) {
	if n := len(z.File); n > lim.Entries {
		return nil, exceeds("it has %d entries, the limit is %d", n, lim.Entries)
	}
	p := &plan{}
	t := tree{explicit: map[string]bool{}, implied: map[string]bool{}}
	var total, compressed uint64
	type span struct{ from, to uint64 }
	var spans []span
	for _, f := range z.File {
		name, err := cleanName(f.Name)
		if err != nil {
			return nil, err
		}
		isDir := strings.HasSuffix(strings.ReplaceAll(f.Name, `\`, "/"), "/")
		mode := f.ExternalAttrs >> 16 // of stat(2), as Python's zipfile and Info-ZIP write it
		if err := checkType(name, mode, isDir); err != nil {
			return nil, err
		}
		if top, _, _ := strings.Cut(name, "/"); isShadow(top) {
			return nil, refuse("it has %q at the top, which would take the place of the SDK itself", clip(top)).
				WithNext("list langbot-plugin in requirements.txt instead of packing it")
		}
		if err := t.add(name, isDir); err != nil {
			return nil, err
		}
		if f.Flags&1 != 0 {
			return nil, refuse("%q is encrypted", clip(name))
		}
		if isDir {
			if f.UncompressedSize64 != 0 {
				return nil, refuse("the directory %q has content", clip(name))
			}
			p.dirs = append(p.dirs, name)
			continue
		}
		if f.Method != zip.Store && f.Method != zip.Deflate {
			return nil, refuse("%q uses compression method %d; stored and deflated are supported", clip(name), f.Method)
		}
		size, packed := f.UncompressedSize64, f.CompressedSize64
		if size > uint64(lim.File) {
			return nil, exceeds("%q has %d bytes, the limit of a file is %d", clip(name), size, lim.File)
		}
		if name == manifestName && size > uint64(lim.Manifest) {
			return nil, exceeds("manifest.yaml has %d bytes, the limit is %d", size, lim.Manifest)
		}
		// packed stays below the archive's size, so that nothing overflows.
		from, err := f.DataOffset()
		if err != nil {
			return nil, refuse("the header of %q is damaged", clip(name))
		}
		if packed > uint64(lim.Archive) {
			return nil, refuse("%q says it has %d packed bytes, more than the archive", clip(name), packed)
		}
		if size > 0 && (packed == 0 || size > packed*uint64(lim.Ratio)) {
			return nil, exceeds("%q unpacks to more than %d times its packed size", clip(name), lim.Ratio)
		}
		if total += size; total > uint64(lim.Total) {
			return nil, exceeds("its files have more than %d bytes together, the limit", lim.Total)
		}
		compressed += packed
		if packed > 0 {
			spans = append(spans, span{uint64(from), uint64(from) + packed})
		}
		p.files = append(p.files, file{zip: f, path: name, exec: mode&0o111 != 0})
	}
	if total > compressed*uint64(lim.Ratio) {
		return nil, exceeds("it unpacks to more than %d times its packed size", lim.Ratio)
	}
	slices.SortFunc(spans, func(a, b span) int { return int(int64(a.from) - int64(b.from)) })
	for i := 1; i < len(spans); i++ {
		if spans[i].from < spans[i-1].to {
			return nil, refuse("its entries overlap")
		}
	}
	return p, nil
}

// File types in the high half of the external attributes, from inode(7).
const (
	typeMask    = 0o170000
	typeDir     = 0o040000
	typeRegular = 0o100000
	typeSymlink = 0o120000
)

func checkType(name string, mode uint32, isDir bool) error {
	switch mode & typeMask {
	case 0:
		return nil
	case typeSymlink:
		return refuse("%q is a symbolic link", clip(name))
	case typeDir:
		if !isDir {
			return refuse("%q is a directory by its type and a file by its name", clip(name))
		}
	case typeRegular:
		if isDir {
			return refuse("%q is a file by its type and a directory by its name", clip(name))
		}
	default:
		return refuse("%q is neither a file nor a directory", clip(name))
	}
	return nil
}

// isShadow reports whether a name at the top would be imported as the SDK: the
// package, a module, or a compiled module with any tag.
func isShadow(top string) bool {
	stem, _, _ := strings.Cut(top, ".")
	return strings.EqualFold(stem, shadow)
}

// cleanName is the path of an entry below the package: no empty and no "." part.
func cleanName(raw string) (string, error) {
	if raw == "" || strings.ContainsRune(raw, 0) || !utf8.ValidString(raw) {
		return "", refuse("an entry's name %q is empty or not text", clip(raw))
	}
	if len(raw) > maxPath {
		return "", exceeds("an entry's name has %d bytes, the limit is %d", len(raw), maxPath)
	}
	name := strings.ReplaceAll(raw, `\`, "/")
	if strings.HasPrefix(name, "/") {
		return "", refuse("the name %q is absolute", clip(raw))
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return "", refuse("the name %q leaves the package", clip(raw))
		case len(part) > maxSegment:
			return "", exceeds("a part of the name %q has %d bytes, the limit is %d", clip(raw), len(part), maxSegment)
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return "", refuse("the name %q means the package itself", clip(raw))
	}
	if len(parts) > maxDepth {
		return "", exceeds("the name %q has %d parts, the limit is %d", clip(raw), len(parts), maxDepth)
	}
	if len(parts[0]) >= 2 && parts[0][1] == ':' {
		return "", refuse("the name %q begins with a drive letter", clip(raw))
	}
	return strings.Join(parts, "/"), nil
}

// tree keeps names from standing on each other.
type tree struct {
	explicit map[string]bool // an entry; true: a directory
	implied  map[string]bool // a directory because something is below it
}

func (t *tree) add(name string, isDir bool) error {
	if _, ok := t.explicit[name]; ok {
		return refuse("%q is in it twice", clip(name))
	}
	if t.implied[name] && !isDir {
		return refuse("%q is a file, and there are entries below it", clip(name))
	}
	for i, c := range name {
		if c != '/' {
			continue
		}
		parent := name[:i]
		if dir, ok := t.explicit[parent]; ok && !dir {
			return refuse("%q is below %q, which is a file", clip(name), clip(parent))
		}
		t.implied[parent] = true
	}
	t.explicit[name] = isDir
	if n := len(t.implied); n > maxDirs {
		return exceeds("it has more than %d directories, the limit", maxDirs)
	}
	return nil
}

// content reads a file of the archive: exactly the bytes its header says, with the
// right checksum, into w.
func (f file) content(w io.Writer) error {
	r, err := f.zip.Open()
	if err != nil {
		return refuse("%q cannot be read", clip(f.path))
	}
	defer r.Close()
	n, err := io.CopyBuffer(w, io.LimitReader(r, int64(f.zip.UncompressedSize64)+1), make([]byte, 64<<10))
	if w, ok := errors.AsType[*writeError](err); ok {
		return w.err
	}
	switch {
	case uint64(n) > f.zip.UncompressedSize64:
		return refuse("%q has more bytes than its header says", clip(f.path))
	case errors.Is(err, zip.ErrChecksum):
		return refuse("the checksum of %q is wrong", clip(f.path))
	case err != nil || uint64(n) != f.zip.UncompressedSize64:
		return errdefs.Wrap(err, errdefs.Invalid, "the plugin package is refused: %q is damaged or has another size than its header says", clip(f.path))
	}
	return nil
}

// writeError tells a failed write from a bad archive.
type writeError struct{ err error }

func (e *writeError) Error() string { return fmt.Sprintf("write: %v", e.err) }
func (e *writeError) Unwrap() error { return e.err }

// clip keeps a name from an archive short enough for a message; %q makes it printable.
func clip(s string) string {
	const most = 120
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}
