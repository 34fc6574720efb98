package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/serverproc"
)

// Config says what to measure and with what. Zero counts are the defaults named
// beside them.
type Config struct {
	Stockade    string // the stockade program; required
	HostProgram string // stockade-host; "" is beside it
	Dir         string // where state goes: the file system that is measured; required, removed by the caller
	Version     string
	Opens       int          // opens for latencies: 200
	Callers     int          // concurrent opens for the rate: 64
	Idle        int          // idle attached processes: 5000
	Starts      int          // boxed starts and closes: 20
	Bytes       int64        // output streamed: 1 GiB
	Progress    func(string) // told what is measured next; nil is nobody
}

func (c Config) withDefaults() Config {
	def := func(n *int, v int) {
		if *n <= 0 {
			*n = v
		}
	}
	def(&c.Opens, 200)
	def(&c.Callers, 64)
	def(&c.Idle, 5000)
	def(&c.Starts, 20)
	if c.Bytes <= 0 {
		c.Bytes = 1 << 30
	}
	if c.Progress == nil {
		c.Progress = func(string) {}
	}
	return c
}

// Run measures everything and returns the report. What it starts it stops, also
// when it fails.
func Run(ctx context.Context, cfg Config) (Report, error) {
	cfg = cfg.withDefaults()
	if cfg.Stockade == "" || cfg.Dir == "" {
		return Report{}, errdefs.New(errdefs.Invalid, "the bench needs the stockade program and a directory")
	}
	var r Report
	var err error
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil { // it goes into other programs' settings
		return r, errdefs.Wrap(err, errdefs.Unavailable, "the working directory is not known: %v", err)
	}
	own, err := measureOwn(ctx, cfg)
	if err != nil {
		return r, err
	}
	boxed, runtime, err := measureBoxed(ctx, cfg)
	if err != nil {
		return r, err
	}
	r.Machine = describe(cfg.Dir, runtime, cfg.Version)
	r.Results = append(own, boxed...)
	return r, nil
}

// bed is a server with a tenant's client, to be measured.
type bed struct {
	server *serverproc.Server
	admin  *client.Client
	tenant *client.Client
}

func newBed(ctx context.Context, cfg Config, name string, args ...string) (*bed, error) {
	if cfg.HostProgram != "" {
		args = append(args, "--host-program", cfg.HostProgram)
	}
	args = append(args, "--log-level", "warn")
	s, err := serverproc.New(serverproc.Config{Exe: cfg.Stockade, StateDir: filepath.Join(cfg.Dir, name), Args: args})
	if err != nil {
		return nil, err
	}
	if err := s.Start(ctx); err != nil {
		return nil, err
	}
	b := &bed{server: s}
	if b.admin, err = s.Client("admin"); err == nil {
		b.tenant, err = s.Client("default")
	}
	if err != nil {
		return nil, errors.Join(err, s.Kill())
	}
	return b, nil
}

func (b *bed) stop(ctx context.Context) error {
	b.admin.CloseIdle()
	b.tenant.CloseIdle()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	return b.server.Stop(ctx)
}

// run makes a box and a run in it, and returns the run's client.
func (b *bed) run(ctx context.Context, key string) (api.Box, api.RunCreated, *client.Client, error) {
	box, err := b.tenant.AcquireBox(ctx, api.BoxRequest{Key: key})
	if err != nil {
		return box, api.RunCreated{}, nil, err
	}
	run, err := b.tenant.CreateRun(ctx, api.RunRequest{Box: box.ID})
	if err != nil {
		return box, run, nil, err
	}
	return box, run, b.tenant.WithKey(run.Token), nil
}

// measureOwn measures what is the server's own, with a host that does nothing.
func measureOwn(ctx context.Context, cfg Config) (results []Result, err error) {
	socket := filepath.Join(cfg.Dir, "null.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the null host's socket cannot be made: %v", err)
	}
	hostCtx, stopHost := context.WithCancel(ctx)
	served := make(chan error, 1)
	host := newNullHost()
	go func() { served <- host.serve(hostCtx, listener) }()
	defer func() {
		stopHost()
		err = errors.Join(err, <-served)
	}()
	wide := fmt.Sprint(cfg.Idle + cfg.Opens + cfg.Callers*100)
	b, err := newBed(ctx, cfg, "own", "--host-socket", socket, "--process-max-per-run", wide, "--process-max-per-workspace", wide)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.stop(ctx)) }()
	_, _, run, err := b.run(ctx, "own")
	if err != nil {
		return nil, err
	}
	for _, m := range []struct {
		what string
		f    func(context.Context, Config, *bed, *client.Client) ([]Result, error)
	}{
		{"the server's own share of an open", openLatency},
		{"durable opens per second", openRate},
		{"memory per idle attached process", idleMemory},
	} {
		cfg.Progress(m.what)
		rs, err := m.f(ctx, cfg, b, run)
		if err != nil {
			return results, fmt.Errorf("measuring %s: %w", m.what, err)
		}
		results = append(results, rs...)
	}
	return results, nil
}

