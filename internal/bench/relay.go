package bench

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// RelayConfig says what to measure of the relay. Zero counts are the defaults named
// beside them.
type RelayConfig struct {
	Stockade string // the stockade program; required
	Dir      string // where state goes; required, removed by the caller
	Python   string // an interpreter with the websockets library: python3
	Version  string
	Events   int           // events of 200 B through one job: 400,000; a tenth of 16 KiB
	Daemons  int           // daemons with one job each: 100
	Idle     int           // idle daemons: 5000
	Empty    int           // empty jobs: 2000
	Stalled  int64         // bytes for a consumer that stops reading: 500 MiB
	ToolTime time.Duration // of one slow tool call: 12 s
	Progress func(string)
}

func (c RelayConfig) withDefaults() RelayConfig {
	def := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	def(&c.Events, 400_000)
	def(&c.Daemons, 100)
	def(&c.Idle, 5000)
	def(&c.Empty, 2000)
	if c.Stalled <= 0 {
		c.Stalled = 500 << 20
	}
	if c.ToolTime <= 0 {
		c.ToolTime = 12 * time.Second
	}
	if c.Python == "" {
		c.Python = "python3"
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// benchToken is long enough for every profile and no secret.
const benchToken = "stockade-bench-0123456789-abcdefghij"

// relayFigures is what was measured of one hub.
type relayFigures struct {
	rate, cpu      map[int]float64 // by event size: events/s, µs of CPU per event; one job
	many, spread   map[int]float64 // the same with many daemons; how far the ends are apart
	hello, helloBy time.Duration   // median; beside a flooding job
	cancel, stopBy time.Duration
	empty, durable float64 // jobs/s
	idle           float64 // KiB per daemon
	fenced         int     // of toolTargets daemons
	carried        bool    // an event of 2 MiB
	stallGrowth    int64   // bytes of memory
	stallOtherRuns bool    // beside the stalled job
}

// toolTargets is how many daemons are tried with a slow tool.
const toolTargets = 5

// RunRelay measures the relay's hub beside the baseline, each in a process of its
// own on one processor, fed by the same client. Without an interpreter that has the
// library it measures ours alone, and says so.
func RunRelay(ctx context.Context, cfg RelayConfig) (Report, error) {
	cfg = cfg.withDefaults()
	if cfg.Stockade == "" || cfg.Dir == "" {
		return Report{}, errdefs.New(errdefs.Invalid, "the bench needs the stockade program and a directory")
	}
	r := Report{Machine: describe(cfg.Dir, "", cfg.Version)}
	ours, err := measureRelay(ctx, cfg, "stockade", []string{cfg.Stockade, "bench", "relay-hub", "--token", benchToken})
	if err != nil {
		return r, err
	}
	var base *relayFigures
	python, missing := pythonHub(ctx, cfg)
	if missing == nil {
		if base, err = measureRelay(ctx, cfg, "Python", python); err != nil {
			return r, err
		}
		r.Machine.Runtime = "baseline: " + filepath.Base(cfg.Python) + " with websockets"
	}
	r.Results = relayResults(cfg, ours, base)
	if missing != nil {
		for i := range r.Results {
			r.Results[i].Note = strings.TrimSpace(r.Results[i].Note + " no baseline: " + missing.Error())
		}
	}
	return r, nil
}

// measureRelay measures one hub, a fresh process for each thing that changes its
// memory or its state.
func measureRelay(ctx context.Context, cfg RelayConfig, name string, argv []string) (*relayFigures, error) {
	f := &relayFigures{rate: map[int]float64{}, cpu: map[int]float64{}, many: map[int]float64{}, spread: map[int]float64{}}
	for _, m := range []struct {
		what string
		args []string
		do   func(context.Context, RelayConfig, *hubProcess, *relayFigures) error
	}{
		{"events through one job", nil, relayOneJob},
		{"events of many daemons", nil, relayManyJobs},
		{"hello and cancel", nil, relayLatencies},
		{"empty jobs", nil, func(ctx context.Context, cfg RelayConfig, h *hubProcess, f *relayFigures) (err error) {
			f.empty, err = relayEmpty(ctx, cfg, h)
			return err
		}},
		{"empty jobs with durable markers", []string{"--state", filepath.Join(cfg.Dir, "state-"+name)}, func(ctx context.Context, cfg RelayConfig, h *hubProcess, f *relayFigures) (err error) {
			f.durable, err = relayEmpty(ctx, cfg, h)
			return err
		}},
		{"idle daemons", nil, relayIdle},
		{"large messages", nil, relayLarge},
		{"a consumer that stops reading", nil, relayStalled},
		{"a slow tool beside a cancel", []string{"--tool-time", fmt.Sprint(cfg.ToolTime.Seconds())}, relayTools},
	} {
		cfg.Progress(name + " hub: " + m.what)
		h, err := startHub(ctx, name, append(slices.Clone(argv), m.args...))
		if err != nil {
			return nil, err
		}
		err = m.do(ctx, cfg, h, f)
		h.stop()
		if err != nil {
			return nil, fmt.Errorf("measuring %s of the %s hub: %w", m.what, name, err)
		}
	}
	return f, nil
}

// relayPeers connects n daemons, named by prefix and number.
func relayPeers(ctx context.Context, h *hubProcess, prefix string, n int) (names []string, closeAll func(), err error) {
	peers := make([]*relayPeer, n)
	closeAll = func() {
		for _, p := range peers {
			if p != nil {
				p.close()
			}
		}
	}
	var next atomic.Int64
	err = parallel(min(n, 32), func(int) error {
		for {
			i := int(next.Add(1) - 1)
			if i >= n {
				return nil
			}
			p, err := connectRelay(ctx, h.url, fmt.Sprint(prefix, i), benchToken)
			if err != nil {
				return err
			}
			peers[i] = p
		}
	})
	for i := range n {
		names = append(names, fmt.Sprint(prefix, i))
	}
	if err != nil {
		closeAll()
	}
	return names, closeAll, err
}

// tries is how often a rate is measured; the best counts, because what disturbs only
// ever makes it slower.
const tries = 3

// relaySizes are the events that are sent, with what fraction of cfg.Events.
var relaySizes = []struct{ bytes, share int }{{200, 1}, {16 << 10, 10}}

func relayOneJob(ctx context.Context, cfg RelayConfig, h *hubProcess, f *relayFigures) error {
	names, closeAll, err := relayPeers(ctx, h, "d", 1)
	if err != nil {
		return err
	}
	defer closeAll()
	for _, s := range relaySizes {
		n := cfg.Events / s.share
		if _, err := h.ask(ctx, hubAsk{Op: "jobs", Daemons: names, Payload: relayPayload{Events: n / 10, Size: s.bytes}}); err != nil {
			return err // the warm-up
		}
		for range tries {
			before, err := h.cpu()
			if err != nil {
				return err
			}
			r, err := h.ask(ctx, hubAsk{Op: "jobs", Daemons: names, Payload: relayPayload{Events: n, Size: s.bytes}})
			if err != nil {
				return err
			}
			after, err := h.cpu()
			if err != nil {
				return err
			}
			if r.Events != int64(n) {
				return errdefs.New(errdefs.Internal, "%d of %d events arrived", r.Events, n)
			}
			if rate := float64(n) / r.Took; rate > f.rate[s.bytes] {
				f.rate[s.bytes] = rate
				f.cpu[s.bytes] = float64((after - before).Microseconds()) / float64(n)
			}
		}
	}
	return nil
}

// manyTimes is how many times the events of the one job are shared out to many.
const manyTimes = 2

func relayManyJobs(ctx context.Context, cfg RelayConfig, h *hubProcess, f *relayFigures) error {
	names, closeAll, err := relayPeers(ctx, h, "d", cfg.Daemons)
	if err != nil {
		return err
	}
	defer closeAll()
	for _, s := range relaySizes {
		// Enough for each job to take turns with the others many times.
		each := max(1, manyTimes*cfg.Events/s.share/cfg.Daemons)
		if _, err := h.ask(ctx, hubAsk{Op: "jobs", Daemons: names, Payload: relayPayload{Events: max(1, each/10), Size: s.bytes}}); err != nil {
			return err
		}
		for range tries {
			r, err := h.ask(ctx, hubAsk{Op: "jobs", Daemons: names, Payload: relayPayload{Events: each, Size: s.bytes}})
			if err != nil {
				return err
			}
			if rate := float64(each*cfg.Daemons) / r.Took; rate > f.many[s.bytes] {
				f.many[s.bytes] = rate
				f.spread[s.bytes] = 100 * (slices.Max(r.Ends) - slices.Min(r.Ends)) / slices.Max(r.Ends)
			}
		}
	}
	return nil
}

func relayLatencies(ctx context.Context, _ RelayConfig, h *hubProcess, f *relayFigures) error {
	names, closeAll, err := relayPeers(ctx, h, "d", 2)
	if err != nil {
		return err
	}
	defer closeAll()
	const times = 50
	if f.hello, err = helloTime(ctx, h, "quiet", times); err != nil {
		return err
	}
	held := relayPayload{Events: 1, Size: 200, Hold: true}
	if f.cancel, err = cancelTime(ctx, h, names[0], held, times); err != nil {
		return err
	}
	// The same, beside a job that floods for as long as this takes.
	if _, err := h.ask(ctx, hubAsk{Op: "flood", Daemons: names[1:], Payload: relayPayload{Events: -1, Size: 200}}); err != nil {
		return err
	}
	if f.helloBy, err = helloTime(ctx, h, "beside", times); err != nil {
		return err
	}
	if f.stopBy, err = cancelTime(ctx, h, names[0], held, times); err != nil {
		return err
	}
	_, err = h.ask(ctx, hubAsk{Op: "unstall"})
	return err
}

func helloTime(ctx context.Context, h *hubProcess, prefix string, n int) (time.Duration, error) {
	var times []time.Duration
	for i := range n {
		p, err := dialRelay(ctx, h.url)
		if err != nil {
			return 0, err
		}
		took, err := p.hello(fmt.Sprint(prefix, i), benchToken)
		p.conn.Close()
		if err != nil {
			return 0, err
		}
		times = append(times, took)
	}
	return quantile(times, .5), nil
}

func cancelTime(ctx context.Context, h *hubProcess, daemon string, payload relayPayload, n int) (time.Duration, error) {
	r, err := h.ask(ctx, hubAsk{Op: "cancel", Daemons: []string{daemon}, Payload: payload, N: n})
	if err != nil {
		return 0, err
	}
	var times []time.Duration
	for _, s := range r.Times {
		times = append(times, time.Duration(s*float64(time.Second)))
	}
	return quantile(times, .5), nil
}

func relayEmpty(ctx context.Context, cfg RelayConfig, h *hubProcess) (float64, error) {
	names, closeAll, err := relayPeers(ctx, h, "d", 1)
	if err != nil {
		return 0, err
	}
	defer closeAll()
	r, err := h.ask(ctx, hubAsk{Op: "repeat", Daemons: names, N: cfg.Empty})
	return float64(cfg.Empty) / r.Took, err
}

func relayIdle(ctx context.Context, cfg RelayConfig, h *hubProcess, f *relayFigures) error {
	// One daemon first, so that what is made once does not count.
	_, closeOne, err := relayPeers(ctx, h, "first", 1)
	if err != nil {
		return err
	}
	defer closeOne()
	pid := h.cmd.Process.Pid
	before, err := anonymous(pid)
	if err != nil {
		return err
	}
	_, closeAll, err := relayPeers(ctx, h, "idle", cfg.Idle)
	if err != nil {
		return err
	}
	defer closeAll()
	after, err := settled(ctx, func() (int64, error) { return anonymous(pid) }, func() bool { return connections(pid) >= cfg.Idle })
	f.idle = float64(after-before) / float64(cfg.Idle) / 1024
	return err
}

func relayLarge(ctx context.Context, _ RelayConfig, h *hubProcess, f *relayFigures) error {
	names, closeAll, err := relayPeers(ctx, h, "d", 1)
	if err != nil {
		return err
	}
	defer closeAll()
	r, err := h.ask(ctx, hubAsk{Op: "jobs", Daemons: names, Payload: relayPayload{Events: 1, Size: 2 << 20, Pad: strings.Repeat("p", 2<<20)}})
	f.carried = err == nil && r.Events == 1
	return ctx.Err() // that it is not carried is a figure
}

func relayStalled(ctx context.Context, cfg RelayConfig, h *hubProcess, f *relayFigures) error {
	names, closeAll, err := relayPeers(ctx, h, "d", 2)
	if err != nil {
		return err
	}
	defer closeAll()
	const size = 16 << 10
	pid := h.cmd.Process.Pid
	before, err := anonymous(pid)
	if err != nil {
		return err
	}
	n := int(cfg.Stalled / size)
	if _, err := h.ask(ctx, hubAsk{Op: "stall", Daemons: names[:1], Payload: relayPayload{Events: n, Size: size, Hold: true}}); err != nil {
		return err
	}
	// Meanwhile another job goes on, on another daemon.
	other, err := h.ask(ctx, hubAsk{Op: "jobs", Daemons: names[1:], Payload: relayPayload{Events: 1000, Size: size}})
	if err != nil {
		return err
	}
	f.stallOtherRuns = other.Events == 1000
	// The daemon goes on sending all the while, as far as the hub lets it.
	begun := time.Now()
	after, err := settled(ctx, func() (int64, error) { return anonymous(pid) }, func() bool { return time.Since(begun) > 5*time.Second })
	if err != nil {
		return err
	}
	f.stallGrowth = after - before
	_, err = h.ask(ctx, hubAsk{Op: "unstall"})
	return err
}

func relayTools(ctx context.Context, _ RelayConfig, h *hubProcess, f *relayFigures) error {
	names, closeAll, err := relayPeers(ctx, h, "d", toolTargets)
	if err != nil {
		return err
	}
	defer closeAll()
	r, err := h.ask(ctx, hubAsk{Op: "tool", Daemons: names})
	f.fenced = r.Fenced
	return err
}
