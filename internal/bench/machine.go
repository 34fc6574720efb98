package bench

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// fsyncTimes times n writes of one page, each synced.
func fsyncTimes(dir string, n int) ([]time.Duration, error) {
	f, err := os.CreateTemp(dir, "fsync")
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "no file can be made in %s: %v", dir, err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	page := make([]byte, 4096)
	times := make([]time.Duration, 0, n)
	for range n {
		start := time.Now()
		if _, err := f.Write(page); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be written: %v", dir, err)
		}
		if err := f.Sync(); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be synced: %v", dir, err)
		}
		times = append(times, time.Since(start))
	}
	return times, nil
}

func fsyncRate(dir string) (float64, error) {
	times, err := fsyncTimes(dir, 1000)
	var sum time.Duration
	for _, t := range times {
		sum += t
	}
	return float64(len(times)) / sum.Seconds(), err
}

// parallel runs f(0) to f(n-1) at once and joins them.
func parallel(n int, f func(int) error) error {
	var g errgroup.Group
	for i := range n {
		g.Go(func() error { return f(i) })
	}
	return g.Wait()
}

// rollup returns fields of /proc/PID/smaps_rollup in bytes (proc_pid_smaps(5)).
func rollup(pid int) (map[string]int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the memory of process %d cannot be read: %v", pid, err)
	}
	out := map[string]int64{}
	for sc := bufio.NewScanner(bytes.NewReader(b)); sc.Scan(); {
		f := strings.Fields(sc.Text())
		if len(f) == 3 && f[2] == "kB" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				continue
			}
			out[strings.TrimSuffix(f[0], ":")] = n * 1024
		}
	}
	return out, nil
}

// anonymous is the memory that is the process's own and no file's.
func anonymous(pid int) (int64, error) {
	m, err := rollup(pid)
	return m["Anonymous"], err
}

// private is the memory that would be free if the process were gone.
func private(pid int) (int64, error) {
	m, err := rollup(pid)
	return m["Private_Clean"] + m["Private_Dirty"], err
}

// ticksPerSecond is USER_HZ, which Linux fixes at 100 on every platform it runs on.
const ticksPerSecond = 100

// cpuTime is the processor time a process has used (proc_pid_stat(5), fields 14, 15).
func cpuTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, errdefs.Wrap(err, errdefs.Unavailable, "the time of process %d cannot be read: %v", pid, err)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	if len(f) < 13 {
		return 0, errdefs.New(errdefs.Internal, "/proc/PID/stat has %d fields", len(f))
	}
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * time.Second / ticksPerSecond, nil
}

// connections counts the sockets a process has open.
func connections(pid int) int {
	n := 0
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	for _, e := range entries {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, e.Name())); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// settled waits until ready holds and f has stopped moving by more than a
// hundredth, and returns it.
func settled(ctx context.Context, f func() (int64, error), ready func() bool) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	var last int64
	for {
		now, err := f()
		if err != nil {
			return 0, err
		}
		if ready() && last > 0 && now-last < last/100 && last-now < last/100 {
			return now, nil
		}
		last = now
		select {
		case <-ctx.Done():
			return 0, errdefs.New(errdefs.Unavailable, "what is measured did not come to rest within a minute")
		case <-tick.C:
		}
	}
}

// children finds processes by their command line's second word, below a parent
// or anywhere: the shims of one host directory name it in their arguments.
func shims(hostDir string) []int {
	var pids []int
	entries, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, e := range entries {
		b, err := os.ReadFile(e)
		if err != nil {
			continue // it ended meanwhile
		}
		args := strings.Split(string(b), "\x00")
		if len(args) > 2 && args[1] == "shim" && strings.Contains(string(b), hostDir) {
			if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(e))); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
