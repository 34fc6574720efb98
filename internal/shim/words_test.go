package shim

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/wire"
)

func TestLookPath(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check(t, os.Mkdir(filepath.Join(dir, "a"), 0o755))
	check(t, os.Mkdir(filepath.Join(dir, "b"), 0o755))
	check(t, os.Mkdir(filepath.Join(dir, "a", "dir"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "a", "plain"), nil, 0o644))
	check(t, os.WriteFile(filepath.Join(dir, "b", "plain"), nil, 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "a", "only"), nil, 0o644))
	path := dir + "/a:" + dir + "/none::" + dir + "/b"
	for _, c := range []struct{ name, want, fails string }{
		{"plain", dir + "/b/plain", ""},
		{"only", "", "permission denied"},
		{"dir", "", "is a directory"},
		{"nothing", "", "command not found"},
		{dir + "/b/plain", dir + "/b/plain", ""},
		{dir + "/a/plain", "", "permission denied"},
		{dir + "/a/plain/x", "", "not a directory"},
		{dir, "", "is a directory"},
	} {
		got, err := lookPath(c.name, path)
		if got != c.want || (err != nil) != (c.fails != "") || err != nil && !strings.Contains(err.Error(), c.fails) {
			t.Errorf("%s: %q %v", c.name, got, err)
		}
	}
}

func TestParseInit(t *testing.T) {
	t.Parallel()
	cwd, argv, err := parseInit([]string{"--cwd", "/w", "--", "cmd", "--", "-x"})
	if err != nil || cwd != "/w" || strings.Join(argv, " ") != "cmd -- -x" {
		t.Errorf("%q %q %v", cwd, argv, err)
	}
	for _, bad := range [][]string{nil, {"--"}, {"cmd"}, {"--cwd"}, {"--cwd", "/w"}, {"--", ""}, {"--other", "--", "cmd"}} {
		if _, _, err := parseInit(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func FuzzReadReport(f *testing.F) {
	f.Add([]byte("{\"kind\":\"begun\"}\n{\"kind\":\"exited\",\"code\":3}\n"))
	f.Add([]byte("{\"kind\":\"begun\"}\n{\"kind\":\"signalled\",\"signal\":\"SIGSEGV\"}\n"))
	f.Add([]byte("{\"kind\":\"spawn_failed\",\"detail\":\"x\"}\n"))
	f.Add([]byte("{\"kind\":\"exited\",\"code\":0}\n"))
	f.Add([]byte("{\"kind\":\"begun\"}\n{\"kind\":\"exited\",\"code\":0}\n{\"kind\":\"exited\",\"code\":1}\n"))
	f.Add([]byte("{\"kind\":\"begun\"}\n{\"kind\":\"oom\"}\n"))
	f.Add([]byte("nonsense"))
	f.Fuzz(func(t *testing.T, b []byte) {
		begun := 0
		var ended []process.InitReport
		err := readReport(strings.NewReader(string(b)), func() { begun++ }, func(r process.InitReport) {
			if r.Kind != api.ExitSpawnFailed && begun == 0 {
				t.Errorf("%+v without a fork", r)
			}
			ended = append(ended, r)
		})
		if begun > 1 || len(ended) > 1 {
			t.Errorf("begun %d, ended %+v, %v", begun, ended, err)
		}
		for _, r := range ended {
			if process.InitStatus(r) < 0 {
				t.Errorf("%+v", r)
			}
		}
	})
}

func TestReportRoundTrip(t *testing.T) {
	t.Parallel()
	for _, want := range []process.InitReport{
		{Kind: api.ExitExited}, {Kind: api.ExitExited, Code: 255},
		{Kind: api.ExitSignalled, Signal: "SIGTERM"}, {Kind: api.ExitSpawnFailed, Detail: "no \"such\"\nfile"},
	} {
		var got process.InitReport
		in := string(encodeLine(reportLine{Kind: kindBegun})) + string(encodeReport(want))
		if err := readReport(strings.NewReader(in), func() {}, func(r process.InitReport) { got = r }); err != nil || got != want {
			t.Errorf("%+v %v, want %+v", got, err, want)
		}
	}
}

func FuzzParseExit(f *testing.F) {
	dir := f.TempDir()
	zero := 0
	check(f, WriteExit(dir, wire.ProcState{ID: "proc_x", Phase: wire.PhaseEnded, Exit: &api.Exit{Kind: api.ExitExited, Code: &zero}}))
	b, err := os.ReadFile(filepath.Join(dir, exitFile))
	check(f, err)
	f.Add(b)
	f.Add([]byte(`{"version":1,"state":{},"crc32c":"00000000"}`))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		st, err := parseExit(b)
		if err == nil && checkEnded(st) != nil {
			t.Errorf("%+v was believed", st)
		}
	})
}

func TestWriteExitRefusesWhatIsNone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	zero := 0
	for _, st := range []wire.ProcState{
		{},
		{ID: "x", Phase: wire.PhaseRunning, Exit: &api.Exit{Kind: api.ExitUnknown}},
		{ID: "x", Phase: wire.PhaseEnded},
		{ID: "x", Phase: wire.PhaseEnded, Exit: &api.Exit{Kind: "fine"}},
		{ID: "x", Phase: wire.PhaseEnded, Exit: &api.Exit{Kind: api.ExitExited}},
		{ID: "x", Phase: wire.PhaseEnded, Exit: &api.Exit{Kind: api.ExitUnknown, Code: &zero}},
	} {
		wantCode(t, WriteExit(dir, st), errdefs.Internal)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) > 0 {
		t.Errorf("%v %v", left, err)
	}
}