func (c Config) openRequest(id string) api.OpenRequest {
	return api.OpenRequest{RequestID: id, Argv: []string{"true"}, Limits: api.Limits{Overflow: api.OverflowDropOldest}}
}

// openLatency times opens one after the other: HTTP, authorisation, two durable
// commits, the null host's answer.
func openLatency(ctx context.Context, cfg Config, _ *bed, run *client.Client) ([]Result, error) {
	sync, err := fsyncTimes(cfg.Dir, cfg.Opens)
	if err != nil {
		return nil, err
	}
	times := make([]time.Duration, 0, cfg.Opens)
	for i := range cfg.Opens {
		start := time.Now()
		if _, err := run.Open(ctx, cfg.openRequest(fmt.Sprint("latency-", i))); err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
	}
	p50, p99 := quantile(times, .5), quantile(times, .99)
	base := quantile(sync, .5)
	return []Result{
		{Name: "open, server's own share, p50", Value: millis(p50), Unit: "ms", Baseline: millis(base), Ratio: ratio(millis(p50), millis(base)),
			Target: "≤ 2 ms", OK: p50 <= 2*time.Millisecond, Note: "baseline is one 4 KiB write and fsync; an open commits twice"},
		{Name: "open, server's own share, p99", Value: millis(p99), Unit: "ms", Baseline: millis(quantile(sync, .99)), Ratio: ratio(millis(p99), millis(quantile(sync, .99))),
			Target: "≤ 10 ms", OK: p99 <= 10*time.Millisecond},
	}, nil
}

// openRate opens from many callers at once.
func openRate(ctx context.Context, cfg Config, _ *bed, run *client.Client) ([]Result, error) {
	const each = 40
	base, err := fsyncRate(cfg.Dir)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	err = parallel(cfg.Callers, func(i int) error {
		for j := range each {
			if _, err := run.Open(ctx, cfg.openRequest(fmt.Sprintf("rate-%d-%d", i, j))); err != nil {
				return err
			}
		}
		return nil
	})
	rate := float64(cfg.Callers*each) / time.Since(start).Seconds()
	return []Result{{Name: fmt.Sprintf("durable opens, %d callers", cfg.Callers), Value: rate, Unit: "/s", Baseline: base, Ratio: ratio(rate, base),
		Target: "–", OK: true, Note: "baseline is one file written and synced 4 KiB at a time by one caller"}}, err
}

// idleMemory attaches readers to processes that say nothing and looks at the
// server's anonymous memory before and after.
func idleMemory(ctx context.Context, cfg Config, b *bed, run *client.Client) ([]Result, error) {
	before, err := anonymous(b.server.PID())
	if err != nil {
		return nil, err
	}
	attached, detach := context.WithCancel(ctx)
	defer detach()
	ended := make(chan struct{}, cfg.Idle)
	running := 0
	defer func() {
		detach()
		for range running {
			<-ended
		}
	}()
	procs := make([]*client.Process, cfg.Idle)
	if err := parallel(cfg.Callers, func(i int) error {
		for j := i; j < cfg.Idle; j += cfg.Callers {
			p, err := run.Open(ctx, cfg.openRequest(fmt.Sprint("idle-", j)))
			if err != nil {
				return err
			}
			procs[j] = p
		}
		return nil
	}); err != nil {
		return nil, err
	}
	for _, p := range procs {
		out := p.Output(attached, client.OutputOptions{})
		running++
		go func() {
			_, _ = out.Next() // ends with the context
			out.Close()
			ended <- struct{}{}
		}()
	}
	after, err := settled(ctx, func() (int64, error) { return anonymous(b.server.PID()) }, func() bool { return connections(b.server.PID()) >= cfg.Idle })
	if err != nil {
		return nil, err
	}
	each := float64(after-before) / float64(cfg.Idle) / 1024
	return []Result{{Name: fmt.Sprintf("server memory per idle attached process, %d", cfg.Idle), Value: each, Unit: "KiB",
		Target: "≤ 64 KiB", OK: each <= 64, Note: "anonymous memory of the server, one owner and one following reader per process"}}, nil
}

var errShort = errors.New("the output ended early")

func removeAll(dir string) { _ = os.RemoveAll(dir) }
