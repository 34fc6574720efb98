package relayclient

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/demo"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/testmodel"
)

const modelKey = "the-right-key-of-the-model"

// vendorAgents are the real agents, and how a payload has them use a scripted model.
var vendorAgents = map[string]func(program, model, key, home string) json.RawMessage{
	"claude": func(program, model, key, home string) json.RawMessage {
		return object(map[string]any{"kind": "claude-code", "prompt": "make the file", "config": map[string]any{
			"command": []string{program}, "timeout": 120,
			"env": map[string]any{"ANTHROPIC_BASE_URL": model, "ANTHROPIC_API_KEY": key, "HOME": home, "IS_SANDBOX": "1",
				"DISABLE_TELEMETRY": 1, "DISABLE_AUTOUPDATER": 1, "DISABLE_ERROR_REPORTING": 1, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": 1, "CLAUDE_CODE_MAX_RETRIES": 0},
		}})
	},
	"codex": func(program, model, key, home string) json.RawMessage {
		return object(map[string]any{"kind": "codex", "prompt": "make the file", "config": map[string]any{
			"command": []string{program}, "args": codexModel(model), "timeout": 120,
			"env": map[string]any{"OPENAI_API_KEY": key, "HOME": home, "CODEX_HOME": home},
		}})
	},
	"codex-acp": func(program, model, key, home string) json.RawMessage {
		return object(map[string]any{"kind": "acp", "prompt_text": "make the file", "config": map[string]any{
			"provider": "codex", "acp_command": append([]string{program}, append(codexModel(model), "-c", `sandbox_mode="danger-full-access"`, "-c", `approval_policy="never"`)...),
			"timeout": 120, "env": map[string]any{"OPENAI_API_KEY": key, "HOME": home, "CODEX_HOME": home},
		}})
	},
}

func codexModel(model string) []string {
	return []string{"-c", "model_provider=test", "-c", `model="gpt-5"`, "-c",
		fmt.Sprintf(`model_providers.test={name="test",base_url=%q,env_key="OPENAI_API_KEY",wire_api="responses",request_max_retries=0,stream_max_retries=0}`, model+"/v1")}
}

func object(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

// vendor finds a real agent's program.
func vendor(t *testing.T, name string) string {
	t.Helper()
	need.Tool(t, "node", "nodejs")
	root, err := demo.FindCheckout("")
	if err != nil {
		t.Fatal(err)
	}
	dir, ok := demo.AgentsInstalled(root)
	need.That(t, ok, "this test needs the vendor CLIs: make setup-agents")
	program := filepath.Join(dir, "node_modules/.bin", name)
	_, err = os.Stat(program)
	need.That(t, err == nil, "this test needs %s: make setup-agents", name)
	return program
}

// Real agents at a real hub: start, stream, tools, complete; fail; cancel.
func TestVendorAgents(t *testing.T) {
	if testing.Short() {
		t.Skip("real agents take a while")
	}
	for name, payloadFor := range vendorAgents {
		t.Run(name, func(t *testing.T) {
			program := vendor(t, name)
			script := []testmodel.Turn{
				{Text: "Let me make it. ", Call: &testmodel.Call{Shell: "echo made >made.txt"}},
				{Text: "The file is made, friend."},
			}
			h, url := newHub(t, nil)
			work := t.TempDir()
			t.Setenv("TMPDIR", t.TempDir()) // where Claude Code leaves notes of each session
			connect(t, url, "d", func(c *Config) { c.AllowWorkspace, c.AllowCommand = []string{work}, []string{program} })
			// Codex wants a home that is not below a temporary directory.
			home, err := os.MkdirTemp("/var/tmp", "relayclient")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(home) })

			t.Run("complete", func(t *testing.T) {
				model := startModel(t, testmodel.Config{Script: script, Key: modelKey, Piece: 8})
				var mu sync.Mutex
				asked := map[string]bool{}
				got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payloadFor(program, model.URL(), modelKey, home),
					Tools: toolsFunc(func(_ context.Context, p json.RawMessage) (json.RawMessage, error) {
						return mcpServer(&mu, asked, p)
					})}))
				all := types(got)
				if !strings.HasPrefix(all, "state.updated ") || !strings.Contains(all, "message.delta") || !strings.HasSuffix(all, " run.completed") {
					t.Fatalf("events %s\n%s", all, got)
				}
				if last := string(got[len(got)-2]); !strings.Contains(last, "The file is made, friend.") {
					t.Errorf("the final message is %s", last)
				}
				if b, err := os.ReadFile(filepath.Join(work, "made.txt")); err != nil || string(b) != "made\n" {
					t.Errorf("the file: %q, %v", b, err)
				}
				mu.Lock()
				if !asked["initialize"] || !asked["tools/list"] {
					t.Errorf("the host's tools were not asked for: %v", asked)
				}
				mu.Unlock()
				none(t, work)
			})
			t.Run("fail", func(t *testing.T) {
				model := startModel(t, testmodel.Config{Script: script, Key: modelKey})
				const wrong = "a-wrong-key-of-the-model"
				got := events(t, runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payloadFor(program, model.URL(), wrong, home)}))
				if !strings.Contains(types(got), "run.failed=") || strings.Contains(fmt.Sprintf("%s", got), wrong) {
					t.Errorf("events %s", got)
				}
				none(t, work)
			})
			t.Run("cancel", func(t *testing.T) {
				held, never := make(chan struct{}), make(chan struct{})
				t.Cleanup(func() { close(never) })
				hold := sync.OnceFunc(func() { close(held) })
				model := startModel(t, testmodel.Config{Script: script, Key: modelKey, Hold: func(turn int) <-chan struct{} {
					if turn < 1 {
						return nil
					}
					hold()
					return never
				}})
				j := runJob(t, h, relay.JobRequest{DaemonID: "d", Payload: payloadFor(program, model.URL(), modelKey, home)})
				<-held
				if len(in(work)) == 0 {
					t.Error("there should be processes: the test proves nothing")
				}
				if o, err := j.Cancel(bg, "test"); err != nil || !o.Acknowledged {
					t.Errorf("outcome %+v, %v", o, err)
				}
				none(t, work)
			})
			if f := h.Fences(); len(f) != 0 {
				t.Errorf("fences %+v", f)
			}
		})
	}
}

