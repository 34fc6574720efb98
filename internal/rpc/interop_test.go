package rpc

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

var testBinding = pluginwire.Context{InstanceUUID: "instance", WorkspaceUUID: "workspace", PlacementGeneration: 1,
	InstallationUUID: "installation", RuntimeRevision: 1, ArtifactDigest: strings.Repeat("0a", 32)}

// genuine is a real worker of the plugin kit under one SDK.
type genuine struct {
	*Conn
	cmd        *exec.Cmd
	registered chan error
	container  json.RawMessage
	fromPlugin func(ctx context.Context, in *Inbound) (any, error)
}

// streamOp reads a stream of the host with the SDK's own caller, slowly at first.
const streamOp = `
    async def op_llm(self, params):
        texts = []
        async for chunk in self.plugin.invoke_llm_stream(llm_model_uuid="m", messages=[]):
            texts.append(chunk.content)
            if len(texts) < 10:
                await asyncio.sleep(0.02)
            if len(texts) == params.get("stop"):
                break
        return {"texts": texts}
`

func startGenuine(t testing.TB, series string) *genuine { return startGenuineOver(t, series, false) }

func startGenuineOver(t testing.TB, series string, socket bool) *genuine {
	python := need.SDK(t, series)
	g := &genuine{registered: make(chan error, 1)}
	g.cmd = exec.Command(python, "-m", "langbot_plugin.cli.__init__", "run", "-s", "--prod")
	g.cmd.Dir = t.TempDir()
	if err := os.CopyFS(g.cmd.Dir, os.DirFS(need.Testdata(t, "plugins", "kit"))); err != nil {
		t.Fatal(err)
	}
	probe, err := os.OpenFile(filepath.Join(g.cmd.Dir, "components", "tools", "probe.py"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := probe.WriteString(streamOp); err != nil {
		t.Fatal(err)
	}
	probe.Close()
	g.cmd.Env = []string{"LANGBOT_PLUGIN_REGISTRATION_CAPABILITY=" + strings.Repeat("c", 64), "LANGBOT_PLUGIN_RUNTIME_PROFILE=oss_dev",
		"LANGBOT_PLUGIN_FILE_STORAGE_DIR=" + t.TempDir(), "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"}
	var stderr strings.Builder
	g.cmd.Stderr = &stderr
	var tr Transport
	if socket {
		accepted := make(chan *websocket.Conn, 1)
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-LangBot-Plugin-Registration-Capability") != strings.Repeat("c", 64) {
				t.Errorf("the header of the capability is missing: %v", r.Header)
			}
			if c, err := websocket.Accept(w, r, nil); err == nil {
				accepted <- c
			}
		}))
		t.Cleanup(srv.Close)
		g.cmd.Args = slices.DeleteFunc(g.cmd.Args, func(a string) bool { return a == "-s" })
		g.cmd.Env = append(g.cmd.Env, "RUNTIME_WS_URL=ws"+strings.TrimPrefix(srv.URL, "http")+"/plugin/ws")
		if err := g.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		select {
		case c := <-accepted:
			tr = WebSocket(c)
		case <-time.After(60 * time.Second):
			_ = g.cmd.Process.Kill()
			_ = g.cmd.Wait()
			t.Fatalf("the worker did not connect; its stderr:\n%s", stderr.String())
		}
	} else {
		in, err := g.cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, outW, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		g.cmd.Stdout = outW
		if err := g.cmd.Start(); err != nil {
			t.Fatal(err)
		}
		outW.Close()
		tr = Stdio(out, in, func() error { in.Close(); return out.Close() })
	}
	g.Conn = New(tr, Config{Handle: g.handle, Reserved: func(a string) bool { return a == pluginwire.ActionRegisterPlugin }})
	done := make(chan error, 1)
	go func() { done <- g.Run(context.Background()) }()
	t.Cleanup(func() {
		g.Close(nil)
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
		_ = g.cmd.Process.Kill()
		_ = g.cmd.Wait()
		if t.Failed() {
			t.Logf("stderr of the worker:\n%s", stderr.String())
		}
	})
	select {
	case err := <-g.registered:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(60 * time.Second):
		t.Fatalf("the worker did not register; its stderr:\n%s", stderr.String())
	}
	return g
}

