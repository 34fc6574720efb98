package boxhost

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

type entry struct {
	name, content, link string
	kind                byte
	mode                int64
}

func archive(t *testing.T, entries ...entry) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.kind == 0 {
			e.kind = tar.TypeReg
		}
		if e.mode == 0 {
			e.mode = 0o644
		}
		h := &tar.Header{Name: e.name, Typeflag: e.kind, Linkname: e.link, Mode: e.mode, Size: int64(len(e.content)), Uid: 0}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func list(t *testing.T, r io.Reader) []string {
	t.Helper()
	var names []string
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			slices.Sort(names)
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 1000 || h.Gid != 1000 {
			t.Errorf("%s belongs to %d:%d", h.Name, h.Uid, h.Gid)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		s := h.Name
		if h.Linkname != "" {
			s += " -> " + h.Linkname
		}
		if len(b) > 0 {
			s += "=" + string(b)
		}
		names = append(names, s)
	}
}

func TestFilesInAndOut(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	err := f.PutFiles(t.Context(), id, "/workspace/new/dir", archive(t,
		entry{name: "./", kind: tar.TypeDir, mode: 0o700},
		entry{name: "./run.sh", content: "#!/bin/sh\necho ran\n", mode: 0o4755},
		entry{name: "sub/", kind: tar.TypeDir, mode: 0o750},
		entry{name: "/sub/f", content: "x"},
		entry{name: "l", kind: tar.TypeSymlink, link: "sub/f"},
		entry{name: "hard", kind: tar.TypeLink, link: "sub/f"},
	))
	if err != nil {
		t.Fatal(err)
	}
	if out := f.sh(id, "cd new/dir && ./run.sh; cat l hard; stat -c '%a %U %n' run.sh sub sub/f ../dir; echo y > sub/f; ls ~"); out !=
		"ran\nxx755 agent run.sh\n750 agent sub\n644 agent sub/f\n755 agent ../dir\n" {
		t.Errorf("got %q", out)
	}
	var b bytes.Buffer
	if err := f.GetFiles(t.Context(), id, "/workspace/new", &b); err != nil {
		t.Fatal(err)
	}
	want := []string{"new/", "new/dir/", "new/dir/hard=y\n", "new/dir/l -> sub/f", "new/dir/run.sh=#!/bin/sh\necho ran\n", "new/dir/sub/", "new/dir/sub/f=y\n"}
	if got := list(t, &b); !slices.Equal(got, want) {
		t.Errorf("out: %q", got)
	}
	b.Reset()
	if err := f.GetFiles(t.Context(), id, "/workspace/new/dir/sub/.", &b); err != nil {
		t.Fatal(err)
	}
	if got := list(t, &b); !slices.Equal(got, []string{"f=y\n"}) {
		t.Errorf("contents only: %q", got)
	}
	b.Reset()
	if err := f.GetFiles(t.Context(), id, "/workspace/new/dir/sub/f", &b); err != nil {
		t.Fatal(err)
	}
	if got := list(t, &b); !slices.Equal(got, []string{"f=y\n"}) {
		t.Errorf("one file: %q", got)
	}
	// The cache is a volume of its own.
	if err := f.PutFiles(t.Context(), id, "/home/agent/.cache", archive(t, entry{name: "c", content: "c"})); err != nil {
		t.Fatal(err)
	}
	if out := f.sh(id, "cat ~/.cache/c"); out != "c" {
		t.Errorf("cache: %q", out)
	}
	wantCode(t, f.PutFiles(t.Context(), id, "/home/agent", archive(t, entry{name: ".cache/c", content: "c"})), errdefs.Invalid, "cache")
	if err := f.PutFiles(t.Context(), id, "/home/agent", archive(t, entry{name: ".profile", content: "p"})); err != nil {
		t.Error(err)
	}
}

