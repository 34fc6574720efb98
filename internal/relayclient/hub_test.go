package relayclient

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/relaywire"
)

const token = "test-only-installation-token-8f69c142049db2bc"

var bg = context.Background()

// newHub is a real hub.
func newHub(t *testing.T, change func(*relay.HubConfig)) (*relay.Hub, string) {
	t.Helper()
	cfg := relay.HubConfig{Token: token, SpillDir: t.TempDir()}
	if change != nil {
		change(&cfg)
	}
	h, err := relay.NewHub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	url, err := h.Start(bg, relay.Endpoint{Token: cfg.Token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Stop(bg); err != nil {
			t.Error(err)
		}
	})
	return h, url
}

// client runs Run in the background.
type running struct {
	stop context.CancelFunc
	done chan struct{}
	err  error
}

func connect(t *testing.T, url, id string, change func(*Config)) *running {
	t.Helper()
	cfg := Config{URL: url, DaemonID: id, Token: token, ReconnectDelay: 20 * time.Millisecond,
		AllowWorkspace: []string{t.TempDir()}, AllowCommand: []string{"*"}, AllowEnv: []string{"FAKE_*"}, Keeper: []string{exe(), "relay-keep"}}
	if testing.Verbose() {
		cfg.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("test", t.Name())
	}
	if change != nil {
		change(&cfg)
	}
	ctx, stop := context.WithCancel(bg)
	r := &running{stop: stop, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.err = Run(ctx, cfg)
	}()
	t.Cleanup(func() {
		stop()
		<-r.done
	})
	return r
}

func (r *running) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-r.done:
	case <-time.After(soon):
		t.Fatal("the client does not end")
	}
	return r.err
}

// payload is one for a fake agent of a kind.
func payload(kind, mode, notes string, more map[string]any) json.RawMessage {
	config := map[string]any{"env": map[string]any{"FAKE_MODE": mode, "FAKE_NOTES": notes}}
	p := map[string]any{"config": config}
	command := []string{exe(), "fake", kind}
	switch kind {
	case "acp":
		p["prompt_text"], config["acp_command"], config["provider"] = "do it", command, "custom"
	case "claude":
		p["prompt"], p["resume"], config["command"] = "do it", false, command
	case "codex":
		p["prompt"], p["approval_grant"], config["command"] = "do it", nil, command
		config["approval_policy"] = "never"
	}
	for k, v := range more {
		config[k] = v
	}
	b, err := json.Marshal(p)
	if err != nil {
		panic(err)
	}
	return b
}

var kinds = []string{"acp", "claude", "codex"}

// events reads a job to its end, however long that takes as long as something comes.
func events(t *testing.T, j *relay.Job) (all []json.RawMessage) {
	t.Helper()
	for {
		ctx, cancel := context.WithTimeout(bg, soon)
		e, err := j.Next(ctx)
		cancel()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("after %s: %v", all, err)
		}
		all = append(all, append(json.RawMessage(nil), e...))
	}
}

func types(events []json.RawMessage) string {
	var names []string
	for _, raw := range events {
		var e struct {
			Type string `json:"type"`
			Data struct {
				Code  string `json:"code"`
				Chunk struct {
					Final bool `json:"is_final"`
				} `json:"chunk"`
			} `json:"data"`
		}
		if json.Unmarshal(raw, &e) != nil {
			return "not JSON: " + string(raw)
		}
		n := e.Type
		if e.Data.Code != "" {
			n += "=" + e.Data.Code
		}
		if e.Data.Chunk.Final {
			n += "!"
		}
		names = append(names, n)
	}
	return strings.Join(names, " ")
}

func runJob(t *testing.T, h *relay.Hub, req relay.JobRequest) *relay.Job {
	t.Helper()
	if err := h.WaitForDaemon(bg, req.DaemonID, soon); err != nil {
		t.Fatal(err)
	}
	j, err := h.RunJob(bg, req)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestStartStreamCompleteFail(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			h, url := newHub(t, nil)
			connect(t, url, "d", nil)
			file := filepath.Join(t.TempDir(), "notes")
			got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, "", file, nil)}))
			want := map[string]string{
				"acp":    "state.updated message.delta message.delta message.delta message.completed run.completed",
				"claude": "state.updated message.delta message.delta! run.completed",
				"codex":  "state.updated message.delta message.delta message.delta! run.completed",
			}[kind]
			if types(got) != want {
				t.Errorf("got %s\n%s\nwant %s", types(got), got, want)
			}
			if last := string(got[len(got)-2]); !strings.Contains(last, "answer: ") || strings.Contains(last, "I think") {
				t.Errorf("the final message is %s", last)
			}
			if alive(pidOf(t, file, "agent")) {
				t.Error("the agent is alive after the end")
			}

			got = events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, "", file, map[string]any{"streaming": false})}))
			if types(got) != "state.updated message.completed run.completed" {
				t.Errorf("not streaming: %s", types(got))
			}

			got = events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, "crash", file, nil)}))
			last := got[len(got)-1]
			code := map[string]string{"acp": "acp.process_exited", "claude": "claude_code.process_failed", "codex": "codex.process_exited"}[kind]
			if !strings.HasSuffix(types(got), "run.failed="+code) || !strings.Contains(string(last), "it broke, Authorization: [REDACTED]") {
				t.Errorf("crashed: %s, %s", types(got), last)
			}

			command := "command"
			if kind == "acp" {
				command = "acp_command"
			}
			for name, p := range map[string]json.RawMessage{
				"config_invalid":    payload(kind, "", file, map[string]any{"workspace": "/etc"}),
				"command_not_found": payload(kind, "", file, map[string]any{command: "no-such-program-here"}),
			} {
				got = events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: p}))
				if !strings.HasPrefix(types(got), "run.failed=") || !strings.HasSuffix(types(got), name) {
					t.Errorf("%s: %s", name, got)
				}
			}
			if f := h.Fences(); len(f) != 0 {
				t.Errorf("fences %v", f)
			}
		})
	}
}

