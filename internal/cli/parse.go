package cli

import (
	"path/filepath"
	"strconv"
	"strings"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// parseSize reads a size as docker run does: a number with an optional b, k, m,
// g or t, powers of 1024. "" is 0.
func parseSize(flag, s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	digits := strings.TrimRight(strings.ToLower(s), "bkmgti")
	unit := strings.ToLower(s)[len(digits):]
	shift, ok := map[string]uint{"": 0, "b": 0, "k": 10, "kb": 10, "kib": 10, "m": 20, "mb": 20, "mib": 20,
		"g": 30, "gb": 30, "gib": 30, "t": 40, "tb": 40, "tib": 40}[unit]
	n, err := strconv.ParseFloat(digits, 64)
	n *= float64(uint64(1) << shift)
	if err != nil || !ok || !(n >= 1 && n <= 1<<50) {
		return 0, errdefs.New(errdefs.Invalid, "%s: %q is not a size", flag, s).WithNext("write a number with k, m, g or t, like 512m")
	}
	return int64(n), nil
}

// parseVolume reads -v SRC:DST[:ro|rw].
func parseVolume(s string) (api.Mount, error) {
	parts := strings.Split(s, ":")
	if len(parts) < 2 || len(parts) > 3 || parts[0] == "" || parts[1] == "" {
		return api.Mount{}, errdefs.New(errdefs.Invalid, "-v %q is not SRC:DST[:ro]", s)
	}
	m := api.Mount{Dest: parts[1], Writable: true}
	if len(parts) == 3 {
		switch parts[2] {
		case "ro":
			m.Writable = false
		case "rw":
		default:
			return m, errdefs.New(errdefs.Invalid, "-v %q: the mode %q is neither ro nor rw", s, parts[2])
		}
	}
	return m, source(&m, parts[0])
}

// parseMount reads --mount type=bind,source=SRC,target=DST[,readonly].
func parseMount(s string) (api.Mount, error) {
	m := api.Mount{Writable: true}
	var src string
	for part := range strings.SplitSeq(s, ",") {
		k, v, hasValue := strings.Cut(part, "=")
		switch k {
		case "type":
			if v != "bind" {
				return m, errdefs.New(errdefs.Invalid, "--mount %q: the type %q is not bind, the only one there is", s, v)
			}
		case "source", "src":
			src = v
		case "target", "destination", "dst":
			m.Dest = v
		case "readonly", "ro":
			m.Writable = hasValue && v != "true" && v != "1"
		default:
			return m, errdefs.New(errdefs.Invalid, "--mount %q: unknown option %q", s, k)
		}
	}
	if src == "" || m.Dest == "" {
		return m, errdefs.New(errdefs.Invalid, "--mount %q needs source and target", s)
	}
	return m, source(&m, src)
}

func source(m *api.Mount, src string) error {
	abs, err := filepath.Abs(src)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the mount source %q is not a path", src)
	}
	m.Source = abs
	return nil
}
