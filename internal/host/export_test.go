package host

import "github.com/stockade-run/stockade/internal/wire"

// WriteSpec writes the durable intent of a process, as a host does that is
// killed right after it.
func WriteSpec(dir string, spec wire.ProcSpec) error {
	text, err := canonical(spec)
	if err != nil {
		return err
	}
	return writeSpec(dir, text)
}
