package shim

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// exitRecord is the content of exit.json. Sum is the CRC-32C of State's bytes as
// they stand in the file.
type exitRecord struct {
	Version int             `json:"version"`
	State   json.RawMessage `json:"state"`
	Sum     string          `json:"crc32c"`
}

const exitVersion = 1

// maxExitRecord bounds what is read back; a record has well under 64 KiB.
const maxExitRecord = 1 << 20

func sumText(b []byte) string {
	return fmt.Sprintf("%08x", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// WriteExit writes the exit record of a process directory durably: after nil it
// survives a power cut. The state must be ended and carry an exit. The shim uses
// it for its child, the host program when the shim died.
func WriteExit(dir string, st wire.ProcState) error {
	if err := checkEnded(st); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "not an exit record: %v", err)
	}
	state, err := json.Marshal(st)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "encode the exit record")
	}
	b, err := json.Marshal(exitRecord{Version: exitVersion, State: state, Sum: sumText(state)})
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "encode the exit record")
	}
	return writeDurable(dir, exitFile, b)
}

// ReadExit reads the exit record of a process directory. Without one it returns
// errdefs.NotFound. A record that is damaged is errdefs.Indeterminate: it is never
// read as any kind of exit.
func ReadExit(dir string) (wire.ProcState, error) {
	f, err := os.Open(filepath.Join(dir, exitFile))
	if errors.Is(err, fs.ErrNotExist) {
		return wire.ProcState{}, errdefs.New(errdefs.NotFound, "%s has no exit record", filepath.Base(dir))
	}
	if err != nil {
		return wire.ProcState{}, errdefs.Wrap(err, errdefs.Unavailable, "read the exit record: %v", err)
	}
	defer f.Close()
	b := make([]byte, maxExitRecord+1)
	n := 0
	for n < len(b) {
		m, err := f.Read(b[n:])
		n += m
		if err != nil {
			break
		}
	}
	st, err := parseExit(b[:n])
	if err != nil {
		return wire.ProcState{}, errdefs.Wrap(err, errdefs.Indeterminate, "the exit record of %s is damaged: %v", filepath.Base(dir), err).
			WithNext("how the process ended cannot be told from it; look at %s", filepath.Join(dir, exitFile))
	}
	return st, nil
}

func parseExit(b []byte) (wire.ProcState, error) {
	if len(b) > maxExitRecord {
		return wire.ProcState{}, fmt.Errorf("more than %d bytes", maxExitRecord)
	}
	var rec exitRecord
	if err := json.Unmarshal(b, &rec); err != nil {
		return wire.ProcState{}, err
	}
	if rec.Version != exitVersion {
		return wire.ProcState{}, fmt.Errorf("version %d, this program knows %d", rec.Version, exitVersion)
	}
	if sumText(rec.State) != rec.Sum {
		return wire.ProcState{}, errors.New("wrong checksum")
	}
	var st wire.ProcState
	if err := json.Unmarshal(rec.State, &st); err != nil {
		return wire.ProcState{}, err
	}
	return st, checkEnded(st)
}

// checkEnded holds the rules of an exit record (P3): ended, with an exit; a code
// for exited and only there.
func checkEnded(st wire.ProcState) error {
	switch {
	case st.ID == "":
		return errors.New("no id")
	case st.Phase != wire.PhaseEnded:
		return fmt.Errorf("phase %q", st.Phase)
	case st.Exit == nil:
		return errors.New("no exit")
	}
	switch st.Exit.Kind {
	case api.ExitExited, api.ExitSignalled, api.ExitOOM, api.ExitDeadline, api.ExitSpawnFailed, api.ExitUnknown:
	default:
		return fmt.Errorf("exit kind %q", st.Exit.Kind)
	}
	if (st.Exit.Kind == api.ExitExited) != (st.Exit.Code != nil) {
		return fmt.Errorf("exit kind %q with code %v", st.Exit.Kind, st.Exit.Code)
	}
	return nil
}
