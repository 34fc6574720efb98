package artifact

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
)

// The test binary is also the process that dies: it installs the archive named by
// the first variable into the directory and kills itself at the step.
const (
	crashArchive = "STOCKADE_TEST_ARCHIVE"
	crashDir     = "STOCKADE_TEST_DIR"
	crashStep    = "STOCKADE_TEST_STEP"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashArchive) != "" {
		os.Exit(crash())
	}
	need.Main(m)
}

func crash() int {
	archive, err := os.ReadFile(os.Getenv(crashArchive))
	if err != nil {
		return 3
	}
	s, err := open(Config{Dir: os.Getenv(crashDir)}, func(step string) error {
		if step == os.Getenv(crashStep) {
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	})
	if err != nil {
		return 4
	}
	if _, err := s.Install(context.Background(), digestOf(archive), archive); err != nil {
		return 5
	}
	return 0
}

// steps lists the steps of an installation in which a damaged artifact is replaced.
func steps(t *testing.T, dir string, archive []byte) []string {
	t.Helper()
	var seen []string
	s, err := open(Config{Dir: dir}, func(step string) error { seen = append(seen, step); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Install(t.Context(), digestOf(archive), archive); err != nil {
		t.Fatal(err)
	}
	return seen
}

// damaged makes a store with a directory in the way of the archive.
func damaged(t *testing.T, archive []byte) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "artifacts")
	if err := os.MkdirAll(filepath.Join(dir, "sha256", digestOf(archive), "code", "half"), 0o755); err != nil {
		t.Fatal(err)
	}
	plugintest.Unlock(t, dir)
	return dir
}

// A process killed after any step of a publication leaves nothing that is trusted
// and wrong, and the next one succeeds and cleans up.
func TestKilledAtEveryStep(t *testing.T) {
	t.Parallel()
	archive := toy(t)
	file := filepath.Join(t.TempDir(), "archive")
	if err := os.WriteFile(file, archive, 0o600); err != nil {
		t.Fatal(err)
	}
	all := steps(t, damaged(t, archive), archive)
	for _, want := range []string{"staged", "extracted", "listed", "marked", "files sealed", "sealed", "written through", "aside", "removed", "renamed", "published"} {
		if !slices.Contains(all, want) {
			t.Errorf("the step %q is missing among %q", want, all)
		}
	}
	for i, step := range all {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dir := damaged(t, archive)
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), crashArchive+"="+file, crashDir+"="+dir, crashStep+"="+step)
			out, err := cmd.CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("it was not killed: %v %s", err, out)
			}
			// Before anything is swept: only a whole artifact is trusted.
			looker := openStore(t, Config{Dir: dir, ReadOnly: true})
			_, ok, err := looker.Lookup(digestOf(archive))
			if published := i >= slices.Index(all, "renamed"); err != nil || ok != published {
				t.Errorf("trusted %v, published %v, %v", ok, published, err)
			}
			if ok {
				if v, err := looker.Verify(t.Context(), digestOf(archive)); err != nil || len(v.Problems) != 0 {
					t.Errorf("%+v, %v", v, err)
				}
			}
			s := openStore(t, Config{Dir: dir})
			if _, err := s.Install(t.Context(), digestOf(archive), archive); err != nil {
				t.Fatal(err)
			}
			if v, err := s.Verify(t.Context(), digestOf(archive)); err != nil || len(v.Problems) != 0 {
				t.Errorf("%+v, %v", v, err)
			}
			nothingIn(t, s, digestOf(archive))
		})
	}
}

// A step that fails instead, as a disk does, cleans up by itself.
func TestFailsAtEveryStep(t *testing.T) {
	t.Parallel()
	archive := toy(t)
	all := steps(t, damaged(t, archive), archive)
	for _, step := range all {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dir := damaged(t, archive)
			broken := true
			s, err := open(Config{Dir: dir}, func(at string) error {
				if broken && at == step {
					return errors.New("broken at " + at)
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Install(t.Context(), digestOf(archive), archive); err == nil || !strings.Contains(err.Error(), "broken at") {
				t.Fatalf("got %v", err)
			}
			broken = false
			if _, err := s.Install(t.Context(), digestOf(archive), archive); err != nil {
				t.Fatal(err)
			}
			reopened := openStore(t, Config{Dir: dir}) // sweeps what was already aside
			nothingIn(t, reopened, digestOf(archive))
			if v, err := reopened.Verify(t.Context(), digestOf(archive)); err != nil || len(v.Problems) != 0 {
				t.Errorf("%+v, %v", v, err)
			}
		})
	}
}
