package broker

import (
	"crypto/sha256"
	"encoding/json"
	"path"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// Bounds of a command. One string is bounded by the kernel (MAX_ARG_STRLEN in
// execve(2), 32 pages), the sum by the host: 1 MiB for arguments and environment
// together, of which the base environment needs a little.
const (
	maxArgs     = 4096
	maxArg      = 128 << 10
	maxArgTotal = 1<<20 - baseRoom
	baseRoom    = 8 << 10
	maxCwd      = 4096 // PATH_MAX
	maxSize     = 4096 // rows and columns
	minMemory   = 4 << 20
	maxPids     = 1 << 22 // PID_MAX_LIMIT
)

// checkOpen refuses a request that no host could carry out, before anything is
// recorded (P11), and returns it in its canonical form: the same wish always
// looks the same.
func checkOpen(req api.OpenRequest, l Limits) (api.OpenRequest, error) {
	if err := ident.CheckName("request_id", req.RequestID); err != nil {
		return req, err
	}
	if err := checkArgv(req.Argv); err != nil {
		return req, err
	}
	cwd, err := cleanCwd(req.Cwd)
	if err != nil {
		return req, err
	}
	req.Cwd = cwd
	if err := checkEnv(req.Env); err != nil {
		return req, err
	}
	total := len(req.Cwd)
	for name, value := range req.Env {
		total += len(name) + len(value) + 2
	}
	for _, a := range req.Argv {
		total += len(a) + 1
	}
	if total > maxArgTotal {
		return req, errdefs.New(errdefs.Invalid, "argv and env have %d bytes together, the limit is %d", total, maxArgTotal).
			WithNext("put long values into a file or on standard input").With("limit", decimal(maxArgTotal))
	}
	if len(req.Env) == 0 {
		req.Env = nil
	}
	if req.PTY != nil {
		if err := checkSize(*req.PTY); err != nil {
			return req, err
		}
	}
	return req, checkLimits(req.Limits, l)
}

func checkArgv(argv []string) error {
	if len(argv) == 0 || argv[0] == "" {
		return errdefs.New(errdefs.Invalid, "argv is empty").WithNext("give the program first, then its arguments")
	}
	if len(argv) > maxArgs {
		return errdefs.New(errdefs.Invalid, "argv has %d items, the limit is %d", len(argv), maxArgs).With("limit", decimal(maxArgs))
	}
	for i, a := range argv {
		if strings.IndexByte(a, 0) >= 0 {
			return errdefs.New(errdefs.Invalid, "argv item %d holds a NUL byte, which no argument can", i)
		}
		if len(a) >= maxArg {
			return errdefs.New(errdefs.Invalid, "argv item %d has %d bytes, the limit is %d", i, len(a), maxArg-1).
				WithNext("put it into a file or on standard input").With("limit", decimal(maxArg-1))
		}
	}
	return nil
}

// cleanCwd returns the working directory in its one form: "" for the workspace
// itself. Whether it exists, and whether a link leads out of the workspace, only
// the host can say, at the moment it is used.
func cleanCwd(s string) (string, error) {
	refuse := func(why string) (string, error) {
		return "", errdefs.New(errdefs.Invalid, "cwd %s", why).WithNext("give a path below the workspace, such as src/app, or leave it out")
	}
	switch {
	case s == "":
		return "", nil
	case len(s) > maxCwd:
		return refuse("has " + decimal(int64(len(s))) + " bytes, the limit is " + decimal(maxCwd))
	case strings.IndexByte(s, 0) >= 0:
		return refuse("holds a NUL byte")
	case path.IsAbs(s):
		return refuse("is absolute; it must be relative to the workspace")
	}
	for part := range strings.SplitSeq(s, "/") {
		if part == ".." {
			return refuse("holds ..")
		}
	}
	if s = path.Clean(s); s == "." {
		return "", nil
	}
	return s, nil
}

func checkSize(w api.Winsize) error {
	if w.Rows < 1 || w.Cols < 1 || w.Rows > maxSize || w.Cols > maxSize {
		return errdefs.New(errdefs.Invalid, "a terminal of %d rows and %d columns is not possible", w.Rows, w.Cols).
			WithNext("use 1 to %d of each", maxSize)
	}
	return nil
}

func checkLimits(l api.Limits, bounds Limits) error {
	ranged := func(name string, v, low, high int64) error {
		if v != 0 && (v < low || v > high) {
			return errdefs.New(errdefs.Invalid, "limits.%s is %d, it may be %d to %d, or 0 for the default", name, v, low, high).
				With("limit", decimal(high))
		}
		return nil
	}
	for _, err := range []error{
		ranged("deadline_ms", l.DeadlineMillis, 1, bounds.MaxDeadline.Milliseconds()),
		ranged("spool_bytes", l.SpoolBytes, minSpool, bounds.MaxSpool),
		ranged("memory_bytes", l.MemoryBytes, minMemory, api.MaxOffset),
		ranged("pids", l.Pids, api.MinPids, maxPids),
	} {
		if err != nil {
			return err
		}
	}
	switch l.Overflow {
	case "", api.OverflowBlock, api.OverflowDropOldest:
		return nil
	}
	return errdefs.New(errdefs.Invalid, "limits.overflow %q is unknown", cutTo(string(l.Overflow), 32)).WithNext("use block or drop_oldest")
}

// digestOf identifies the arguments of a canonical request (P1), without its
// request id and before defaults are filled in, so that a server with other
// defaults knows a repeated request again.
func digestOf(req api.OpenRequest, box string) [32]byte {
	req.RequestID, req.Box = "", box
	b, err := json.Marshal(struct {
		Version int             `json:"v"`
		Open    api.OpenRequest `json:"open"`
	}{1, req})
	if err != nil {
		panic("broker: open arguments cannot be encoded: " + err.Error()) // strings, integers, a map
	}
	return sha256.Sum256(b)
}

// specFor is what the host is told, defaults filled in.
func specFor(handle, box string, req api.OpenRequest, models map[string]string, l Limits) wire.ProcSpec {
	s := wire.ProcSpec{
		ID: handle, Box: box, Argv: req.Argv, Cwd: req.Cwd, Stdin: req.Stdin, PTY: req.PTY,
		Env:            environment(req.PTY != nil, req.Env, models),
		DeadlineMillis: req.Limits.DeadlineMillis, SpoolBytes: req.Limits.SpoolBytes, Overflow: req.Limits.Overflow,
		MemoryBytes: req.Limits.MemoryBytes, Pids: req.Limits.Pids,
	}
	if s.DeadlineMillis == 0 {
		s.DeadlineMillis = max(int64(l.DefaultDeadline/time.Millisecond), 1)
	}
	if s.SpoolBytes == 0 {
		s.SpoolBytes = l.DefaultSpool
	}
	if s.Overflow == "" {
		s.Overflow = api.OverflowBlock
	}
	return s
}

func specOf(p store.Process) (wire.ProcSpec, error) {
	var s wire.ProcSpec
	if len(p.Spec) == 0 {
		return s, nil
	}
	if err := json.Unmarshal(p.Spec, &s); err != nil {
		return s, errdefs.Wrap(err, errdefs.Internal, "the recorded arguments of %s cannot be read", p.Handle)
	}
	return s, nil
}
