package boxhost

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestWorkingDirectory(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	f.sh(id, `mkdir -p a/b; echo > file; ln -s a/b inside; ln -s /etc absolute; ln -s ../home up; ln -s a/../../home sly; ln -s loop loop; ln -s /proc/self/fd/7 magic; ln -s none dangling`)
	for cwd, want := range map[string]string{
		"": "/workspace", ".": "/workspace", "a": "/workspace/a", "a/b/": "/workspace/a/b",
		"./a/../a/b": "/workspace/a/b", "inside": "/workspace/inside",
	} {
		if out, code := f.run(id, cwd, "/bin/sh", "-c", "pwd"); code != 0 || out != want+"\n" {
			t.Errorf("%q: %q, %d", cwd, out, code)
		}
	}
	for cwd, part := range map[string]string{
		"/": "absolute", "/workspace/a": "absolute", "..": "leads out", "a/../..": "leads out", "../workspace-other": "leads out",
		"absolute": "symbolic link", "up": "symbolic link", "sly": "symbolic link", "loop": "symbolic link",
		"magic": "symbolic link", "none": "does not exist", "dangling": "does not exist", "file": "not a directory", "file/x": "not a directory",
		strings.Repeat("x", 300): "too long", strings.Repeat("x/", 2100): "limit", "a\x00b": "NUL",
	} {
		dir := filepath.Join(t.TempDir(), "bundle")
		_, err := f.Bundle(t.Context(), wire.ProcSpec{ID: "p", Box: id, Argv: []string{"true"}, Cwd: cwd}, dir)
		wantCode(t, err, errdefs.Invalid, part)
		if _, err := os.Stat(filepath.Join(dir, "config.json")); !os.IsNotExist(err) {
			t.Errorf("%q: a configuration was written all the same", cwd)
		}
	}
}

func TestBundle(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil)
	id := f.put(nil)
	spec := wire.ProcSpec{ID: "proc_x", Box: id, Argv: []string{"a", "--", "b"}, Env: []string{"A=1", "PATH=/mine"},
		PTY: &api.Winsize{Rows: 3, Cols: 4}}
	dir := t.TempDir()
	l, err := f.Bundle(t.Context(), spec, dir)
	if err != nil || l.Container != "proc_x" || l.Cgroup != f.cfg.CgroupParent+"/"+id+"/proc_x" {
		t.Fatalf("%+v, %v", l, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	var s specs.Spec
	if err := json.Unmarshal(b, &s); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(s.Process.Args, " "); got != "/.stockade/init init --cwd /workspace -- a -- b" {
		t.Errorf("args %q", got)
	}
	if got := strings.Join(s.Process.Env, " "); got != "A=1 PATH=/mine" {
		t.Errorf("env %q", got)
	}
	for _, c := range []struct {
		change func(*wire.ProcSpec)
		code   errdefs.Code
		part   string
	}{
		{func(s *wire.ProcSpec) { s.Argv = nil }, errdefs.Invalid, "argv is empty"},
		{func(s *wire.ProcSpec) { s.Argv = []string{""} }, errdefs.Invalid, "argv is empty"},
		{func(s *wire.ProcSpec) { s.Argv = []string{"a", "b\x00"} }, errdefs.Invalid, "NUL"},
		{func(s *wire.ProcSpec) { s.Env = []string{"A=\x00"} }, errdefs.Invalid, "NUL"},
		{func(s *wire.ProcSpec) { s.Env = []string{"=x"} }, errdefs.Invalid, "NAME=VALUE"},
		{func(s *wire.ProcSpec) { s.Env = []string{"x"} }, errdefs.Invalid, "NAME=VALUE"},
		{func(s *wire.ProcSpec) { s.ID = "../x" }, errdefs.Invalid, "id"},
		{func(s *wire.ProcSpec) { s.ID = "" }, errdefs.Invalid, "id"},
		{func(s *wire.ProcSpec) { s.Box = "other" }, errdefs.NotFound, "no box"},
	} {
		s := spec
		c.change(&s)
		_, err := f.Bundle(t.Context(), s, t.TempDir())
		wantCode(t, err, c.code, c.part)
	}
}
