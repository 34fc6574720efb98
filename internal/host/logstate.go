package host

import (
	"path/filepath"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/spool"
)

// diskLog works out the state of a log from its files, for a process whose shim
// left no record. known is what the shim said last. With an error the state is
// right up to the damage.
func diskLog(dir string, known api.LogState) (api.LogState, error) {
	r, err := spool.Open(filepath.Join(dir, spoolDir))
	if errdefs.Is(err, errdefs.NotFound) {
		return known, nil
	}
	if err != nil {
		return known, err
	}
	defer r.Close()
	return r.Recover()
}
