package host_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

// reader reads a log to its end whatever happens to the host program, as a
// server would.
type reader struct {
	h      *hosttest.Host
	id     string
	cursor int64
	stdout []byte
}

// some reads until the answer ends or breaks; true at the log's end.
func (r *reader) some(t *testing.T) bool {
	t.Helper()
	body, err := r.h.Client().Log(context.Background(), r.id, host.LogQuery{Cursor: r.cursor, Follow: true})
	if err != nil {
		if !errdefs.Is(err, errdefs.Unavailable) {
			t.Errorf("log: %v", err)
		}
		return false
	}
	defer body.Close()
	f := host.NewFrameReader(body, r.cursor)
	for {
		b, err := f.Next()
		if err != nil {
			if !errdefs.Is(err, errdefs.Unavailable) && !errors.Is(err, io.EOF) {
				t.Errorf("log: %v", err)
			}
			return false
		}
		for h, p := range host.Frames(b.Frames) {
			if h.Kind == wire.KindStdout {
				r.stdout = append(r.stdout, p...)
			}
		}
		r.cursor = f.Cursor()
		if b.Gap != nil {
			t.Errorf("gap %+v", b.Gap)
		}
		if b.Status != nil {
			return b.Status.EOF
		}
	}
}

func TestKillingTheHostLosesNoByte(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	const size = 24 << 20
	spec := h.Run(hosttest.Sh(h.Box(), `head -c 25165824 /dev/urandom > /tmp/x; sha256sum < /tmp/x >&2
for i in $(seq 0 47); do dd if=/tmp/x bs=512k skip=$i count=1 2>/dev/null; sleep 0.02; done; exit 5`))
	r := &reader{h: h, id: spec.ID}
	done := make(chan struct{})
	go func() {
		defer close(done)
		hosttest.Eventually(t, "the log is at its end", func() bool { return r.some(t) })
	}()
	for range 4 {
		h.Restart()
	}
	<-done
	_, stderr := h.Output(spec.ID)
	sum := sha256.Sum256(r.stdout)
	if len(r.stdout) != size || !strings.HasPrefix(string(stderr), hex.EncodeToString(sum[:])) {
		t.Errorf("%d of %d bytes, digest %x, the process says %s", len(r.stdout), size, sum, stderr)
	}
	if st := h.Phase(spec.ID, wire.PhaseEnded); !exited(st, 5) || st.Proof == nil {
		t.Errorf("state %+v", st)
	}
}

func TestAnExitWhileNoHostRunsIsRecorded(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	spec := hosttest.Sh(box, "echo up; read x; echo $x; exit 9")
	spec.Stdin = true
	h.Run(spec)
	hosttest.Eventually(t, "it is up", func() bool {
		st, err := h.Client().Proc(context.Background(), spec.ID)
		return err == nil && st.Log.Next == 3
	})
	live := h.Run(hosttest.Sh(box, "echo up; sleep 1000"))
	h.Phase(live.ID, wire.PhaseRunning)
	if _, err := h.Client().WriteStdin(context.Background(), spec.ID, 0, []byte("bye"), false); err != nil {
		t.Fatal(err)
	}
	shim := h.Shim(spec.ID)
	h.Kill()
	for _, init := range childrenOf(t, shim) {
		for _, command := range childrenOf(t, init) {
			_ = unix.Kill(command, unix.SIGTERM)
		}
	}
	exit := filepath.Join(h.Dir, "procs", spec.ID, "exit.json")
	hosttest.Eventually(t, "the exit record is there", func() bool { _, err := os.Stat(exit); return err == nil })
	h.Start()
	st, err := h.Client().Proc(context.Background(), spec.ID)
	if err != nil || st.Phase != wire.PhaseEnded || st.Exit.Kind != api.ExitSignalled || st.Exit.Signal != "SIGTERM" || st.Proof == nil {
		t.Errorf("first answer of the new host: %+v %+v, %v", st, st.Exit, err)
	}
	if st, err := h.Client().Proc(context.Background(), live.ID); err != nil || st.Phase != wire.PhaseRunning {
		t.Errorf("the other: %+v, %v", st, err)
	}
}

// childrenOf returns the direct children of a process.
func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	out, err := exec.Command("pgrep", "-P", itoa(pid)).Output()
	if err != nil {
		t.Fatalf("children of %d: %v", pid, err)
	}
	var pids []int
	for _, f := range strings.Fields(string(out)) {
		pids = append(pids, atoi(t, f))
	}
	return pids
}

func TestADeadShimIsSettled(t *testing.T) { need.EachRuntime(t, aDeadShimIsSettled) }

