package demo

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/testmodel"
)

func TestCodexEvents(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	c := &codex{ev: record(&out)}
	err := driveLines(strings.NewReader(strings.Join([]string{
		`not an event`,
		`{"type":"thread.started","thread_id":"x"}`,
		`{"type":"item.completed","item":{"type":"reasoning","text":"hm"}}`,
		`{"type":"item.completed","item":{"type":"agent_message","text":"I look."}}`,
		`{"type":"item.completed","item":{"type":"command_execution","command":"ls","aggregated_output":"a\nb\n","exit_code":0}}`,
		`{"type":"error","message":"Reconnecting... 1/5"}`,
		`{"type":"turn.completed","usage":{}}`,
	}, "\n")), c.line)
	want := "  │ … hm\n  │ I look.\n  │ $ ls\n  │   a\n  │   b\n  │ codex: Reconnecting... 1/5\n"
	if err != nil || !c.done || out.String() != want {
		t.Errorf("%v %v\n%s", err, c.done, out.String())
	}
	c = &codex{ev: record(&out)}
	if err := driveLines(strings.NewReader(`{"type":"turn.failed","error":{"message":"no"}}`), c.line); err == nil || c.done {
		t.Errorf("a failed turn: %v", err)
	}
}

func TestClaudeEvents(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	c := &claude{ev: record(&out), titles: map[string]string{}}
	err := driveLines(strings.NewReader(strings.Join([]string{
		`{"type":"system","subtype":"init"}`,
		`{"type":"user","message":{"content":"the prompt"}}`,
		`{"type":"assistant","message":{"content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"I look."}]}}`,
		`{"type":"assistant","message":{"content":[{"type":"tool_use","id":"t1","name":"Bash","input":{"command":"ls"}}]}}`,
		`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t1","content":"a\nb"}]}}`,
		`{"type":"assistant","message":{"content":[{"type":"tool_use","id":"t2","name":"Edit","input":{"file_path":"/x","old_string":"1"}}]}}`,
		`{"type":"user","message":{"content":[{"type":"tool_result","tool_use_id":"t2","content":[{"type":"text","text":"ok"}]}]}}`,
		`{"type":"result","subtype":"success","is_error":false,"result":"done"}`,
	}, "\n")), c.line)
	want := "  │ … hm\n  │ I look.\n  │ $ ls\n  │   a\n  │   b\n  │ $ Edit /x\n  │   ok\n"
	if err != nil || !c.done || out.String() != want {
		t.Errorf("%v %v\n%s", err, c.done, out.String())
	}
	c = &claude{ev: record(&out), titles: map[string]string{}}
	if err := driveLines(strings.NewReader(`{"type":"result","subtype":"success","is_error":true,"result":"API Error"}`), c.line); err == nil || c.done {
		t.Errorf("a failed result: %v", err)
	}
}

// agents returns the directory with the vendors' CLIs.
func agents(t *testing.T) string {
	t.Helper()
	root, err := FindCheckout("")
	if err != nil {
		t.Fatal(err)
	}
	dir, ok := AgentsInstalled(root)
	need.That(t, ok, "this test needs the vendors' CLIs: make setup-agents")
	return filepath.Join(dir, "node_modules/.bin")
}

// The real CLIs do the task with the scripted model behind a gateway, outside of
// any box, although the gateway is closed before an answer and opened again, and
// another answer breaks off in the middle.
func TestVendorsDoTheTask(t *testing.T) {
	t.Parallel()
	bin := agents(t)
	for _, agent := range []string{agentCodex, agentClaude} {
		t.Run(agent, func(t *testing.T) {
			t.Parallel()
			dir, home := unpack(t, agent), t.TempDir()
			script := modelScript()
			for i, turn := range script {
				if c := turn.Call; c != nil && c.Read != "" {
					script[i].Call = &testmodel.Call{Read: filepath.Join(dir, programFile)}
				} else if c != nil && c.Edit != nil {
					script[i].Call = &testmodel.Call{Edit: &testmodel.Edit{Path: filepath.Join(dir, programFile), Old: c.Edit.Old, New: c.Edit.New}}
				}
			}
			held, never := make(chan struct{}), make(chan struct{})
			hold := sync.OnceFunc(func() { close(held) })
			var broke atomic.Bool
			cut := func(turn int) bool { return turn == 2 && !broke.Swap(true) }
			model, err := testmodel.Start(testmodel.Config{Script: script, Key: "right", Cut: cut, Hold: func(turn int) <-chan struct{} {
				select {
				case <-held:
					return nil
				default:
				}
				if turn != 1 {
					return nil
				}
				hold()
				return never // it ends with the call
			}})
			if err != nil {
				t.Fatal(err)
			}
			defer model.Close()
			style, base := gateway.StyleAnthropic, model.URL()
			if agent == agentCodex {
				style, base = gateway.StyleOpenAI, model.URL()+"/v1"
			}
			gw, err := gateway.New(gateway.Config{
				Providers: map[string]gateway.Provider{"model": {BaseURL: base, Key: "right", Style: style}},
				Listen:    func(_, network, addr string) (net.Listener, error) { return net.Listen(network, addr) },
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := gw.Close(context.WithoutCancel(t.Context())); err != nil {
					t.Error(err)
				}
			}()
			grant := gateway.Grant{Run: "run", Providers: []string{"model"}}
			routes, err := gw.Open(t.Context(), grant)
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			defer wg.Wait()
			stop := make(chan struct{})
			defer close(stop)
			wg.Go(func() {
				select {
				case <-held:
				case <-stop:
					t.Error("the second turn was not asked for")
					return
				}
				grant.Ports = map[string]int{"model": routes[0].Port}
				if err := gw.CloseRun(t.Context(), "run"); err != nil {
					t.Error(err)
				}
				again, err := gw.Open(t.Context(), grant)
				if err != nil || again[0].Port != routes[0].Port {
					t.Errorf("opened again: %v %v", again, err)
				}
			})
			var line []string
			env := []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + home, "TMPDIR=" + home}
			var out bytes.Buffer
			ev := record(&out)
			co, cl := &codex{ev: ev}, &claude{ev: ev, titles: map[string]string{}}
			on, done := co.line, &co.done
			if agent == agentCodex {
				line = codexLine(routes[0].BaseURL, true)
			} else {
				line = claudeLine()
				on, done = cl.line, &cl.done
				// It is root here, which it refuses outside of a sandbox.
				env = append(env, "IS_SANDBOX=1")
				for k, v := range claudeEnv {
					env = append(env, k+"="+v)
				}
			}
			for k, v := range gw.Env(routes) {
				env = append(env, k+"="+v)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(bin, line[0]), line[1:]...)
			cmd.Dir, cmd.Env = dir, env
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			text, err := cmd.Output()
			if err == nil {
				err = driveLines(bytes.NewReader(text), on)
			}
			if err != nil || !*done {
				t.Fatalf("%v, done %v\n%s\n%s\n%s", err, *done, out.String(), text, stderr.String())
			}
			if b, err := exec.Command("sh", filepath.Join(dir, testFile)).CombinedOutput(); err != nil {
				t.Errorf("the program is not mended: %v\n%s\n%s", err, b, out.String())
			}
			turns := map[int]bool{}
			for _, r := range model.Requests() {
				turns[r.Turn] = true
				if r.Refused || strings.Contains(fmt.Sprint(r.Header), gateway.Placeholder) {
					t.Errorf("the model saw %v", r.Header)
				}
			}
			for i := range script {
				if !turns[i] {
					t.Errorf("turn %d was not asked for\n%s", i, out.String())
				}
			}
		})
	}
}
