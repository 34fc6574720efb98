package pluginruntime

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/worker"
)

// held is a run whose process waits for its end and would not take a hint.
type held struct {
	stream *rpc.Stream
	handle string
	run    string // at the broker
}

const stubborn = `hold trap "" TERM; while :; do sleep 1; done`

// hold begins such a run and waits until its process runs.
func hold(t *testing.T, h *lbhost.Host, c *client.Client, on pluginwire.Context, run M) held {
	t.Helper()
	return holdAs(t, h, c, "runner", on, run)
}

// holdAs is hold for another name of the toy runner.
func holdAs(t *testing.T, h *lbhost.Host, c *client.Client, plugin string, on pluginwire.Context, run M) held {
	t.Helper()
	stream, err := h.Stream(t.Context(), pluginwire.ActionRunRunner, lbhost.Of("stockade", plugin, M{"runner_name": "default", "context": run}), on)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := stream.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var delta M
	if err := json.Unmarshal(raw, &delta); err != nil {
		t.Fatal(err)
	}
	out := held{stream: stream, handle: fmt.Sprint(at(delta, "data", "chunk", "content"))}
	until(t, "the process running", func() (bool, error) {
		info, err := c.Process(out.handle).Get(t.Context())
		out.run = info.Run
		return info.State == client.StateRunning, err
	})
	return out
}

// last reads a stream to its end and returns the last result.
func (r held) last(t *testing.T) (last M) {
	t.Helper()
	for {
		raw, err := r.stream.Next(t.Context())
		if err == io.EOF {
			return last
		}
		if err != nil {
			t.Fatal(err)
		}
		last = nil
		if err := json.Unmarshal(raw, &last); err != nil {
			t.Fatal(err)
		}
	}
}

// gone waits for the proof that the process of a run is gone, and for the end of the run.
func (r held) gone(t *testing.T, c *client.Client) {
	t.Helper()
	until(t, "the end of the run and the proof", func() (bool, error) {
		info, err := c.Process(r.handle).Get(t.Context())
		if err != nil || info.Receipt == nil || info.Cleanup != "quiescent" {
			return false, err
		}
		run, err := c.Run(t.Context(), r.run)
		return run.State == "finished", err
	})
}