func (g *genuine) handle(ctx context.Context, in *Inbound) (any, error) {
	if in.Action != pluginwire.ActionRegisterPlugin {
		if g.fromPlugin != nil {
			return g.fromPlugin(ctx, in)
		}
		return nil, pluginwire.UnknownAction(in.Action)
	}
	err := func() error {
		if in.HasContext {
			return fmt.Errorf("register_plugin came with a context")
		}
		if name, _ := pluginwire.StringField(in.Data, "registration_capability"); name != strings.Repeat("c", 64) {
			return fmt.Errorf("the capability is %q", name)
		}
		settings := map[string]any{"plugin_settings": map[string]any{"enabled": true, "priority": 3, "plugin_config": map[string]any{"greeting": "grüezi 🐮"}}}
		if _, err := g.Call(ctx, pluginwire.ActionInitializePlugin, settings, CallOptions{Context: testBinding}); err != nil {
			return err
		}
		var err error
		g.container, err = g.Call(ctx, pluginwire.ActionGetPluginContainer, nil, CallOptions{Context: testBinding})
		return err
	}()
	g.registered <- err
	return nil, err
}

func (g *genuine) tool(t testing.TB, name string, params any) json.RawMessage {
	t.Helper()
	answer, err := g.Call(context.Background(), pluginwire.ActionCallTool, map[string]any{
		"tool_name": name, "tool_parameters": params, "query_id": 7,
		"session": map[string]any{"launcher_type": "person", "launcher_id": "1", "sender_id": "1", "use_prompt_name": "", "using_conversation": nil, "conversations": []any{}},
	}, CallOptions{Context: testBinding, Timeout: 60 * time.Second})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return pluginwire.Field(answer, "tool_response")
}

