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
	"time"

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

// private returns the private resident memory of a process in bytes.
func private(t testing.TB, pid int) int64 {
	t.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	check(t, err)
	defer f.Close()
	sum := int64(0)
	for sc := bufio.NewScanner(f); sc.Scan(); {
		name, rest, _ := strings.Cut(sc.Text(), ":")
		if name == "Private_Dirty" || name == "Private_Clean" {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			check(t, err)
			if name == "Private_Clean" {
				t.Logf("private clean %d KiB", kb)
			}
			sum += kb << 10
		}
	}
	return sum
}

// An idle shim has at most 2 MiB of its own, also after it was busy.
func TestIdleMemory(t *testing.T) {
	exe := hostProgram(t)
	other := func(c *Config) {}
	p := newProcExe(t, exe, sh(`echo ready; read x; head -c 50000000 /dev/zero; cat >/dev/null; sleep 1000`), with(stdin), with(other)).start()
	p.says("ready")
	id, _ := readIdentity(p.dir)
	time.Sleep(2 * time.Second)
	t.Logf("idle shim: %d KiB", private(t, id.PID)>>10)
	b, err := os.ReadFile(filepath.Join(p.dir, pidFile))
	check(t, err)
	pid, _ := strconv.Atoi(strings.TrimSpace(string(b)))
	t.Logf("init: %d KiB", private(t, pid)>>10)
	out, _ := exec.Command("sh", "-c", fmt.Sprintf("awk '/^[0-9a-f]+-/{n=$0} /^Private_Dirty/&&$2>0{print $2, n}' /proc/%d/smaps|sort -n; ls /proc/%d/task | wc -l; ls /proc/%d/task | wc -l", id.PID, id.PID, pid)).CombinedOutput()
	t.Logf("%s", out)
	at := int64(0)
	for i := range 20 {
		data := make([]byte, 1<<20)
		if i == 0 {
			data[0] = '\n'
		}
		st, err := p.client.WriteStdin(p.ctx(), at, data, false)
		if err != nil {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		at = st.Accepted
	}
	p.until(0, "output", func(st wire.ProcState) bool { return st.Log.Next >= 50000000 })
	time.Sleep(2 * time.Second)
	out, _ = exec.Command("sh", "-c", fmt.Sprintf("awk '/^[0-9a-f]+-/{n=$0} /^Private_Dirty/&&$2>0{print $2, n}' /proc/%d/smaps|sort -n; ", id.PID)).CombinedOutput()
	t.Logf("%s", out)
	b, _ = os.ReadFile(filepath.Join(p.dir, logFile))
	t.Logf("%s", b)
	t.Logf("after use: %d KiB", private(t, id.PID)>>10)
}