// Paired with test_coding_relay_v1.py, real_standard_client_cancels_and_reaps_child.
func TestRealStandardClientCancelsAndReapsChild(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		for _, action := range []string{"cancel", "disconnect", "timeout"} {
			t.Run(kind+"/"+action, func(t *testing.T) {
				t.Parallel()
				h, url := newHub(t, nil)
				file := filepath.Join(t.TempDir(), "notes")
				w := newWire(t, url)
				connect(t, w.url, "worker", func(c *Config) { c.ReconnectDelay = time.Hour })
				req := relay.JobRequest{DaemonID: "worker", Payload: payload(kind, "hang", file, nil)}
				if action == "timeout" {
					req.Timeout = 10 * time.Second // long enough for three programs to start on a busy machine
				}
				j := runJob(t, h, req)
				agent, grandchild := pidOf(t, file, "agent"), pidOf(t, file, "stubborn")
				if !alive(agent) || !alive(grandchild) {
					t.Fatal("they should be there")
				}
				switch action {
				case "cancel":
					o, err := j.Cancel(bg, "test")
					if err != nil || !o.Acknowledged || o.Fence != nil {
						t.Errorf("outcome %+v, %v", o, err)
					}
				case "disconnect":
					w.cut()
					wait(t, func() bool { return !alive(agent) && !alive(grandchild) })
				case "timeout":
					drainAny(j)
					if o := j.Outcome(); o.Code != "relay.daemon_timeout" || !o.Acknowledged {
						t.Errorf("outcome %+v", o)
					}
				}
				if alive(agent) || alive(grandchild) {
					t.Error("a process is left after the settling")
				}
				if kind == "acp" && action == "cancel" {
					if n := notes(t, file, "cancelled"); n != "session" {
						t.Errorf("session/cancel was not sent: %s", n)
					}
				}
				wait(t, func() bool { return len(h.Jobs()) == 0 })
				if f := h.Fences(); len(f) != 0 && action != "disconnect" || len(f) == 0 && action == "disconnect" {
					t.Errorf("fences %+v", f)
				}
			})
		}
	}
}

// wire is a TCP connection between client and hub that can be cut.
type wire struct {
	url string
	cut func()
}

func newWire(t *testing.T, hub string) wire {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(hub)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cut := context.WithCancel(bg)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp4", u.Host)
			if err != nil {
				_ = a.Close()
				return
			}
			wg.Go(func() { _, _ = io.Copy(a, b); _ = a.Close() })
			wg.Go(func() { _, _ = io.Copy(b, a); _ = b.Close() })
			context.AfterFunc(ctx, func() { _ = a.Close(); _ = b.Close() })
		}
	})
	context.AfterFunc(ctx, func() { _ = l.Close() })
	t.Cleanup(func() {
		cut()
		wg.Wait()
	})
	return wire{"ws://" + l.Addr().String(), cut}
}

// A client that is told to stop ends its jobs and tells the hub: no fence.
func TestStoppedClientSettles(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	c := connect(t, url, "d", nil)
	file := filepath.Join(t.TempDir(), "notes")
	j := runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload("claude", "hang", file, nil)})
	agent, grandchild := pidOf(t, file, "agent"), pidOf(t, file, "stubborn")
	c.stop()
	got := events(t, j)
	if alive(agent) || alive(grandchild) {
		t.Error("told before the end")
	}
	if !strings.HasSuffix(types(got), "run.failed=agent_runtime.daemon_cancelled") {
		t.Errorf("got %s", types(got))
	}
	if err := c.wait(t); err != nil {
		t.Error(err)
	}
	if f := h.Fences(); len(f) != 0 {
		t.Errorf("fences %+v", f)
	}
}

