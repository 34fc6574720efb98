package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
)

func openStore(t testing.TB, cfg Config) *Store {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "artifacts")
	}
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	plugintest.Unlock(t, cfg.Dir)
	return s
}

func digestOf(archive []byte) string {
	sum := sha256.Sum256(archive)
	return hex.EncodeToString(sum[:])
}

// nothingIn checks that neither an artifact nor a leftover is on the disk.
func nothingIn(t testing.TB, s *Store, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(s.shelf.Path("x")))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("on the disk are %q, want %q", got, names)
	}
}

func toy(t testing.TB) []byte {
	return zipOf(t, manifest(), member{name: "main.py", content: "print()", mode: 0o100755, deflate: true},
		member{name: "bin/", mode: 0o040700}, member{name: "bin/tool", content: "#!/bin/sh\n", mode: 0o104755},
		member{name: `bin\elf`, content: "\x7fELF…", mode: 0o100700}, member{name: "bin/data", content: "#!/bin/sh", mode: 0o100644},
		member{name: ".env", content: "A=b"})
}

// AS-01: the same package twice is one directory, read-only; execute bits stay
// where execve(2) has a use for them, others never.
func TestInstall(t *testing.T) {
	t.Parallel()
	s, archive := openStore(t, Config{}), toy(t)
	digest := digestOf(archive)
	if _, ok, err := s.Lookup(digest); ok || err != nil {
		t.Fatalf("there before it was installed: %v", err)
	}
	first, err := s.Install(t.Context(), digest, archive)
	if err != nil {
		t.Fatal(err)
	}
	if m := first.Manifest; m.Author != "tester" || m.Name != "toy" || m.Version != "1.10" || m.Raw["kind"] != "Plugin" {
		t.Errorf("manifest %+v", m)
	}
	again, err := s.Install(t.Context(), digest, archive)
	if err != nil || again.Code != first.Code || first.Code != filepath.Join(first.Root, "code") {
		t.Errorf("%q, then %q, %v", first.Code, again.Code, err)
	}
	for path, want := range map[string]fs.FileMode{
		"": fs.ModeDir | 0o555, "code": fs.ModeDir | 0o555, "code/bin": fs.ModeDir | 0o555, "code/manifest.yaml": 0o444,
		"code/main.py": 0o444, "code/bin/tool": 0o555, "code/bin/elf": 0o555, "code/bin/data": 0o444, "code/.env": 0o444,
		".verified-sha256": 0o444, ".files.json": 0o444,
	} {
		if info, err := os.Lstat(filepath.Join(first.Root, path)); err != nil || info.Mode() != want {
			t.Errorf("%q: %v, %v, want %v", path, info, err, want)
		}
	}
	if b, err := os.ReadFile(filepath.Join(first.Root, ".verified-sha256")); err != nil || string(b) != digest {
		t.Errorf("marker %q, %v", b, err)
	}
	if b, err := os.ReadFile(filepath.Join(first.Code, "main.py")); err != nil || string(b) != "print()" {
		t.Errorf("main.py %q, %v", b, err)
	}
	if v, err := s.Verify(t.Context(), digest); err != nil || !v.Listed || len(v.Problems) != 0 || v.Files != 6 {
		t.Errorf("%+v, %v", v, err)
	}
	// AS-02: other bytes are another artifact.
	other := zipOf(t, manifest(), member{name: "main.py", content: "print(2)"})
	second, err := s.Install(t.Context(), digestOf(other), other)
	if err != nil || second.Root == first.Root || filepath.Base(second.Root) != digestOf(other) {
		t.Errorf("%+v, %v", second, err)
	}
}

