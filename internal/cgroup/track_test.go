package cgroup

import (
	"os"
	"path/filepath"
	"testing"
)

// TestTrack: a group that only tracks is in every hierarchy but that of the scheduler,
// and enables no controller; where there is nothing else, it is there.
func TestTrack(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		files       map[string]string
		with, lacks []string
	}{
		"v1": {
			map[string]string{"cpu,cpuacct/cgroup.procs": "", "freezer/cgroup.procs": "", "pids/cgroup.procs": ""},
			[]string{"freezer/a/b", "pids/a/b"}, []string{"cpu,cpuacct/a"},
		},
		"v1, the scheduler's alone": {map[string]string{"cpu,cpuacct/cgroup.procs": ""}, []string{"cpu,cpuacct/a/b"}, nil},
		"v2": {
			map[string]string{"cgroup.controllers": "cpu memory pids", "cgroup.subtree_control": ""}, []string{"a/b"}, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := fake(t, c.files)
			if err := New(root, "/a/b").Track(); err != nil {
				t.Fatal(err)
			}
			for _, dir := range c.with {
				if _, err := os.Stat(filepath.Join(root, dir)); err != nil {
					t.Error(err)
				}
			}
			for _, dir := range c.lacks {
				if _, err := os.Stat(filepath.Join(root, dir)); err == nil {
					t.Errorf("%s is there", dir)
				}
			}
			if name == "v2" && content(t, root, "cgroup.subtree_control") != "" {
				t.Error("a controller was enabled")
			}
		})
	}
}
