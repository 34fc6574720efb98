package bench

import (
	"fmt"
	"time"
)

// runtimeResults makes the rows of the report.
func runtimeResults(cfg RuntimeConfig, alone through, ours, base *runtimeFigures, jail string) []Result {
	var rows []Result
	add := func(name string, value float64, unit string, baseline float64, target string, ok bool, note string) {
		rows = append(rows, Result{Name: name, Value: round3(value), Unit: unit, Baseline: round3(baseline), Ratio: ratio(value, baseline), Target: target, OK: ok, Note: note})
	}
	const mib = 1 << 20
	added := func(d, without time.Duration) float64 { return millis(max(d-without, 0)) }
	few := func(name string, v, b float64, unit, note string) {
		add(name, v, unit, b, "≤ 1/5", v <= b/5, note)
	}
	for _, q := range []struct {
		name string
		at   float64
	}{{"p50", .5}, {"p99", .99}} {
		without := quantile(alone.latencies, q.at)
		few("added to a tool call, "+q.name, added(quantile(ours.through.latencies, q.at), without), added(quantile(base.through.latencies, q.at), without), "ms",
			fmt.Sprintf("the worker alone needs %.3f ms", millis(without)))
	}
	perCall := func(t through) float64 { return t.callCPU.Seconds() * 1000 / float64(t.calls.n) }
	few("runtime's processor time per call", perCall(ours.through), perCall(base.through), "ms", "")
	more := func(name string, v, b float64, unit, note string) {
		add(name, v, unit, b, "more", v > b, note)
	}
	more("tool calls", ours.through.calls.perSecond(), base.through.calls.perSecond(), "/s",
		fmt.Sprintf("%d at once into one worker, which alone does %.0f/s", callsAtOnce, alone.calls.perSecond()))
	more("stream frames", ours.through.frames.perSecond(), base.through.frames.perSecond(), "/s",
		fmt.Sprintf("one stream; the worker alone sends %.0f/s", alone.frames.perSecond()))
	more(fmt.Sprintf("events to %d plugins", cfg.Dedicated), ours.events, base.events, "/s", "deliveries; the workers share the processors with the runtime")
	add("file into the runtime", ours.file.perSecond()/mib, "MiB/s", base.file.perSecond()/mib, "≥ 5 ×", ours.file.perSecond() >= 5*base.file.perSecond(),
		"chunks of 16 KiB, each answered before the next")
	quarter := func(name string, v, b int64) {
		add(name, float64(v)/mib, "MiB", float64(b)/mib, "≤ 1/4", v <= b/4, "private to the runtime's own process")
	}
	quarter(fmt.Sprintf("memory, %d installations", cfg.Dedicated), ours.manyMemory, base.manyMemory)
	quarter(fmt.Sprintf("memory, %d slots in one process", cfg.Slots), ours.poolMemory, base.poolMemory)
	idle := func(name string, v, b time.Duration) {
		add(name, millis(v), "ms/s", millis(b), "no more", v <= b+time.Millisecond, "processor time of the runtime's own process")
	}
	idle(fmt.Sprintf("idle, %d installations", cfg.Dedicated), ours.manyIdle, base.manyIdle)
	idle(fmt.Sprintf("idle, %d slots in one process", cfg.Slots), ours.poolIdle, base.poolIdle)
	less := func(name string, v, b time.Duration, note string) {
		add(name, millis(v), "ms", millis(b), "no more", v <= b+b/10, note)
	}
	less("slot attach, p50", ours.attachP50, base.attachP50, jail)
	less("slot attach, p99", ours.attachP99, base.attachP99, "")
	less("apply to running, everything cached, p50", quantile(ours.applied, .5), quantile(base.applied, .5), "a new worker each time: most of it is Python's start")
	return rows
}