// TestGenuineWorkers: registration with nested calls, and payloads of every size
// class both ways, with each SDK.
func TestGenuineWorkers(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5", "0.6", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			g := startGenuine(t, series)
			if status, _ := pluginwire.StringField(g.container, "status"); status != "initialized" {
				t.Errorf("the container's status is %q", status)
			}
			for _, size := range []int{10, 16<<10 - 300, 16 << 10, 20 << 10, 70 << 10, 1 << 20} {
				for _, kind := range []string{"x", `"\`, "é🐮", "\n\t"} {
					if size > 1<<20 && kind != "x" {
						continue
					}
					text := strings.Repeat(kind, size/len(kind))
					var got struct{ Params struct{ Text string } }
					if err := json.Unmarshal(g.tool(t, "echo", map[string]any{"text": text}), &got); err != nil {
						t.Fatal(err)
					}
					if got.Params.Text != text {
						t.Fatalf("%d bytes of %q came back as %d bytes", len(text), kind, len(got.Params.Text))
					}
				}
			}
			// An unknown action of a genuine worker, and unknown to us.
			_, err := g.Call(t.Context(), "no_such_action", nil, CallOptions{Context: testBinding})
			if p, ok := err.(*PeerError); !ok || p.Message != "ValueError: Action no_such_action not found" {
				t.Errorf("an unknown action: %v", err)
			}
			// The worker's standard output is the plugin's too.
			g.tool(t, "probe", map[string]any{"op": "noise", "lines": []string{"hello", "{not json}", `{"json": "but no message"}`, "[1]", ""}})
			if n := g.Counters().Ignored; n == 0 {
				t.Error("no line was ignored")
			}
			// Cancelled at the peer, where it can be; the connection lives either way.
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			if _, err := g.Call(ctx, pluginwire.ActionCallTool, map[string]any{"tool_name": "probe", "query_id": 1,
				"tool_parameters": map[string]any{"op": "sleep", "seconds": 3600},
				"session":         map[string]any{"launcher_type": "person", "launcher_id": "1", "sender_id": "1"}},
				CallOptions{Context: testBinding, CancelPeer: true}); err == nil {
				t.Error("a call outlived its context")
			}
			g.tool(t, "probe", map[string]any{"op": "pid"})
		})
	}
}

// TestGenuineHostCalls: a worker calls back with a large answer while its own action
// is unanswered.
func TestGenuineHostCalls(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5", "0.6", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			g := startGenuine(t, series)
			big := strings.Repeat("ß", 100<<10)
			g.fromPlugin = func(ctx context.Context, in *Inbound) (any, error) {
				if in.Action != pluginwire.ActionGetBots {
					return nil, pluginwire.UnknownAction(in.Action)
				}
				return map[string]any{"bots": []any{map[string]any{"uuid": "b", "text": big}}}, nil
			}
			var got struct{ Bots []struct{ Text string } }
			if err := json.Unmarshal(g.tool(t, "probe", map[string]any{"op": "bots"}), &got); err != nil || len(got.Bots) != 1 || got.Bots[0].Text != big {
				t.Errorf("bots: %v, %d", err, len(got.Bots))
			}
		})
	}
}

func (g *genuine) command(t testing.TB, params ...string) *Stream {
	t.Helper()
	s, err := g.Stream(t.Context(), pluginwire.ActionExecuteCommand, map[string]any{"command_context": map[string]any{
		"query_id": 1, "session": map[string]any{"launcher_type": "person", "launcher_id": "1", "sender_id": "1"},
		"command_text": strings.Join(params, " "), "full_command_text": "say " + strings.Join(params, " "), "command": "say", "crt_command": "say",
		"params": params, "crt_params": params, "privilege": 1,
	}}, CallOptions{Context: testBinding, Timeout: 30 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestGenuineSockets: the same over a WebSocket, with the SDK's own client.
func TestGenuineSockets(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5", "0.6", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			g := startGenuineOver(t, series, true)
			for _, size := range []int{10, 64 << 10, 100 << 10, 4 << 20} {
				text := strings.Repeat("é🐮", size/6)
				var got struct{ Params struct{ Text string } }
				if err := json.Unmarshal(g.tool(t, "echo", map[string]any{"text": text}), &got); err != nil || got.Params.Text != text {
					t.Fatalf("%d bytes came back as %d, %v", len(text), len(got.Params.Text), err)
				}
			}
		})
	}
}

// TestGenuineStreams: streams both ways, read to the end, slowly, and given up.
func TestGenuineStreams(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5", "0.6", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			g := startGenuine(t, series)
			const frames = 500
			s := g.command(t, "many", fmt.Sprint(frames))
			for i := range frames {
				data, err := s.Next(t.Context())
				if err != nil {
					t.Fatalf("frame %d: %v", i, err)
				}
				text, _ := pluginwire.StringField(pluginwire.Field(data, "command_response"), "text")
				if text != fmt.Sprint(i) {
					t.Fatalf("frame %d is %s", i, data)
				}
			}
			if _, err := s.Next(t.Context()); err != io.EOF {
				t.Fatalf("the end: %v", err)
			}
			s = g.command(t, "many", "20000")
			for range 10 {
				if _, err := s.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			s.Close()
			s = g.command(t, "broken")
			var err error
			for err == nil {
				_, err = s.Next(t.Context())
			}
			if err == io.EOF {
				t.Log("the SDK ends a broken command without an error")
			} else if p, ok := err.(*PeerError); !ok || !strings.Contains(p.Message, "told to break") {
				t.Errorf("a broken command: %v", err)
			}
			if series == "0.5" {
				return // knows no streaming model
			}
			ended := make(chan error, 2)
			g.fromPlugin = func(ctx context.Context, in *Inbound) (any, error) {
				if in.Action != pluginwire.ActionInvokeLLMStream {
					return nil, pluginwire.UnknownAction(in.Action)
				}
				if in.WantsStream != (series == "0.7") {
					t.Errorf("flow control: %v", in.WantsStream)
				}
				n := 100 // what a peer without flow control keeps is bounded
				if in.WantsStream {
					n = frames
				}
				var err error
				for i := range n {
					if err = in.Send(ctx, map[string]any{"chunk": map[string]any{"role": "assistant", "content": fmt.Sprint(i)}}); err != nil {
						break
					}
				}
				ended <- err
				return nil, err
			}
			var got struct{ Texts []string }
			if err := json.Unmarshal(g.tool(t, "probe", map[string]any{"op": "llm"}), &got); err != nil || len(got.Texts) < 100 {
				t.Fatalf("%d texts, %v", len(got.Texts), err)
			}
			for i, text := range got.Texts {
				if text != fmt.Sprint(i) {
					t.Fatalf("text %d is %s", i, text)
				}
			}
			if err := <-ended; err != nil {
				t.Errorf("the sender: %v", err)
			}
			if err := json.Unmarshal(g.tool(t, "probe", map[string]any{"op": "llm", "stop": 3}), &got); err != nil || len(got.Texts) != 3 {
				t.Fatalf("%d texts, %v", len(got.Texts), err)
			}
			if err := <-ended; (err != nil) != (series == "0.7") {
				t.Errorf("the sender of a stream that was given up: %v", err)
			}
			g.tool(t, "probe", map[string]any{"op": "pid"})
		})
	}
}

// BenchmarkGenuine calls an echo tool of a real worker: most of it is Python.
func BenchmarkGenuine(b *testing.B) {
	g := startGenuine(b, "0.7")
	for b.Loop() {
		g.tool(b, "echo", map[string]any{"text": "x"})
	}
}