// testRunnerProcessesEnd: however a run ends, its processes are ended with it, with
// proof; and where LangBot still listens, it hears of the end after that.
func testRunnerProcessesEnd(t *testing.T, programs string) {
	t.Parallel()
	s, c := brokerOf(t, programs)
	r := start(t, "0.7", granting(s, "stockade/runner", "stockade/slots"))
	ws := workspace("ws-1")
	one, two := runnerOf(t, ws, "one"), runnerOf(t, ws, "two")
	slot := append([]string{"name: runner", "name: slots"}, slots...)
	left, right := runnerOf(t, ws, "left", slot...), runnerOf(t, ws, "right", slot...)
	left.Mode, right.Mode = pluginwire.ModeShared, pluginwire.ModeShared
	all := []lbhost.Installation{one, two, left, right}
	h := r.dial(lbhost.Config{})
	if _, err := h.Handshake(t.Context(), ws, all...); err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		running(t, h, i)
	}
	quiescent := func(t *testing.T, run held) {
		t.Helper()
		info, err := c.Process(run.handle).Get(t.Context())
		if err != nil || info.Cleanup != "quiescent" {
			t.Errorf("LangBot heard of the end before the proof: %+v, %v", info, err)
		}
	}

	t.Run("deadline", func(t *testing.T) {
		run := told("deadline", "talk", stubborn)
		run["runtime"] = M{"metadata": M{}, "deadline_at": nowPlus(20)}
		held := hold(t, h, c, one.Binding, run)
		if last := held.last(t); at(last, "data", "code") != "runner.timeout" {
			t.Errorf("%v", last)
		}
		held.gone(t, c)
		if got, err := c.Run(t.Context(), held.run); err != nil || got.ExpiresAt.Sub(got.CreatedAt) > 85*time.Second {
			t.Errorf("its life is not by its deadline: %+v, %v", got, err)
		}
	})
	t.Run("completed, with a process left", func(t *testing.T) {
		out := callsOf(t, h, one.Binding, "leaves", []any{"open_run_process", M{"request_id": "q", "argv": []string{"sh", "-c", `trap "" TERM; while :; do sleep 1; done`}}})
		info, err := c.Process(fmt.Sprint(out[0]["handle"])).Get(t.Context())
		if err != nil || info.Cleanup != "quiescent" {
			t.Errorf("LangBot heard of the end before the proof: %+v, %v", info, err)
		}
	})
	t.Run("the worker dies", func(t *testing.T) {
		held := hold(t, h, c, two.Binding, told("dies", "talk", stubborn))
		kill(t, filepath.Join(r.dir, "plugin-runtime", "installations", "two"))
		if last := held.last(t); last["type"] != "run.failed" {
			t.Errorf("%v", last)
		}
		quiescent(t, held)
		held.gone(t, c)
		running(t, h, two)
	})
	t.Run("a slot leaves", func(t *testing.T) {
		// Both have a run with the same id, in one process.
		a, b := holdAs(t, h, c, "slots", left.Binding, told("same", "talk", stubborn)), holdAs(t, h, c, "slots", right.Binding, told("same", "talk", stubborn))
		runA, errA := c.Run(t.Context(), a.run)
		runB, errB := c.Run(t.Context(), b.run)
		if errA != nil || errB != nil || runA.Installation.InstallationUUID != "left" || runB.Installation.InstallationUUID != "right" || runA.Box == runB.Box {
			t.Fatalf("%+v, %+v", runA, runB)
		}
		spy, err := json.Marshal([][]any{{"get_run_process", M{"handle": a.handle}}, {"close_run_process", M{"handle": a.handle}}})
		if err != nil {
			t.Fatal(err)
		}
		frames, err := h.Run(t.Context(), right.Binding, "stockade", "slots", "default", told("spy", "talk", "calls "+string(spy)))
		if err != nil || strings.Count(fmt.Sprint(frames), "not_found") < 2 {
			t.Errorf("a sibling's handle: %v, %v", frames, err)
		}
		if _, err := h.Remove(t.Context(), left.Binding); err != nil {
			t.Fatal(err)
		}
		if last := a.last(t); last["type"] != "run.failed" {
			t.Errorf("%v", last)
		}
		quiescent(t, a)
		a.gone(t, c)
		if info, err := c.Process(b.handle).Get(t.Context()); err != nil || info.State != client.StateRunning {
			t.Errorf("the sibling's process: %+v, %v", info, err)
		}
		b.stream.Close()
		b.gone(t, c)
	})
	t.Run("a newer revision", func(t *testing.T) {
		held := hold(t, h, c, one.Binding, told("fenced", "talk", stubborn))
		newer := one
		newer.Binding.RuntimeRevision++
		if state, err := h.Apply(t.Context(), newer); err != nil || state.ErrorCode != "" {
			t.Fatalf("%+v, %v", state, err)
		}
		if last := held.last(t); last["type"] != "run.failed" {
			t.Errorf("%v", last)
		}
		quiescent(t, held)
		held.gone(t, c)
		one = newer
		running(t, h, one)
	})
	t.Run("the broker goes and comes", func(t *testing.T) {
		held := hold(t, h, c, one.Binding, told("down", "talk", stubborn))
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		out := callsOf(t, h, one.Binding, "meanwhile", []any{"open_run_process", M{"request_id": "q", "argv": []string{"true"}}})
		if codeOf(out[0]) != "unavailable" || at(out[0], "data", "error", "retryable") != true || strings.Contains(fmt.Sprint(out[0]), "127.0.0.1") {
			t.Errorf("without a broker: %v", out[0])
		}
		held.stream.Close()
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		held.gone(t, c)
		if got := runText(t, h, one.Binding, told("again", "talk", "process echo back")); got != "back\nexit 0" {
			t.Errorf("%q", got)
		}
	})
	t.Run("the broker is killed in the middle", func(t *testing.T) {
		// The runner notices nothing: its calls are repeated by their ids, offsets and cursors.
		got := make(chan []M, 1)
		go func() {
			out, err := h.Run(t.Context(), one.Binding, "stockade", "runner", "default",
				told("through", "talk", `process touch began; n=0; while [ $n -lt 40 ]; do n=$((n+1)); echo $n; sleep 0.1; done; exit 4`))
			if err != nil {
				t.Error(err)
			}
			got <- out
		}()
		until(t, "the first output", func() (bool, error) {
			all, err := c.Processes(t.Context(), client.ProcessFilter{Live: true})
			return len(all.Items) == 1 && all.Items[0].Log.Next > 0, err
		})
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := ""
		for n := range 40 {
			want += fmt.Sprintln(n + 1)
		}
		out := <-got
		if len(out) == 0 || at(out[len(out)-1], "data", "message", "content") != want+"exit 4" {
			t.Errorf("%v", out)
		}
	})
	t.Run("LangBot goes", func(t *testing.T) {
		held := hold(t, h, c, one.Binding, told("lost", "talk", stubborn))
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
		held.gone(t, c)
		h = r.dial(lbhost.Config{})
		if _, err := h.Handshake(t.Context(), ws, one); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("the runtime stops", func(t *testing.T) {
		running(t, h, one)
		held := hold(t, h, c, one.Binding, told("stops", "talk", stubborn))
		if err := r.stop(); err != nil {
			t.Error(err)
		}
		info, err := c.Process(held.handle).Get(t.Context())
		if err != nil || info.Cleanup != "quiescent" || info.Receipt == nil {
			t.Errorf("the runtime has stopped: %+v, %v", info, err)
		}
	})
}

// kill ends every process whose working directory or environment is below a directory
// of an installation.
func kill(t *testing.T, dir string) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, file := range all {
		env, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(env), dir+"/") {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/environ", &pid); err == nil && pid != os.Getpid() && syscall.Kill(pid, syscall.SIGKILL) == nil {
			n++
		}
	}
	if n == 0 {
		t.Fatalf("no worker of %s was found", dir)
	}
}