// drainAny reads a job until it ends, however.
func drainAny(j *relay.Job) (all []json.RawMessage) {
	for {
		ctx, cancel := context.WithTimeout(bg, soon)
		e, err := j.Next(ctx)
		cancel()
		if err != nil {
			return all
		}
		all = append(all, e)
	}
}

// Paired with test_coding_native_lifecycle.py, bundled_daemon_ack_only_after_native_group_exit:
// cancelled twice, acknowledged when all are gone, not fenced, used again.
func TestBundledDaemonAckOnlyAfterNativeGroupExit(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			h, url := newHub(t, nil)
			connect(t, url, "d", nil)
			file := filepath.Join(t.TempDir(), "notes")
			j := runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, "hang", file, nil)})
			agent, grandchild := pidOf(t, file, "agent"), pidOf(t, file, "stubborn")
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(func() {
					o, err := j.Cancel(bg, "test")
					if err != nil || !o.Acknowledged {
						t.Errorf("outcome %+v, %v", o, err)
					}
					if alive(agent) || alive(grandchild) {
						t.Error("acknowledged before the group's end")
					}
				})
			}
			wg.Wait()
			got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, "", file, nil)}))
			if !strings.HasSuffix(types(got), "run.completed") {
				t.Errorf("the daemon's next job: %s", types(got))
			}
		})
	}
}

// runnerFunc is a Runner of a test's.
type runnerFunc func(ctx context.Context, id string, payload json.RawMessage, emit func(json.RawMessage) error, mcp MCP) error

func (f runnerFunc) Run(ctx context.Context, id string, p json.RawMessage, emit func(json.RawMessage) error, mcp MCP) error {
	return f(ctx, id, p, emit, mcp)
}

// Paired with test_coding_relay_v1.py, client_cleanup_failure_refuses_reconnect.
func TestClientCleanupFailureRefusesReconnect(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *relay.HubConfig) { c.Limits.CancelTimeout = 200 * time.Millisecond })
	ended := make(chan struct{})
	var once sync.Once
	c := connect(t, url, "bad-cleanup", func(c *Config) {
		c.Runner = runnerFunc(func(ctx context.Context, _ string, p json.RawMessage, _ func(json.RawMessage) error, _ MCP) error {
			if strings.Contains(string(p), "other") {
				<-ctx.Done()
				once.Do(func() { close(ended) })
				return context.Cause(ctx)
			}
			return &UnconfirmedError{Why: "fixture"}
		})
	})
	other := runJob(t, h, relay.JobRequest{DaemonID: "bad-cleanup", Payload: json.RawMessage(`{"x":"other"}`)})
	j := runJob(t, h, relay.JobRequest{DaemonID: "bad-cleanup", Payload: json.RawMessage(`{}`)})
	err := c.wait(t)
	if !errdefs.Is(err, errdefs.Indeterminate) || !strings.Contains(err.Error(), "fixture") {
		t.Errorf("the client ends with %v", err)
	}
	<-ended // the other job was ended too
	drainAny(j)
	drainAny(other)
	wait(t, func() bool { return len(h.Fences()) == 1 })
	if err := h.WaitForDaemon(bg, "bad-cleanup", 100*time.Millisecond); !relaywire.Is(err, relaywire.CodeFenced) {
		t.Errorf("then %v", err)
	}
}

// Paired with test_coding_native_lifecycle.py, same_installation_two_agent_configs_and_reconfiguration:
// each daemon works where its own payload says.
func TestSameInstallationTwoAgentConfigs(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	for _, id := range []string{"one", "two"} {
		root := t.TempDir()
		dir, file := filepath.Join(root, id), filepath.Join(t.TempDir(), "notes")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		connect(t, url, id, func(c *Config) { c.AllowWorkspace = []string{root} })
		events(t, runJob(t, h, relay.JobRequest{DaemonID: id, Payload: payload("claude", "", file, map[string]any{"workspace": dir})}))
		if got := notes(t, file, "cwd"); got != dir {
			t.Errorf("%s works in %s, not %s", id, got, dir)
		}
	}
}

