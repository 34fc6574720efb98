package spool

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

var benchSizes = []int{100, 4 << 10, 64 << 10, 256 << 10}

func sizeName(n int) string {
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	return fmt.Sprintf("%dKiB", n>>10)
}

func BenchmarkAppend(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(sizeName(size), func(b *testing.B) {
			w := newWriter(b, Config{Overflow: api.OverflowDropOldest})
			p := content(0, size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				appendAll(b, w, wire.KindStdout, p)
			}
		})
	}
}

// BenchmarkRead reads one log of 48 MiB again and again, in reads of 256 KiB.
func BenchmarkRead(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(sizeName(size), func(b *testing.B) {
			dir := b.TempDir()
			w := newWriter(b, Config{Dir: dir, Cap: 256 << 20})
			p := content(0, size)
			for w.State().Next < 48<<20 {
				appendAll(b, w, wire.KindStdout, p)
			}
			r := newReader(b, dir)
			next, cursor := w.State().Next, int64(0)
			const max = 256 << 10
			buf := make([]byte, BufSize(max))
			total := int64(0)
			b.ReportAllocs()
			b.ResetTimer()
			for range b.N {
				frames, n, _, err := r.Read(cursor, max, next, buf)
				if err != nil || len(frames) == 0 {
					b.Fatal(len(frames), err)
				}
				total += n - cursor
				if cursor = n; cursor == next {
					cursor = 0
				}
			}
			b.ReportMetric(float64(total)/(1<<20)/b.Elapsed().Seconds(), "MiB/s")
		})
	}
}

// BenchmarkReadAnywhere reads 64 KiB from a place the reader did not stop at: the
// price of finding it, at worst (a segment of tiny records).
func BenchmarkReadAnywhere(b *testing.B) {
	for _, size := range []int{100, 64 << 10} {
		b.Run(sizeName(size), func(b *testing.B) {
			dir := b.TempDir()
			w := newWriter(b, Config{Dir: dir, Cap: 256 << 20})
			p := content(0, size)
			for w.State().Next < 48<<20 {
				appendAll(b, w, wire.KindStdout, p)
			}
			r := newReader(b, dir)
			next := w.State().Next
			const max = 64 << 10
			buf := make([]byte, BufSize(max))
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				cursor := int64(i) * 7_777_777 % (next - max)
				if _, _, _, err := r.Read(cursor, max, next, buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTogether writes and reads one log at the same time, under block: what
// a stream from child to reader can do at most, pipe and HTTP left out.
func BenchmarkTogether(b *testing.B) {
	for _, size := range benchSizes {
		b.Run(sizeName(size), func(b *testing.B) {
			dir := b.TempDir()
			w := newWriter(b, Config{Dir: dir})
			p := content(0, size)
			total := int64(b.N) * int64(size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			var wg sync.WaitGroup
			wg.Go(func() {
				for range b.N {
					if err := w.Append(context.Background(), wire.KindStdout, p); err != nil {
						b.Error(err)
						return
					}
				}
			})
			r := newReader(b, dir)
			const max = 256 << 10
			buf := make([]byte, BufSize(max))
			for cursor := int64(0); cursor < total; {
				changed := w.Changed()
				limit := w.State().Next
				if limit == cursor {
					<-changed
					continue
				}
				_, next, gap, err := r.Read(cursor, max, limit, buf)
				if err != nil || gap != nil {
					b.Fatal(gap, err)
				}
				cursor = next
				if err := w.Ack(cursor); err != nil {
					b.Fatal(err)
				}
			}
			wg.Wait()
		})
	}
}
