package shim

import (
	"runtime"
	"runtime/debug"
)

// A shim lives long and mostly idles, so what counts is how many pages it has
// touched. Measured (Go 1.26, private anonymous memory of an idle shim): 1.1 MiB
// as long as the collector never ran; 2.4 MiB after two cycles, because the first
// cycles build the collector's own tables, which are larger than all the garbage
// of a start. So a start stays below the collector's threshold, and only a shim
// that was busy collects and gives back.
const (
	// gcPercent puts the first cycle at 2 MiB of heap (4 MiB × 50 %).
	gcPercent = 50
	// shimProcs is how many threads of a shim run Go code at once.
	shimProcs = 1
	// trimAfter is how much must have been allocated for a trim to be worth it.
	trimAfter = 2 << 20
	// trimQuiet is the most that a shim allocates between two looks while it idles.
	trimQuiet = 128 << 10
)

func tune() {
	runtime.GOMAXPROCS(shimProcs)
	debug.SetGCPercent(gcPercent)
}

// memory gives back what a busy time has left, once it is over.
type memory struct {
	last    uint64 // allocated in all at the last look
	trimmed uint64 // and at the last trim
}

func (m *memory) trim() {
	var st runtime.MemStats
	runtime.ReadMemStats(&st)
	quiet := st.TotalAlloc-m.last < trimQuiet
	m.last = st.TotalAlloc
	if quiet && st.TotalAlloc-m.trimmed > trimAfter {
		debug.FreeOSMemory()
		m.trimmed = st.TotalAlloc
	}
}