// AS-03: a wrong digest is refused before anything is looked at.
func TestDigest(t *testing.T) {
	t.Parallel()
	s, archive := openStore(t, Config{}), toy(t)
	for _, digest := range []string{digestOf([]byte("other")), "", "x", strings.ToUpper(digestOf(archive)), "../" + digestOf(archive)[3:], digestOf(archive) + "0"} {
		if _, err := s.Install(t.Context(), digest, archive); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v", digest, err)
		}
	}
	if _, err := s.Install(t.Context(), digestOf([]byte("other")), archive); err == nil || !strings.Contains(err.Error(), "digest mismatch") {
		t.Errorf("got %v", err)
	}
	if _, _, err := s.Lookup("x"); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("lookup: %v", err)
	}
	if _, err := s.Verify(t.Context(), "x"); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("verify: %v", err)
	}
	if _, err := s.Verify(t.Context(), digestOf(archive)); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("verify of nothing: %v", err)
	}
	nothingIn(t, s)
}

// AS-09, AS-06: whatever fails leaves nothing, and the next attempt is as good as the first.
func TestFailureLeavesNothing(t *testing.T) {
	t.Parallel()
	s := openStore(t, Config{Limits: Limits{File: 64 << 10, Total: 200 << 10}})
	for _, c := range refusals(t, 64<<10) {
		if c.code != "" {
			_, _ = s.Install(t.Context(), digestOf(c.archive), c.archive)
		}
	}
	nothingIn(t, s)
	archive := toy(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Install(ctx, digestOf(archive), archive); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	nothingIn(t, s)
	if _, err := s.Install(t.Context(), digestOf(archive), archive); err != nil {
		t.Error(err)
	}
	nothingIn(t, s, digestOf(archive))
}

// IM-31, IM-32: equal packages are published once, different ones side by side.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "artifacts")
	stores := []*Store{openStore(t, Config{Dir: dir}), openStore(t, Config{Dir: dir})} // as two processes
	archives := [][]byte{toy(t), zipOf(t, manifest())}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			a := archives[i/2%2]
			if _, err := stores[i%2].Install(t.Context(), digestOf(a), a); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	items, err := stores[0].List()
	if err != nil || len(items) != 2 || items[0].Problem+items[1].Problem != "" {
		t.Errorf("%+v, %v", items, err)
	}
	if entries, err := os.ReadDir(filepath.Join(dir, "sha256")); err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
}

// damages are what a crash of another program, a disk or a hand can do to an artifact.
var damages = map[string]func(root string) error{
	"no marker":        func(r string) error { return os.Remove(r + "/.verified-sha256") },
	"foreign marker":   func(r string) error { return rewrite(r+"/.verified-sha256", digestOf(nil)) },
	"long marker":      func(r string) error { return rewrite(r+"/.verified-sha256", strings.Repeat("0", 1<<20)) },
	"no code":          func(r string) error { return os.RemoveAll(r + "/code") },
	"code is a link":   func(r string) error { return errors.Join(os.Rename(r+"/code", r+"/c"), os.Symlink("c", r+"/code")) },
	"no manifest":      func(r string) error { return os.Remove(r + "/code/manifest.yaml") },
	"damaged manifest": func(r string) error { return rewrite(r+"/code/manifest.yaml", "a: [b") },
	"other manifest":   func(r string) error { return rewrite(r+"/code/manifest.yaml", "kind: Bot") },
	"manifest link": func(r string) error {
		return errors.Join(os.Remove(r+"/code/manifest.yaml"), os.Symlink("/etc/passwd", r+"/code/manifest.yaml"))
	},
	"empty directory": func(r string) error { return errors.Join(os.RemoveAll(r), os.Mkdir(r, 0o755)) },
	"a file":          func(r string) error { return errors.Join(os.RemoveAll(r), os.WriteFile(r, nil, 0o644)) },
	"a link":          func(r string) error { return errors.Join(os.RemoveAll(r), os.Symlink("/", r)) },
}

func rewrite(path, content string) error {
	return errors.Join(os.Remove(path), os.WriteFile(path, []byte(content), 0o444))
}