// TestRunnerProcessesNotGranted: without a grant there is no sign of processes.
func TestRunnerProcessesNotGranted(t *testing.T) {
	t.Parallel()
	need.SDK(t, "0.7")
	r := start(t, "0.7", nil)
	ws := workspace("ws-1")
	i := runnerOf(t, ws, "one")
	h := r.connect(lbhost.Config{}, i)
	running(t, h, i)
	run := told("r", "talk", "granted")
	run["runtime"] = M{"metadata": M{"run_process": M{"max_wait_ms": 1}}}
	if got := runText(t, h, i.Binding, run); got != "null" {
		t.Errorf("the runner is told %s", got)
	}
	got := callsOf(t, h, i.Binding, "r", []any{"open_run_process", M{"request_id": "q", "argv": []string{"true"}}})
	if !strings.HasSuffix(fmt.Sprint(got[0]["text"]), "ValueError: Action open_run_process not found") {
		t.Errorf("%v", got[0])
	}
}

// sweep takes away what a killed runtime left of its workers, as the next one on its
// data directory would.
func sweep(t *testing.T, data string) {
	t.Helper()
	interp, err := worker.Probe(context.Background(), need.SDK(t, "0.7"))
	if err != nil {
		t.Fatal(err)
	}
	l, err := worker.Direct(worker.DirectConfig{Interp: interp, DataDir: data})
	if err == nil {
		err = l.Close()
	}
	if err != nil {
		t.Errorf("what the killed runtime left stays: %v", err)
	}
}

// testKilledRuntimeLeavesNoRun: the runtime is killed; the broker ends its run, and
// what ran in it, when the run's time is over.
func testKilledRuntimeLeavesNoRun(t *testing.T, programs string) {
	t.Parallel()
	if testing.Short() {
		t.Skip("it waits for a minute")
	}
	s, c := brokerOf(t, programs)
	data := t.TempDir()
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(s.exe, "runtime", "--data-dir", data, "--listen", "127.0.0.1", "--ws-control-port", "0", "--ws-debug-port", "0",
		"--python", need.SDK(t, "0.7"), "--broker-url", s.URL(), "--broker-key-file", s.keyFile, "--runner-process", "stockade/runner")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
		sweep(t, data)
		if t.Failed() {
			b, _ := os.ReadFile(log.Name())
			t.Logf("the runtime said:\n%s", b)
		}
	})
	r := &live{t: t, dir: data, at: addresses(t, data)}
	i := runnerOf(t, workspace("ws-1"), "one")
	h := r.connect(lbhost.Config{}, i)
	running(t, h, i)
	run := told("killed", "talk", stubborn)
	run["runtime"] = M{"metadata": M{}, "deadline_at": nowPlus(20)}
	held := hold(t, h, c, i.Binding, run)
	if err := syscall.Kill(cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		info, err := c.Process(held.handle).Get(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if info.Receipt != nil && info.Cleanup == "quiescent" {
			if run, err := c.Run(ctx, held.run); err != nil || run.FinishedAt == nil && run.State == "active" {
				t.Errorf("%+v, %v", run, err)
			}
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("the process still runs: %+v", info)
		}
	}
}
