package rpc

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"runtime"
	"testing"
)

// osPipes is a pair of stdio transports over pipes of the kernel, as a worker has them.
func osPipes(t testing.TB) (a, b Transport) {
	r1, w1, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r2, w2, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	closer := func(r, w *os.File) func() error {
		return func() error { w.Close(); return r.Close() }
	}
	return Stdio(r1, w2, closer(r1, w2)), Stdio(r2, w1, closer(r2, w1))
}

var benchSizes = []struct {
	name string
	n    int
}{{"300B", 300}, {"8KiB", 8 << 10}, {"64KiB", 64 << 10}, {"1MiB", 1 << 20}}

// BenchmarkCall is one call and its answer over pipes: two messages, four goroutines.
func BenchmarkCall(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(size.name, func(b *testing.B) {
			x, y := osPipes(b)
			l, _, stop := join(b, x, y, Config{}, Config{Handle: echo})
			defer stop()
			data := object(size.n)
			b.SetBytes(2 * int64(size.n))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := l.Call(context.Background(), "echo", data, CallOptions{Context: testBinding}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRelay is a call from a host through the Runtime's middle to a worker: what
// the middle adds is the difference to BenchmarkCall.
func BenchmarkRelay(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(size.name, func(b *testing.B) {
			x, y := osPipes(b)
			down, _, stop := join(b, x, y, Config{}, Config{Handle: echo})
			defer stop()
			v, w := osPipes(b)
			host, _, stop2 := join(b, v, w, Config{}, Config{Handle: func(ctx context.Context, in *Inbound) (any, error) {
				return down.Call(ctx, in.Action, in.Data, CallOptions{Context: in.Context})
			}})
			defer stop2()
			data := object(size.n)
			b.SetBytes(2 * int64(size.n))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := host.Call(context.Background(), "echo", data, CallOptions{Context: testBinding}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkParallel is how many calls a second pass over one connection.
func BenchmarkParallel(b *testing.B) {
	x, y := osPipes(b)
	l, _, stop := join(b, x, y, Config{}, Config{Handle: echo})
	defer stop()
	data := object(300)
	b.SetParallelism(16)
	b.ReportAllocs()
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			if _, err := l.Call(context.Background(), "echo", data, CallOptions{Context: testBinding}); err != nil {
				b.Error(err)
			}
		}
	})
}

// BenchmarkStream is one frame of a flow-controlled stream.
func BenchmarkStream(b *testing.B) {
	x, y := osPipes(b)
	frame := object(300)
	l, _, stop := join(b, x, y, Config{}, Config{Handle: func(ctx context.Context, in *Inbound) (any, error) {
		for range b.N {
			if err := in.Send(ctx, frame); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}})
	defer stop()
	b.ReportAllocs()
	b.ResetTimer()
	s, err := l.Stream(context.Background(), "act", nil, CallOptions{})
	if err != nil {
		b.Fatal(err)
	}
	for {
		if _, err := s.Next(context.Background()); err == io.EOF {
			return
		} else if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkIdle is the memory of one idle connection that has been busy.
func BenchmarkIdle(b *testing.B) {
	const n = 200
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		var stops []func()
		for range n {
			x, y := osPipes(b)
			l, _, stop := join(b, x, y, Config{}, Config{Handle: echo})
			stops = append(stops, stop)
			if _, err := l.Call(context.Background(), "echo", object(200<<10), CallOptions{Context: testBinding}); err != nil {
				b.Fatal(err)
			}
			for range 2 * calmReads {
				if _, err := l.Call(context.Background(), "echo", json.RawMessage(`{}`), CallOptions{Context: testBinding}); err != nil {
					b.Fatal(err)
				}
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		used := float64(after.HeapInuse+after.StackInuse) - float64(before.HeapInuse+before.StackInuse)
		b.ReportMetric(used/(2*n), "B/conn")
		for _, stop := range stops {
			stop()
		}
	}
}
