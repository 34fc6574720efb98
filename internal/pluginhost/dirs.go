package pluginhost

import (
	"errors"
	"io/fs"
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
	base := filepath.Join(m.root, installationsDir, uuid)
	return makeDirs(base, dirs{
		home: filepath.Join(base, "home"), tmp: filepath.Join(base, "tmp"), data: filepath.Join(base, "data"),
		transfer: filepath.Join(base, transferDir), files: filepath.Join(base, filesDir),
	})
}

// Names of an installation's directories; filesDir is ours.
const (
	installationsDir = "installations"
	filesDir         = "runtime-transfer"
	transferDir      = "rpc-transfer"
	boxedTransfers   = "lbp-rpc" // the SDK's own below its TMPDIR, where it is told no other: in a box
)

// Directories below plugin-runtime that belong to processes of one runtime.
const (
	poolsDir           = "shared-workers"
	poolTransfersDir   = "shared-transfers"
	debugTransfersDir  = "debug-transfers"
	legacyTransfersDir = "legacy-transfers"
)

func (m *Manager) poolBase(digest string) string { return filepath.Join(m.root, poolsDir, digest) }

// poolDirs names a pool's directories; freshPool makes them.
func (m *Manager) poolDirs(digest string) dirs {
	base := m.poolBase(digest)
	return dirs{
		home: filepath.Join(base, "home"), tmp: filepath.Join(base, "tmp"), data: filepath.Join(base, "data"),
		transfer: filepath.Join(base, transferDir), files: filepath.Join(m.root, poolTransfersDir, digest),
	}
}

// freshPool makes a pool's directories, empty: what a process of it has left may be
// of tenants who are no longer in it.
func (m *Manager) freshPool(digest string) error {
	if err := os.RemoveAll(m.poolBase(digest)); err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "what the last process of the shared worker left cannot be removed").
			WithNext("check the runtime's data directory")
	}
	_, err := makeDirs(m.poolBase(digest), m.poolDirs(digest))
	return err
}

// sweep removes what the processes of a killed runtime have left that no process of
// this one will look for: scratch of pools, and files that nobody has fetched.
func (m *Manager) sweep() {
	left := []string{poolsDir, poolTransfersDir, debugTransfersDir, legacyTransfersDir}
	ents, err := os.ReadDir(filepath.Join(m.root, installationsDir))
	for _, e := range ents {
		at := filepath.Join(installationsDir, e.Name())
		left = append(left, filepath.Join(at, filesDir), filepath.Join(at, transferDir), filepath.Join(at, "tmp", boxedTransfers))
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	for _, dir := range left {
		err = errors.Join(err, os.RemoveAll(filepath.Join(m.root, dir)))
	}
	if err != nil {
		m.log.Warn("what an ended runtime left cannot all be removed", "err", err)
	}
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

// dropTransfers removes the files that a worker was sent and did not delete: who asked
// it to read them has gone with its connection, and no SDK looks for them again. The
// next worker finds its directory empty. No worker of these directories runs.
func (d dirs) dropTransfers() error {
	err := errors.Join(os.RemoveAll(d.transfer), os.RemoveAll(filepath.Join(d.tmp, boxedTransfers)))
	if err == nil {
		err = os.MkdirAll(d.transfer, 0o700)
	}
	if err != nil {
		return errdefs.Wrap(err, errdefs.Unavailable, "the files that an ended worker was sent cannot be removed").
			WithNext("check the runtime's data directory")
	}
	return nil
}
