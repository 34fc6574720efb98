package pluginruntime

import (
	"bytes"
	"os"
	"strconv"
	"time"
)

// health is the body of /healthz.
func (r *runtime) health() (any, error) {
	out := map[string]any{"live": r.live.Load(), "resources": r.manager.Health(), "runtime": r.process()}
	if r.processes != nil {
		out["runner_processes"] = r.processes.Counters()
	}
	return out, nil
}

// process is what the published SDK 0.7 tells of its process, under the same names.
func (r *runtime) process() map[string]any {
	profile := "unknown"
	if cfg, ok := r.manager.Configured(); ok {
		profile = string(cfg.Profile)
	}
	out := map[string]any{
		"version": r.Version, "sdk_version": r.interp.SDK, "profile": profile, "pid": os.Getpid(),
		"uptime_seconds": time.Since(r.started).Seconds(),
	}
	if rss, cpu, ok := usage(); ok {
		out["rss_bytes"], out["cpu_seconds"] = rss, cpu
	}
	return out
}

// ticks is how many clock ticks a second has in /proc; it is 100 on every Linux.
const ticks = 100

// usage reads memory and processor time of this process from /proc.
func usage() (rss int64, cpu float64, ok bool) {
	b, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0, 0, false
	}
	return parseStat(b, int64(os.Getpagesize()))
}

// parseStat reads a line of proc(5)'s stat. The name in parentheses may hold
// anything, so fields count from the last parenthesis.
func parseStat(b []byte, page int64) (rss int64, cpu float64, ok bool) {
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return 0, 0, false
	}
	f := bytes.Fields(b[i+1:])
	const user, system, resident = 11, 12, 21 // utime, stime, rss: fields 14, 15 and 24
	if len(f) <= resident {
		return 0, 0, false
	}
	n := func(i int) int64 {
		v, err := strconv.ParseInt(string(f[i]), 10, 64)
		if err != nil {
			ok = false
		}
		return v
	}
	ok = true
	cpu = float64(n(user)+n(system)) / ticks
	rss = n(resident) * page
	return rss, cpu, ok
}