func aDeadShimIsSettled(t *testing.T, runtime string) {
	t.Parallel()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	script := `echo said; (setsid sleep 1000 &) ; sleep 1000`
	for name, kill := range map[string]func(pid int){
		"while the host lives":    func(pid int) { _ = unix.Kill(pid, unix.SIGKILL) },
		"while the host is dead":  func(pid int) { h.Kill(); _ = unix.Kill(pid, unix.SIGKILL); h.Start() },
		"together with the host":  func(pid int) { _ = unix.Kill(pid, unix.SIGKILL); h.Restart() },
		"after the host's return": func(pid int) { h.Restart(); _ = unix.Kill(pid, unix.SIGKILL) },
	} {
		spec := h.Run(hosttest.Sh(box, script))
		hosttest.Eventually(t, "it says something", func() bool {
			st, err := h.Client().Proc(context.Background(), spec.ID)
			return err == nil && st.Log.Next == 5
		})
		kill(h.Shim(spec.ID))
		st := h.Phase(spec.ID, wire.PhaseEnded)
		if st.Exit.Kind != api.ExitUnknown || st.Proof == nil || st.Proof.Method != "cgroup" {
			t.Errorf("%s: %+v %+v", name, st, st.Exit)
		}
		if left := h.Inside(box, spec.ID); len(left) > 0 {
			t.Errorf("%s: left inside: %v", name, left)
		}
		if out, _ := h.Output(spec.ID); string(out) != "said\n" {
			t.Errorf("%s: log %q", name, out)
		}
		if again, err := h.Client().Start(context.Background(), spec); err != nil || again.Exit == nil || again.Exit.Kind != api.ExitUnknown {
			t.Errorf("%s: started again: %+v, %v", name, again, err)
		}
	}
}

// A host may be killed between the durable intent and anything else.
func TestADurableIntentIsCarriedOut(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	if err := h.Client().SetLease(context.Background(), time.Hour); err != nil { // as before every start
		t.Fatal(err)
	}
	h.Kill()
	whole, broken, half := hosttest.Sh(box, "echo ran"), hosttest.Sh(box, "echo ran"), hosttest.Sh(box, "echo ran")
	broken.Cwd = "nowhere"
	for _, s := range []wire.ProcSpec{whole, broken} {
		dir := filepath.Join(h.Dir, "procs", s.ID)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := host.WriteSpec(dir, s); err != nil {
			t.Fatal(err)
		}
	}
	// Killed before the intent was durable: nothing was promised.
	if err := os.MkdirAll(filepath.Join(h.Dir, "procs", half.ID, "bundle"), 0o700); err != nil {
		t.Fatal(err)
	}
	h.Start()
	if out, _ := h.Output(whole.ID); string(out) != "ran\n" {
		t.Errorf("it said %q", out)
	}
	st := h.Phase(broken.ID, wire.PhaseEnded)
	if st.Exit.Kind != api.ExitSpawnFailed || st.Proof == nil || st.Proof.Method != "never_started" {
		t.Errorf("one that cannot start: %+v %+v", st, st.Exit)
	}
	if _, err := h.Client().Proc(context.Background(), half.ID); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("one that was not accepted: %v", err)
	}
}

