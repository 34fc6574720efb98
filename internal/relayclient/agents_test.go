package relayclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// What an agent leaves behind, be it finished or dead, is ended before the job's end,
// even if it holds the output.
func TestLeftoversAreEnded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ prompt, last string }{{"leave", "run.completed"}, {"leave and crash", "run.failed="}} {
		for _, kind := range kinds {
			t.Run(c.prompt+" "+kind, func(t *testing.T) {
				t.Parallel()
				h, url := newHub(t, nil)
				connect(t, url, "d", nil)
				file := filepath.Join(t.TempDir(), "notes")
				got := types(events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, c.prompt, file, nil)})))
				if c.last == "run.completed" && !strings.HasSuffix(got, c.last) || !strings.Contains(got, c.last) {
					t.Errorf("events %s", got)
				}
				if b, _ := os.ReadFile(file); strings.Contains(string(b), "stubborn") && alive(pidOf(t, file, "stubborn")) {
					t.Error("somebody is left")
				}
			})
		}
	}
}

// The payload's own time-out is told by its own code, and may be tried again.
func TestPayloadTimeout(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			h, url := newHub(t, nil)
			connect(t, url, "d", nil)
			file := filepath.Join(t.TempDir(), "notes")
			got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payload(kind, "hang", file, map[string]any{"timeout": 0.5})}))
			code := map[string]string{"acp": "acp.timeout", "claude": "claude_code.timeout", "codex": "codex.timeout"}[kind]
			if last := string(got[len(got)-1]); !strings.HasSuffix(types(got), "run.failed="+code) || !strings.Contains(last, `"retryable":true`) {
				t.Errorf("events %s", got)
			}
			if alive(pidOf(t, file, "agent")) {
				t.Error("the agent is left")
			}
		})
	}
}

// What the machine's owner has not allowed is refused before anything starts.
func TestNotAllowed(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	work := t.TempDir()
	if err := os.Symlink("/etc", filepath.Join(work, "out")); err != nil {
		t.Fatal(err)
	}
	connect(t, url, "strict", func(c *Config) { c.AllowCommand, c.AllowWorkspace = nil, []string{work} })
	connect(t, url, "own", func(c *Config) { c.AllowCommand, c.AllowWorkspace = []string{exe()}, []string{work} })
	file := filepath.Join(t.TempDir(), "notes")
	env := func(name string) map[string]any { return map[string]any{"env": map[string]any{name: "secret value"}} }
	for name, c := range map[string]struct {
		daemon, kind string
		more         map[string]any
		want         string
	}{
		"command":           {"strict", "claude", nil, "claude_code.permission_denied"},
		"acp command":       {"strict", "acp", nil, "acp.permission_denied"},
		"shell":             {"own", "codex", map[string]any{"command": "sh -c 'exit 0'"}, "codex.permission_denied"},
		"relative":          {"own", "codex", map[string]any{"command": "./x"}, "codex.permission_denied"},
		"workspace":         {"own", "claude", map[string]any{"workspace": "/"}, "claude_code.config_invalid"},
		"link":              {"own", "claude", map[string]any{"workspace": work + "/out"}, "claude_code.config_invalid"},
		"dots":              {"own", "claude", map[string]any{"workspace": work + "/../.."}, "claude_code.config_invalid"},
		"missing directory": {"own", "claude", map[string]any{"workspace": work + "/none"}, "claude_code.config_invalid"},
		"loader":            {"own", "claude", env("LD_PRELOAD"), "claude_code.config_invalid"},
		"search path":       {"own", "claude", env("PATH"), "claude_code.config_invalid"},
		"node options":      {"own", "claude", env("NODE_OPTIONS"), "claude_code.config_invalid"},
		"ours":              {"own", "claude", env("STOCKADE_X"), "claude_code.config_invalid"},
		"zero byte":         {"own", "claude", env("A\x00"), "claude_code.config_invalid"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := events(t, runJob(t, h, relay.JobRequest{DaemonID: c.daemon, Payload: payload(c.kind, "", file, c.more)}))
			if types(got) != "run.failed="+c.want || strings.Contains(string(got[0]), "secret value") {
				t.Errorf("got %s, want %s", got, c.want)
			}
		})
	}
	t.Cleanup(func() {
		if b, err := os.ReadFile(file); err == nil {
			t.Errorf("something ran: %s", b)
		}
	})
	for _, bad := range []string{`{}`, `{"kind":"x"}`, `{"prompt":"x"}`} {
		got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "own", Payload: []byte(bad)}))
		if types(got) != "run.failed=agent_runtime.config_invalid" {
			t.Errorf("%s: %s", bad, got)
		}
	}
}