// unseal lets a test that is not root change an artifact.
func unseal(t *testing.T, root string) {
	t.Helper()
	for _, d := range []string{root, root + "/code", root + "/code/bin"} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// Where the published SDK raises or is stuck, ours is not found and then published anew.
func TestDamageHeals(t *testing.T) {
	t.Parallel()
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, archive := openStore(t, Config{}), toy(t)
			digest := digestOf(archive)
			a, err := s.Install(t.Context(), digest, archive)
			if err != nil {
				t.Fatal(err)
			}
			unseal(t, a.Root)
			if err := damage(a.Root); err != nil {
				t.Fatal(err)
			}
			if _, ok, err := s.Lookup(digest); ok || err != nil {
				t.Errorf("lookup: %v, %v", ok, err)
			}
			if items, err := s.List(); err != nil || len(items) != 1 || items[0].Problem == "" {
				t.Errorf("list: %+v, %v", items, err)
			}
			if v, err := s.Verify(t.Context(), digest); err != nil || len(v.Problems) == 0 {
				t.Errorf("verify: %+v, %v", v, err)
			}
			if _, err := s.Install(t.Context(), digest, archive); err != nil {
				t.Fatal(err)
			}
			if v, err := s.Verify(t.Context(), digest); err != nil || len(v.Problems) != 0 || !v.Listed {
				t.Errorf("verify after the repair: %+v, %v", v, err)
			}
			nothingIn(t, s, digest)
		})
	}
}

func TestVerify(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		do   func(root string) error
		says string // "" for no problem
	}{
		"same":       {func(string) error { return nil }, "can be written"}, // unsealed by the test
		"changed":    {func(r string) error { return rewrite(r+"/code/main.py", "prinT()") }, `"main.py" has another content`},
		"grown":      {func(r string) error { return rewrite(r+"/code/main.py", "print() ") }, "another content"},
		"missing":    {func(r string) error { return os.Remove(r + "/code/main.py") }, `"main.py" is missing`},
		"added":      {func(r string) error { return os.WriteFile(r+"/code/more.py", nil, 0o444) }, `"more.py" was not in the package`},
		"added link": {func(r string) error { return os.Symlink("/etc/passwd", r+"/code/more.py") }, "neither a file"},
		"link for a file": {func(r string) error {
			return errors.Join(os.Remove(r+"/code/main.py"), os.Symlink("/etc/passwd", r+"/code/main.py"))
		}, `"main.py" is missing`},
		"executable":      {func(r string) error { return os.Chmod(r+"/code/main.py", 0o555) }, "execute bits"},
		"writable":        {func(r string) error { return os.Chmod(r+"/code/main.py", 0o644) }, `"main.py" can be written`},
		"listing damaged": {func(r string) error { return rewrite(r+"/.files.json", "{") }, "listing is damaged"},
		"listing foreign": {func(r string) error { return rewrite(r+"/.files.json", `{"schema":1,"digest":"x"}`) }, "another artifact"},
		"listing link": {func(r string) error {
			return errors.Join(os.Remove(r+"/.files.json"), os.Symlink("/dev/zero", r+"/.files.json"))
		}, "listing cannot be read"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, archive := openStore(t, Config{}), toy(t)
			a, err := s.Install(t.Context(), digestOf(archive), archive)
			if err != nil {
				t.Fatal(err)
			}
			unseal(t, a.Root)
			if err := c.do(a.Root); err != nil {
				t.Fatal(err)
			}
			v, err := s.Verify(t.Context(), a.Digest)
			if err != nil || !strings.Contains(strings.Join(v.Problems, "\n"), c.says) {
				t.Errorf("%+v, %v, want %q", v, err, c.says)
			}
		})
	}
}

// A tree that the Python runtime published has no listing: it is used, and its
// verification says what it is worth.
func TestUpstreamTree(t *testing.T) {
	t.Parallel()
	s, archive := openStore(t, Config{}), toy(t)
	a, err := s.Install(t.Context(), digestOf(archive), archive)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(a.Root, 0o755), os.Remove(a.Root+"/.files.json"), os.Chmod(a.Root, 0o555)); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := s.Lookup(a.Digest); !ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
	if v, err := s.Verify(t.Context(), a.Digest); err != nil || v.Listed || v.Files != 6 || len(v.Problems) != 0 {
		t.Errorf("%+v, %v", v, err)
	}
}

