package shim

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/wire"
)

// hostProgram builds the real host program, as it is shipped.
func hostProgram(t testing.TB) string {
	t.Helper()
	need.Runc(t)
	dir, err := os.MkdirTemp("", "shimexe")
	check(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	check(t, os.Chmod(dir, 0o755))
	exe := filepath.Join(dir, "stockade-host")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", exe, "github.com/stockade-run/stockade/cmd/stockade-host")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the host program: %v\n%s", err, out)
	}
	if out, err := exec.Command("sync", exe).CombinedOutput(); err != nil { // dirty pages of a new file look private
		t.Fatalf("sync: %v %s", err, out)
	}
	return exe
}

// anonymous returns the anonymous resident memory of a process in bytes: what it
// shares with nobody. The pages of its program are shared with every other shim.
func anonymous(t testing.TB, pid int) int64 {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	check(t, err)
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if rest, ok := strings.CutPrefix(sc.Text(), "Anonymous:"); ok {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			check(t, err)
			return kb << 10
		}
	}
	t.Fatal("no Anonymous in smaps_rollup")
	return 0
}

// An idle shim has at most 2 MiB of its own (DESIGN section 11).
func TestIdleMemory(t *testing.T) {
	t.Parallel()
	p := newProcExe(t, hostProgram(t), sh(`echo ready; sleep 1000`), with(stdin)).start()
	p.says("ready")
	p.until(-1, "running", func(st wire.ProcState) bool { return st.Phase == wire.PhaseRunning })
	id, _ := readIdentity(p.dir)
	got := anonymous(t, id.PID)
	b, err := os.ReadFile(filepath.Join(p.dir, pidFile))
	check(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	check(t, err)
	t.Logf("shim %d KiB, init %d KiB", got>>10, anonymous(t, pid)>>10)
	if got > 2<<20 {
		t.Errorf("an idle shim has %d KiB of its own, the limit is 2048", got>>10)
	}
}
