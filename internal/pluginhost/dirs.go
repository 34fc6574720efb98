package pluginhost

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/worker"
)

// installationName is what an installation's id may be, as it names a directory;
// the published SDK 0.6.3 and 0.7 ask the same.
var installationName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$`)

// dirs are the directories of one installation, pool or legacy plugin, all of
// mode 0700. An installation's are named by its id alone, so that its data
// outlives its revisions.
type dirs struct {
	home, tmp, data string
	transfer        string // the SDK's own, when it runs as a plain process
	files           string // what the worker has pushed to the runtime
}

func (m *Manager) installationDirs(uuid string) (dirs, error) {
	if !installationName.MatchString(uuid) {
		return dirs{}, errdefs.New(errdefs.Invalid, "the installation id %q cannot name a directory", uuid).
			WithNext("use at most 128 letters, digits, dots, dashes and underscores, the first a letter or digit")
	}
	base := filepath.Join(m.root, "installations", uuid)
	return makeDirs(base, dirs{
		home: filepath.Join(base, "home"), tmp: filepath.Join(base, "tmp"), data: filepath.Join(base, "data"),
		transfer: filepath.Join(base, "rpc-transfer"), files: filepath.Join(base, "runtime-transfer"),
	})
}

func (m *Manager) poolDirs(digest string) (dirs, error) {
	base := filepath.Join(m.root, "shared-workers", digest)
	return makeDirs(base, dirs{
		home: filepath.Join(base, "home"), tmp: filepath.Join(base, "tmp"), data: filepath.Join(base, "data"),
		transfer: filepath.Join(base, "rpc-transfer"), files: filepath.Join(m.root, "shared-transfers", digest),
	})
}

func makeDirs(base string, d dirs) (dirs, error) {
	for _, dir := range []string{base, d.home, d.tmp, d.data, filepath.Join(base, "root"), d.transfer, d.files} {
		err := os.MkdirAll(dir, 0o700)
		if err == nil {
			err = os.Chmod(dir, 0o700)
		}
		if err != nil {
			return dirs{}, errdefs.Wrap(err, errdefs.Unavailable, "a directory of the installation cannot be made: %v", errors.Unwrap(err)).
				WithNext("check the runtime's data directory and its free space")
		}
	}
	return d, nil
}

func (d dirs) private() *worker.Private {
	return &worker.Private{Home: d.home, Tmp: d.tmp, Data: d.data}
}
