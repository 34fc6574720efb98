package cgroup

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// fake makes a tree of files: path → content; a path that ends in a slash is an
// empty directory, "-> x" a symbolic link.
func fake(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		dir := filepath.Dir(path)
		if strings.HasSuffix(name, "/") {
			dir = path
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "-> "); ok {
			err = os.Symlink(target, path)
		} else if !strings.HasSuffix(name, "/") {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func content(t *testing.T, root, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func wantCode(t *testing.T, err error, code errdefs.Code) {
	t.Helper()
	if !errdefs.Is(err, code) {
		t.Fatalf("error %v has code %q, want %q", err, errdefs.CodeOf(err), code)
	}
}

func TestDetectLayouts(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name        string
		files       map[string]string
		kind        Kind
		controllers string
		missing     []string // a word of each
	}{
		{"v2", map[string]string{"cgroup.controllers": "cpuset cpu io memory pids\n", "cgroup.procs": "", "user.slice/cgroup.procs": ""},
			V2, "cpu cpuset io memory pids", nil},
		{"v2 without memory", map[string]string{"cgroup.controllers": "cpu pids"}, V2, "cpu pids", []string{"memory"}},
		{"v2 with nothing", map[string]string{"cgroup.controllers": "\n"}, V2, "", []string{"cpu", "memory", "pids"}},
		{"v1", map[string]string{"cpu,cpuacct/cgroup.procs": "", "cpu": "-> cpu,cpuacct", "cpuacct": "-> cpu,cpuacct", "memory/cgroup.procs": "",
			"pids/cgroup.procs": "", "freezer/cgroup.procs": "", "systemd/cgroup.procs": "", "empty/": ""},
			V1, "cpu cpuacct freezer memory pids", nil},
		{"v1 without freezer", map[string]string{"cpu/cgroup.procs": "", "memory/cgroup.procs": "", "pids/cgroup.procs": ""},
			V1, "cpu memory pids", []string{"freezer"}},
		{"hybrid", map[string]string{"cpu/cgroup.procs": "", "memory/cgroup.procs": "", "freezer/cgroup.procs": "", "pids/cgroup.procs": "",
			"unified/cgroup.controllers": "", "unified/cgroup.procs": ""},
			Hybrid, "cpu freezer memory pids", nil},
		{"hybrid with a controller on v2", map[string]string{"cpu/cgroup.procs": "", "freezer/cgroup.procs": "", "memory/cgroup.procs": "",
			"unified/cgroup.controllers": "pids", "unified/cgroup.procs": ""},
			Hybrid, "cpu freezer memory pids", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			m, err := Detect(fake(t, tt.files))
			if err != nil {
				t.Fatal(err)
			}
			if m.Kind != tt.kind || strings.Join(m.Controllers, " ") != tt.controllers || len(m.Missing) != len(tt.missing) {
				t.Fatalf("%+v", m)
			}
			for i, word := range tt.missing {
				if !strings.Contains(m.Missing[i], "controller "+word) {
					t.Errorf("missing %q, want %s", m.Missing[i], word)
				}
			}
			all := api.BoxLimits{CPUMillis: 1, MemoryBytes: 1, Pids: 1}
			want := api.BoxLimits{}
			if !slices.Contains(tt.missing, "cpu") {
				want.CPUMillis = 1
			}
			if !slices.Contains(tt.missing, "memory") {
				want.MemoryBytes = 1
			}
			if !slices.Contains(tt.missing, "pids") {
				want.Pids = 1
			}
			if got := m.Enforceable(all); got != want {
				t.Errorf("enforceable %+v, want %+v", got, want)
			}
		})
	}
	for _, files := range []map[string]string{{}, {"x/y": ""}} {
		_, err := Detect(fake(t, files))
		wantCode(t, err, errdefs.Unavailable)
	}
	_, err := Detect(filepath.Join(t.TempDir(), "absent"))
	wantCode(t, err, errdefs.Unavailable)
}

func TestBadPaths(t *testing.T) {
	t.Parallel()
	root := fake(t, map[string]string{"cgroup.controllers": "cpu", "cgroup.procs": "1\n", "cgroup.events": "populated 1", "a/cgroup.procs": ""})
	for _, path := range []string{"", "/", "a", "/a/", "/a/..", "/../a", "/a//b", "/./a", "/a\x00"} {
		g := New(root, path)
		wantCode(t, g.Create(api.BoxLimits{}), errdefs.Internal)
		wantCode(t, g.Add(1), errdefs.Internal)
		wantCode(t, g.Kill(t.Context()), errdefs.Internal)
		wantCode(t, g.Remove(t.Context()), errdefs.Internal)
		_, err := g.Populated()
		wantCode(t, err, errdefs.Internal)
		_, err = g.Procs()
		wantCode(t, err, errdefs.Internal)
		_, err = g.OOMKills()
		wantCode(t, err, errdefs.Internal)
	}
}

// v2Group is the files the kernel makes in a v2 group.
func v2Group(files map[string]string, dir string) map[string]string {
	for _, name := range []string{"cgroup.procs", "cgroup.subtree_control", "cpu.max", "memory.max", "memory.swap.max", "pids.max", "cgroup.kill"} {
		files[filepath.Join(dir, name)] = ""
	}
	files[filepath.Join(dir, "cgroup.controllers")] = "cpu memory pids"
	files[filepath.Join(dir, "cgroup.events")] = "populated 0\nfrozen 0\n"
	files[filepath.Join(dir, "memory.events")] = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 0\noom_group_kill 0\n"
	return files
}

func TestV2(t *testing.T) {
	t.Parallel()
	files := v2Group(v2Group(v2Group(map[string]string{}, "."), "stockade"), "stockade/box")
	files["cgroup.controllers"] = "cpuset cpu io memory pids"
	files["cgroup.subtree_control"] = "cpu"
	root := fake(t, files)
	g := New(root, "/stockade/box")
	limits := api.BoxLimits{CPUMillis: 1500, MemoryBytes: 64 << 20, Pids: 99}
	if err := g.Create(limits); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"cgroup.subtree_control":              "+memory +pids", // cpu was enabled
		"stockade/cgroup.subtree_control":     "+cpu +memory +pids",
		"stockade/box/cgroup.subtree_control": "",
		"stockade/box/cpu.max":                "150000 100000",
		"stockade/box/memory.max":             "67108864",
		"stockade/box/memory.swap.max":        "0",
		"stockade/box/pids.max":               "99",
		"stockade/cpu.max":                    "",
	} {
		if got := content(t, root, name); got != want {
			t.Errorf("%s holds %q, want %q", name, got, want)
		}
	}
	if err := g.Create(api.BoxLimits{CPUMillis: 1}); err != nil || content(t, root, "stockade/box/cpu.max") != "1000 100000" {
		t.Error("the smallest quota", err)
	}

	// Counting, and the process that is only seen through "populated".
	if some, err := g.Populated(); some || err != nil {
		t.Fatal(some, err)
	}
	if n, err := g.OOMKills(); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	set := func(name, value string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(root, name), []byte(value), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	set("stockade/box/cgroup.events", "frozen 0\npopulated 1\n")
	set("stockade/box/memory.events", "oom 4\noom_kill 3\n")
	if some, err := g.Populated(); !some || err != nil {
		t.Fatal(some, err)
	}
	if n, err := g.OOMKills(); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if err := g.Add(1234); err != nil || content(t, root, "stockade/box/cgroup.procs") != "1234" {
		t.Fatal(err)
	}
	set("stockade/box/cgroup.procs", "") // so that nobody is signalled

	// The kernel is told to kill; who stays is reported.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	wantCode(t, g.Kill(ctx), errdefs.Indeterminate)
	if got := content(t, root, "stockade/box/cgroup.kill"); got != "1" {
		t.Fatalf("cgroup.kill holds %q", got)
	}

	// A file that does not say what it must is an error, not an empty group.
	set("stockade/box/cgroup.events", "frozen 0\n")
	if some, err := g.Populated(); some || err == nil {
		t.Fatal(some, err)
	}
	set("stockade/box/cgroup.events", "populated x\n")
	_, err := g.Populated()
	wantCode(t, err, errdefs.Unavailable)

	absent := New(root, "/stockade/other")
	if some, err := absent.Populated(); some || err != nil {
		t.Fatal(some, err)
	}
	_, err = absent.OOMKills()
	wantCode(t, err, errdefs.NotFound)
	wantCode(t, absent.Add(1), errdefs.NotFound)
	if err := absent.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestLimitWithoutController(t *testing.T) {
	t.Parallel()
	files := v2Group(v2Group(map[string]string{}, "."), "b")
	files["cgroup.controllers"], files["b/cgroup.controllers"] = "cpu pids", "cpu pids"
	root := fake(t, files)
	g := New(root, "/b")
	err := g.Create(api.BoxLimits{MemoryBytes: 1})
	wantCode(t, err, errdefs.Unavailable)
	if !strings.Contains(err.Error(), "memory") {
		t.Fatal(err)
	}
	if err := g.Create(api.BoxLimits{CPUMillis: 10, Pids: 1}); err != nil {
		t.Fatal(err)
	}
	_, err = g.OOMKills()
	wantCode(t, err, errdefs.Unavailable)
}

func TestV1Files(t *testing.T) {
	t.Parallel()
	root := fake(t, map[string]string{
		"cpu,cpuacct/cgroup.procs": "", "cpu,cpuacct/a/cpu.cfs_period_us": "", "cpu,cpuacct/a/cpu.cfs_quota_us": "",
		"memory/cgroup.procs": "", "memory/a/memory.limit_in_bytes": "", "memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
		"memory/a/below/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
		"cpuset/cgroup.procs":               "", "cpuset/cpuset.cpus": "0-3\n", "cpuset/cpuset.mems": "0\n", "cpuset/a/cpuset.cpus": "\n", "cpuset/a/cpuset.mems": "\n",
		"pids/cgroup.procs": "", "pids/a/pids.max": "max", "pids/a/cgroup.procs": "", "pids/a/below/cgroup.procs": "77\n78\n",
		"systemd/cgroup.procs": "1\n", "unified/cgroup.controllers": "", "unified/cgroup.subtree_control": "", "unified/a/cgroup.controllers": "",
		"unified/a/cgroup.subtree_control": "", "unified/a/cgroup.events": "populated 0\n", "unified/a/cgroup.procs": "79\n",
	})
	g := New(root, "/a")
	if err := g.Create(api.BoxLimits{CPUMillis: 250, MemoryBytes: 4096, Pids: 5}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"cpu,cpuacct/a/cpu.cfs_period_us": "100000", "cpu,cpuacct/a/cpu.cfs_quota_us": "25000", "memory/a/memory.limit_in_bytes": "4096",
		"cpuset/a/cpuset.cpus": "0-3", "cpuset/a/cpuset.mems": "0", "pids/a/pids.max": "5",
	} {
		if got := content(t, root, name); got != want {
			t.Errorf("%s holds %q, want %q", name, got, want)
		}
	}
	if _, err := os.Stat(filepath.Join(root, "systemd/a")); err != nil {
		t.Error("not made in the named hierarchy:", err)
	}
	if n, err := g.OOMKills(); n != 3 || err != nil {
		t.Fatal(n, err)
	}
	if pids, err := g.Procs(); !slices.Equal(pids, []int{77, 78, 79}) || err != nil {
		t.Fatal(pids, err)
	}
	if some, err := g.Populated(); !some || err != nil {
		t.Fatal(some, err)
	}
}