func FuzzLease(f *testing.F) {
	f.Add([]byte(`{"boot_id":"b","expiry_ns":9223372036854775807}`), "b")
	f.Add([]byte(`{"boot_id":"a","expiry_ns":1}`), "b")
	f.Add([]byte(`garbage`), "b")
	f.Fuzz(func(t *testing.T, b []byte, boot string) {
		path := filepath.Join(t.TempDir(), "lease")
		check(t, os.WriteFile(path, b, 0o600))
		left, err := leaseLeft(path, boot)
		if left < 0 || err != nil && left != 0 {
			t.Errorf("%v %v", left, err)
		}
		var l lease
		if left > 0 && (json.Unmarshal(b, &l) != nil || l.BootID != boot) {
			t.Errorf("%v granted", left)
		}
	})
}

func TestLeaseFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lease")
	boot := mustBoot(t)
	if left, err := leaseLeft(path, boot); left != 0 || err == nil {
		t.Errorf("%v %v", left, err)
	}
	check(t, WriteLease(path, time.Hour))
	if left, err := leaseLeft(path, boot); err != nil || left <= 0 || left > time.Hour {
		t.Errorf("%v %v", left, err)
	}
	if left, err := leaseLeft(path, "another boot"); left != 0 || err == nil {
		t.Errorf("%v %v", left, err)
	}
	wantCode(t, WriteLease(path, 0), errdefs.Invalid)
}

func TestSockets(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), strings.Repeat("x", 120), "s.sock")
	_, err := DialUnix(context.Background(), path)
	wantCode(t, err, errdefs.Unavailable)
	check(t, os.Mkdir(filepath.Dir(path), 0o755))
	for range 2 { // the second replaces the socket that the first left
		l, err := ListenUnix(path)
		check(t, err)
		fi, err := os.Lstat(path)
		check(t, err)
		if fi.Mode().Perm() != 0o600 {
			t.Errorf("mode %v", fi.Mode())
		}
		c, err := DialUnix(context.Background(), path)
		check(t, err)
		c.Close()
		l.Close()
	}
	_, err = DialUnix(context.Background(), path)
	wantCode(t, err, errdefs.Unavailable)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%#v", err)
	}
}

func TestIdentity(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if alive, err := Find(dir); alive || err != nil {
		t.Errorf("empty directory: %v %v", alive, err)
	}
	f, err := lock(dir)
	check(t, err)
	_, err = lock(dir)
	wantCode(t, err, errdefs.Conflict)
	id, err := self()
	check(t, err)
	check(t, writeIdentity(dir, id))
	if alive, err := Find(dir); !alive || err != nil {
		t.Errorf("lock and identity: %v %v", alive, err)
	}
	for name, wrong := range map[string]identity{
		"start time": {id.PID, id.Start + 1, id.BootID},
		"boot":       {id.PID, id.Start, "another"},
		"pid":        {1, id.Start, id.BootID},
	} {
		check(t, writeIdentity(dir, wrong))
		if living(dir) {
			t.Errorf("lives with a wrong %s", name)
		}
	}
	check(t, writeIdentity(dir, id))
	// A child of another test that is forked and not executed yet has the lock too.
	syscall.ForkLock.RLock()
	f.Close()
	alive, err := Find(dir)
	syscall.ForkLock.RUnlock()
	if alive || err != nil {
		t.Errorf("without the lock: %v %v", alive, err)
	}
	check(t, os.WriteFile(filepath.Join(dir, identityFile), []byte("{"), 0o600))
	if living(dir) {
		t.Error("lives with a damaged identity")
	}
}