// edit changes a file of a process while no host runs.
func edit(t *testing.T, h *hosttest.Host, id, name string, change func([]byte) []byte) {
	t.Helper()
	path := filepath.Join(h.Dir, "procs", id, name)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, change(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestADamagedExitRecordIsNotSuccess(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	changes := map[string]func([]byte) []byte{
		"flipped":   func(b []byte) []byte { return bytes.Replace(b, []byte(`"exited"`), []byte(`"exitee"`), 1) },
		"empty":     func([]byte) []byte { return nil },
		"cut":       func(b []byte) []byte { return b[:len(b)/2] },
		"not ours":  func([]byte) []byte { return []byte(`{"version":1,"state":{},"crc32c":"00000000"}`) },
		"too large": func([]byte) []byte { return make([]byte, 3<<20) },
	}
	ids := map[string]string{}
	for name := range changes {
		spec := h.Run(hosttest.Sh(box, "echo done"))
		h.Phase(spec.ID, wire.PhaseEnded)
		ids[name] = spec.ID
	}
	hosttest.Eventually(t, "the shims are gone", func() bool { return len(h.Programs("shim")) == 0 })
	h.Kill()
	for name, change := range changes {
		edit(t, h, ids[name], "exit.json", change)
	}
	h.Start()
	for name, id := range ids {
		st := h.Phase(id, wire.PhaseEnded)
		if st.Exit.Kind != api.ExitUnknown || !strings.Contains(st.Exit.Detail, "damaged") || st.Proof == nil {
			t.Errorf("%s: %+v %+v", name, st, st.Exit)
		}
		if out, _ := h.Output(id); string(out) != "done\n" {
			t.Errorf("%s: log %q", name, out)
		}
	}
}

func TestADamagedSpecIsNeverStarted(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	spec := h.Run(hosttest.Sh(box, "echo up; sleep 1000"))
	h.Phase(spec.ID, wire.PhaseRunning)
	shim := h.Shim(spec.ID)
	h.Kill()
	edit(t, h, spec.ID, "spec.json", func(b []byte) []byte { return b[:len(b)-10] })
	h.Start()
	// The shim lives and knows what it keeps.
	if st, err := h.Client().Proc(context.Background(), spec.ID); err != nil || st.Phase != wire.PhaseRunning {
		t.Errorf("with a living shim: %+v, %v", st, err)
	}
	if _, err := h.Client().Start(context.Background(), spec); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("start over a damaged record: %v", err)
	}
	_ = unix.Kill(shim, unix.SIGKILL)
	if st := h.Phase(spec.ID, wire.PhaseEnded); st.Exit.Kind != api.ExitUnknown || st.Proof == nil {
		t.Errorf("after its death: %+v", st)
	}
	if left := h.Inside(box, spec.ID); len(left) > 0 {
		t.Errorf("left inside: %v", left)
	}
}

func TestADamagedLogIsReported(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	spec := hosttest.Sh(h.Box(), "echo first; read x; echo second")
	spec.Stdin = true
	h.Run(spec)
	hosttest.Eventually(t, "the first frame is there", func() bool {
		st, err := h.Client().Proc(context.Background(), spec.ID)
		return err == nil && st.Log.Next == 6
	})
	if _, err := h.Client().WriteStdin(context.Background(), spec.ID, 0, []byte("\n"), false); err != nil {
		t.Fatal(err)
	}
	h.Phase(spec.ID, wire.PhaseEnded)
	segs, err := filepath.Glob(filepath.Join(h.Dir, "procs", spec.ID, "log", "*.seg"))
	if err != nil || len(segs) != 1 {
		t.Fatalf("%v, %v", segs, err)
	}
	edit(t, h, spec.ID, "log/"+filepath.Base(segs[0]), func(b []byte) []byte {
		b[len(b)-1] ^= 1
		return b
	})
	body, err := h.Client().Log(context.Background(), spec.ID, host.LogQuery{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	r := host.NewFrameReader(body, 0)
	var got []byte
	for {
		b, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range host.Frames(b.Frames) {
			got = append(got, p...)
		}
		if b.Status != nil {
			if string(got) != "first\n" || b.Status.EOF || b.Status.Error == nil || b.Status.Error.Code != errdefs.Indeterminate {
				t.Errorf("read %q, status %+v", got, b.Status)
			}
			return
		}
	}
}

func TestAfterARebootNothingCanRun(t *testing.T) { need.EachRuntime(t, afterARebootNothingCanRun) }

func afterARebootNothingCanRun(t *testing.T, runtime string) {
	t.Parallel()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	spec := h.Run(hosttest.Sh(box, "echo up; sleep 1000"))
	h.Phase(spec.ID, wire.PhaseRunning)
	shim := h.Shim(spec.ID)
	h.Kill()
	// A machine that went down in the middle: every process is gone, and the
	// files are those of another boot.
	inside := childrenOf(t, shim)
	_ = unix.Kill(shim, unix.SIGKILL)
	for _, pid := range inside {
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	another := func(b []byte) []byte { return bytes.Replace(b, []byte(bootID(t)), []byte(otherBoot), 1) }
	edit(t, h, spec.ID, "shim.json", another)
	edit(t, h, spec.ID, "starting", another)
	h.Start()
	st := h.Phase(spec.ID, wire.PhaseEnded)
	if st.Exit.Kind != api.ExitUnknown || st.Proof == nil || st.Proof.Method != "reboot" {
		t.Errorf("%+v %+v", st, st.Exit)
	}
}

const otherBoot = "00000000-0000-0000-0000-000000000000"

func bootID(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// A power cut soon after a start takes whatever was not synced, but not the
// intent and the start marker: they are enough to know that nothing runs.
func TestAPowerCutLeavesNoFence(t *testing.T) {
	t.Parallel()
	h := hosttest.New(t)
	box := h.Box()
	h.Kill()
	spec := hosttest.Sh(box, "echo never")
	dir := filepath.Join(h.Dir, "procs", spec.ID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := host.WriteSpec(dir, spec); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"starting": spec.ID + "\n" + otherBoot + "\n", "keep.json": "", "shim.json": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h.Start()
	st := h.Phase(spec.ID, wire.PhaseEnded)
	if st.Exit.Kind != api.ExitUnknown || st.Proof == nil || st.Proof.Method != "reboot" {
		t.Errorf("%+v %+v", st, st.Exit)
	}
}
