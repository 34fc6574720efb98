package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
)

// measureBoxed measures real processes in a real box, beside the runtime alone
// on the very bundle that the host program made. It returns the runtime's name
// and version too.
func measureBoxed(ctx context.Context, cfg Config) (results []Result, runtime string, err error) {
	rt, err := oci.FindRuntime("")
	if err != nil {
		return nil, "", err
	}
	runtime = rt.Name + " " + rt.Version
	b, err := newBed(ctx, cfg, "boxed")
	if err != nil {
		return nil, runtime, err
	}
	defer func() { err = errors.Join(err, b.stop(ctx)) }()
	box, created, run, err := b.run(ctx, "boxed")
	if err != nil {
		return nil, runtime, err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		_, ferr := run.FinishRun(end, created.Run.ID, api.FinishRequest{Reason: "bench over"})
		err = errors.Join(err, ferr, b.tenant.RemoveBox(end, box.ID))
	}()
	hostDir := filepath.Join(cfg.Dir, "boxed", "host")
	for _, m := range []struct {
		what string
		f    func() ([]Result, error)
	}{
		{"open to first byte", func() ([]Result, error) { return firstByte(ctx, cfg, run, rt.Path, hostDir) }},
		{"output throughput", func() ([]Result, error) { return throughput(ctx, cfg, run) }},
		{"close to receipt", func() ([]Result, error) { return closing(ctx, cfg, run) }},
		{"memory of a shim", func() ([]Result, error) { return shimMemory(ctx, run, hostDir) }},
	} {
		cfg.Progress(m.what)
		rs, err := m.f()
		if err != nil {
			return results, runtime, fmt.Errorf("measuring %s: %w", m.what, err)
		}
		results = append(results, rs...)
	}
	return results, runtime, nil
}

func boxedRequest(id string, argv ...string) api.OpenRequest {
	return api.OpenRequest{RequestID: id, Argv: argv}
}

// firstByte times open to first byte of echo, turn about with the runtime alone.
func firstByte(ctx context.Context, cfg Config, run *client.Client, runtime, hostDir string) ([]Result, error) {
	warm, err := run.Open(ctx, boxedRequest("first-warm", "echo", "hello"))
	if err != nil {
		return nil, err
	}
	if _, err := warm.Wait(ctx); err != nil {
		return nil, err
	}
	bundle, err := bareBundle(filepath.Join(hostDir, "procs", warm.Handle(), "bundle"), filepath.Join(cfg.Dir, "bare"))
	if err != nil {
		return nil, err
	}
	defer removeAll(filepath.Join(cfg.Dir, "bare"))
	ours, theirs := []time.Duration{}, []time.Duration{}
	for i := range cfg.Starts {
		start := time.Now()
		p, err := run.Open(ctx, boxedRequest(fmt.Sprint("first-", i), "echo", "hello"))
		if err != nil {
			return nil, err
		}
		out := p.Output(ctx, client.OutputOptions{})
		if _, err := out.Next(); err != nil {
			return nil, fmt.Errorf("%w: %w", errShort, err)
		}
		ours = append(ours, time.Since(start))
		out.Close()
		if _, err := p.Wait(ctx); err != nil {
			return nil, err
		}
		d, err := bareFirstByte(ctx, runtime, filepath.Join(cfg.Dir, "bare-root"), bundle, fmt.Sprintf("stockade-bench-%d-%d", os.Getpid(), i))
		if err != nil {
			return nil, err
		}
		theirs = append(theirs, d)
	}
	p50, base := quantile(ours, .5), quantile(theirs, .5)
	r := ratio(millis(p50), millis(base))
	return []Result{{Name: "open to first byte in a warm box, p50", Value: millis(p50), Unit: "ms", Baseline: millis(base), Ratio: r,
		Target: "≤ 1.5 × runc run", OK: r <= 1.5, Note: "baseline is the runtime's own run of the same command with the same bundle, without our init"}}, nil
}

// bareBundle copies a bundle's configuration with the command itself as PID 1
// and a control group of its own.
func bareBundle(from, to string) (string, error) {
	b, err := os.ReadFile(filepath.Join(from, "config.json"))
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "the bundle of a process cannot be read: %v", err)
	}
	var spec specs.Spec
	if err := json.Unmarshal(b, &spec); err != nil {
		return "", errdefs.Wrap(err, errdefs.Internal, "the bundle of a process cannot be understood: %v", err)
	}
	for i, a := range spec.Process.Args {
		if a == "--" {
			spec.Process.Args = spec.Process.Args[i+1:]
			break
		}
	}
	if !filepath.IsAbs(spec.Root.Path) {
		spec.Root.Path = filepath.Join(from, spec.Root.Path)
	}
	spec.Linux.CgroupsPath += "-bare"
	if err := os.MkdirAll(to, 0o700); err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "%s cannot be made: %v", to, err)
	}
	if b, err = json.Marshal(spec); err == nil {
		err = os.WriteFile(filepath.Join(to, "config.json"), b, 0o600)
	}
	if err != nil {
		return "", errdefs.Wrap(err, errdefs.Unavailable, "the bare bundle cannot be written: %v", err)
	}
	return to, nil
}