// A replacement that fails leaves what was there, and nothing beside it.
func TestWriteDurable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	check(t, writeDurable(dir, "f", []byte("one")))
	check(t, os.Mkdir(filepath.Join(dir, "f.tmp"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "f.tmp", "x"), nil, 0o600))
	wantCode(t, writeDurable(dir, "f", []byte("two")), errdefs.Unavailable)
	if b, _ := os.ReadFile(filepath.Join(dir, "f")); string(b) != "one" {
		t.Errorf("%q", b)
	}
	check(t, os.RemoveAll(filepath.Join(dir, "f.tmp")))
	check(t, writeDurable(dir, "f", []byte("two")))
	if b, _ := os.ReadFile(filepath.Join(dir, "f")); string(b) != "two" {
		t.Errorf("%q", b)
	}
	if _, err := os.Stat(filepath.Join(dir, "f.tmp")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	e := diskError(unix.ENOSPC, "write f")
	if e.Code != errdefs.Exhausted || e.Next == "" {
		t.Errorf("%+v", e)
	}
}

func TestTimer(t *testing.T) {
	t.Parallel()
	tm, err := newTimer()
	check(t, err)
	c := newClock()
	before := c.now()
	check(t, tm.arm(time.Hour))
	check(t, tm.disarm())
	check(t, tm.arm(5*time.Millisecond))
	if !tm.wait() || c.now().Sub(before) < 5*time.Millisecond {
		t.Errorf("went off after %v", c.now().Sub(before))
	}
	check(t, tm.arm(-time.Second)) // at once
	if !tm.wait() {
		t.Error("closed")
	}
	done := make(chan bool)
	go func() { done <- tm.wait() }()
	tm.close()
	if <-done {
		t.Error("went off when it was closed")
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ok := Config{Spec: wire.ProcSpec{ID: "p"}, Runtime: "/r", RuntimeRoot: "/rt", Container: "c", Bundle: "/b", Cgroup: "/g"}
	check(t, WriteConfig(dir, ok))
	if got, err := readConfig(dir); err != nil || got.Spec.ID != "p" || got.Cgroup != "/g" {
		t.Errorf("%+v %v", got, err)
	}
	for _, spoil := range []func(*Config){
		func(c *Config) { c.Spec.ID = "" }, func(c *Config) { c.Runtime = "runc" }, func(c *Config) { c.Bundle = "" }, func(c *Config) { c.Cgroup = "x" },
	} {
		c := ok
		spoil(&c)
		wantCode(t, WriteConfig(dir, c), errdefs.Invalid)
	}
	check(t, os.WriteFile(filepath.Join(dir, configFile), []byte("{"), 0o600))
	if _, err := readConfig(dir); err == nil {
		t.Error("a damaged configuration was read")
	}
}

// A signal that the starter ignores is the command's to use: posix_spawn of the
// C library hands on signal 32 ignored.
func TestIgnoredRealTimeSignalsAreReset(t *testing.T) {
	state := func(sig uintptr, set *sigaction) (now sigaction) {
		if _, _, errno := syscall.RawSyscall6(syscall.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(&now)), 8, 0, 0); errno != 0 {
			t.Fatal(errno)
		}
		return now
	}
	const sig = 40
	before := state(sig, &sigaction{handler: sigIgnore})
	defer state(sig, &before)
	heedRealTime()
	if now := state(sig, nil); now.handler != sigDefault {
		t.Errorf("signal %d is at %d", sig, now.handler)
	}
}

func mustBoot(t testing.TB) string {
	b, err := bootID()
	check(t, err)
	return b
}
