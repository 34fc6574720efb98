package main

import (
	"bytes"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/host"
)

func TestCommandLine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{nil, exitUsage, "stockade-host serve"},
		{[]string{"help"}, 0, "stockade-host serve"},
		{[]string{"version"}, 0, Version()},
		{[]string{"--version"}, 0, Version()},
		{[]string{"dance"}, exitUsage, `no command "dance"`},
		{[]string{"shim"}, exitUsage, "started by the host program"},
		{[]string{"serve"}, exitUsage, "--dir is required"},
		{[]string{"serve", "--dir", "/x", "more"}, exitUsage, "unexpected argument"},
		{[]string{"serve", "--dir", "/x", "--tool", "node"}, exitUsage, "NAME=DIR"},
		{[]string{"serve", "--dir", "/x", "--tool", "node=relative"}, exitUsage, "NAME=DIR"},
		{[]string{"serve", "--dir", "/x", "--colour"}, exitUsage, "colour"},
		{[]string{"serve", "--dir", "/x", "--log-level", "loud"}, exitUsage, "log-level"},
		{[]string{"serve", "--help"}, 0, "--dir"},
	} {
		var out bytes.Buffer
		code := run(c.args, &out, &out)
		// The flag package writes one dash.
		if text := strings.ReplaceAll(out.String(), "  -", "  --"); code != c.code || !strings.Contains(text, c.says) {
			t.Errorf("%q: exit code %d, %q; want %d and %q", c.args, code, text, c.code, c.says)
		}
	}
}

func TestServeOptions(t *testing.T) {
	t.Parallel()
	cfg, err := serveConfig([]string{"--dir", "some/dir", "--runtime", "crun", "--tool", "node=/opt/n", "--tool", "go=/usr/local/go",
		"--profile-dir", "/a", "--profile-dir", "/b", "--allow-mount", "/srv", "--digest", "d", "--cgroup-parent", "/g", "--cgroup-root", "/r"}, &bytes.Buffer{})
	if err != nil {
		t.Fatal(err)
	}
	wd, _ := os.Getwd()
	exe, _ := os.Executable()
	want := host.Config{
		Dir: filepath.Join(wd, "some/dir"), Version: Version(), Digest: "d", Exe: exe, Runtime: "crun",
		Profile: []string{"/a", "/b"}, Tools: map[string]string{"node": "/opt/n", "go": "/usr/local/go"}, AllowMounts: []string{"/srv"},
		CgroupParent: "/g", CgroupRoot: "/r",
	}
	cfg.Logger = nil
	if !reflect.DeepEqual(cfg, want) {
		t.Errorf("got %+v, want %+v", cfg, want)
	}
}
