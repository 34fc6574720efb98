package relay

import (
	"runtime"
	"runtime/debug"
	"syscall"
	"testing"
	"time"
)

// A silent daemon costs the hub at most 19 KiB, also when it has been pinged.
func TestIdleDaemonIsCheap(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector's memory is not the hub's")
	}
	const daemons, most = 1000, 19 << 10
	_, url := newHub(t, func(c *HubConfig) {
		c.Limits.Daemons, c.Limits.PingInterval, c.Limits.PongTimeout = daemons+1, 50*time.Millisecond, time.Minute
		c.Logger = nil
	})
	rawConnect(t, url, "first")
	used := func() int64 {
		debug.FreeOSMemory()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse + m.StackInuse)
	}
	before := used()
	for i := range daemons {
		fd := bareConnect(t, url, i)
		t.Cleanup(func() { syscall.Close(fd) })
	}
	each := (used() - before) / daemons
	t.Logf("%d bytes per silent daemon", each)
	if each > most {
		t.Errorf("a silent daemon costs %d bytes, at most %d", each, most)
	}
}
