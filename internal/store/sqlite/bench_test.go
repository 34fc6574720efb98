package sqlite

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/store"
)

// BenchmarkSync is the baseline: what the disk itself can make durable, one
// append of a page at a time.
func BenchmarkSync(b *testing.B) {
	for name, sync := range map[string]func(int) error{"fsync": syscall.Fsync, "fdatasync": syscall.Fdatasync} {
		b.Run(name, func(b *testing.B) {
			f, err := os.Create(filepath.Join(b.TempDir(), "f"))
			if err != nil {
				b.Fatal(err)
			}
			defer f.Close()
			page := make([]byte, 4096)
			for b.Loop() {
				if _, err := f.Write(page); err != nil {
					b.Fatal(err)
				}
				if err := sync(int(f.Fd())); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "syncs/s")
		})
	}
}

// BenchmarkCreateProcess records intents durably, with an audit event each, from
// a number of callers, beside a number of processes that live already and those
// it makes.
func BenchmarkCreateProcess(b *testing.B) {
	for _, c := range []struct{ callers, live int }{{1, 0}, {64, 0}, {1, 5000}, {64, 5000}} {
		b.Run(fmt.Sprintf("callers=%d/live=%d", c.callers, c.live), func(b *testing.B) {
			s := open(b, Config{Path: tempPath(b)})
			defer s.Close()
			base, err := seed(b.Context(), s, "w")
			if err != nil {
				b.Fatal(err)
			}
			var n atomic.Int64
			create := func() {
				p, a := processOf(base, fmt.Sprint("p", n.Add(1)))
				if _, _, err := s.CreateProcess(b.Context(), p, store.Capacity{PerTarget: 1 << 30, PerWorkspace: 1 << 30, PerRun: 1 << 30}, a); err != nil {
					b.Error(err)
				}
			}
			spread(c.live, 64, create)
			b.ResetTimer()
			spread(b.N, c.callers, create)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
		})
	}
}

// BenchmarkSaveProcess saves a new state, each caller of its own process.
func BenchmarkSaveProcess(b *testing.B) {
	for _, callers := range []int{1, 64} {
		b.Run(fmt.Sprintf("callers=%d", callers), func(b *testing.B) {
			s := open(b, Config{Path: tempPath(b)})
			defer s.Close()
			r, err := seed(b.Context(), s, "w")
			if err != nil {
				b.Fatal(err)
			}
			procs := make(chan store.Process, callers)
			for i := range callers {
				p, a := processOf(r, fmt.Sprint("p", i))
				p, _, err := s.CreateProcess(b.Context(), p, store.Capacity{}, a)
				if err != nil {
					b.Fatal(err)
				}
				procs <- p
			}
			b.ResetTimer()
			spread(b.N, callers, func() {
				p := <-procs
				v, err := s.SaveProcess(b.Context(), p, store.Change{})
				if err != nil {
					b.Error(err)
				}
				p.Version = v
				procs <- p
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "saves/s")
		})
	}
}

// BenchmarkReads is what most requests need.
func BenchmarkReads(b *testing.B) {
	s := open(b, Config{Path: tempPath(b)})
	defer s.Close()
	r, err := seed(b.Context(), s, "w")
	if err != nil {
		b.Fatal(err)
	}
	var n atomic.Int64
	spread(5000, 64, func() {
		p, a := processOf(r, fmt.Sprint("p", n.Add(1)))
		if _, _, err := s.CreateProcess(b.Context(), p, store.Capacity{}, a); err != nil {
			b.Error(err)
		}
	})
	sc := store.Scope{Workspace: r.Workspace, Run: r.ID}
	b.Run("Process", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Process(b.Context(), sc, "proc_p77"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Page100", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Processes(b.Context(), sc, store.ProcessFilter{Live: true, Page: store.Page{Limit: 100}}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// spread does n pieces of work from a number of callers.
func spread(n, callers int, do func()) {
	var left atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				do()
			}
		})
	}
	wg.Wait()
}
