package shim

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/wire"
)

// From Start to the first byte of output in the log, against the runtime alone
// with the same bundle, from its start to the first byte in a pipe. They take
// turns, so that both meet the same machine; the medians count.
func BenchmarkFirstByte(b *testing.B) {
	exe := hostProgram(b)
	var shims, runtimes []time.Duration
	for b.Loop() {
		p := newProcExe(b, exe, sh(`echo ready; sleep 1000`))
		began := time.Now()
		check(b, Start(p.ctx(), p.exe, p.dir))
		p.until(0, "output", func(st wire.ProcState) bool { return st.Log.Next > 0 })
		shims = append(shims, time.Since(began))
		p.close(0)

		p = newProcExe(b, exe, sh(`echo ready; sleep 1000`), plain)
		cmd := exec.Command(p.cfg.Runtime, "--root", p.cfg.RuntimeRoot, "run", "--bundle", p.cfg.Bundle, p.cfg.Container)
		out, err := cmd.StdoutPipe()
		check(b, err)
		began = time.Now()
		check(b, cmd.Start())
		_, err = out.Read(make([]byte, 16))
		runtimes = append(runtimes, time.Since(began))
		check(b, err)
		check(b, exec.Command(p.cfg.Runtime, "--root", p.cfg.RuntimeRoot, "delete", "--force", p.cfg.Container).Run())
		_ = cmd.Wait()
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2]) / 1e6
	}
	b.ReportMetric(median(shims), "ms/shim")
	b.ReportMetric(median(runtimes), "ms/runtime")
	b.ReportMetric(median(shims)/median(runtimes), "ratio")
	b.ReportMetric(0, "ns/op")
}

// One stream from the child into the log, against the same producer into a file
// through a pipe.
func BenchmarkOutput(b *testing.B) {
	exe := hostProgram(b)
	const n = 256 << 20
	producer := fmt.Sprintf(`exec head -c %d /dev/zero`, n)
	b.Run("shim", func(b *testing.B) {
		b.SetBytes(n)
		for b.Loop() {
			b.StopTimer()
			p := newProcExe(b, exe, sh(`read x; `+producer), with(stdin), with(func(c *Config) { c.Spec.SpoolBytes = 2 * n }))
			p.start()
			p.until(-1, "running", func(st wire.ProcState) bool { return st.Phase == wire.PhaseRunning })
			b.StartTimer()
			_, err := p.client.WriteStdin(p.ctx(), 0, []byte("\n"), true)
			check(b, err)
			p.until(-1, "the end of the log", func(st wire.ProcState) bool { return st.Log.EOF })
			b.StopTimer()
			p.ended()
			b.StartTimer()
		}
	})
	b.Run("dd", func(b *testing.B) {
		b.SetBytes(n)
		for b.Loop() {
			file := filepath.Join(b.TempDir(), "out")
			check(b, exec.Command("sh", "-c", fmt.Sprintf("(%s) | dd of=%s bs=256k 2>/dev/null", producer, file)).Run())
			check(b, os.Remove(file))
		}
	})
}
