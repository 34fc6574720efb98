package bench

import (
	"fmt"
	"time"
)

// relayResults makes the rows of the report. base is nil when there is no baseline:
// then a target that is a ratio is not judged.
func relayResults(cfg RelayConfig, ours, base *relayFigures) []Result {
	none := base == nil
	if none {
		base = &relayFigures{}
	}
	var rows []Result
	add := func(name string, value float64, unit string, baseline float64, target string, ok bool, note string) {
		if none {
			baseline = 0
		}
		rows = append(rows, Result{Name: name, Value: round3(value), Unit: unit, Baseline: round3(baseline), Ratio: ratio(value, baseline), Target: target, OK: ok, Note: note})
	}
	for _, s := range relaySizes {
		times := map[int]float64{200: 3, 16 << 10: 2}[s.bytes]
		label := sizeWord(s.bytes)
		goal := fmt.Sprintf("≥ %.0f ×", times)
		add("events through one job, "+label, ours.rate[s.bytes], "/s", base.rate[s.bytes], goal, none || ours.rate[s.bytes] >= times*base.rate[s.bytes], "")
		add("CPU per event, one job, "+label, ours.cpu[s.bytes], "µs", base.cpu[s.bytes], "≤ 1/2", none || ours.cpu[s.bytes] <= base.cpu[s.bytes]/2, "")
		add(fmt.Sprintf("events of %d daemons, %s", cfg.Daemons, label), ours.many[s.bytes], "/s", base.many[s.bytes], goal, none || ours.many[s.bytes] >= times*base.many[s.bytes], "")
		add(fmt.Sprintf("their last end after their first, %s", label), ours.spread[s.bytes], "%", base.spread[s.bytes], "≤ 30 %", ours.spread[s.bytes] <= 30, "of the whole time")
	}
	noWorse := func(v, b time.Duration) bool { return none || v <= b+b/10 }
	ms := func(d time.Duration) float64 { return millis(d) }
	add("hello to ready, p50", ms(ours.hello), "ms", ms(base.hello), "no worse", noWorse(ours.hello, base.hello), "")
	add("hello to ready beside a flooding job, p50", ms(ours.helloBy), "ms", ms(base.helloBy), "≤ 1 ms", ours.helloBy <= time.Millisecond, "")
	add("cancel to return, p50", ms(ours.cancel), "ms", ms(base.cancel), "no worse", noWorse(ours.cancel, base.cancel), "")
	add("cancel to return beside another job's flood, p50", ms(ours.stopBy), "ms", ms(base.stopBy), "≤ 1 ms", ours.stopBy <= time.Millisecond, "")
	add("empty jobs, one after the other", ours.empty, "/s", base.empty, "no worse", none || ours.empty >= base.empty*.95, "")
	add("empty jobs with durable markers", ours.durable, "/s", base.durable, "no worse", none || ours.durable >= base.durable*.95, "ours also syncs the directory, so that the marker's name is durable as well")
	add(fmt.Sprintf("memory per idle daemon, %d", cfg.Idle), ours.idle, "KiB", base.idle, "≤ 19 KiB", ours.idle <= 19, "anonymous memory of the hub")
	add(fmt.Sprintf("daemons fenced by a %s tool call beside a cancel, of %d", cfg.ToolTime, toolTargets), float64(ours.fenced), "", float64(base.fenced), "0", ours.fenced == 0, "")
	add("an event and a payload of 2 MiB are carried", truth(ours.carried), "", truth(base.carried), "1", ours.carried, "1 is yes")
	const mib = 1 << 20
	add(fmt.Sprintf("memory for a consumer that stops reading, %d MiB of events", cfg.Stalled/mib), float64(ours.stallGrowth)/mib, "MiB", float64(base.stallGrowth)/mib,
		"≤ 64 MiB", ours.stallGrowth <= 64*mib && ours.stallOtherRuns, "while another job on another daemon runs to its end")
	return rows
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func sizeWord(n int) string {
	if n >= 1024 {
		return fmt.Sprintf("%d KiB", n/1024)
	}
	return fmt.Sprintf("%d B", n)
}

func round3(v float64) float64 { return float64(int64(v*1000+.5)) / 1000 }
