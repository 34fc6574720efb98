// Package python_test runs the tests of the Python package for runner authors.
package python_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// TestRunner runs them under every SDK that has runners.
func TestRunner(t *testing.T) {
	t.Parallel()
	// What is read here is what the test's cache depends on.
	if err := filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".py" {
			_, err = os.ReadFile(path)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, series := range []string{"0.6", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(need.SDK(t, series), "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::DeprecationWarning")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}
