package pluginhost

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// PH-02, PH-07: what a worker says about whom it speaks for is taken out, what its
// registration proved is put in, and the rest arrives byte by byte.
func TestForwardIsScrubbed(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		_, a, b := r.pair()
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			return map[string]any{}, nil, in.Action != pluginwire.ActionGetPluginSettings
		})
		w := r.launcher.nth(0)
		forged := json.RawMessage(`{"bot_uuid":"x","odd":1.50,"context":{"a":1},"action_context":1,"instance_uuid":"i","workspace_uuid":"w","placement_generation":9,` +
			`"execution_generation":9,"installation_uuid":"inst-b","runtime_revision":9,"artifact_digest":"d","caller_plugin_identity":"evil/one"}`)
		if _, err := w.ask(pluginwire.ActionGetBotInfo, forged, a); err != nil {
			r.t.Fatal(err)
		}
		calls := r.host.made(pluginwire.ActionGetBotInfo)
		if len(calls) != 1 || calls[0].from != a || calls[0].data != `{"bot_uuid":"x","odd":1.50,"caller_plugin_identity":"tester/toy"}` {
			r.t.Errorf("%+v", calls)
		}
		// The envelope of a sibling that is attached speaks for the sibling; of one that
		// is not, for nobody.
		if _, err := w.ask(pluginwire.ActionGetWorkspaceStorage, map[string]any{"key": "k", "owner": "ws-9", "owner_type": "x"}, b); err != nil {
			r.t.Fatal(err)
		}
		calls = r.host.made(pluginwire.ActionGetBinaryStorage)
		if len(calls) != 1 || calls[0].from != b || !strings.Contains(calls[0].data, `"owner_type":"workspace","owner":"ws-1"`) || strings.Contains(calls[0].data, "ws-9") {
			r.t.Errorf("%+v", calls)
		}
		foreign := b
		foreign.WorkspaceUUID = "ws-2"
		if _, err := w.ask(pluginwire.ActionGetBots, struct{}{}, foreign); err == nil || !strings.Contains(err.Error(), "not attached") {
			r.t.Errorf("%v", err)
		}
		if _, err := w.ask("no_such_action", struct{}{}, a); err == nil || !strings.Contains(err.Error(), "ValueError: Action no_such_action not found") {
			r.t.Errorf("%v", err)
		}
	})
}

// The payload's timeout is the time of the call and is not sent on.
func TestForwardTimeoutFromPayload(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action == pluginwire.ActionInvokeLLM {
				<-ctx.Done()
				return nil, ctx.Err(), true
			}
			return nil, nil, false
		})
		before := time.Now()
		_, err := r.launcher.nth(0).conn.Call(context.Background(), pluginwire.ActionInvokeLLM, map[string]any{"timeout": 7, "messages": []any{}}, rpc.CallOptions{Context: b, Timeout: -1})
		if err == nil || time.Since(before) != 7*time.Second {
			r.t.Errorf("%v after %s", err, time.Since(before))
		}
		if calls := r.host.made(pluginwire.ActionInvokeLLM); len(calls) != 1 || strings.Contains(calls[0].data, "timeout") {
			r.t.Errorf("%+v", calls)
		}
	})
}

// A stream from LangBot goes through frame by frame, and its error too.
func TestForwardStream(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action != pluginwire.ActionInvokeLLMStream {
				return nil, nil, false
			}
			for i := range 50 {
				if err := in.Send(ctx, map[string]int{"chunk": i}); err != nil {
					return nil, err, true
				}
			}
			if strings.Contains(string(in.Data), "fail") {
				return nil, pluginwire.WithClass("ModelError", errors.New("the model fell over")), true
			}
			return nil, nil, true
		})
		read := func(model string) (n int, err error) {
			s, err := r.launcher.nth(0).conn.Stream(context.Background(), pluginwire.ActionInvokeLLMStream, map[string]any{"llm_model_uuid": model}, rpc.CallOptions{Context: b})
			if err != nil {
				return 0, err
			}
			defer s.Close()
			for ; ; n++ {
				frame, err := s.Next(context.Background())
				if err != nil {
					return n, err
				}
				if string(frame) != fmt.Sprintf(`{"chunk":%d}`, n) {
					return n, fmt.Errorf("frame %d is %s", n, frame)
				}
			}
		}
		if n, err := read("good"); n != 50 || !errors.Is(err, io.EOF) {
			r.t.Errorf("%d frames, %v", n, err)
		}
		if n, err := read("fail"); n != 50 || err == nil || !strings.Contains(err.Error(), "ModelError: the model fell over") {
			r.t.Errorf("%d frames, %v", n, err)
		}
	})
}

