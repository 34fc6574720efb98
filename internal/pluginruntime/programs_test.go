package pluginruntime

import (
	"context"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
)

// TestPrograms runs what needs the programs as they are shipped, built once.
func TestPrograms(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Programs(t, dir)
	t.Run("stdio control", func(t *testing.T) { testStdioControl(t, dir) })
	t.Run("signals", func(t *testing.T) { testSignals(t, dir) })
	t.Run("shared profile", func(t *testing.T) { testSharedProfile(t, dir) })
	t.Run("runner processes", func(t *testing.T) { testRunnerProcesses(t, dir) })
	t.Run("runner processes end", func(t *testing.T) { testRunnerProcessesEnd(t, dir) })
	t.Run("runner processes of boxed workers", func(t *testing.T) { testRunnerProcessesOfBoxedWorkers(t, dir) })
	t.Run("a killed runtime leaves no run", func(t *testing.T) { testKilledRuntimeLeavesNoRun(t, dir) })
}

// testStdioControl (AP-01): LangBot starts the program as its child and speaks over
// its standard streams; the program ends when LangBot hangs up.
func testStdioControl(t *testing.T, programs string) {
	t.Parallel()
	dir := t.TempDir()
	kit := install(workspace("ws-1"), "kit-1", "kit")(t)
	for range 2 { // the second finds the directory free
		cmd := exec.Command(filepath.Join(programs, "stockade"), "runtime", "-s", "--python", need.SDK(t, "0.7"), "--data-dir", filepath.Join(dir, "data"),
			"--listen", "127.0.0.1", "--ws-debug-port", "0")
		var said strings.Builder
		cmd.Stderr = &said
		h, err := lbhost.Start(cmd, lbhost.Config{Dir: filepath.Join(dir, "langbot")})
		if err != nil {
			t.Fatal(err)
		}
		_, err = h.Handshake(t.Context(), h.Workspace("ws-1"), kit)
		if err == nil {
			running(t, h, kit)
			_, err = h.CallTool(t.Context(), kit.Binding, "probe", M{"op": "big", "size": 100_000})
		}
		if cerr := h.Close(); err != nil || cerr != nil {
			t.Fatalf("%v, %v; it said: %s", err, cerr, said.String())
		}
		if !strings.Contains(said.String(), "plugin runtime: LangBot on standard input and output") {
			t.Errorf("it said: %s", said.String())
		}
	}
}

// testSignals (AP-15): SIGTERM stops the workers in order, and the program ends well.
func testSignals(t *testing.T, programs string) {
	t.Parallel()
	data := filepath.Join(t.TempDir(), "data")
	cmd := exec.Command(filepath.Join(programs, "stockade"), "runtime", "--python", need.SDK(t, "0.7"), "--data-dir", data,
		"--listen", "127.0.0.1", "--ws-control-port", "0", "--ws-debug-port", "0")
	var said strings.Builder
	cmd.Stderr = &said
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	defer func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}()
	at := addresses(t, data)
	r := &live{t: t, dir: filepath.Dir(data), at: at}
	kit := install(workspace("ws-1"), "kit-1", "kit")(t)
	h := r.connect(lbhost.Config{}, kit)
	running(t, h, kit)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	select {
	case <-h.Gone():
	case <-ctx.Done():
		t.Fatal("the connection did not end")
	}
	out, _ := io.ReadAll(stdout)
	ended = true
	if err := cmd.Wait(); err != nil || len(out) != 0 {
		t.Errorf("it ended with %v, wrote %q and said: %s", err, out, said.String())
	}
}
