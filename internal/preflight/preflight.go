// Package preflight says what this machine has and lacks for running boxes, in
// the words of the kernel, and how to bring what is missing.
package preflight

import (
	"context"
	"slices"
	"time"
)

// Config says where boxes would live.
type Config struct {
	Dir          string            // state directory, or the place it will be; "" skips its checks
	InitPath     string            // the stockade-host program, which is PID 1 of containers; "" is reported as missing
	Runtime      string            // name or path of the OCI runtime; "" is the first found
	CgroupParent string            // below it the container probe makes a control group; "" is the root of every hierarchy
	Tools        map[string]string // programs to look for, and the command that installs each
	Python       string            // interpreter of plugin workers; "" is the first on the PATH
}

// Check is the answer to one question.
type Check struct {
	Name   string `json:"name"`          // what people search for, such as "user namespaces"
	Needed bool   `json:"needed"`        // boxes do not work, or are not safe, without it
	OK     bool   `json:"ok"`            //
	Found  string `json:"found"`         // what was found, for people
	Fix    string `json:"fix,omitempty"` // the command that brings it, when not OK
}

// probeTime bounds one probe that runs another program.
const probeTime = 20 * time.Second

// Run carries out every probe and returns their answers in a fixed order. It
// leaves nothing behind. Most take microseconds; those that run a program are
// bounded by 20 seconds each and by ctx.
func Run(ctx context.Context, cfg Config) []Check {
	var cs []Check
	cs = append(cs, privileges()...)
	cs = append(cs, kernel()...)
	cs = append(cs, namespaces()...)
	cs = append(cs, cgroups()...)
	rt, check := ociRuntime(cfg.Runtime)
	cs = append(cs, check, hostProgram(ctx, cfg.InitPath), container(ctx, cfg, rt))
	cs = append(cs, otherRuntimes(ctx, cfg, rt)...)
	cs = append(cs, limits()...)
	cs = append(cs, stateDir(cfg.Dir)...)
	cs = append(cs, tools(ctx, cfg.Tools)...)
	cs = append(cs, plugins(ctx, cfg.Python, cs)...)
	return cs
}

// Missing returns the needed checks that are not OK.
func Missing(checks []Check) []Check {
	return slices.DeleteFunc(slices.Clone(checks), func(c Check) bool { return c.OK || !c.Needed })
}

// ok and bad make a check that is needed; nice makes one that is not.
func ok(name, found string) Check { return Check{Name: name, Needed: true, OK: true, Found: found} }

func bad(name, found, fix string) Check {
	return Check{Name: name, Needed: true, Found: found, Fix: fix}
}

func nice(name string, good bool, found, fix string) Check {
	c := Check{Name: name, OK: good, Found: found}
	if !good {
		c.Fix = fix
	}
	return c
}
