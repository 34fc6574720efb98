package pluginruntime

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

type M = map[string]any

// TestEveryActionAgainstGenuineWorkers goes through the whole table of control
// actions with a plugin that has one of every component, under each SDK.
func TestEveryActionAgainstGenuineWorkers(t *testing.T) {
	t.Parallel()
	for _, sdk := range series {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := start(t, sdk, nil)
			kit := install(workspace("ws-1"), "kit-1", "kit")(t)
			script := lbhost.NewScript()
			script.Set("kit-1", M{"greeting": "good day"})
			script.File("/docs/a", []byte(strings.Repeat("text ", 20000)))
			h := r.connect(lbhost.Config{Script: script}, kit)
			running(t, h, kit)
			for _, c := range kitCases {
				t.Run(c.name, func(t *testing.T) { c.do(t, h, kit.Binding) })
			}
		})
	}
}

// kitCases are asked of a running kit, in this order.
var kitCases = []struct {
	name string
	do   func(t *testing.T, h *lbhost.Host, on pluginwire.Context)
}{
	{"list_plugins and get_plugin_info", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		all, err := h.ListPlugins(t.Context(), on)
		if err != nil || len(all) != 1 {
			t.Fatalf("%d plugins, %v", len(all), err)
		}
		info, err := h.Ask(t.Context(), pluginwire.ActionGetPluginInfo, M{"author": "stockade", "plugin_name": "kit"}, on)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(any(all[0]), info["plugin"]) {
			t.Errorf("the two descriptions differ: %v, %v", all[0], info["plugin"])
		}
		info, err = h.Ask(t.Context(), pluginwire.ActionGetPluginInfo, M{"author": "stockade", "plugin_name": "other"}, on)
		if err != nil || info["plugin"] != nil {
			t.Errorf("another plugin: %v, %v", info, err)
		}
	}},
	{"tools", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		tools, err := h.ListTools(t.Context(), on, nil)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, tool := range tools {
			if tool["owner"] != "stockade/kit" {
				t.Errorf("owner is %v", tool["owner"])
			}
			names = append(names, fmt.Sprint(at(tool, "manifest", "metadata", "name")))
		}
		if !strings.Contains(strings.Join(names, " "), "echo") {
			t.Errorf("tools: %v", names)
		}
		if none, err := h.ListTools(t.Context(), on, []string{"somebody/else"}); err != nil || len(none) != 0 {
			t.Errorf("filtered out: %v, %v", none, err)
		}
		got, err := h.CallTool(t.Context(), on, "probe", M{"op": "bots"})
		if err != nil || string(got) != `{"bots": ["bot-1", "bot-2"]}` && string(got) != `{"bots":["bot-1","bot-2"]}` {
			t.Errorf("%s, %v", got, err)
		}
		if asked := h.Script.Asked(pluginwire.ActionGetBots); len(asked) == 0 || asked[0].Context != on {
			t.Errorf("LangBot was not asked under the binding: %v", asked)
		}
		if got, err := h.CallTool(t.Context(), on, "no such tool", M{}); err != nil || string(got) != "{}" {
			t.Errorf("a tool nobody has: %s, %v", got, err)
		}
		_, err = h.CallTool(t.Context(), on, "probe", M{"op": "raise", "text": "as told"})
		if err == nil || !strings.Contains(err.Error(), "as told") {
			t.Errorf("a tool that raises: %v", err)
		}
	}},
	{"a session of another Workspace", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		session := lbhost.Session()
		session["workspace_uuid"] = "ws-2"
		_, err := h.Ask(t.Context(), pluginwire.ActionCallTool, M{"tool_name": "echo", "tool_parameters": M{}, "session": session, "query_id": 1}, on)
		if err == nil || !strings.Contains(err.Error(), "does not match") {
			t.Errorf("it was admitted: %v", err)
		}
	}},
	{"storage is the installation's", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		got, err := h.CallTool(t.Context(), on, "probe", M{"op": "store", "key": "k", "value": "v"})
		if err != nil || !strings.Contains(string(got), `"v"`) {
			t.Fatalf("%s, %v", got, err)
		}
		a := h.Script.Asked(pluginwire.ActionSetBinaryStorage)[0]
		if a.Context != on || a.Field("owner_type") != "plugin" || a.Field("owner") != "stockade/kit" {
			t.Errorf("asked %s under %v", a.Data, a.Context)
		}
	}},
	{"a file from LangBot", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		got, err := h.CallTool(t.Context(), on, "probe", M{"op": "file", "path": "/docs/a"})
		if err != nil {
			t.Fatal(err)
		}
		var file struct {
			Base64 string
			Size   int
		}
		if err := json.Unmarshal(got, &file); err != nil {
			t.Fatal(err)
		}
		b, err := base64.StdEncoding.DecodeString(file.Base64)
		if err != nil || string(b) != strings.Repeat("text ", 20000) {
			t.Errorf("%d bytes, %v", len(b), err)
		}
	}},
	{"an answer of a megabyte", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		got, err := h.CallTool(t.Context(), on, "probe", M{"op": "big", "size": 1 << 20})
		if err != nil || len(got) < 1<<20 {
			t.Errorf("%d bytes, %v", len(got), err)
		}
	}},
	{"commands", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		all, err := h.ListCommands(t.Context(), on)
		if err != nil || len(all) != 1 {
			t.Fatalf("%v, %v", all, err)
		}
		frames, err := h.Command(t.Context(), on, "say", "words", "one", "two", "three")
		if err != nil || len(frames) != 3 || frames[2]["text"] != "three" {
			t.Errorf("%v, %v", frames, err)
		}
		frames, err = h.Command(t.Context(), on, "say", "many", "300")
		if err != nil || len(frames) != 300 || frames[299]["text"] != "299" {
			t.Errorf("%d frames, %v", len(frames), err)
		}
		frames, err = h.Command(t.Context(), on, "unheard-of")
		if err != nil || len(frames) != 0 {
			t.Errorf("a command nobody has: %v, %v", frames, err)
		}
		frames, err = h.Command(t.Context(), on, "say", "broken")
		if err == nil || len(frames) != 1 || frames[0]["text"] != "before" {
			t.Errorf("a command that breaks: %v, %v", frames, err)
		}
	}},
	{"events", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		out, err := h.Emit(t.Context(), on, lbhost.Message("PersonMessageReceived", "hi"), nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(out.Emitted) != 1 || out.Event["workspace_uuid"] != "ws-1" || out.Event["query_id"] != float64(7) {
			t.Errorf("%d plugins, event %v", len(out.Emitted), out.Event)
		}
		if out, err := h.Emit(t.Context(), on, lbhost.Message("PersonMessageReceived", "hi"), []string{}); err != nil || len(out.Emitted) != 0 {
			t.Errorf("with no plugin included: %v, %v", out, err)
		}
		event := lbhost.Message("PersonMessageReceived", "hi")
		event["workspace_uuid"] = "ws-2"
		if _, err := h.Emit(t.Context(), on, event, nil); err == nil || !strings.Contains(err.Error(), "Execution scope mismatch") {
			t.Errorf("an event of another Workspace: %v", err)
		}
	}},
	{"icon, readme and assets", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		icon, err := h.Icon(t.Context(), on, "stockade", "kit")
		if err != nil || !strings.Contains(string(icon.Bytes), "<svg") || icon.Mime != "image/svg+xml" {
			t.Errorf("icon: %q, %v", icon, err)
		}
		for _, language := range []string{"en", "zh_Hans"} {
			if f, err := h.Readme(t.Context(), on, "stockade", "kit", language); err != nil || len(f.Bytes) == 0 {
				t.Errorf("readme in %s: %q, %v", language, f, err)
			}
		}
		if f, err := h.Asset(t.Context(), on, "stockade", "kit", "note.txt"); err != nil || len(f.Bytes) == 0 || f.Mime != "text/plain" {
			t.Errorf("asset: %q, %v", f, err)
		}
		for _, path := range []string{"missing.txt", "../manifest.yaml", "/etc/passwd"} {
			if f, err := h.Asset(t.Context(), on, "stockade", "kit", path); err == nil && len(f.Bytes) > 0 {
				t.Errorf("asset %s: %q", path, f)
			}
		}
		if f, err := h.Icon(t.Context(), on, "stockade", "other"); err != nil || len(f.Bytes) != 0 || f.Mime != "" {
			t.Errorf("an icon of a plugin that is not there: %v, %v", f, err)
		}
		if f, err := h.Readme(t.Context(), on, "stockade", "other", "en"); err != nil || len(f.Bytes) != 0 {
			t.Errorf("a readme of a plugin that is not there: %v, %v", f, err)
		}
	}},
	{"pages", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		page := func(more M) M {
			data := lbhost.Of("stockade", "kit", M{"page_id": "board", "endpoint": "/list", "method": "GET", "body": M{"a": 1}}, more)
			if data["method"] == nil {
				delete(data, "method")
			}
			return data
		}
		got, err := h.Ask(t.Context(), pluginwire.ActionPageAPI, page(nil), on)
		if err != nil || got["error"] != nil || at(got, "data", "endpoint") != "/list" {
			t.Errorf("%v, %v", got, err)
		}
		for name, more := range map[string]M{"fails": {"endpoint": "/fail"}, "page": {"page_id": "none"}, "plugin": {"plugin_name": "none"},
			"field": {"method": nil}} {
			got, err := h.Ask(t.Context(), pluginwire.ActionPageAPI, page(more), on)
			if err != nil || got["error"] == nil {
				t.Errorf("%s: %v, %v", name, got, err)
			}
		}
	}},
	{"knowledge", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		got, err := h.Ask(t.Context(), pluginwire.ActionListKnowledgeEngines, M{}, on)
		if err != nil || at(got, "engines", 0, "plugin_id") != "stockade/kit" || at(got, "engines", 0, "creation_schema", "schema", 0, "name") != "size" {
			t.Fatalf("%v, %v", got, err)
		}
		if caps := at(got, "engines", 0, "capabilities"); !strings.Contains(fmt.Sprint(caps), "doc_ingestion") {
			t.Errorf("capabilities: %v", caps)
		}
		for action, name := range map[string]string{pluginwire.ActionGetRAGCreationSettings: "size", pluginwire.ActionGetRAGRetrievalSettings: "threshold"} {
			got, err := h.Ask(t.Context(), action, lbhost.Of("stockade", "kit"), on)
			if err != nil || at(got, "schema", 0, "name") != name {
				t.Errorf("%s: %v, %v", action, got, err)
			}
		}
		for action, data := range map[string]M{
			pluginwire.ActionRAGOnKBCreate: {"kb_id": "kb-1"}, pluginwire.ActionRAGOnKBDelete: {"kb_id": "kb-1"},
			pluginwire.ActionRAGDeleteDocument: {"kb_id": "kb-1", "document_id": "doc-1"},
		} {
			if got, err := h.Ask(t.Context(), action, lbhost.Of("stockade", "kit", data), on); err != nil || got["success"] != true {
				t.Errorf("%s: %v, %v", action, got, err)
			}
		}
		got, err = h.Ask(t.Context(), pluginwire.ActionRetrieveKnowledge, lbhost.Of("stockade", "kit", M{"retriever_name": "", "retrieval_context": M{
			"query": "where", "knowledge_base_id": "kb-1", "retrieval_settings": M{}, "creation_settings": M{}, "filters": M{}}}), on)
		if err != nil || at(got, "results", 0, "content", 0, "text") != "where" {
			t.Errorf("%v, %v", got, err)
		}
		got, err = h.Ask(t.Context(), pluginwire.ActionRAGIngestDocument, lbhost.Of("stockade", "kit", M{"context": M{
			"file_object": M{"metadata": M{"filename": "a.txt", "file_size": 100000, "mime_type": "text/plain", "document_id": "doc-1",
				"knowledge_base_id": "kb-1"}, "storage_path": "/docs/a"},
			"knowledge_base_id": "kb-1", "creation_settings": M{}}}), on)
		if err != nil || got["chunks_created"] != float64(100000) {
			t.Errorf("%v, %v", got, err)
		}
		_, err = h.Ask(t.Context(), pluginwire.ActionRetrieveKnowledge, lbhost.Of("stockade", "none", M{"retriever_name": "", "retrieval_context": M{}}), on)
		if err == nil || !strings.Contains(err.Error(), "not found") {
			t.Errorf("a plugin that is not there: %v", err)
		}
	}},
	{"parsers", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		got, err := h.Ask(t.Context(), pluginwire.ActionListParsers, M{}, on)
		if err != nil || at(got, "parsers", 0, "plugin_author") != "stockade" {
			t.Fatalf("%v, %v", got, err)
		}
		doc := strings.Repeat("line\n", 10000)
		got, err = h.Parse(t.Context(), on, "stockade", "kit", []byte(doc), "text/plain", "a.txt")
		if err != nil || got["text"] != doc || at(got, "sections", 0, "heading") != "a.txt" {
			t.Errorf("%.100v, %v", got, err)
		}
	}},
	{"runners of a plugin without one", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		if all, err := h.ListRunners(t.Context(), on); err != nil || len(all) != 0 {
			t.Errorf("%v, %v", all, err)
		}
		for runner, code := range map[[2]string]string{{"kit", "default"}: "runner.not_found", {"none", "default"}: "runner.plugin_not_found"} {
			out, err := h.Run(t.Context(), on, "stockade", runner[0], runner[1], lbhost.RunContext("run-1", "hi"))
			if err != nil || len(out) != 1 || out[0]["type"] != "run.failed" || at(out[0], "data", "code") != code || out[0]["sequence"] != float64(1) {
				t.Errorf("%v: %v, %v", runner, out, err)
			}
		}
	}},
	{"logs and diagnostics", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		if _, err := h.CallTool(t.Context(), on, "probe", M{"op": "log", "lines": []string{"a line of the log"}}); err != nil {
			t.Fatal(err)
		}
		until(t, "the line in the log", func() (bool, error) {
			lines, err := h.Logs(t.Context(), on, "stockade", "kit", 100, "")
			return strings.Contains(fmt.Sprint(lines), "a line of the log"), err
		})
		if lines, err := h.Logs(t.Context(), on, "stockade", "kit", 1, ""); err != nil || len(lines) != 1 {
			t.Errorf("one line: %v, %v", lines, err)
		}
		if lines, err := h.Logs(t.Context(), on, "stockade", "none", 100, ""); err != nil || len(lines) != 0 {
			t.Errorf("of a plugin that is not there: %v, %v", lines, err)
		}
		for _, name := range []string{"kit", "none"} {
			if _, err := h.Ask(t.Context(), pluginwire.ActionPluginDiagnostic, M{"plugin": M{"author": "stockade", "name": name},
				"code": "reply.failed", "message": "it did not go out", "details": M{"a": 1}, "query": M{"query_id": 1}}, on); err != nil {
				t.Errorf("diagnostic for %s: %v", name, err)
			}
		}
	}},
	{"storage analysis and debug info", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		got, err := h.Ask(t.Context(), pluginwire.ActionGetStorageAnalysis, M{}, pluginwire.Context{})
		if err != nil || at(got, "directories", 1, "key") != "artifacts" || at(got, "directories", 1, "size_bytes").(float64) == 0 {
			t.Errorf("%v, %v", got, err)
		}
		info, err := h.DebugInfo(t.Context(), on.Workspace())
		if err != nil || len(info.Key) < 32 || !strings.HasSuffix(info.Expires, "Z") || info.Port == 0 || info.Numbers["installation_runtimes"] != float64(1) {
			t.Errorf("%+v, %v", info, err)
		}
		if again, err := h.DebugInfo(t.Context(), on.Workspace()); err != nil || again.Key != info.Key || again.Expires != info.Expires {
			t.Errorf("asked again: %v, %v", again, err)
		}
		if _, err := h.DebugInfo(t.Context(), on); err == nil {
			t.Error("a debug key for an installation")
		}
	}},
	{"the lifecycle of data/plugins", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		_, err := h.Frames(t.Context(), pluginwire.ActionRestartPlugin, lbhost.Of("stockade", "kit"), on)
		if err == nil {
			t.Error("a managed plugin was restarted as one of data/plugins")
		}
	}},
	{"unknown action", func(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
		_, err := h.Ask(t.Context(), "no_such_action", M{}, on)
		if err == nil || err.Error() != "ValueError: Action no_such_action not found" {
			t.Errorf("%v", err)
		}
	}},
}

// at follows keys and indexes into a decoded value; nil where there is nothing.
func at(v any, path ...any) any {
	for _, step := range path {
		switch node := v.(type) {
		case map[string]any:
			v = node[fmt.Sprint(step)]
		case []any:
			i, ok := step.(int)
			if !ok || i >= len(node) {
				return nil
			}
			v = node[i]
		default:
			return nil
		}
	}
	return v
}
