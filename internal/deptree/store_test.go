package deptree

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

// DE-01: prepared once, reused, read-only.
func TestPrepare(t *testing.T) {
	t.Parallel()
	f := installs("toy", "1.5")
	s := openStore(t, Config{Install: f})
	src := code(t, "# things\n\ntoy >= 1 ; python_version > '3'\nnever ; python_version < '3'\nlangbot-plugin>=0.7\n")
	if s.Ready(someArtifact, src) || !s.Ready(someArtifact, code(t, "\n")) {
		t.Error("ready before it was prepared, or not where nothing is asked for")
	}
	first, err := s.Prepare(t.Context(), someArtifact, src)
	if err != nil {
		t.Fatal(err)
	}
	if !s.Ready(someArtifact, src) {
		t.Error("not ready when it was prepared")
	}
	again, err := s.Prepare(t.Context(), someArtifact, src)
	if err != nil || again != first || f.runs.Load() != 1 {
		t.Errorf("%+v, then %+v, %v, %d runs", first, again, err, f.runs.Load())
	}
	for path, want := range map[string]fs.FileMode{
		"": fs.ModeDir | 0o555, "site-packages": fs.ModeDir | 0o555, "site-packages/toy": fs.ModeDir | 0o555,
		"site-packages/toy/__init__.py": 0o444, ".ready.json": 0o444, ".admission.json": 0o444,
	} {
		if info, err := os.Lstat(filepath.Join(first.Root, path)); err != nil || info.Mode() != want {
			t.Errorf("%q: %v, %v", path, info, err)
		}
	}
	onDisk(t, s, first.Digest)
	if entries, err := os.ReadDir(first.Root); err != nil || len(entries) != 3 {
		t.Errorf("the tree holds %v, %v", entries, err)
	}
	c := s.Counters()
	if c.CacheHits != 1 || c.Misses != 1 || c.Failures != 0 || c.PrepareSecondsTotal <= 0 || c.PrepareSecondsLast != c.PrepareSecondsTotal {
		t.Errorf("%+v", c)
	}
	if items, err := s.List(); err != nil || len(items) != 1 || items[0].Artifact != someArtifact || items[0].Problem != "" || items[0].Files != 4 {
		t.Errorf("%+v, %v", items, err)
	}
}

// Without requirements no installer runs and an empty tree is published.
func TestNoRequirements(t *testing.T) {
	t.Parallel()
	f := &fake{}
	s := openStore(t, Config{Install: f})
	for _, dir := range []string{t.TempDir(), code(t, ""), code(t, "# nothing\n"), code(t, "langbot-plugin")} {
		tree, err := s.Prepare(t.Context(), someArtifact, dir)
		if err != nil {
			t.Fatal(err)
		}
		if entries, err := os.ReadDir(tree.SitePackages); err != nil || len(entries) != 0 {
			t.Errorf("%v, %v", entries, err)
		}
	}
	if f.runs.Load() != 0 {
		t.Errorf("the installer ran %d times", f.runs.Load())
	}
}

// The key separates what must not be shared.
func TestKey(t *testing.T) {
	t.Parallel()
	base := Config{Interp: Interpreter{Path: "/p", Version: "3.11", CacheTag: "cpython-311", Implementation: "cpython", SDK: "0.7.18"}, Profile: "shared"}
	seen := map[string]string{}
	for name, change := range map[string]func(c *Config) (artifact string, requirements string){
		"base":        func(*Config) (string, string) { return someArtifact, "a" },
		"artifact":    func(*Config) (string, string) { return strings.Repeat("b", 64), "a" },
		"requirement": func(*Config) (string, string) { return someArtifact, "a\n" },
		"profile":     func(c *Config) (string, string) { c.Profile = "oss_dev"; return someArtifact, "a" },
		"sdk":         func(c *Config) (string, string) { c.Interp.SDK = "0.7.17"; return someArtifact, "a" },
		"old sdk":     func(c *Config) (string, string) { c.Interp.SDK = "0.6.3"; return someArtifact, "a" },
		"no sdk":      func(c *Config) (string, string) { c.Interp.SDK = ""; return someArtifact, "a" },
		"version":     func(c *Config) (string, string) { c.Interp.Version = "3.12"; return someArtifact, "a" },
		"tag":         func(c *Config) (string, string) { c.Interp.CacheTag = "x"; return someArtifact, "a" },
		"other":       func(c *Config) (string, string) { c.Interp.Implementation = "pypy"; return someArtifact, "a" },
	} {
		cfg := base
		artifact, requirements := change(&cfg)
		k := (&Store{cfg: cfg}).key(artifact, []byte(requirements))
		if was, ok := seen[k.Digest]; ok {
			t.Errorf("%s and %s have one key", name, was)
		}
		seen[k.Digest] = name
		if wantSchema := map[string]int{"old sdk": 2}[name]; wantSchema != 0 && k.Schema != wantSchema || wantSchema == 0 && k.Schema != 3 {
			t.Errorf("%s has schema %d", name, k.Schema)
		}
	}
	// What is none of the key's business.
	same := base
	same.Interp.Path, same.IndexURL, same.Uv = "/q", "http://h/", "/uv"
	if k := (&Store{cfg: same}).key(someArtifact, []byte("a")); seen[k.Digest] != "base" {
		t.Error("the path, the index or uv changed the key")
	}
}

