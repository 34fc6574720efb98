package host

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/shim"
	"github.com/stockade-run/stockade/internal/wire"
)

// Names in the host's directory and in a process directory (see package shim for
// the rest of the latter).
const (
	specFile    = "spec.json"
	bundleDir   = "bundle"
	spoolDir    = "log"
	exitFile    = "exit.json"
	keepFile    = "keep.json"
	shimFile    = "shim.json"
	damagedExit = "exit.json.damaged"
)

// Limits of a spec. They are wider than the server's own, which are what a
// caller meets; these bound what a host works on whoever asks.
const (
	maxSpec     = 4 << 20 // bytes of JSON; execve itself takes 2 MiB of arguments and environment
	maxArgs     = 16384
	maxArgBytes = 1 << 20 // arguments and environment together
)

// specRecord is the content of spec.json: the durable intent. Sum is the CRC-32C
// of Spec's bytes as they stand in the file.
type specRecord struct {
	Version int             `json:"version"`
	Spec    json.RawMessage `json:"spec"`
	Sum     string          `json:"crc32c"`
}

const specVersion = 1

// canonical is the one text of a spec, by which specs are compared.
func canonical(spec wire.ProcSpec) ([]byte, error) {
	if spec.Env == nil {
		spec.Env = []string{}
	}
	return json.Marshal(spec)
}

func writeSpec(dir string, spec []byte) error {
	b, err := json.Marshal(specRecord{Version: specVersion, Spec: spec, Sum: sumText(spec)})
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the spec could not be encoded")
	}
	return writeDurable(dir, specFile, b)
}

// readSpec returns fs.ErrNotExist when there is none: then nothing was ever
// accepted there.
func readSpec(dir string) (wire.ProcSpec, []byte, error) {
	b, err := os.ReadFile(filepath.Join(dir, specFile))
	if err != nil {
		return wire.ProcSpec{}, nil, err
	}
	var rec specRecord
	if err := json.Unmarshal(b, &rec); err != nil {
		return wire.ProcSpec{}, nil, fmt.Errorf("%s is damaged: %w", specFile, err)
	}
	if rec.Version != specVersion {
		return wire.ProcSpec{}, nil, fmt.Errorf("%s has version %d, this program knows %d", specFile, rec.Version, specVersion)
	}
	if sumText(rec.Spec) != rec.Sum {
		return wire.ProcSpec{}, nil, fmt.Errorf("%s is damaged: wrong checksum", specFile)
	}
	var spec wire.ProcSpec
	if err := json.Unmarshal(rec.Spec, &spec); err != nil {
		return wire.ProcSpec{}, nil, fmt.Errorf("%s is damaged: %w", specFile, err)
	}
	if spec.ID != filepath.Base(dir) {
		return wire.ProcSpec{}, nil, fmt.Errorf("%s is of another process", specFile)
	}
	text, err := canonical(spec)
	return spec, text, err
}

// writeKeep writes what the shim is told. Unlike shim.WriteConfig it does not
// wait for the disk: after a power cut a process that was not tried is prepared
// anew, and one that was tried cannot be running, whatever this file says.
func writeKeep(dir string, cfg shim.Config) error {
	b, err := json.Marshal(cfg)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "%s could not be encoded", keepFile)
	}
	path := filepath.Join(dir, keepFile)
	err = os.WriteFile(path+".tmp", b, 0o600)
	if err == nil {
		err = os.Rename(path+".tmp", path)
	}
	if err != nil {
		return diskError(err, "write %s", keepFile)
	}
	return nil
}

// readKeep reads back what a shim was told; for settling a process whose shim died.
func readKeep(dir string) (shim.Config, error) {
	var cfg shim.Config
	b, err := os.ReadFile(filepath.Join(dir, keepFile))
	if err != nil {
		return cfg, err
	}
	return cfg, json.Unmarshal(b, &cfg)
}

// keeper is what shim.json says of the last shim of a directory.
type keeper struct {
	PID    int    `json:"pid"`
	Start  uint64 `json:"start"`
	BootID string `json:"boot_id"`
}

// lastKeeper returns the zero value if there was none or it cannot be told.
func lastKeeper(dir string) keeper {
	var k keeper
	b, err := os.ReadFile(filepath.Join(dir, shimFile))
	if err != nil || json.Unmarshal(b, &k) != nil {
		return keeper{}
	}
	return k
}

// checkSpec refuses a spec that no host could start.
func checkSpec(id string, spec wire.ProcSpec) error {
	bad := func(format string, args ...any) *errdefs.Error { return errdefs.New(errdefs.Invalid, format, args...) }
	switch {
	case !ident.Valid(ident.Process, id):
		return bad("the process id is not one")
	case spec.ID != id:
		return bad("the spec is of another process than the path says")
	case !ident.Valid(ident.Box, spec.Box):
		return bad("the box id is not one")
	case len(spec.Argv) == 0 || spec.Argv[0] == "":
		return bad("there is no command").WithNext("give the program as the first argument")
	case len(spec.Argv)+len(spec.Env) > maxArgs:
		return bad("%d arguments and variables, the limit is %d", len(spec.Argv)+len(spec.Env), maxArgs)
	case spec.DeadlineMillis < 0 || spec.SpoolBytes < 0 || spec.MemoryBytes < 0 || spec.Pids < 0:
		return bad("a limit is negative")
	case spec.Overflow != "" && spec.Overflow != api.OverflowBlock && spec.Overflow != api.OverflowDropOldest:
		return bad("the overflow policy is neither block nor drop_oldest")
	case spec.PTY != nil && (spec.PTY.Rows == 0 || spec.PTY.Cols == 0 || spec.PTY.Rows > 4096 || spec.PTY.Cols > 4096):
		return bad("a terminal has 1 to 4096 rows and columns")
	}
	total := 0
	for _, s := range append(append([]string{spec.Cwd}, spec.Argv...), spec.Env...) {
		if strings.IndexByte(s, 0) >= 0 {
			return bad("an argument, a variable or the directory holds a NUL byte")
		}
		total += len(s) + 1
	}
	if total > maxArgBytes {
		return bad("arguments and environment have %d bytes, the limit is %d", total, maxArgBytes)
	}
	for _, kv := range spec.Env {
		if i := strings.IndexByte(kv, '='); i <= 0 {
			return bad("an environment entry has no name")
		}
	}
	return nil
}

// sameSpec refuses another spec for an id that is in use.
func sameSpec(have, want []byte) error {
	if bytes.Equal(have, want) {
		return nil
	}
	return errdefs.New(errdefs.Conflict, "this process id was started with another spec").
		WithNext("use a new id for another process")
}

func notExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
