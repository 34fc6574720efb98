package pluginruntime

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// A runtime idles most of its life. What a busy time has left (garbage, grown stacks,
// free spans) the collector would keep until the next one, and then again: with 50
// workers that had started it was a third of the process's memory.
const (
	// lookEvery is how often it is looked whether a busy time is over.
	lookEvery = 3 * time.Second
	// quietBytes is the most that is allocated between two looks while nothing happens.
	quietBytes = 128 << 10
	// worthBytes is how much must have been allocated for a trim to be worth its time,
	// some milliseconds.
	worthBytes = 2 << 20
	// gcPercent keeps what lives together: with 100 the live objects of 50 workers, 2.5 MiB,
	// are strewn over 5.7 MiB of spans, with 50 over 4.7.
	gcPercent = 50
)

// giveBack returns memory to the system after each busy time, until ctx ends. An
// operator's GOGC is left as it is.
func giveBack(ctx context.Context) {
	if os.Getenv("GOGC") == "" {
		defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	var last, trimmed uint64
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		metrics.Read(sample)
		now := sample[0].Value.Uint64()
		if now-last < quietBytes && now-trimmed > worthBytes {
			debug.FreeOSMemory()
			trimmed = now
		}
		last = now
	}
}
