package deptree

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// crashEnv makes the test binary prepare a tree and kill itself at a step.
const crashEnv = "STOCKADE_TEST_CRASH"

type crashPlan struct {
	Dir, Code, Step string
	Interp          Interpreter
}

func TestMain(m *testing.M) {
	if plan := os.Getenv(crashEnv); plan != "" {
		os.Exit(crash(plan))
	}
	need.Main(m)
}

func crash(plan string) int {
	var p crashPlan
	if err := json.Unmarshal([]byte(plan), &p); err != nil {
		return 3
	}
	s, err := open(Config{Dir: p.Dir, Install: installs("toy", "1"), Interp: p.Interp, Profile: "oss_dev"}, func(step string) error {
		if step == p.Step {
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	})
	if err != nil {
		return 4
	}
	if _, err := s.Prepare(context.Background(), someArtifact, p.Code); err != nil {
		return 5
	}
	return 0
}

// unsealed makes a store in whose way is what a crash of the published SDK between
// its rename and its chmod leaves.
func unsealed(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "environments")
	s := openStore(t, Config{Dir: dir, Install: installs("toy", "0")})
	key := s.key(someArtifact, []byte("toy"))
	mark, err := json.Marshal(key)
	if err != nil {
		t.Fatal(err)
	}
	root := s.shelf.Path(key.Digest)
	if err := errors.Join(os.MkdirAll(filepath.Join(root, sitePackages), 0o755), os.WriteFile(filepath.Join(root, readyName), mark, 0o444)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// A process killed after any step leaves nothing that is reused and wrong, and the
// next one succeeds and cleans up.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	src, interp := code(t, "toy"), interpreter(t, "0.7.18")
	var all []string
	s, err := open(Config{Dir: unsealed(t), Install: installs("toy", "1"), Interp: interp, Profile: "oss_dev"},
		func(step string) error { all = append(all, step); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Prepare(t.Context(), someArtifact, src); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"staged", "installed", "validated", "marked", "files sealed", "sealed", "written through", "aside", "removed", "renamed", "published"} {
		if !slices.Contains(all, want) {
			t.Errorf("the step %q is missing among %q", want, all)
		}
	}
	for i, step := range all {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dir := unsealed(t)
			plan, err := json.Marshal(crashPlan{Dir: dir, Code: src, Step: step, Interp: interp})
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), crashEnv+"="+string(plan))
			out, err := cmd.CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("it was not killed: %v %s", err, out)
			}
			f := installs("toy", "1")
			next := openStore(t, Config{Dir: dir, Install: f})
			tree, err := next.Prepare(t.Context(), someArtifact, src)
			if err != nil {
				t.Fatal(err)
			}
			if published := i >= slices.Index(all, "renamed"); (f.runs.Load() == 0) != published {
				t.Errorf("the installer ran %d times, published %v", f.runs.Load(), published)
			}
			if _, err := os.Stat(filepath.Join(tree.SitePackages, "toy-1.dist-info/METADATA")); err != nil {
				t.Error(err)
			}
			onDisk(t, next, tree.Digest)
		})
	}
}
