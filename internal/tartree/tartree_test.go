package tartree

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

type entry struct {
	name, content, link string
	kind                byte
	mode                int64
	size                int64 // said, if not that of content
}

func archiveOf(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: e.mode, Size: int64(len(e.content))}
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if e.size != 0 {
			h.Size = e.size
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
		if e.size != 0 { // the writer would complain
			return b.Bytes()
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// place is a directory to extract into, and one beside it that must not change.
type place struct {
	root    *os.Root
	dir     string
	outside string
	before  string
}

func newPlace(t testing.TB) *place {
	t.Helper()
	top := t.TempDir()
	p := &place{dir: filepath.Join(top, "in"), outside: filepath.Join(top, "out")}
	for _, d := range []string{p.dir, p.outside} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(p.outside, "precious"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	// A link out is there already, as a tenant may have made it.
	for name, target := range map[string]string{"out": "../out", "abs": p.outside, "file": "../out/precious"} {
		if err := os.Symlink(target, filepath.Join(p.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if p.root, err = os.OpenRoot(p.dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.root.Close() })
	p.before = p.look(t)
	return p
}

// look describes everything beside the directory.
func (p *place) look(t testing.TB) string {
	t.Helper()
	var s strings.Builder
	err := filepath.WalkDir(filepath.Dir(p.dir), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == p.dir {
			return fs.SkipDir
		}
		st, err := os.Lstat(path)
		if err != nil {
			return err
		}
		fmt.Fprintln(&s, path, st.Mode(), st.Size(), st.ModTime())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s.String()
}

func (p *place) unchanged(t testing.TB) {
	t.Helper()
	if now := p.look(t); now != p.before {
		t.Errorf("something outside changed:\n%s\nbefore:\n%s", now, p.before)
	}
}

func own() ExtractOptions {
	return ExtractOptions{Limits: Limits{Bytes: 1 << 20, Entries: 1000}, UID: os.Getuid(), GID: os.Getgid()}
}

func TestHostileArchives(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("d/", 3000) + "f"
	for name, c := range map[string]struct {
		archive []byte
		code    errdefs.Code
		part    string
	}{
		"parent":              {archiveOf(t, entry{name: "../evil", content: "x"}), errdefs.Invalid, "leads out"},
		"parent inside":       {archiveOf(t, entry{name: "a/../../evil", content: "x"}), errdefs.Invalid, "leads out"},
		"parent directory":    {archiveOf(t, entry{name: "../evil/", kind: tar.TypeDir}), errdefs.Invalid, "leads out"},
		"through a link":      {archiveOf(t, entry{name: "out/evil", content: "x"}), errdefs.Invalid, "symbolic link"},
		"through an absolute": {archiveOf(t, entry{name: "abs/evil", content: "x"}), errdefs.Invalid, "symbolic link"},
		"directory at a link": {archiveOf(t, entry{name: "out/", kind: tar.TypeDir, mode: 0o777}), errdefs.Invalid, "symbolic link"},
		"own link": {archiveOf(t, entry{name: "l", kind: tar.TypeSymlink, link: "../out"}, entry{name: "l/evil", content: "x"}),
			errdefs.Invalid, "symbolic link"},
		"own link, deep": {archiveOf(t, entry{name: "a/b/", kind: tar.TypeDir}, entry{name: "a/b/l", kind: tar.TypeSymlink, link: "../../.."}, entry{name: "a/b/l/out/evil", content: "x"}),
			errdefs.Invalid, "symbolic link"},
		"two links":        {archiveOf(t, entry{name: "l", kind: tar.TypeSymlink, link: "m"}, entry{name: "m", kind: tar.TypeSymlink, link: "/"}, entry{name: "l/x", content: "x"}), errdefs.Invalid, ""},
		"hard link out":    {archiveOf(t, entry{name: "h", kind: tar.TypeLink, link: "../out/precious"}), errdefs.Invalid, "leads out"},
		"hard link by way": {archiveOf(t, entry{name: "h", kind: tar.TypeLink, link: "out/precious"}), errdefs.Invalid, "symbolic link"},
		"hard link to abs": {archiveOf(t, entry{name: "h", kind: tar.TypeLink, link: "/etc/passwd"}), errdefs.NotFound, "no such"},
		"hard link to dir": {archiveOf(t, entry{name: "d/", kind: tar.TypeDir}, entry{name: "h", kind: tar.TypeLink, link: "d"}), errdefs.Invalid, "not a file"},
		"hard link self":   {archiveOf(t, entry{name: "h", kind: tar.TypeLink, link: "h"}), errdefs.Invalid, "itself"},
		"device":           {archiveOf(t, entry{name: "null", kind: tar.TypeChar}), errdefs.Invalid, "device"},
		"block device":     {archiveOf(t, entry{name: "sda", kind: tar.TypeBlock}), errdefs.Invalid, "device"},
		"fifo":             {archiveOf(t, entry{name: "fifo", kind: tar.TypeFifo}), errdefs.Invalid, "FIFO"},
		"unknown kind":     {archiveOf(t, entry{name: "x", kind: 'V'}), errdefs.Invalid, "kind"},
		"file for root":    {archiveOf(t, entry{name: ".", content: "x"}), errdefs.Invalid, ""},
		"file over dir":    {archiveOf(t, entry{name: "d/", kind: tar.TypeDir}, entry{name: "d", content: "x"}), errdefs.Invalid, "directory"},
		"dir over file":    {archiveOf(t, entry{name: "d", content: "x"}, entry{name: "d/", kind: tar.TypeDir}), errdefs.Invalid, "not a directory"},
		"below a file":     {archiveOf(t, entry{name: "d", content: "x"}, entry{name: "d/f", content: "x"}), errdefs.Invalid, ""},
		"long name":        {archiveOf(t, entry{name: long, content: "x"}), errdefs.Invalid, "limit"},
		"long element":     {archiveOf(t, entry{name: strings.Repeat("x", 300), content: "x"}), errdefs.Invalid, "too long"},
		"loop":             {archiveOf(t, entry{name: "l", kind: tar.TypeSymlink, link: "l"}, entry{name: "l/f", content: "x"}), errdefs.Invalid, ""},
		"no target":        {archiveOf(t, entry{name: "l", kind: tar.TypeSymlink}), errdefs.Invalid, "target"},
		"deep":             {archiveOf(t, entry{name: strings.Repeat("d/", maxDepth+1) + "f"}), errdefs.Invalid, "deeper"},
		"large":            {archiveOf(t, entry{name: "f", size: 2 << 20}), errdefs.Exhausted, "limit"},
		"cut off":          {archiveOf(t, entry{name: "f", content: "half", size: 1 << 19}), errdefs.Invalid, "cut off"},
		"not a tar":        {bytes.Repeat([]byte("nonsense"), 200), errdefs.Invalid, "not a tar"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPlace(t)
			_, err := Extract(t.Context(), p.root, bytes.NewReader(c.archive), own())
			if !errdefs.Is(err, c.code) || !strings.Contains(fmt.Sprint(err), c.part) {
				t.Errorf("%v (%s), want %s with %q", err, errdefs.CodeOf(err), c.code, c.part)
			}
			p.unchanged(t)
		})
	}
}

func TestManyEntries(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	var es []entry
	for i := range 20 {
		es = append(es, entry{name: fmt.Sprint(i), content: "12345"})
	}
	for _, l := range []Limits{{Entries: 10}, {Bytes: 50}} {
		opt := own()
		opt.Limits = l
		_, err := Extract(t.Context(), p.root, bytes.NewReader(archiveOf(t, es...)), opt)
		if !errdefs.Is(err, errdefs.Exhausted) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	opt := own()
	opt.Limits.Entries = 10
	if _, err := Extract(t.Context(), p.root, bytes.NewReader(archiveOf(t, entry{name: strings.Repeat("d/", 12) + "f"})), opt); !errdefs.Is(err, errdefs.Exhausted) {
		t.Errorf("directories that are only implied: %v", err)
	}
	if _, err := os.Stat(filepath.Join(p.dir, "15")); err == nil {
		t.Error("more than the limit was made")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Extract(ctx, p.root, bytes.NewReader(archiveOf(t, es...)), own()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// holes is an archive of one file of so many bytes that it holds none of: the
// sparse format of GNU tar, whose map has one empty piece at the end.
func holes(t *testing.T, size int64) []byte {
	t.Helper()
	b := archiveOf(t, entry{name: "holes"})
	octal := func(at int, n int64) { copy(b[at:], fmt.Sprintf("%011o\x00", n)) }
	b[156] = tar.TypeGNUSparse
	copy(b[257:], "ustar  \x00")
	octal(386, size) // the first piece of the map: where, and how long
	octal(398, 0)
	octal(483, size)
	copy(b[148:], "        ")
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// Whether there is room is asked for what is written, not for what is read.
func TestRoomForFilesWithHoles(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	opt := own()
	opt.Limits.Bytes = 8 << 20
	asked := int64(0)
	full := errdefs.New(errdefs.Exhausted, "full")
	opt.Room = func(n int64) error {
		if asked += n; asked > 4<<20 {
			return full
		}
		return nil
	}
	if _, err := Extract(t.Context(), p.root, bytes.NewReader(holes(t, 3<<20)), opt); err != nil || asked < 3<<20 {
		t.Errorf("asked for %d bytes of 3 MiB: %v", asked, err)
	}
	if _, err := Extract(t.Context(), p.root, bytes.NewReader(holes(t, 3<<20)), opt); !errors.Is(err, full) {
		t.Errorf("went on without room: %v", err)
	}
}

// An existing link is replaced, never written through.
func TestReplaces(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	_, err := Extract(t.Context(), p.root, bytes.NewReader(archiveOf(t,
		entry{name: "file", content: "new", mode: 0o6755},
		entry{name: "abs", kind: tar.TypeSymlink, link: "elsewhere"},
		entry{name: "later", kind: tar.TypeLink, link: "target"},
		entry{name: "target", content: "t"},
		entry{name: "made/for/me", content: "m"})), own())
	if err != nil {
		t.Fatal(err)
	}
	p.unchanged(t)
	st, err := os.Lstat(filepath.Join(p.dir, "file"))
	if err != nil || st.Mode() != 0o755 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if target, err := os.Readlink(filepath.Join(p.dir, "abs")); err != nil || target != "elsewhere" {
		t.Errorf("link %q, %v", target, err)
	}
	if b, err := os.ReadFile(filepath.Join(p.dir, "later")); err != nil || string(b) != "t" {
		t.Errorf("hard link before its target: %q, %v", b, err)
	}
}

func TestWriteBounds(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	if err := os.MkdirAll(filepath.Join(p.dir, strings.Repeat("d/", maxDepth+2)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := Write(t.Context(), p.root, "d", io.Discard, WriteOptions{As: "d"}); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("a deep tree: %v", err)
	}
	if err := Write(t.Context(), p.root, "d", io.Discard, WriteOptions{As: "d", Limits: Limits{Entries: 10}}); !errdefs.Is(err, errdefs.Exhausted) {
		t.Errorf("many entries: %v", err)
	}
	for _, name := range []string{"out/precious", "abs/precious", "../out/precious"} {
		var b bytes.Buffer
		if err := Write(t.Context(), p.root, name, &b, WriteOptions{As: "x"}); err == nil || b.Len() > 0 {
			t.Errorf("%s was read: %v, %d bytes", name, err, b.Len())
		}
	}
	failing := errors.New("gone")
	if err := Write(t.Context(), p.root, "d/d", failWriter{failing}, WriteOptions{As: "x", Limits: Limits{Entries: 1 << 20}}); err == nil {
		t.Error("a failing writer was not noticed")
	}
}

type failWriter struct{ err error }

func (f failWriter) Write([]byte) (int, error) { return 0, f.err }

// What goes in comes out: any tree of files, directories and links.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		names := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-c]{1,2}(/[a-c]{1,2}){0,2}`), 0, 12, rapid.ID[string]).Draw(rt, "names")
		slices.Sort(names)
		var es []entry
		kinds := map[string]byte{}
		for _, n := range names {
			kind := byte(tar.TypeReg)
			switch rapid.IntRange(0, 2).Draw(rt, "kind") {
			case 1:
				kind = tar.TypeDir
			case 2:
				kind = tar.TypeSymlink
			}
			ok := true
			for i := range n {
				if n[i] == '/' && kinds[n[:i]] != 0 && kinds[n[:i]] != tar.TypeDir {
					ok = false
				}
			}
			if !ok {
				continue
			}
			kinds[n] = kind
			e := entry{name: n, kind: kind, mode: int64(rapid.SampledFrom([]int{0o644, 0o755, 0o600}).Draw(rt, "mode"))}
			switch kind {
			case tar.TypeReg:
				e.content = rapid.String().Draw(rt, "content")
			case tar.TypeSymlink:
				e.link, e.mode = rapid.SampledFrom([]string{"a", "/x", "../../y"}).Draw(rt, "target"), 0o777
			case tar.TypeDir:
				e.name += "/"
			}
			es = append(es, e)
		}
		dir, err := os.MkdirTemp("", "tartree")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		root, err := os.OpenRoot(dir)
		if err != nil {
			rt.Fatal(err)
		}
		defer root.Close()
		if _, err := Extract(context.Background(), root, bytes.NewReader(archiveOf(t, es...)), own()); err != nil {
			rt.Fatal(err)
		}
		var out bytes.Buffer
		if err := Write(context.Background(), root, ".", &out, WriteOptions{}); err != nil {
			rt.Fatal(err)
		}
		got := map[string]entry{}
		for tr := tar.NewReader(&out); ; {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				rt.Fatal(err)
			}
			b, err := io.ReadAll(tr)
			if err != nil {
				rt.Fatal(err)
			}
			got[h.Name] = entry{name: h.Name, content: string(b), link: h.Linkname, kind: h.Typeflag, mode: h.Mode}
		}
		for _, e := range es {
			if got[e.name] != e {
				rt.Fatalf("%+v became %+v", e, got[e.name])
			}
		}
	})
}

func FuzzExtract(f *testing.F) {
	f.Add(archiveOf(f, entry{name: "a", content: "x"}, entry{name: "d/", kind: tar.TypeDir}, entry{name: "l", kind: tar.TypeSymlink, link: "a"}), false)
	f.Add(archiveOf(f, entry{name: "../x", content: "x"}), true)
	f.Add(archiveOf(f, entry{name: "l", kind: tar.TypeSymlink, link: "/"}, entry{name: "l/tmp/x", content: "x"}), true)
	f.Add(archiveOf(f, entry{name: "l", kind: tar.TypeSymlink, link: ".."}, entry{name: "l/out/x", kind: tar.TypeLink, link: "file"}), false)
	f.Add(archiveOf(f, entry{name: "out/.wh.precious"}, entry{name: ".wh..wh..opq"}, entry{name: ".wh.out"}), true)
	f.Add(archiveOf(f, entry{name: ".wh..wh."}, entry{name: "abs/.wh..wh..opq"}), true)
	f.Fuzz(func(t *testing.T, data []byte, image bool) {
		p := newPlace(t)
		opt := own()
		opt.Limits = Limits{Bytes: 1 << 16, Entries: 64}
		opt.Image = image
		st, err := Extract(t.Context(), p.root, bytes.NewReader(data), opt)
		if err != nil && errdefs.CodeOf(err) == errdefs.Internal {
			t.Errorf("an archive's fault is told as ours: %v", err)
		}
		if st.Bytes > opt.Limits.Bytes && !errdefs.Is(err, errdefs.Exhausted) {
			t.Errorf("%d bytes of %d", st.Bytes, opt.Limits.Bytes)
		}
		p.unchanged(t)
		if err := Write(t.Context(), p.root, ".", io.Discard, WriteOptions{}); err != nil && errdefs.CodeOf(err) == errdefs.Internal {
			t.Errorf("what was extracted cannot be read: %v", err)
		}
	})
}
