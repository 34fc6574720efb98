package deptree

import (
	"context"
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
)

// eachInstaller runs a test with pip and with uv.
func eachInstaller(t *testing.T, run func(t *testing.T, uv string)) {
	t.Run("pip", func(t *testing.T) {
		t.Parallel()
		run(t, "")
	})
	t.Run("uv", func(t *testing.T) {
		t.Parallel()
		run(t, need.UV(t))
	})
}

// what lists a tree without what names the installer.
func what(t *testing.T, site string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(site, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(site, path)
		info, err2 := d.Info()
		if err := errors.Join(err, err2); err != nil {
			return err
		}
		switch d.Name() {
		// Written by the installer: PEP 376, PEP 610, and uv's own note.
		case "INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json", "uv_build.json":
			return nil
		}
		b.WriteString(info.Mode().String() + " " + rel + "\n")
		if d.Type().IsRegular() && filepath.Base(filepath.Dir(path)) != "bin" { // scripts name the interpreter
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			b.Write(content)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// The real installers against a real index: wheels, a source distribution, a
// dependency of a dependency, a script, an extra, a direct URL.
func TestRealInstallers(t *testing.T) {
	t.Parallel()
	script := map[string]string{"toy-1.5.dist-info/entry_points.txt": "[console_scripts]\ntoy = toy:main\n"}
	x := newIndex(t, wheel(t, "toy", "1.5", []string{"below>=1", "rare; extra == 'more'"}, script), wheel(t, "toy", "2.0rc1", nil, nil),
		wheel(t, "below", "1.2", nil, nil), wheel(t, "rare", "1", nil, nil), wheel(t, "direct", "4", nil, nil),
		sdist(t, "built", "3", wheel(t, "built", "3", nil, nil)))
	requirements := "toy[more]<3\nbuilt==3\nabsent ; python_version < '3'\ndirect @ http://" + x.addr + "/files/direct-4-py3-none-any.whl\nlangbot-plugin\n"
	var lock sync.Mutex
	trees := map[string]string{}
	t.Run("each", func(t *testing.T) {
		eachInstaller(t, func(t *testing.T, uv string) {
			s := openStore(t, Config{Install: &direct{}, IndexURL: x.url, Uv: uv})
			tree, err := s.Prepare(t.Context(), someArtifact, code(t, requirements))
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{"toy/__init__.py", "below", "rare", "built", "direct"} {
				if _, err := os.Stat(filepath.Join(tree.SitePackages, file)); err != nil {
					t.Error(err)
				}
			}
			if b, err := os.ReadFile(filepath.Join(tree.SitePackages, "toy/__init__.py")); err != nil || !strings.Contains(string(b), "1.5") {
				t.Errorf("a pre-release was taken: %s, %v", b, err)
			}
			if _, err := os.Stat(filepath.Join(tree.SitePackages, "langbot_plugin")); err == nil {
				t.Error("the SDK was installed")
			}
			if info, err := os.Stat(filepath.Join(tree.SitePackages, "bin/toy")); err != nil || info.Mode() != 0o555 {
				t.Errorf("the script: %v, %v", info, err)
			}
			onDisk(t, s, tree.Digest)
			listing := what(t, tree.SitePackages)
			lock.Lock()
			defer lock.Unlock()
			trees[uv] = tree.Digest + "\n" + listing
		})
	})
	if len(trees) == 2 {
		pip := trees[""]
		for _, other := range trees {
			if other != pip {
				t.Errorf("pip made\n%s\nuv made\n%s", pip, other)
			}
		}
	}
}

// An index that is down, slow, lying, or wants credentials.
func TestIndexTrouble(t *testing.T) {
	t.Parallel()
	lie := wheel(t, "toy", "1", nil, nil)
	lie.hash = strings.Repeat("0", 64)
	damaged := wheel(t, "toy", "1", nil, nil)
	damaged.content = damaged.content[:len(damaged.content)/2]
	other := wheel(t, "toy", "1", nil, nil)
	other.file = "toy-2-py3-none-any.whl"
	broken := sdist(t, "toy", "1", wheel(t, "toy", "1", nil, nil))
	broken.content = broken.content[:10]
	stalled := newIndex(t, wheel(t, "toy", "1", nil, nil))
	stalled.stall = make(chan struct{})
	locked := newIndex(t, wheel(t, "toy", "1", nil, nil))
	locked.auth = "me:s3cret-word"
	with := func(userinfo string) string { return "http://" + userinfo + "@" + locked.addr + "/simple/" }
	for name, c := range map[string]struct {
		url     string
		timeout time.Duration
		says    []string // "" for success
	}{
		"down":              {downIndex, 0, []string{"exit code"}},
		"empty":             {newIndex(t).url, 0, []string{"exit code", "toy"}},
		"wrong hash":        {newIndex(t, lie).url, 0, []string{"exit code"}},
		"half a wheel":      {newIndex(t, damaged).url, 0, []string{"exit code"}},
		"other version":     {newIndex(t, other).url, 0, []string{"exit code"}},
		"half a source":     {newIndex(t, broken).url, 0, []string{"exit code"}},
		"stalled":           {stalled.url, 8 * time.Second, []string{"timed out"}},
		"no credentials":    {locked.url, 0, []string{"exit code"}},
		"wrong credentials": {with("me:wr0ng-word"), 0, []string{"exit code"}},
		"credentials":       {with("me:s3cret-word"), 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			eachInstaller(t, func(t *testing.T, uv string) {
				d := &direct{}
				s := openStore(t, Config{Install: d, IndexURL: c.url, Uv: uv, Timeout: c.timeout})
				_, err := s.Prepare(t.Context(), someArtifact, code(t, "toy"))
				if argv, _ := d.argv.Load().([]string); strings.Contains(strings.Join(argv, " "), "word") || len(argv) == 0 {
					t.Errorf("the arguments are %q", argv)
				}
				if c.says == nil {
					if err != nil {
						t.Error(err)
					}
					return
				}
				if !errdefs.Is(err, errdefs.Unavailable) {
					t.Fatalf("got %v", err)
				}
				for _, says := range c.says {
					if !strings.Contains(err.Error(), says) {
						t.Errorf("%q is not in %v", says, err)
					}
				}
				if strings.Contains(err.Error(), "word") {
					t.Errorf("a secret is in %v", err)
				}
				onDisk(t, s)
			})
		})
	}
}

// DE-04 with real installers: cancelled in the middle of a download.
func TestCancelReal(t *testing.T) {
	t.Parallel()
	eachInstaller(t, func(t *testing.T, uv string) {
		x := newIndex(t, wheel(t, "toy", "1", nil, nil))
		x.stall = make(chan struct{})
		s := openStore(t, Config{Install: &direct{}, IndexURL: x.url, Uv: uv})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		x.onFile = cancel
		if _, err := s.Prepare(ctx, someArtifact, code(t, "toy")); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		onDisk(t, s)
		x.onFile = nil
		close(x.stall)
		if _, err := s.Prepare(t.Context(), someArtifact, code(t, "toy")); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
}
