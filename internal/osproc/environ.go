package osproc

import (
	"maps"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Bounds of an environment. The kernel's own limit on one string is 128 KiB
// (execve(2)); saying so before is kinder than E2BIG.
const (
	maxEnvValue = 128<<10 - 1
	maxEnvNames = 1000
)

// Rules say which variables a child gets.
type Rules struct {
	// Allow lists the names of this program's own variables that a child gets. A
	// name may end in *, for all that begin so.
	Allow []string
	// Reserved lists, in the same form, what nobody but this program may set.
	Reserved []string
}

func matches(name string, list []string) bool {
	return slices.ContainsFunc(list, func(p string) bool {
		prefix, all := strings.CutSuffix(p, "*")
		return name == p || all && strings.HasPrefix(name, prefix)
	})
}

// Environment makes the environment of a child: what of own (NAME=VALUE) the
// rules allow, then extra, which wins, then set, which always wins and may hold
// reserved names. A reserved or impossible name in extra is an invalid error that
// names it, and never its value. The result is sorted.
func Environment(own []string, rules Rules, extra, set map[string]string) ([]string, error) {
	if len(extra) > maxEnvNames {
		return nil, errdefs.New(errdefs.Invalid, "the environment has %d names, the limit is %d", len(extra), maxEnvNames)
	}
	env := map[string]string{}
	for _, kv := range own {
		if name, value, ok := strings.Cut(kv, "="); ok && matches(name, rules.Allow) && !matches(name, rules.Reserved) {
			env[name] = value
		}
	}
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		value := extra[name]
		switch {
		case name == "" || strings.ContainsAny(name, "=\x00"):
			return nil, errdefs.New(errdefs.Invalid, "%q cannot be the name of an environment variable", name)
		case matches(name, rules.Reserved):
			return nil, errdefs.New(errdefs.Invalid, "the environment variable %s is reserved", name).WithNext("leave it out")
		case strings.ContainsRune(value, 0):
			return nil, errdefs.New(errdefs.Invalid, "the environment variable %s holds a zero byte", name)
		case len(name)+len(value) > maxEnvValue:
			return nil, errdefs.New(errdefs.Invalid, "the environment variable %s has %d bytes, the limit is %d", name, len(value), maxEnvValue)
		}
		env[name] = value
	}
	maps.Copy(env, set)
	list := make([]string, 0, len(env))
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	slices.Sort(list)
	return list, nil
}
