package host_test

import (
	"context"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/host"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/wire"
)

// follow reads a log to its end and returns how much output it held, and when
// the first of it came.
func follow(b *testing.B, h *hosttest.Host, id string) (int64, time.Time) {
	b.Helper()
	body, err := h.Client().Log(context.Background(), id, host.LogQuery{Follow: true})
	if err != nil {
		b.Fatal(err)
	}
	defer body.Close()
	var first time.Time
	r := host.NewFrameReader(body, 0)
	for {
		batch, err := r.Next()
		if err != nil {
			b.Fatal(err)
		}
		if first.IsZero() {
			first = time.Now()
		}
		if batch.Status != nil {
			return r.Cursor(), first
		}
	}
}

// BenchmarkStart measures from the request to its answer (accepted, durable) and
// to the first byte of output.
func BenchmarkStart(b *testing.B) {
	h := hosttest.New(b)
	box := h.Box()
	var answer, output time.Duration
	for b.Loop() {
		spec := hosttest.Spec(box, "/bin/echo", "x")
		begin := time.Now()
		if _, err := h.Client().Start(context.Background(), spec); err != nil {
			b.Fatal(err)
		}
		answer += time.Since(begin)
		_, first := follow(b, h, spec.ID)
		output += first.Sub(begin)
		h.Phase(spec.ID, wire.PhaseEnded)
	}
	b.ReportMetric(float64(answer.Microseconds())/float64(b.N)/1000, "ms/answer")
	b.ReportMetric(float64(output.Microseconds())/float64(b.N)/1000, "ms/first-byte")
}

// BenchmarkLive measures child, log on disk, reader, at the same time.
func BenchmarkLive(b *testing.B) {
	h := hosttest.New(b)
	box := h.Box()
	const size = 1 << 30
	for b.Loop() {
		spec := hosttest.Sh(box, "head -c 1073741824 /dev/zero")
		spec.SpoolBytes = 2 << 30
		h.Run(spec)
		if n, _ := follow(b, h, spec.ID); n != size {
			b.Fatalf("%d bytes", n)
		}
		h.Phase(spec.ID, wire.PhaseEnded)
		if err := h.Client().Forget(context.Background(), spec.ID); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(size)
}

// BenchmarkEnded measures reading a log that is there already.
func BenchmarkEnded(b *testing.B) {
	h := hosttest.New(b)
	const size = 1 << 30
	spec := hosttest.Sh(h.Box(), "head -c 1073741824 /dev/zero")
	spec.SpoolBytes = 2 << 30
	h.Run(spec)
	h.Phase(spec.ID, wire.PhaseEnded)
	for b.Loop() {
		if n, _ := follow(b, h, spec.ID); n != size {
			b.Fatalf("%d bytes", n)
		}
	}
	b.SetBytes(size)
}
