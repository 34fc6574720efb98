package box_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/driver"
	"github.com/stockade-run/stockade/internal/driver/box"
	"github.com/stockade-run/stockade/internal/driver/drivertest"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

var _ interface {
	driver.Driver
	driver.Stopper
} = (*box.Driver)(nil)

func TestMain(m *testing.M) {
	os.Exit(hosttest.Main(func() int { return need.Run(m) }))
}

// config is one of a host program that is the test binary.
func config(t *testing.T) box.Config {
	t.Helper()
	need.Runc(t)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := fmt.Sprintf("/stockade-test-%d-%s", os.Getpid(), strings.ToLower(rand.Text()[:8]))
	cfg := box.Config{HostExe: exe, Dir: filepath.Join(t.TempDir(), "host"), Args: []string{"--cgroup-parent", parent}}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, pid := range programs(cfg.Dir) {
			t.Errorf("left behind: process %d", pid)
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		if err := cgroup.New("", parent).Remove(ctx); err != nil {
			t.Errorf("left behind: %v", err)
		}
		log, _ := os.ReadFile(filepath.Join(cfg.Dir, box.LogFile))
		if strings.Contains(string(log), "DATA RACE") || strings.Contains(string(log), "panic") || t.Failed() {
			t.Errorf("log of the host program:\n%s", log)
		}
	})
	return cfg
}

// stop ends what a driver started.
func stop(t *testing.T, d *box.Driver, dir string) {
	t.Helper()
	if err := d.Stop(context.Background()); err != nil {
		t.Errorf("stop: %v", err)
	}
	for end := time.Now().Add(time.Minute); len(programs(dir)) > 0 && time.Now().Before(end); {
		<-time.After(10 * time.Millisecond)
	}
}

// programs returns the live processes whose command line names the directory.
func programs(dir string) []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if b, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); strings.Contains(string(b), dir) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// hostPID returns the host program of a directory, 0 if none runs.
func hostPID(dir string) int {
	for _, pid := range programs(dir) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if args := strings.Split(string(b), "\x00"); len(args) > 1 && args[1] == "serve" {
			return pid
		}
	}
	return 0
}

func TestConformance(t *testing.T) {
	t.Parallel()
	need.EachRuntime(t, func(t *testing.T, runtime string) {
		drivertest.Run(t, func(t *testing.T) drivertest.Target {
			cfg := config(t)
			cfg.Args = append(cfg.Args, "--runtime", runtime)
			d := box.New(cfg)
			t.Cleanup(func() { stop(t, d, cfg.Dir) })
			return drivertest.Target{Driver: d, Kill: func() {
				if pid := hostPID(cfg.Dir); pid > 0 {
					_ = unix.Kill(pid, unix.SIGKILL)
				}
				for {
					if held, err := host.Locked(cfg.Dir); err != nil || !held {
						return
					}
					<-time.After(time.Millisecond)
				}
			}}
		})
	})
}

func TestTwoServersStartOneHost(t *testing.T) {
	t.Parallel()
	cfg := config(t)
	var wg sync.WaitGroup
	drivers := make([]*box.Driver, 6)
	for i := range drivers {
		drivers[i] = box.New(cfg)
		wg.Go(func() {
			if err := drivers[i].Ensure(context.Background()); err != nil {
				t.Errorf("ensure: %v", err)
			}
		})
	}
	wg.Wait()
	n := 0
	for end := time.Now().Add(time.Minute); time.Now().Before(end); {
		if n = len(programs(cfg.Dir)); n == 1 {
			break // those that came second have gone
		}
		<-time.After(10 * time.Millisecond)
	}
	if n != 1 {
		t.Errorf("%d host programs", n)
	}
	for _, d := range drivers {
		stop(t, d, cfg.Dir)
	}
}

func TestAnotherVersionTakesOverAndKeepsProcesses(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cfg := config(t)
	old := box.New(cfg)
	if err := old.Ensure(ctx); err != nil {
		t.Fatal(err)
	}
	c := host.NewClient(old.Dial, 5)
	defer c.CloseIdle()
	boxID := hosttest.NewID("box")
	if _, err := c.PutBox(ctx, wire.BoxSpec{ID: boxID}); err != nil {
		t.Fatal(err)
	}
	spec := hosttest.Sh(boxID, "echo up; sleep 1000")
	if _, err := c.Start(ctx, spec); err != nil {
		t.Fatal(err)
	}
	hosttest.Eventually(t, "it is up", func() bool {
		st, err := c.Proc(ctx, spec.ID)
		return err == nil && st.Log.Next == 3
	})
	first, err := c.Info(ctx)
	if err != nil {
		t.Fatal(err)
	}
	changed := cfg
	changed.Args = append([]string{"--runtime", "runc"}, cfg.Args...)
	d := box.New(changed)
	if err := d.Ensure(ctx); err != nil {
		t.Fatal(err)
	}
	if second, err := c.Info(ctx); err != nil || second.Digest == first.Digest || second.HostID != first.HostID || !second.Started.After(first.Started) {
		t.Errorf("host program %+v, %v; before %+v", second, err, first)
	}
	st, err := c.Proc(ctx, spec.ID)
	if err != nil || st.Phase != wire.PhaseRunning || st.Log.Next != 3 {
		t.Errorf("the process: %+v, %v", st, err)
	}
	if st, err := c.CloseProc(ctx, spec.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Errorf("close: %+v, %v", st, err)
	}
	if err := c.Forget(ctx, spec.ID); err != nil {
		t.Error(err)
	}
	if err := c.RemoveBox(ctx, boxID); err != nil {
		t.Error(err)
	}
	stop(t, d, cfg.Dir)
}

func TestWhatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	cfg := config(t)
	cfg.Args = append(cfg.Args, "--runtime", "no-such-runtime")
	err := box.New(cfg).Ensure(ctx)
	if !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "no-such-runtime") || strings.Contains(err.Error(), "msg=") {
		t.Errorf("no runtime: %v", err)
	}
	cfg.HostExe = filepath.Join(t.TempDir(), "missing")
	if err := box.New(cfg).Ensure(ctx); !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "missing") {
		t.Errorf("no program: %v", err)
	}
	if err := box.New(box.Config{HostExe: "x", Dir: "y"}).Ensure(ctx); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("relative paths: %v", err)
	}
	if _, err := box.New(cfg).Dial(ctx); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("dial: %v", err)
	}
	if err := box.New(cfg).Stop(ctx); err != nil {
		t.Errorf("stop of what does not run: %v", err)
	}
}

// A host program that was started and has not come to its lock yet is ended by Stop:
// else it would come up after the server that started it has gone.
func TestStopEndsAHostThatIsStillStarting(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	exe, begun := filepath.Join(dir, "slow"), filepath.Join(dir, "begun")
	if err := os.WriteFile(exe, []byte("#!/bin/sh\necho $$ >"+begun+"\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	d := box.New(box.Config{HostExe: exe, Dir: filepath.Join(dir, "host")})
	ctx, cancel := context.WithCancel(t.Context())
	ensured := make(chan error, 1)
	go func() { ensured <- d.Ensure(ctx) }()
	var pid int
	for pid == 0 {
		b, _ := os.ReadFile(begun)
		pid, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		<-time.After(time.Millisecond)
	}
	cancel()
	if err := <-ensured; !errdefs.Is(err, errdefs.Unavailable) {
		t.Error(err)
	}
	if err := d.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if err := unix.Kill(pid, 0); err != unix.ESRCH {
		t.Errorf("the program %d: %v", pid, err)
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}
