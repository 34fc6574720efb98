package broker

import (
	"context"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// bare is a rig in real time, over a real ledger and a host that answers at once.
func bare(b *testing.B) *rig {
	r := &rig{t: b, ctx: context.Background(), path: filepath.Join(b.TempDir(), "ledger.db"), host: newFakeHost(b),
		gate: newFakeGateway(), signer: secret.NewSigner(), limits: Limits{PerRun: 100_000, PerWorkspace: 100_000, PerTarget: 100_000}}
	r.boot()
	r.scene0()
	return r
}

// scene0 is scene without virtual time.
func (r *rig) scene0() {
	for r.b.targets["local"].here() == nil {
		runtime.Gosched()
	}
	r.scene()
}

// BenchmarkOpen is the broker's own share of an open: two durable commits, one
// request to a host that answers at once, everything around them.
func BenchmarkOpen(b *testing.B) {
	r := bare(b)
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		req := request("r"+decimal(int64(i)), "true")
		begun := time.Now()
		p, err := r.b.Open(r.ctx, r.run, req)
		took = append(took, time.Since(begun))
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if _, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{GraceMillis: millis(0)}); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}

// BenchmarkCloseToReceipt is the same for a close.
func BenchmarkCloseToReceipt(b *testing.B) {
	r := bare(b)
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		p, err := r.b.Open(r.ctx, r.run, request("r"+decimal(int64(i)), "true"))
		if err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		if _, err := r.b.Close(r.ctx, r.run, p.Handle, api.CloseRequest{GraceMillis: millis(0)}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkIdle is what a live process costs the server that does nothing with
// it, and how long it takes to classify all after a restart.
func BenchmarkIdle(b *testing.B) {
	const n = 5000
	r := bare(b)
	for i := range n {
		if _, err := r.b.Open(r.ctx, r.run, request("r"+decimal(int64(i)), "true")); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		r.stop()
		before := inUse()
		begun := time.Now()
		r.boot()
		for r.b.Stats().Owners < n || r.b.Stats().Unclassified > 0 {
			time.Sleep(time.Millisecond)
		}
		b.ReportMetric(float64(time.Since(begun).Milliseconds()), "ms-to-classify")
		b.ReportMetric(float64(inUse()-before)/n, "B/process")
	}
	live, err := r.ledger.Processes(r.ctx, everything(), store.ProcessFilter{Live: true, Page: store.Page{Limit: 1000}})
	if err != nil || len(live) != 1000 {
		b.Fatal(len(live), err)
	}
}

func inUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc + m.StackInuse)
}