// What a killed client left in the machine's temporary directory goes when the next one
// starts, and nothing else does.
func TestLeftScratchIsRemoved(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	log := slog.New(slog.DiscardHandler)
	lives, err := newScratch("", log)
	if err != nil {
		t.Fatal(err)
	}
	left, elsewhere := filepath.Join(tmp, scratchPrefix+"left"), filepath.Join(tmp, "elsewhere")
	for _, err := range []error{
		os.MkdirAll(filepath.Join(left, "run-1"), 0o700), os.WriteFile(filepath.Join(left, "run-1", "mcp.json"), nil, 0o600),
		os.Mkdir(elsewhere, 0o700), os.Symlink(elsewhere, filepath.Join(tmp, scratchPrefix+"link")),
		os.WriteFile(filepath.Join(tmp, scratchPrefix+"file"), nil, 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	next, err := newScratch("", log)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Error("it is still there")
	}
	for _, path := range []string{lives.path, next.path, elsewhere, filepath.Join(tmp, scratchPrefix+"file")} {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
	// Many at once do not take each other's.
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 50 {
				s, err := newScratch("", log)
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := os.Stat(s.path); err != nil {
					t.Error(err)
				}
				if err := s.remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	for _, s := range []*scratch{lives, next} {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}
}

// So does the control group that a killed client's agents were in, unless something lives
// there; then the next one finds it.
func TestLeftControlGroupIsRemoved(t *testing.T) {
	need.Root(t)
	t.Setenv("TMPDIR", t.TempDir())
	log := slog.New(slog.DiscardHandler)
	parent := fmt.Sprintf("/stockade-relay-test-%d", os.Getpid())
	killed, err := newScratch(parent, log)
	if err != nil {
		t.Fatal(err)
	}
	run := cgroup.New("", killed.group(parent)+"/run")
	if err := run.Track(); err != nil {
		t.Fatal(err)
	}
	lives := exec.Command("sleep", "600")
	if err := lives.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = lives.Wait() }()
	defer func() { _ = lives.Process.Kill() }()
	if err := run.Add(lives.Process.Pid); err != nil {
		t.Fatal(err)
	}
	killed.lock.Close() // as the kernel does
	next := func() {
		t.Helper()
		s, err := newScratch(parent, log)
		if err == nil {
			err = s.clear(parent)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	next()
	if _, err := os.Stat(killed.path); err != nil {
		t.Fatalf("nothing tells any more whose group it is: %v", err)
	}
	if err := lives.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = lives.Wait()
	next()
	for _, path := range []string{killed.path, filepath.Join(cgroup.DefaultRoot, parent), filepath.Join(cgroup.DefaultRoot, "pids", parent), filepath.Join(cgroup.DefaultRoot, "unified", parent)} {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

// A job that was cancelled before its agent was started starts none.
func TestCancelledBeforeTheStart(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	a, err := newAgents(Config{AllowCommand: []string{"*"}}, relaywire.Limits{}.WithDefaults(), t.TempDir(), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	ctx, cancel := context.WithCancelCause(bg)
	cancel(errCancelled)
	err = a.Run(ctx, "j", payload("claude", "", filepath.Join(t.TempDir(), "notes"), nil), func(json.RawMessage) error { return nil }, MCP{})
	if err != errCancelled || strings.Contains(log.String(), "an agent runs") {
		t.Errorf("%v, and the log says %s", err, &log)
	}
}