// A file from LangBot reaches the plugin under a key of its own; ours is deleted.
// A file of a worker is read by its own plugin only. SW-03.
func TestFiles(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		_, a, b := r.pair()
		w := r.launcher.nth(0)
		dir := r.dir + "/worker"
		store, err := transfer.Open(transfer.Config{Dir: dir})
		if err != nil {
			r.t.Fatal(err)
		}
		defer store.Close()
		holder := store.Holder(nil)
		defer holder.Close()
		w.mu.Lock()
		w.on = func(_ *puppet, ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			return nil, holder.Chunk(in.Data, in.Context), in.Action == pluginwire.ActionFileChunk
		}
		w.mu.Unlock()
		content := bytes.Repeat([]byte("x"), 100_000)
		var mu sync.Mutex
		hostKey := ""
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			if in.Action != pluginwire.ActionGetKnowledgeFileStream {
				return nil, nil, false
			}
			key, err := transfer.Send(ctx, in.Conn, content, "pdf", in.Context)
			mu.Lock()
			hostKey = key
			mu.Unlock()
			return map[string]any{"file_key": key, "more": 1}, err, true
		})
		raw, err := w.ask(pluginwire.ActionGetKnowledgeFileStream, map[string]any{"storage_path": "p"}, a)
		if err != nil {
			r.t.Fatal(err)
		}
		key, _ := pluginwire.StringField(raw, "file_key")
		if key == "" || key == hostKey || !strings.HasSuffix(key, ".pdf") || !strings.Contains(string(raw), `"more":1`) {
			r.t.Errorf("%s for %s", raw, hostKey)
		}
		if got, err := store.Read(key, a); err != nil || !bytes.Equal(got, content) {
			r.t.Errorf("%d bytes, %v", len(got), err)
		}
		if _, err := store.Read(key, b); err == nil {
			r.t.Error("a sibling reads the file")
		}
		if _, err := r.host.ReadFile(r.t.Context(), hostKey, a); err == nil {
			r.t.Error("our copy is still there")
		}
		// The other way.
		mine, err := transfer.Send(r.t.Context(), w.conn, []byte("icon"), "svg", a)
		if err != nil {
			r.t.Fatal(err)
		}
		if got, err := r.plugin(a).ReadFile(mine); err != nil || string(got) != "icon" {
			r.t.Errorf("%q, %v", got, err)
		}
		if _, err := r.plugin(b).ReadFile(mine); err == nil {
			r.t.Error("a sibling's plugin reads the file")
		}
		if err := r.plugin(a).DeleteFile(mine); err != nil {
			r.t.Error(err)
		}
		if _, err := transfer.Send(r.t.Context(), w.conn, []byte("x"), "", pluginwire.Context{}); err == nil {
			r.t.Error("an upload without a binding was taken")
		}
	})
}

// What the runtime answers itself, for the caller's own plugins only; and the two
// tool actions where LangBot does not know them.
func TestLocalAnswers(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		r.run(a, p, pluginwire.ModeDedicated)
		r.run(b, p, pluginwire.ModeDedicated)
		w := r.launcher.nth(1)
		ask := func(action string, data any) string {
			raw, err := w.ask(action, data, b)
			if err != nil {
				return err.Error()
			}
			return string(raw)
		}
		if got := ask(pluginwire.ActionListTools, struct{}{}); strings.Count(got, `"name":"echo"`) != 1 || !strings.Contains(got, `"spec":{}`) {
			r.t.Errorf("list_tools: %s", got)
		}
		if got := ask(pluginwire.ActionListCommands, struct{}{}); got != `{"commands":[]}` {
			r.t.Errorf("list_commands: %s", got)
		}
		if got := ask(pluginwire.ActionListPluginsManifest, struct{}{}); strings.Count(got, `"name":"toy"`) != 1 || strings.Count(got, `"owner":"builtin"`) != 1 {
			r.t.Errorf("list_plugins_manifest: %s", got)
		}
		if got := ask(pluginwire.ActionGetToolDetail, map[string]any{"tool_name": "echo"}); !strings.Contains(got, `"name":"echo"`) {
			r.t.Errorf("get_tool_detail: %s", got)
		}
		if got := ask(pluginwire.ActionCallTool, map[string]any{"tool_name": "echo"}); got != `{"launch":1}` {
			r.t.Errorf("call_tool: %s", got)
		}
		if got := ask(pluginwire.ActionCallTool, map[string]any{"tool_name": "nothing"}); !strings.Contains(got, "Tool nothing not found") {
			r.t.Errorf("call_tool: %s", got)
		}
		r.host.answer(func(ctx context.Context, in *rpc.Inbound) (any, error, bool) {
			return map[string]any{"tool_response": "LangBot's"}, nil, in.Action == pluginwire.ActionCallTool
		})
		if got := ask(pluginwire.ActionCallTool, map[string]any{"tool_name": "echo"}); got != `{"tool_response":"LangBot's"}` {
			r.t.Errorf("call_tool of a LangBot that knows it: %s", got)
		}
	})
}

// With no LangBot connected, a plugin's call fails at once and the worker goes on.
func TestNoLangbot(t *testing.T) {
	inBubble(t, pluginwire.ProfileOSS, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		b := p.bind("inst-a", 1, 1)
		r.run(b, p, pluginwire.ModeDedicated)
		r.host.close()
		synctest.Wait()
		if _, err := r.launcher.nth(0).ask(pluginwire.ActionGetBots, struct{}{}, b); err == nil || !strings.Contains(err.Error(), "closed") {
			r.t.Errorf("%v", err)
		}
		r.call(b)
	})
}
