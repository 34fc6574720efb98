package server

import "github.com/stockade-run/stockade/internal/lockdir"

// AddressFile is the name of the file, in the state directory, that holds the
// URL of the running server for commands on the same machine.
const AddressFile = "address"

// openStateDir takes the state directory of a server; see [lockdir.Take].
func openStateDir(path string) (*lockdir.Dir, error) {
	return lockdir.Take(path, lockdir.Words{Program: "server", Kind: "state directory", Flag: "--state-dir", Lock: "server.lock", Private: true})
}
