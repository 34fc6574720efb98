package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/compression"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/tartree"
)

func TestMain(m *testing.M) { need.Main(m) }

func open(t *testing.T, limits tartree.Limits) *Store {
	t.Helper()
	need.Root(t) // images belong to root
	s, err := Open(Config{Dir: filepath.Join(t.TempDir(), "images"), Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func left(t *testing.T, s *Store) []string {
	t.Helper()
	ents, err := os.ReadDir(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range ents {
		names = append(names, e.Name())
	}
	return names
}

func layers(t *testing.T) []v1.Layer { return compressedLayers(t, compression.GZip) }

func compressedLayers(t *testing.T, how compression.Compression) []v1.Layer {
	layerOf := func(t *testing.T, files ...file) v1.Layer { return compressedLayer(t, how, files...) }
	return []v1.Layer{
		layerOf(t, file{name: "bin/", kind: tar.TypeDir, mode: 0o755}, file{name: "bin/a", content: "old", mode: 0o4755},
			file{name: "gone", content: "x"}, file{name: "dir/x", content: "x"}, file{name: "dir/y", content: "y"},
			file{name: "var/run", kind: tar.TypeSymlink, link: "/run"}, file{name: "run/", kind: tar.TypeDir, mode: 0o755},
			file{name: "dev/null", kind: tar.TypeChar}, file{name: "secret", content: "s", mode: 0o600},
			file{name: "mine", content: "m", mode: 0o600, uid: 1000}, file{name: "hard", kind: tar.TypeLink, link: "bin/a"},
			file{name: "keep/old", content: "o"}, file{name: "was-dir/f", content: "f"}, file{name: "was-link", kind: tar.TypeSymlink, link: "bin"}),
		layerOf(t, file{name: "bin/a", content: "new", mode: 0o755}, file{name: ".wh.gone"}, file{name: "dir/.wh..wh..opq"},
			file{name: "dir/z", content: "z"}, file{name: "keep/new", content: "n"}, file{name: "keep/.wh..wh..opq"}, file{name: ".wh.none"},
			file{name: "was-dir", content: "now a file"}, file{name: "was-link/", kind: tar.TypeDir, mode: 0o755}, file{name: "was-link/f", content: "f"}, file{name: "abs", kind: tar.TypeSymlink, link: "/etc/passwd"}),
		// A layer whose maker followed no link.
		layerOf(t, file{name: "var/run/late", content: "late"}),
	}
}

func TestBothForms(t *testing.T) {
	t.Parallel()
	img := imageOf(t, layers(t)...)
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	id, err := img.ConfigName()
	if err != nil {
		t.Fatal(err)
	}
	zimg := imageOf(t, compressedLayers(t, compression.ZStd)...)
	zdigest, err := zimg.Digest()
	if err != nil {
		t.Fatal(err)
	}
	zipped := func(b *bytes.Buffer) *bytes.Buffer {
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		if _, err := w.Write(b.Bytes()); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return &z
	}
	for _, c := range []struct {
		form    string
		archive func() *bytes.Buffer
		digest  string
		names   []string
	}{
		{"layout", func() *bytes.Buffer { return tarOf(t, layoutDir(t, map[string]v1.Image{"example.com/a:1": img})) }, digest.String(), []string{"example.com/a:1", "mine"}},
		{"layout.gz", func() *bytes.Buffer { return zipped(tarOf(t, layoutDir(t, map[string]v1.Image{"a": img}))) }, digest.String(), []string{"a", "mine"}},
		{"zstd", func() *bytes.Buffer {
			var z bytes.Buffer
			w, err := zstd.NewWriter(&z)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(tarOf(t, layoutDir(t, map[string]v1.Image{"a": zimg})).Bytes()); err != nil {
				t.Fatal(err)
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			return &z
		}, zdigest.String(), []string{"a", "mine"}},
		{"saved", func() *bytes.Buffer { return savedTar(t, "example.com/a:1", img) }, id.String(), []string{"example.com/a:1", "mine"}},
	} {
		t.Run(c.form, func(t *testing.T) {
			t.Parallel()
			s := open(t, tartree.Limits{})
			infos, err := s.Load(t.Context(), "mine", c.archive())
			if err != nil {
				t.Fatal(err)
			}
			if len(infos) != 1 || infos[0].Digest != c.digest || !slices.Equal(infos[0].Names, c.names) || infos[0].Size == 0 || infos[0].Created.IsZero() {
				t.Errorf("%+v", infos)
			}
			got, err := s.Get("mine")
			if err != nil || got.Path != "/image/bin:/bin" {
				t.Fatalf("%+v, %v", got, err)
			}
			var files []string
			err = filepath.WalkDir(got.Rootfs, func(p string, d os.DirEntry, err error) error {
				if err != nil {
					return err
				}
				rel, _ := filepath.Rel(got.Rootfs, p)
				st, err := os.Lstat(p)
				if err != nil || d.IsDir() {
					return err
				}
				line := rel + " " + st.Mode().String()
				if target, err := os.Readlink(p); err == nil {
					line += " -> " + target
				} else {
					b, err := os.ReadFile(p)
					if err != nil {
						return err
					}
					line += " " + string(b)
				}
				files = append(files, line)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			want := []string{"abs Lrwxrwxrwx -> /etc/passwd", "bin/a -rwxr-xr-x new", "dir/z -rw-r--r-- z", "hard -rwxr-xr-x old", "keep/new -rw-r--r-- n",
				"mine -rw----r-- m", "run/late -rw-r--r-- late", "secret -rw------- s",
				"var/run Lrwxrwxrwx -> /run", "was-dir -rw-r--r-- now a file", "was-link/f -rw-r--r-- f"}
			if !slices.Equal(files, want) {
				t.Errorf("files:\n%s\nwant:\n%s", strings.Join(files, "\n"), strings.Join(want, "\n"))
			}
			if names := left(t, s); len(names) != 1 {
				t.Errorf("left: %v", names)
			}
		})
	}
}

func TestNamesMoveAndRemove(t *testing.T) {
	t.Parallel()
	s := open(t, tartree.Limits{})
	one := imageOf(t, layerOf(t, file{name: "1", content: "1"}))
	two := imageOf(t, layerOf(t, file{name: "2", content: "2"}))
	a, err := s.Load(t.Context(), "n", tarOf(t, layoutDir(t, map[string]v1.Image{"one": one})))
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Load(t.Context(), "n", tarOf(t, layoutDir(t, map[string]v1.Image{"two": two})))
	if err != nil {
		t.Fatal(err)
	}
	if img, err := s.Get("n"); err != nil || img.Digest != b[0].Digest {
		t.Errorf("n is %+v, %v", img, err)
	}
	if img, err := s.Get(a[0].Digest); err != nil || !slices.Equal(img.Names, []string{"one"}) {
		t.Errorf("the first is %+v, %v", img, err)
	}
	// The same again changes nothing but names; both in one archive are two.
	both := layoutDir(t, map[string]v1.Image{"x": one, "y": two})
	if infos, err := s.Load(t.Context(), "", tarOf(t, both)); err != nil || len(infos) != 2 {
		t.Errorf("%+v, %v", infos, err)
	}
	if _, err := s.Load(t.Context(), "z", tarOf(t, both)); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("one name for two images: %v", err)
	}
	if infos, err := s.List(); err != nil || len(infos) != 2 {
		t.Errorf("%+v, %v", infos, err)
	}
	// A store opened later knows the same.
	s2, err := Open(Config{Dir: s.dir})
	if err != nil {
		t.Fatal(err)
	}
	if img, err := s2.Get("x"); err != nil || img.Digest != a[0].Digest {
		t.Errorf("%+v, %v", img, err)
	}
	used := errdefs.New(errdefs.Conflict, "in use")
	if _, err := s.Remove("x", func(string) error { return used }); !errors.Is(err, used) {
		t.Errorf("%v", err)
	}
	clean, err := s.Remove("x", nil)
	if err != nil {
		t.Fatal(err)
	}
	// It may take long to delete its files. Nobody waits for that, not even to load
	// it again and to remove that too.
	if _, err := s.Load(t.Context(), "x", tarOf(t, layoutDir(t, map[string]v1.Image{"one": one}))); err != nil {
		t.Error(err)
	}
	again, err := s.Remove("x", nil)
	if err != nil {
		t.Fatal(err)
	}
	clean()
	again()
	for _, ref := range []string{"x", a[0].Digest, "sha256:zz", "", "sha256:" + strings.Repeat("0", 64)} {
		if _, err := s.Remove(ref, nil); !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%q: %v", ref, err)
		}
	}
	if names := left(t, s); len(names) != 1 {
		t.Errorf("left: %v", names)
	}
	for _, name := range []string{"a b", "a\x00", strings.Repeat("x", 300), a[0].Digest, "ä"} {
		if _, err := s.Load(t.Context(), name, strings.NewReader("")); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("name %q: %v", name, err)
		}
	}
}

// Whatever is wrong with an archive, it is refused, says so and leaves nothing.
func TestRefused(t *testing.T) {
	t.Parallel()
	img := imageOf(t, layers(t)...)
	good := layoutDir(t, map[string]v1.Image{"a": img})
	change := func(fn func(dir string)) func() io.Reader {
		return func() io.Reader {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(good)); err != nil {
				t.Fatal(err)
			}
			fn(dir)
			return tarOf(t, dir)
		}
	}
	blobs := func(dir string) []string {
		m, err := filepath.Glob(filepath.Join(dir, "blobs/sha256/*"))
		if err != nil || len(m) < 5 {
			t.Fatal(m, err)
		}
		return m
	}
	// The digest of a layer is right, the configuration states another diff id.
	lying := func() io.Reader {
		cfg, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		cfg = cfg.DeepCopy()
		cfg.RootFS.DiffIDs[0] = cfg.RootFS.DiffIDs[1]
		raw, err := json.Marshal(cfg)
		if err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		put := func(name string, content []byte) {
			if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(content); err != nil {
				t.Fatal(err)
			}
		}
		put("config.json", raw)
		ls, err := img.Layers()
		if err != nil {
			t.Fatal(err)
		}
		var files []string
		for i, l := range ls {
			rc, err := l.Uncompressed()
			if err != nil {
				t.Fatal(err)
			}
			content, err := io.ReadAll(rc)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, string(rune('a'+i))+"/layer.tar")
			put(files[i], content)
		}
		m, err := json.Marshal(tarball.Manifest{{Config: "config.json", Layers: files}})
		if err != nil {
			t.Fatal(err)
		}
		put("manifest.json", m)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return &b
	}
	docker := func(manifest string, entries ...tar.Header) func() io.Reader {
		return func() io.Reader {
			var b bytes.Buffer
			w := tar.NewWriter(&b)
			for _, h := range append(entries, tar.Header{Name: "manifest.json", Mode: 0o644, Size: int64(len(manifest))}) {
				if err := w.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := io.WriteString(w, manifest); err != nil {
				t.Fatal(err)
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			return &b
		}
	}
	for name, c := range map[string]struct {
		archive func() io.Reader
		code    errdefs.Code
	}{
		"empty":         {func() io.Reader { return strings.NewReader("") }, errdefs.Invalid},
		"no tar":        {func() io.Reader { return strings.NewReader(strings.Repeat("no tar ", 1000)) }, errdefs.Invalid},
		"broken gzip":   {func() io.Reader { return strings.NewReader("\x1f\x8b broken") }, errdefs.Invalid},
		"another thing": {func() io.Reader { return bytes.NewReader(docker("{}")().(*bytes.Buffer).Bytes()[:0]) }, errdefs.Invalid},
		"cut off": {func() io.Reader {
			b := tarOf(t, good)
			return bytes.NewReader(b.Bytes()[:b.Len()/2])
		}, errdefs.Invalid},
		"changed blob": {change(func(dir string) {
			b := blobs(dir)[0]
			if err := os.WriteFile(b, []byte("other"), 0o644); err != nil {
				t.Fatal(err)
			}
		}), errdefs.Invalid},
		"missing blob": {change(func(dir string) {
			for _, b := range blobs(dir) {
				if st, _ := os.Stat(b); st.Size() > 0 {
					os.Remove(b)
				}
			}
		}), errdefs.Invalid},
		"broken index": {change(func(dir string) {
			if err := os.WriteFile(filepath.Join(dir, "index.json"), []byte("{"), 0o644); err != nil {
				t.Fatal(err)
			}
		}), errdefs.Invalid},
		"wrong architecture": {change(func(dir string) {
			p := filepath.Join(dir, "index.json")
			b, err := os.ReadFile(p)
			if err != nil {
				t.Fatal(err)
			}
			var idx map[string]any
			if err := json.Unmarshal(b, &idx); err != nil {
				t.Fatal(err)
			}
			idx["manifests"].([]any)[0].(map[string]any)["platform"] = map[string]string{"os": "plan9", "architecture": "mips"}
			if b, err = json.Marshal(idx); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(p, b, 0o644); err != nil {
				t.Fatal(err)
			}
		}), errdefs.Invalid},
		"lying configuration": {lying, errdefs.Invalid},
		"docker: no config":   {docker(`[{"Config":"x.json","Layers":[]}]`), errdefs.Invalid},
		"docker: outside":     {docker(`[{"Config":"../../../etc/passwd","Layers":[]}]`), errdefs.Invalid},
		"docker: link": {docker(`[{"Config":"layer.tar","Layers":[]}]`,
			tar.Header{Name: "layer.tar", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}), errdefs.Invalid},
		"docker: sly link": {docker(`[{"Config":"a/layer.tar/layer.tar","Layers":[]}]`,
			tar.Header{Name: "a/layer.tar", Typeflag: tar.TypeSymlink, Linkname: ".."},
			tar.Header{Name: "a/layer.tar/layer.tar", Typeflag: tar.TypeSymlink, Linkname: "../../x"}), errdefs.Invalid},
		"docker: none":     {docker(`[]`), errdefs.Invalid},
		"docker: not JSON": {docker(`no`), errdefs.Invalid},
		"escaping name":    {docker(`[]`, tar.Header{Name: "../x", Mode: 0o644}), errdefs.Invalid},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := open(t, tartree.Limits{})
			if _, err := s.Load(t.Context(), "", c.archive()); !errdefs.Is(err, c.code) {
				t.Errorf("%v (%s), want %s", err, errdefs.CodeOf(err), c.code)
			}
			if names := left(t, s); len(names) != 0 {
				t.Errorf("left: %v", names)
			}
		})
	}
	t.Run("limits", func(t *testing.T) {
		t.Parallel()
		for _, l := range []tartree.Limits{{Bytes: 10}, {Entries: 3}} {
			s := open(t, l)
			if _, err := s.Load(t.Context(), "", tarOf(t, good)); !errdefs.Is(err, errdefs.Exhausted) {
				t.Errorf("%+v: %v", l, err)
			}
			if names := left(t, s); len(names) != 0 {
				t.Errorf("left: %v", names)
			}
		}
		// A bomb: little to read, much to write.
		s := open(t, tartree.Limits{Bytes: 1 << 20})
		bomb := imageOf(t, layerOf(t, file{name: "zeros", content: strings.Repeat("\x00", 8<<20)}))
		if _, err := s.Load(t.Context(), "", tarOf(t, layoutDir(t, map[string]v1.Image{"b": bomb}))); !errdefs.Is(err, errdefs.Exhausted) {
			t.Errorf("a bomb: %v", err)
		}
		if _, err := s.Load(t.Context(), "", thrownAway(t, 2<<20)); !errdefs.Is(err, errdefs.Exhausted) {
			t.Errorf("a bomb that is thrown away: %v", err)
		}
		if names := left(t, s); len(names) != 0 {
			t.Errorf("left: %v", names)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		t.Parallel()
		s := open(t, tartree.Limits{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := s.Load(ctx, "", tarOf(t, good)); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		if names := left(t, s); len(names) != 0 {
			t.Errorf("left: %v", names)
		}
	})
	t.Run("full disk", func(t *testing.T) {
		t.Parallel()
		s := open(t, tartree.Limits{})
		need.Disk(t, s.dir, "size=128k")
		big := imageOf(t, layerOf(t, file{name: "f", content: strings.Repeat("x", 1<<20)}))
		if _, err := s.Load(t.Context(), "", tarOf(t, layoutDir(t, map[string]v1.Image{"b": big}))); !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "space") {
			t.Errorf("%v", err)
		}
		if names := left(t, s); len(names) != 0 {
			t.Errorf("left: %v", names)
		}
	})
	t.Run("interrupted", func(t *testing.T) {
		t.Parallel()
		s := open(t, tartree.Limits{})
		if err := os.MkdirAll(filepath.Join(s.dir, ".tmp-load-1", "image0"), 0o700); err != nil {
			t.Fatal(err)
		}
		s2, err := Open(Config{Dir: s.dir})
		if err != nil {
			t.Fatal(err)
		}
		if names := left(t, s2); len(names) != 0 {
			t.Errorf("left: %v", names)
		}
	})
}

func FuzzLoad(f *testing.F) {
	f.Add([]byte(""))
	f.Add([]byte("\x1f\x8b\x08"))
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	m := `[{"Config":"c","RepoTags":["a:b"],"Layers":["l"]}]`
	for name, content := range map[string]string{"manifest.json": m, "c": `{"rootfs":{"diff_ids":["sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"]}}`, "l": ""} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			f.Fatal(err)
		}
		io.WriteString(w, content)
	}
	w.Close()
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := Open(Config{Dir: filepath.Join(t.TempDir(), "images"), Limits: tartree.Limits{Bytes: 1 << 20, Entries: 100}})
		if err != nil {
			t.Fatal(err)
		}
		infos, err := s.Load(t.Context(), "", bytes.NewReader(data))
		if err == nil && len(infos) == 0 {
			t.Error("loaded nothing without an error")
		}
		if err != nil && errdefs.CodeOf(err) == errdefs.Internal {
			t.Errorf("an archive's fault is told as ours: %v", err)
		}
		for _, n := range left(t, s) {
			if strings.HasPrefix(n, ".tmp-") {
				t.Errorf("left: %s", n)
			}
		}
	})
}

// thrownAway is an archive with an entry of a kind that no image has.
func thrownAway(t *testing.T, size int64) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "x", Typeflag: tar.TypeCont, Size: size, Format: tar.FormatUSTAR}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}
