package worker

import (
	"bufio"
	"io"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// BenchmarkStart is the way of a worker that does nothing: started, its first
// line, its end and the proof of it.
func BenchmarkStart(b *testing.B) {
	script := "print('up', flush=True)\nimport sys\nsys.stdin.read()\n"
	run := func(b *testing.B, r rig) {
		for b.Loop() {
			p, err := r.Start(b.Context(), r.spec)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := bufio.NewReader(p.Stdout).ReadString('\n'); err != nil && err != io.EOF {
				b.Fatal(err)
			}
			if o := p.Stop(0); o.Err != nil {
				b.Fatal(o.Err)
			}
		}
	}
	b.Run("direct", func(b *testing.B) { run(b, newDirect(b, bare(b, script))) })
	b.Run("runc", func(b *testing.B) { run(b, newBox(b, bare(b, script), with(b, need.Runc(b)))) })
}
