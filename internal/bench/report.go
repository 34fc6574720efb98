// Package bench is "stockade bench": what the promises cost on this machine,
// each figure beside a baseline measured in the same run.
package bench

import (
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// Report is what a run of the bench says, in JSON or as a table.
type Report struct {
	Machine Machine  `json:"machine"`
	Results []Result `json:"results"`
}

// Machine is where it was measured: figures of two machines are not compared.
type Machine struct {
	CPU         string `json:"cpu"`
	Cores       int    `json:"cores"`
	MemoryBytes int64  `json:"memory_bytes"`
	Kernel      string `json:"kernel"`
	Runtime     string `json:"runtime"`
	Filesystem  string `json:"filesystem"`
	Go          string `json:"go"`
	Version     string `json:"version"`
}

// Result is one figure. Baseline and Ratio (value / baseline) are 0 where there
// is nothing to compare with. Target is in words; OK says that it was met.
type Result struct {
	Name     string  `json:"name"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline float64 `json:"baseline"`
	Ratio    float64 `json:"ratio"`
	Target   string  `json:"target"`
	OK       bool    `json:"ok"`
	Note     string  `json:"note,omitempty"`
}

func ratio(v, base float64) float64 {
	if base == 0 {
		return 0
	}
	return math.Round(v/base*1000) / 1000
}

// quantile returns the q-th quantile (0 to 1) of times by the nearest rank.
func quantile(times []time.Duration, q float64) time.Duration {
	if len(times) == 0 {
		return 0
	}
	s := slices.Clone(times)
	slices.Sort(s)
	return s[max(0, int(math.Ceil(q*float64(len(s))))-1)]
}

func millis(d time.Duration) float64 {
	return math.Round(float64(d.Microseconds())) / 1000
}

// describe reads the machine's own words about itself.
func describe(dir, runtimeVersion, version string) Machine {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), Runtime: runtimeVersion, Version: version}
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.SplitSeq(string(b), "\n") {
			if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
				m.CPU = strings.TrimSpace(v)
				break
			}
		}
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		m.MemoryBytes = int64(si.Totalram) * int64(si.Unit)
	}
	var un unix.Utsname
	if unix.Uname(&un) == nil {
		m.Kernel = unix.ByteSliceToString(un.Release[:])
	}
	var fs unix.Statfs_t
	if unix.Statfs(dir, &fs) == nil {
		m.Filesystem = fsName(int64(fs.Type))
	}
	return m
}

// fsName names the file systems of statfs(2) that a state directory lies on.
func fsName(magic int64) string {
	switch magic {
	case unix.EXT4_SUPER_MAGIC:
		return "ext4"
	case unix.XFS_SUPER_MAGIC:
		return "xfs"
	case unix.BTRFS_SUPER_MAGIC:
		return "btrfs"
	case unix.TMPFS_MAGIC:
		return "tmpfs"
	case unix.OVERLAYFS_SUPER_MAGIC:
		return "overlay"
	}
	return fmt.Sprintf("%#x", magic)
}

// Print writes the report as a table for people.
func (r Report) Print(w io.Writer) error {
	m := r.Machine
	fmt.Fprintf(w, "%s, %d cores, %.0f GiB, Linux %s, %s, %s, %s, stockade %s\n\n",
		m.CPU, m.Cores, float64(m.MemoryBytes)/(1<<30), m.Kernel, m.Filesystem, m.Runtime, m.Go, m.Version)
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "WHAT\tVALUE\tBASELINE\tRATIO\tTARGET\tMET")
	for _, x := range r.Results {
		base, rat, met := "–", "–", "no"
		if x.Baseline != 0 {
			base, rat = figure(x.Baseline)+" "+x.Unit, fmt.Sprintf("%.2f", x.Ratio)
		}
		if x.OK {
			met = "yes"
		}
		fmt.Fprintf(tw, "%s\t%s %s\t%s\t%s\t%s\t%s\n", x.Name, figure(x.Value), x.Unit, base, rat, x.Target, met)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, x := range r.Results {
		if x.Note != "" {
			fmt.Fprintf(w, "\n%s: %s", x.Name, x.Note)
		}
	}
	_, err := fmt.Fprintln(w)
	return err
}

func figure(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}
