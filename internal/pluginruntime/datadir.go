package pluginruntime

import (
	"encoding/json"
	"os"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/lockdir"
)

// AddressFile is where a running runtime says, below its data directory, at which
// addresses it listens.
const AddressFile = "plugin-runtime/address.json"

// dataDir is the data directory of a running runtime.
type dataDir struct{ *lockdir.Dir }

// openDataDir takes the data directory; see [lockdir.Take].
func openDataDir(path string) (dataDir, error) {
	d, err := lockdir.Take(path, lockdir.Words{Program: "plugin runtime", Kind: "data directory", Flag: "--data-dir", Lock: "plugin-runtime/.lock"})
	return dataDir{d}, err
}

// Lock takes a data directory as a running runtime has it, for commands that change
// what a runtime keeps. Errors: those of [lockdir.Take].
func Lock(path string) (unlock func(), err error) {
	d, err := openDataDir(path)
	if err != nil {
		return nil, err
	}
	return d.Close, nil
}

// publish writes the addresses for commands and tests of this machine.
func (d dataDir) publish(a Addresses) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	return durable.Atomic(d.Path, AddressFile, append(b, '\n'))
}

func (d dataDir) close() {
	_ = os.Remove(d.File(AddressFile))
	d.Close()
}