func startModel(t *testing.T, cfg testmodel.Config) *testmodel.Server {
	t.Helper()
	m, err := testmodel.Start(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// mcpServer answers as the host's tools would.
func mcpServer(mu *sync.Mutex, asked map[string]bool, p json.RawMessage) (json.RawMessage, error) {
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params struct {
			Version string `json:"protocolVersion"`
		} `json:"params"`
	}
	if err := json.Unmarshal(p, &m); err != nil {
		return nil, err
	}
	mu.Lock()
	asked[m.Method] = true
	mu.Unlock()
	if m.ID == nil {
		return nil, nil
	}
	result := map[string]any{}
	switch m.Method {
	case "initialize":
		result = map[string]any{"protocolVersion": m.Params.Version, "capabilities": map[string]any{"tools": map[string]any{}},
			"serverInfo": map[string]any{"name": "langbot-agent-daemon", "version": "0.1.0"}}
	case "tools/list":
		result["tools"] = []any{map[string]any{"name": "langbot_get_current_event", "description": "the event", "inputSchema": map[string]any{"type": "object"}}}
	}
	return object(map[string]any{"jsonrpc": "2.0", "id": m.ID, "result": result}), nil
}

// in lists the live processes that work in a directory.
func in(dir string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if cwd, err := os.Readlink("/proc/" + e.Name() + "/cwd"); err == nil && strings.HasPrefix(cwd, dir) && alive(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func none(t *testing.T, dir string) {
	t.Helper()
	if pids := in(dir); len(pids) > 0 {
		t.Errorf("processes %v are still there", pids)
	}
}
