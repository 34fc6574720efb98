package host

import (
	"os"
	"os/exec"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// FindProgram returns the path of stockade-host: the one that was named, else that
// beside this program, else that on the PATH. Errors: Unavailable.
func FindProgram(named string) (string, error) {
	if named != "" {
		return filepath.Abs(named)
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), "stockade-host")
		if _, err := os.Stat(beside); err == nil {
			return beside, nil
		}
	}
	path, err := exec.LookPath("stockade-host")
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "the host program stockade-host is neither beside this program nor on the PATH").
			WithNext("build it with make build, or name it with --host-program")
	}
	return filepath.Abs(path)
}