// Paired with test_coding_relay_v1.py, two_separate_installation_processes_shared_network.
func TestTwoSeparateInstallationProcesses(t *testing.T) {
	t.Parallel()
	type side struct {
		h    *relay.Hub
		j    *relay.Job
		pids []int
		file string
	}
	var sides [2]side
	var urls [2]string
	for i := range sides {
		own := token + string(rune('A'+i))
		h, url := newHub(t, func(c *relay.HubConfig) { c.Token, c.Profile = own, relay.Shared })
		urls[i] = url
		home := t.TempDir()
		work := filepath.Join(home, "work")
		if err := os.Mkdir(work, 0o700); err != nil {
			t.Fatal(err)
		}
		cmd := startClient(t, []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home, "FOREIGN_HOST_SECRET=of-the-client"}, url, "same-id", own, work)
		t.Cleanup(func() {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			if err := cmd.Wait(); err != nil {
				t.Errorf("the client ends with %v", err)
			}
			if left, _ := filepath.Glob(filepath.Join(home, "stockade-relay-*")); len(left) > 0 {
				t.Errorf("it leaves %v", left)
			}
		})
		file := filepath.Join(home, "notes")
		sides[i] = side{h: h, file: file, j: runJob(t, h, relay.JobRequest{DaemonID: "same-id", Payload: payload(kinds[i], "hang", file, nil)})}
		sides[i].pids = []int{pidOf(t, file, "agent"), pidOf(t, file, "stubborn")}
		if got := notes(t, file, "foreign"); got != "" {
			t.Errorf("the agent has a variable of the client's: %s", got)
		}
	}
	// The other's token does not open this one's hub.
	crossed := connect(t, urls[0], "attacker", func(c *Config) { c.Token = token + "B" })
	if err := sides[0].h.WaitForDaemon(bg, "attacker", 300*time.Millisecond); err == nil {
		t.Error("a foreign token was accepted")
	}
	crossed.stop()
	if o, err := sides[0].j.Cancel(bg, "test"); err != nil || !o.Acknowledged {
		t.Errorf("outcome %+v, %v", o, err)
	}
	if alive(sides[0].pids[0]) || alive(sides[0].pids[1]) {
		t.Error("A is not gone")
	}
	if !alive(sides[1].pids[0]) || !alive(sides[1].pids[1]) {
		t.Error("cancelling in A ended B")
	}
	if o, err := sides[1].j.Cancel(bg, "test"); err != nil || !o.Acknowledged {
		t.Errorf("outcome %+v, %v", o, err)
	}
}

// toolsFunc answers tool calls.
type toolsFunc func(ctx context.Context, payload json.RawMessage) (json.RawMessage, error)

func (f toolsFunc) Call(ctx context.Context, p json.RawMessage) (json.RawMessage, error) {
	return f(ctx, p)
}

func TestToolsReachTheAgent(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	connect(t, url, "d", nil)
	got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload("claude", "tools", "", nil),
		Tools: toolsFunc(func(_ context.Context, p json.RawMessage) (json.RawMessage, error) {
			return json.RawMessage(`{"jsonrpc":"2.0","id":7,"result":{"tools":["x"]}}`), nil
		})}))
	if last := string(got[len(got)-2]); !strings.Contains(last, `200 {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{\"tools\":[\"x\"]}}`) {
		t.Errorf("the agent got %s", last)
	}
}

// A result of 3 MiB is carried, which is more than the usual limit of a WebSocket.
func TestLargeEventIsCarried(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	connect(t, url, "d", nil)
	got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload("claude", "big", "", nil)}))
	if types(got) != "state.updated message.delta message.delta! run.completed" || len(got[2]) < 6<<20 {
		t.Errorf("%s, %d bytes", types(got), len(got[len(got)-2]))
	}
}

// And so is a payload of 2 MiB.
func TestLargePayloadIsCarried(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	connect(t, url, "d", nil)
	prompt := strings.Repeat("p", 2<<20)
	p := strings.Replace(string(payload("claude", "", "", nil)), "do it", prompt, 1)
	got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: json.RawMessage(p)}))
	if !strings.HasSuffix(types(got), "run.completed") || !strings.Contains(string(got[len(got)-2]), "answer: "+prompt) {
		t.Errorf("%s", types(got))
	}
}

// Limits of one's own: what is too large is told, with the limit named.
func TestTooLargeEventIsToldNotSent(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	connect(t, url, "d", func(c *Config) { c.Limits.MessageBytes = 1 << 20 })
	got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload("claude", "big", "", nil)}))
	last := got[len(got)-1]
	if !strings.HasSuffix(types(got), "run.failed=claude_code.output_too_large") || !strings.Contains(string(last), "1048576") {
		t.Errorf("%s, %s", types(got), last)
	}
}

// A consumer that does not read stops only its own job, and a cancel goes through.
func TestFloodIsHeldBackAndCancelled(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *relay.HubConfig) { c.Limits.SpillBytes, c.Limits.QueueBytes = 1<<20, 1<<20 })
	connect(t, url, "d", nil)
	file := filepath.Join(t.TempDir(), "notes")
	j := runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload("acp", "flood", file, nil)})
	agent := pidOf(t, file, "agent")
	if _, err := j.Next(bg); err != nil {
		t.Fatal(err)
	}
	o, err := j.Cancel(bg, "test")
	if err != nil || !o.Acknowledged || alive(agent) {
		t.Errorf("outcome %+v, %v, alive %v", o, err, alive(agent))
	}
}