func TestFilesRefused(t *testing.T) {
	t.Parallel()
	outside := t.TempDir()
	writeFile(t, filepath.Join(outside, "f"), "x", 0o644)
	f := newFixture(t, func(c *Config) { c.AllowMounts = []string{outside}; c.MaxFileBytes = 1 << 20; c.MaxFileEntries = 50 })
	id := f.put(func(s *wire.BoxSpec) { s.Mounts = mount(outside, "/workspace/m", true) })
	f.sh(id, "ln -s / root; ln -s "+outside+" out; echo > file; mkfifo fifo; mkdir big; for i in $(seq 60); do : > big/$i; done; head -c 2000000 /dev/zero > large")
	ok := func() io.Reader { return archive(t, entry{name: "f", content: "x"}) }
	for _, c := range []struct {
		at   string
		code errdefs.Code
		part string
	}{
		{"relative", errdefs.Invalid, "absolute"}, {"", errdefs.Invalid, "absolute"}, {"/", errdefs.Invalid, "volume"},
		{"/etc", errdefs.Invalid, "volume"}, {"/workspace/../etc", errdefs.Invalid, ".."}, {"/workspacex", errdefs.Invalid, "volume"},
		{"/tmp", errdefs.Invalid, "volume"}, {"/workspace/m", errdefs.Invalid, "mounted"}, {"/workspace/m/x", errdefs.Invalid, "mounted"},
		{"/workspace/root", errdefs.Invalid, "leads out"}, {"/workspace/out", errdefs.Invalid, "leads out"},
		{"/workspace/root/etc", errdefs.Invalid, "leads out"}, {"/workspace/file", errdefs.Invalid, "directory"},
		{"/workspace/fifo", errdefs.Invalid, "directory"}, {"/workspace/a\x00", errdefs.Invalid, "absolute"},
	} {
		wantCode(t, f.PutFiles(t.Context(), id, c.at, ok()), c.code, c.part)
	}
	wantCode(t, f.PutFiles(t.Context(), id, "/workspace", archive(t, entry{name: "m/f", content: "y"})), errdefs.Invalid, "mounted")
	wantCode(t, f.PutFiles(t.Context(), id, "/workspace", archive(t, entry{name: "out/f", content: "y"})), errdefs.Invalid, "symbolic link")
	wantCode(t, f.PutFiles(t.Context(), "none", "/workspace", ok()), errdefs.NotFound, "no box")
	if b, err := os.ReadFile(filepath.Join(outside, "f")); err != nil || string(b) != "x" {
		t.Errorf("outside: %q, %v", b, err)
	}
	for at, part := range map[string]string{"/workspace/none": "no such", "/workspace/none/.": "not exist"} {
		var b bytes.Buffer
		wantCode(t, f.GetFiles(t.Context(), id, at, &b), errdefs.NotFound, part)
		if b.Len() != 0 {
			t.Errorf("%s: %d bytes were written", at, b.Len())
		}
	}
	for at, code := range map[string]errdefs.Code{
		"/etc/passwd": errdefs.Invalid, "/workspace/root/etc/passwd": errdefs.Invalid, "/workspace/m": errdefs.Invalid,
		"/workspace/file/.": errdefs.Invalid, "/workspace/big": errdefs.Exhausted, "/workspace/large": errdefs.Exhausted,
	} {
		if err := f.GetFiles(t.Context(), id, at, io.Discard); !errdefs.Is(err, code) {
			t.Errorf("out of %s: %v, want %s", at, err, code)
		}
	}
	// Links are shown as what they are; a FIFO does not hang the host.
	var b bytes.Buffer
	if err := f.GetFiles(t.Context(), id, "/workspace/root", &b); err != nil || list(t, &b)[0] != "root -> /" {
		t.Errorf("a link: %v", err)
	}
	if err := f.GetFiles(t.Context(), id, "/workspace/fifo", io.Discard); err != nil {
		t.Errorf("a FIFO: %v", err)
	}
	// A reader that breaks off is the caller's error, not the archive's.
	broken := errors.New("broken pipe")
	r, w := io.Pipe()
	w.CloseWithError(broken)
	if err := f.PutFiles(t.Context(), id, "/workspace", r); err == nil || !strings.Contains(err.Error(), "broken pipe") {
		t.Errorf("a broken upload: %v", err)
	}
}

// A disk that is as good as full takes no more files, also in the middle of an
// archive.
func TestFilesNeedSpace(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	f.spare = 1 << 62
	wantCode(t, f.PutFiles(t.Context(), id, "/workspace", archive(t, entry{name: "f", content: "x"})), errdefs.Exhausted, "as good as full")
	sp := &space{dir: t.TempDir()}
	if err := sp.take(1); err != nil {
		t.Fatal(err)
	}
	sp.spare = 1 << 62
	for taken := int64(0); ; taken += 4096 {
		if err := sp.take(4096); err != nil {
			wantCode(t, err, errdefs.Exhausted, "free for files")
			break
		}
		if taken > spaceEvery {
			t.Fatal("more was taken after the disk was full")
		}
	}
}