func TestCollect(t *testing.T) {
	t.Parallel()
	s := openStore(t, Config{})
	var digests []string
	for _, content := range []string{"used", "fresh", "old", "damaged"} {
		archive := zipOf(t, manifest(), member{name: "f", content: content})
		a, err := s.Install(t.Context(), digestOf(archive), archive)
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, a.Digest)
	}
	hour := time.Now().Add(-time.Hour)
	for i, d := range digests {
		if i != 1 {
			if err := os.Chtimes(s.shelf.Path(d), hour.Add(-time.Minute), hour.Add(-time.Minute)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(os.Chmod(s.shelf.Path(digests[3]), 0o755), os.Remove(filepath.Join(s.shelf.Path(digests[3]), markerName)),
		os.Chtimes(s.shelf.Path(digests[3]), hour.Add(-time.Minute), hour.Add(-time.Minute))); err != nil {
		t.Fatal(err)
	}
	removed, bytes, err := s.Collect(t.Context(), map[string]bool{digests[0]: true}, hour)
	if err != nil || len(removed) != 2 || bytes == 0 {
		t.Errorf("%q, %d, %v", removed, bytes, err)
	}
	for i, want := range []bool{true, true, false, false} {
		if _, err := os.Lstat(s.shelf.Path(digests[i])); (err == nil) != want {
			t.Errorf("%d: %v", i, err)
		}
	}
	// Asking for it is using it.
	if _, ok, err := s.Lookup(digests[0]); !ok || err != nil {
		t.Fatal(err)
	}
	if removed, _, err := s.Collect(t.Context(), nil, hour); err != nil || len(removed) != 0 {
		t.Errorf("%q, %v", removed, err)
	}
}

func TestUse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, ok, err := LoadUse(dir); ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
	if err := SaveUse(dir, Use{Artifacts: []string{"b", "a"}, Trees: []string{"c"}, At: time.Unix(1, 0)}); err != nil {
		t.Fatal(err)
	}
	if u, ok, err := LoadUse(dir); !ok || err != nil || strings.Join(u.Artifacts, "") != "ab" || len(u.Trees) != 1 || !u.At.Equal(time.Unix(1, 0)) {
		t.Errorf("%+v, %v, %v", u, ok, err)
	}
	if err := os.WriteFile(filepath.Join(dir, useName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := LoadUse(dir); !errdefs.Is(err, errdefs.Internal) {
		t.Errorf("damaged: %v", err)
	}
}

// A disk that becomes full at any point leaves nothing, and what fits still works.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=256k,nr_inodes=40")
	s := openStore(t, Config{Dir: filepath.Join(dir, "artifacts")})
	large := zipOf(t, manifest(), member{name: "small", content: "x"}, member{name: "large", content: strings.Repeat("x", 1<<20)})
	many := []member{manifest()}
	for _, c := range strings.Split(strings.Repeat("x", 50), "") {
		many = append(many, member{name: c + digestOf([]byte{byte(len(many))})})
	}
	inodes := zipOf(t, many...)
	for _, archive := range [][]byte{large, inodes} {
		if _, err := s.Install(t.Context(), digestOf(archive), archive); !errdefs.Is(err, errdefs.Exhausted) || !strings.Contains(err.Error(), "no space") {
			t.Errorf("a full disk: %v", err)
		}
		nothingIn(t, s)
	}
	if _, err := s.Install(t.Context(), digestOf(toy(t)), toy(t)); err != nil {
		t.Errorf("what fits: %v", err)
	}
}

func TestExtractTo(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	m, err := ExtractTo(t.Context(), toy(t), dir)
	if err != nil || m.Name != "toy" {
		t.Fatalf("%+v, %v", m, err)
	}
	for path, want := range map[string]fs.FileMode{"bin": fs.ModeDir | 0o755, "main.py": 0o644, "bin/tool": 0o755, "bin/data": 0o644} {
		if info, err := os.Lstat(filepath.Join(dir, path)); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info, err)
		}
	}
	if _, err := ExtractTo(t.Context(), toy(t), dir); err == nil {
		t.Error("files were replaced")
	}
	if _, err := ExtractTo(t.Context(), toy(t), filepath.Join(dir, "missing")); err == nil {
		t.Error("a missing directory was filled")
	}
}