func bareFirstByte(ctx context.Context, runtime, root, bundle, id string) (time.Duration, error) {
	cmd := exec.CommandContext(ctx, runtime, "--root", root, "run", "--bundle", bundle, id)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	var complaint strings.Builder
	cmd.Stderr = &complaint
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, errdefs.Wrap(err, errdefs.Unavailable, "the runtime cannot be started: %v", err)
	}
	_, rerr := io.ReadFull(out, make([]byte, 1))
	d := time.Since(start)
	_, _ = io.Copy(io.Discard, out)
	if err := errors.Join(rerr, cmd.Wait()); err != nil {
		return 0, errdefs.Wrap(err, errdefs.Unavailable, "the runtime alone could not run the command: %v: %s", err, complaint.String())
	}
	return d, nil
}

// throughput streams output child → log on disk → HTTP reader, beside the same
// producer through dd into a file.
func throughput(ctx context.Context, cfg Config, run *client.Client) ([]Result, error) {
	const rounds = 3
	script := fmt.Sprintf("head -c %d /dev/zero", cfg.Bytes)
	var ours, theirs []time.Duration
	for i := range rounds {
		file := filepath.Join(cfg.Dir, "dd")
		start := time.Now()
		if out, err := exec.CommandContext(ctx, "sh", "-c", script+" | dd of="+file+" bs=64k").CombinedOutput(); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "dd failed: %v: %s", err, out)
		}
		theirs = append(theirs, time.Since(start))
		if err := os.Remove(file); err != nil {
			return nil, err
		}
		// It waits for a line, so that the start of a box is not in the time.
		req := boxedRequest(fmt.Sprint("stream-", i), "sh", "-c", "read go; exec "+script)
		req.Stdin = true
		p, err := run.Open(ctx, req)
		if err != nil {
			return nil, err
		}
		in := p.Stdin(ctx)
		start = time.Now()
		if _, err := in.Write([]byte("go\n")); err != nil {
			return nil, err
		}
		done, err := p.Copy(ctx, io.Discard, nil, client.OutputOptions{Ack: true})
		if err != nil {
			return nil, err
		}
		ours = append(ours, time.Since(start))
		if done.Stdout != cfg.Bytes {
			return nil, errdefs.New(errdefs.Internal, "%d bytes arrived of %d", done.Stdout, cfg.Bytes)
		}
	}
	rate := func(ts []time.Duration) float64 { return float64(cfg.Bytes) / (1 << 20) / quantile(ts, .5).Seconds() }
	v, base := rate(ours), rate(theirs)
	r := ratio(v, base)
	return []Result{
		{Name: "one stream, child → log on disk → HTTP reader", Value: v, Unit: "MiB/s", Baseline: base, Ratio: r,
			Target: "≥ 0.60 × producer | dd of=file", OK: r >= .6},
		{Name: "the same, absolute", Value: v, Unit: "MiB/s", Target: "≥ 400 MiB/s", OK: v >= 400},
	}, nil
}

// closing times close → receipt of a tree of a shell and two children, all of
// which obey SIGTERM.
func closing(ctx context.Context, cfg Config, run *client.Client) ([]Result, error) {
	var times []time.Duration
	grace := int64(5000)
	for i := range cfg.Starts {
		p, err := run.Open(ctx, boxedRequest(fmt.Sprint("close-", i), "sh", "-c", "trap 'kill $a $b; exit 0' TERM; sleep 1000 & a=$!; sleep 1000 & b=$!; echo up; wait"))
		if err != nil {
			return nil, err
		}
		out := p.Output(ctx, client.OutputOptions{})
		if _, err := out.Next(); err != nil {
			return nil, fmt.Errorf("%w: %w", errShort, err)
		}
		out.Close()
		start := time.Now()
		res, err := p.Close(ctx, api.CloseRequest{Reason: "bench", GraceMillis: &grace})
		if err != nil {
			return nil, err
		}
		times = append(times, time.Since(start))
		if !res.Quiescent || res.Receipt == nil {
			return nil, errdefs.New(errdefs.Internal, "a close of %s gave no receipt", p.Handle())
		}
	}
	p50, p99 := quantile(times, .5), quantile(times, .99)
	return []Result{
		{Name: "close to receipt, p50", Value: millis(p50), Unit: "ms", Target: "–", OK: true},
		{Name: "close to receipt, p99", Value: millis(p99), Unit: "ms", Target: "< 250 ms", OK: p99 < 250*time.Millisecond},
	}, nil
}

// shimMemory looks at the keepers of ten idle processes.
func shimMemory(ctx context.Context, run *client.Client, hostDir string) ([]Result, error) {
	const n = 10
	for i := range n {
		p, err := run.Open(ctx, boxedRequest(fmt.Sprint("shim-", i), "sh", "-c", "echo up; exec sleep 1000"))
		if err != nil {
			return nil, err
		}
		out := p.Output(ctx, client.OutputOptions{})
		if _, err := out.Next(); err != nil {
			return nil, fmt.Errorf("%w: %w", errShort, err)
		}
		out.Close()
	}
	pids := shims(hostDir)
	if len(pids) < n {
		return nil, errdefs.New(errdefs.Internal, "%d shims found, %d expected", len(pids), n)
	}
	each, err := settled(ctx, func() (int64, error) {
		var sum, seen int64
		for _, pid := range pids {
			if m, err := private(pid); err == nil { // keepers of ended processes go meanwhile
				sum, seen = sum+m, seen+1
			}
		}
		return sum / max(1, seen), nil
	}, func() bool { return true })
	if err != nil {
		return nil, err
	}
	v := float64(each) / (1 << 20)
	return []Result{{Name: "private memory of one shim", Value: v, Unit: "MiB", Target: "≤ 2 MiB", OK: v <= 2}}, nil
}