// DE-02: concurrent preparations run the installer once; another process that lost
// the race reuses what won.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	f := installs("toy", "1")
	s := openStore(t, Config{Install: f})
	src := code(t, "toy")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := s.Prepare(t.Context(), someArtifact, src); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if f.runs.Load() != 1 {
		t.Errorf("the installer ran %d times", f.runs.Load())
	}

	// Two stores stand for two processes; each waits until both install.
	dir := filepath.Join(t.TempDir(), "environments")
	var both sync.WaitGroup
	both.Add(2)
	meet := &fake{do: func(_ context.Context, spec InstallSpec) error {
		both.Done()
		both.Wait()
		return put(spec.Target, "toy", "1")
	}}
	a, b := openStore(t, Config{Dir: dir, Install: meet}), openStore(t, Config{Dir: dir, Install: meet})
	for _, s := range []*Store{a, b} {
		wg.Go(func() {
			if _, err := s.Prepare(t.Context(), someArtifact, src); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	key := a.key(someArtifact, []byte("toy"))
	onDisk(t, a, key.Digest)
}

// DE-03, DE-04, DE-08, DE-09: a failure of any kind leaves nothing and is no
// memory: the same key works afterwards.
func TestFailures(t *testing.T) {
	t.Parallel()
	write := func(files ...string) func(context.Context, InstallSpec) error {
		return func(_ context.Context, spec InstallSpec) error {
			err := put(spec.Target, "toy", "1")
			for _, f := range files {
				err = errors.Join(err, os.WriteFile(filepath.Join(spec.Target, f), []byte("0123456789"), 0o644))
			}
			return err
		}
	}
	for name, c := range map[string]struct {
		requirements string
		do           func(ctx context.Context, spec InstallSpec) error
		limits       Limits
		code         errdefs.Code
		says         string
	}{
		"exit": {"toy", func(context.Context, InstallSpec) error { return &InstallError{Exit: 7, Output: "toy of somebody"} },
			Limits{}, errdefs.Unavailable, "exit code 7"},
		"signal":           {"toy", func(context.Context, InstallSpec) error { return &InstallError{Exit: -1} }, Limits{}, errdefs.Unavailable, "exit code -1"},
		"own error":        {"toy", func(context.Context, InstallSpec) error { return errdefs.New(errdefs.Unavailable, "no box") }, Limits{}, errdefs.Unavailable, "no box"},
		"timeout":          {"toy", func(ctx context.Context, _ InstallSpec) error { <-ctx.Done(); return ctx.Err() }, Limits{}, errdefs.Unavailable, "timed out"},
		"nothing there":    {"toy", nil, Limits{}, errdefs.Unavailable, "1 unsatisfied"},
		"other version":    {"toy==2\nother", write(), Limits{}, errdefs.Unavailable, "2 unsatisfied"},
		"too many entries": {"toy", write("a", "b"), Limits{Entries: 5}, errdefs.Exhausted, "too many entries"},
		"too large":        {"toy", write("a"), Limits{Bytes: 50}, errdefs.Exhausted, "total size"},
		"link": {"toy", func(_ context.Context, s InstallSpec) error {
			return errors.Join(put(s.Target, "toy", "1"), os.Symlink("/etc/passwd", s.Target+"/l"))
		}, Limits{}, errdefs.Invalid, "symbolic link"},
		"link for metadata": {"toy", func(_ context.Context, s InstallSpec) error {
			return errors.Join(put(s.Target, "x", "1"), os.Symlink("x-1.dist-info", s.Target+"/toy-1.dist-info"))
		}, Limits{}, errdefs.Invalid, "symbolic link"},
		"fifo": {"toy", func(_ context.Context, s InstallSpec) error {
			return errors.Join(put(s.Target, "toy", "1"), unix.Mkfifo(s.Target+"/p", 0o600))
		}, Limits{}, errdefs.Invalid, "special file"},
		"hard link": {"toy", func(_ context.Context, s InstallSpec) error {
			return errors.Join(put(s.Target, "toy", "1"), os.Link(s.Target+"/toy/__init__.py", s.Target+"/r"))
		}, Limits{}, errdefs.Invalid, "hard link"},
		"metadata too large": {"toy", func(_ context.Context, s InstallSpec) error {
			return errors.Join(put(s.Target, "toy", "1"), os.WriteFile(s.Target+"/toy-1.dist-info/METADATA", make([]byte, maxMetadata+1), 0o644))
		}, Limits{}, errdefs.Exhausted, "metadata"},
		"no metadata": {"toy", func(_ context.Context, s InstallSpec) error {
			return errors.Join(put(s.Target, "toy", "1"), os.WriteFile(s.Target+"/toy-1.dist-info/METADATA", []byte{0, 1, 2, 255}, 0o644))
		}, Limits{}, errdefs.Unavailable, "unsatisfied"},
		"odd version": {"toy==1", func(_ context.Context, s InstallSpec) error { return put(s.Target, "toy", "one") }, Limits{}, errdefs.Unavailable, "unsatisfied"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fake{do: c.do}
			if f.do == nil {
				f.do = func(context.Context, InstallSpec) error { return nil }
			}
			cfg := Config{Install: f, Limits: c.limits}
			if name == "timeout" {
				cfg.Timeout = time.Millisecond
			}
			s := openStore(t, cfg)
			src := code(t, c.requirements)
			_, err := s.Prepare(t.Context(), someArtifact, src)
			if !errdefs.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v (%s), want %s saying %q", err, errdefs.CodeOf(err), c.code, c.says)
			}
			onDisk(t, s)
			if got := s.Counters(); got.Failures != 1 || got.Misses != 1 {
				t.Errorf("%+v", got)
			}
			f.do = func(_ context.Context, s InstallSpec) error {
				return errors.Join(put(s.Target, "toy", "2"), put(s.Target, "other", "1"))
			}
			if name == "odd version" {
				f.do = func(_ context.Context, s InstallSpec) error { return put(s.Target, "toy", "1") }
			}
			s.cfg.Limits, s.cfg.Timeout = Limits{Entries: 100, Bytes: 1 << 20}, time.Minute
			if _, err := s.Prepare(t.Context(), someArtifact, src); err != nil {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// DE-04: cancelling ends the installer and cleans up; who waited goes on.
func TestCancel(t *testing.T) {
	t.Parallel()
	started := make(chan struct{}, 2)
	f := &fake{}
	f.do = func(ctx context.Context, spec InstallSpec) error {
		if f.runs.Load() > 1 {
			return put(spec.Target, "toy", "1")
		}
		started <- struct{}{}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	s := openStore(t, Config{Install: f})
	src := code(t, "toy")
	ctx, cancel := context.WithCancel(t.Context())
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { _, err := s.Prepare(ctx, someArtifact, src); first <- err }()
	select {
	case <-started:
	case err := <-first:
		t.Fatalf("it ended before the installer ran: %v", err)
	}
	go func() { _, err := s.Prepare(context.Background(), someArtifact, src); second <- err }()
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the cancelled one: %v", err)
	}
	if err := <-second; err != nil {
		t.Errorf("the one that waited: %v", err)
	}
	onDisk(t, s, s.key(someArtifact, []byte("toy")).Digest)
}

// What a crash of the published SDK between its rename and its chmod leaves, or a
// disk, is made again instead of being in the way.
func TestRepair(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(root string) error{
		"unsealed root": func(r string) error { return os.Chmod(r, 0o755) },
		"unsealed site": func(r string) error { return os.Chmod(r+"/site-packages", 0o755) },
		"no mark": func(r string) error {
			return errors.Join(os.Chmod(r, 0o755), os.Remove(r+"/.ready.json"), os.Chmod(r, 0o555))
		},
		"damaged mark":   func(r string) error { return rewrite(r, `{"digest":`) },
		"foreign mark":   func(r string) error { return rewrite(r, `{"digest":"x"}`) },
		"more in mark":   func(r string) error { return rewriteWith(r, `"schema_version":3`, `"schema_version":3,"x":1`) },
		"other artifact": func(r string) error { return rewriteWith(r, someArtifact, strings.Repeat("b", 64)) },
		"no site": func(r string) error {
			return errors.Join(os.Chmod(r, 0o755), os.Chmod(r+"/site-packages", 0o755), os.RemoveAll(r+"/site-packages"), os.Chmod(r, 0o555))
		},
		"site is a link": func(r string) error {
			return errors.Join(os.Chmod(r, 0o755), os.Chmod(r+"/site-packages", 0o755), os.RemoveAll(r+"/site-packages"), os.Symlink("/usr/lib", r+"/site-packages"), os.Chmod(r, 0o555))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := installs("toy", "1")
			s := openStore(t, Config{Install: f})
			src := code(t, "toy")
			tree, err := s.Prepare(t.Context(), someArtifact, src)
			if err != nil {
				t.Fatal(err)
			}
			if err := damage(tree.Root); err != nil {
				t.Fatal(err)
			}
			if items, err := s.List(); err != nil || len(items) != 1 || items[0].Problem == "" {
				t.Errorf("list: %+v, %v", items, err)
			}
			if _, err := s.Prepare(t.Context(), someArtifact, src); err != nil || f.runs.Load() != 2 {
				t.Errorf("%v after %d runs", err, f.runs.Load())
			}
			onDisk(t, s, tree.Digest)
			if items, err := s.List(); err != nil || len(items) != 1 || items[0].Problem != "" {
				t.Errorf("list: %+v, %v", items, err)
			}
		})
	}
}

func rewrite(root, mark string) error {
	path := filepath.Join(root, readyName)
	return errors.Join(os.Chmod(root, 0o755), os.Remove(path), os.WriteFile(path, []byte(mark), 0o444), os.Chmod(root, 0o555))
}

func rewriteWith(root, old, new string) error {
	b, err := os.ReadFile(filepath.Join(root, readyName))
	return errors.Join(err, rewrite(root, strings.Replace(string(b), old, new, 1)))
}

func TestDeclarations(t *testing.T) {
	t.Parallel()
	s := openStore(t, Config{Install: &fake{}})
	link, dir := t.TempDir(), t.TempDir()
	if err := errors.Join(os.Symlink("/etc/hostname", link+"/requirements.txt"), os.Mkdir(dir+"/requirements.txt", 0o755)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		dir  string
		code errdefs.Code
		says string
	}{
		"no code":   {filepath.Join(link, "missing"), errdefs.Unavailable, "unavailable"},
		"link":      {link, errdefs.Unavailable, "unavailable"},
		"directory": {dir, errdefs.Unavailable, "unavailable"},
		"too large": {code(t, strings.Repeat("#", maxFile+1)), errdefs.Exhausted, "too large"},
		"not UTF-8": {code(t, "\xff"), errdefs.Invalid, "UTF-8"},
	} {
		if _, err := s.Prepare(t.Context(), someArtifact, c.dir); !errdefs.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.Prepare(t.Context(), "../x", t.TempDir()); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("digest: %v", err)
	}
	onDisk(t, s)
}

func TestCollect(t *testing.T) {
	t.Parallel()
	s := openStore(t, Config{Install: &fake{}})
	old := time.Now().Add(-time.Hour)
	var trees []Tree
	for _, artifact := range []string{"a", "b", "c"} {
		tree, err := s.Prepare(t.Context(), strings.Repeat(artifact, 64), t.TempDir())
		if err == nil && artifact != "c" {
			err = os.Chtimes(tree.Root, old, old)
		}
		if err != nil {
			t.Fatal(err)
		}
		trees = append(trees, tree)
	}
	removed, bytes, err := s.Collect(t.Context(), map[string]bool{trees[0].Digest: true}, old.Add(time.Minute))
	if err != nil || len(removed) != 1 || removed[0] != trees[1].Digest || bytes == 0 {
		t.Errorf("%q, %d, %v", removed, bytes, err)
	}
}

func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=64k")
	f := &fake{do: func(_ context.Context, s InstallSpec) error {
		err := put(s.Target, "toy", "1")
		if err == nil {
			err = os.WriteFile(filepath.Join(s.Target, "all"), make([]byte, 1<<20), 0o644)
		}
		if !errors.Is(err, unix.ENOSPC) {
			return err
		}
		return nil // the installer thinks that it is done; the mark has no room
	}}
	s := openStore(t, Config{Dir: filepath.Join(dir, "environments"), Install: f})
	if _, err := s.Prepare(t.Context(), someArtifact, code(t, "toy")); err == nil {
		t.Error("prepared on a full disk")
	}
	onDisk(t, s)
	f.do = func(_ context.Context, s InstallSpec) error { return put(s.Target, "toy", "1") }
	if _, err := s.Prepare(t.Context(), someArtifact, code(t, "toy")); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// Credentials reach neither errors nor the log, wherever the installer shows them.
func TestRedaction(t *testing.T) {
	t.Parallel()
	const output = `Looking in indexes: https://me:s3cret-word@index.test/simple
  could not fetch https://token@files.test/a.whl?sig=hush#sha256=00
ERROR: no match for x from https://me:s3cret-word@index.test/simple?key=hush, s3cret-word, s3cret%2Dword or https://a@b:c@d.test/x`
	for redacted, wants := range map[string][]string{
		(&Store{secrets: []string{"s3cret-word"}}).hide(output): {"https://***@index.test/simple?***", "https://***@files.test/a.whl?***", "no match for x"},
		redact("no secrets at http://h.test/p and user@host"):   {"http://h.test/p", "user@host"},
	} {
		for _, secret := range []string{"s3cret-word", "hush", "token", "b:c"} {
			if strings.Contains(redacted, secret) {
				t.Errorf("%q is in %q", secret, redacted)
			}
		}
		for _, want := range wants {
			if !strings.Contains(redacted, want) {
				t.Errorf("%q is not in %q", want, redacted)
			}
		}
	}
	var log bytes.Buffer
	f := &fake{do: func(context.Context, InstallSpec) error { return &InstallError{Exit: 1, Output: output} }}
	s := openStore(t, Config{Install: f, IndexURL: "https://me:s3cret-word@index.test/simple", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	_, err := s.Prepare(t.Context(), someArtifact, code(t, "x @ https://me:s3cret-word@index.test/x.whl?sig=hush"))
	if err == nil || !strings.Contains(err.Error(), "ERROR: no match for x") {
		t.Fatalf("got %v", err)
	}
	for _, text := range []string{err.Error(), log.String()} {
		if strings.Contains(text, "s3cret-word") || strings.Contains(text, "hush") {
			t.Errorf("a secret is in %q", text)
		}
	}
	if _, err := Open(Config{Dir: t.TempDir(), IndexURL: "http://me:s3cret-word@[::1"}); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("got %v", err)
	}
	if _, err := s.Prepare(t.Context(), someArtifact, code(t, "langbot-plugin @ https://me:s3cret-word@h/x.whl")); err == nil || strings.Contains(err.Error(), "s3cret") {
		t.Errorf("got %v", err)
	}
}

// Whatever stands around a URL, its credentials and its query are taken out.
func TestRedactAnything(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.StringMatching(`[A-Za-z0-9:@._~%!$&*+,;=-]{0,8}`)
		around := rapid.StringMatching(`[a-z@:/?# "\n]{0,12}`)
		text := around.Draw(t, "before") + " " + rapid.SampledFrom([]string{"http", "https", "git+ssh", "HTTPS"}).Draw(t, "scheme") + "://" +
			part.Draw(t, "user") + "s3cret" + part.Draw(t, "pass") + "@host.test/p?" + part.Draw(t, "key") + "hush" + around.Draw(t, "after")
		if got := redact(text); strings.Contains(got, "s3cret") || strings.Contains(got, "hush") {
			t.Errorf("%q became %q", text, got)
		}
	})
}

func TestReason(t *testing.T) {
	t.Parallel()
	s := &Store{}
	for output, want := range map[string]string{
		"":                                  "",
		"noise\nlast line\n":                ": last line",
		"ERROR: first\nERROR: second\nhint": ": ERROR: second",
		"Resolved\n  × No solution found\n  ╰─▶ because\n      of that\n": ": × No solution found ╰─▶ because of that",
		"a\x1b[31mb\xff":          ": a [31mb?",
		strings.Repeat("x", 1000): ": " + strings.Repeat("x", maxReason) + "…",
	} {
		if got := s.reason(output); got != want {
			t.Errorf("%q: got %q, want %q", output, got, want)
		}
	}
}
