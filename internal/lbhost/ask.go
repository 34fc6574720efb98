package lbhost

import (
	"context"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/transfer"
)

// M is a JSON object.
type M = map[string]any

// plugin adds the two fields that name a plugin.
func plugin(author, name string, more M) M {
	m := M{"plugin_author": author, "plugin_name": name}
	for k, v := range more {
		m[k] = v
	}
	return m
}

// Push sends a file to the runtime and returns its key there.
func (h *Host) Push(ctx context.Context, data []byte, ext string, as pluginwire.Context) (string, error) {
	return transfer.Send(ctx, h.Conn, data, ext, as)
}

// Take returns a file that the runtime pushed, and deletes it.
func (h *Host) Take(key string, as pluginwire.Context) ([]byte, error) {
	b, err := h.files.Read(key, as)
	if err != nil {
		return nil, err
	}
	return b, h.files.Delete(key, as)
}

// ListPlugins lists the visible plugins.
func (h *Host) ListPlugins(ctx context.Context, on pluginwire.Context) ([]M, error) {
	var out struct{ Plugins []M }
	err := h.ask(ctx, pluginwire.ActionListPlugins, M{}, on, &out)
	return out.Plugins, err
}

// ListTools lists tools; include nil is every plugin's.
func (h *Host) ListTools(ctx context.Context, on pluginwire.Context, include []string) ([]M, error) {
	var out struct{ Tools []M }
	err := h.ask(ctx, pluginwire.ActionListTools, M{"include_plugins": include}, on, &out)
	return out.Tools, err
}

// Session is a session as LangBot sends one, without a conversation.
func Session() M {
	return M{"launcher_type": "person", "launcher_id": "user-1", "sender_id": "user-1", "use_prompt_name": "default",
		"using_conversation": nil, "conversations": []any{}}
}

// CallTool calls a tool and returns its answer.
func (h *Host) CallTool(ctx context.Context, on pluginwire.Context, tool string, params any) (json.RawMessage, error) {
	var out struct {
		Response json.RawMessage `json:"tool_response"`
	}
	err := h.ask(ctx, pluginwire.ActionCallTool, M{"tool_name": tool, "tool_parameters": params, "session": Session(),
		"query_id": 1, "include_plugins": nil}, on, &out)
	return out.Response, err
}

// ListCommands lists commands.
func (h *Host) ListCommands(ctx context.Context, on pluginwire.Context) ([]M, error) {
	var out struct{ Commands []M }
	err := h.ask(ctx, pluginwire.ActionListCommands, M{"include_plugins": nil}, on, &out)
	return out.Commands, err
}

// Command runs a command line and returns every frame of its answer.
func (h *Host) Command(ctx context.Context, on pluginwire.Context, words ...string) ([]M, error) {
	frames, err := h.Frames(ctx, pluginwire.ActionExecuteCommand, M{"command_context": CommandContext(words...), "include_plugins": nil}, on)
	return decodeAll(frames), err
}

// CommandContext is the context of a command line as LangBot sends it.
func CommandContext(words ...string) M {
	text := ""
	for i, w := range words {
		if i > 0 {
			text += " "
		}
		text += w
	}
	return M{"query_id": 1, "session": Session(), "command_text": text, "full_command_text": "!" + text, "command": words[0],
		"crt_command": words[0], "params": words[1:], "crt_params": words[1:], "privilege": 1}
}

// Emission is the answer to an event.
type Emission struct {
	Emitted []M `json:"emitted_plugins"`
	Event   M   `json:"event_context"`
	Sources []M `json:"response_sources"`
}

// Message is a message of a person, as an event that plugins listen to. name is
// PersonMessageReceived or PersonNormalMessageReceived.
func Message(name, text string) M {
	chain := []M{{"type": "Plain", "text": text}}
	event := M{
		"instance_uuid": nil, "workspace_uuid": nil, "placement_generation": nil, "query_uuid": "query-7",
		"event_name": name, "launcher_type": "person", "launcher_id": "user-1", "sender_id": "user-1", "message_chain": chain,
		"message_event": M{"type": "FriendMessage", "time": 1.0, "message_chain": chain,
			"sender": M{"id": "user-1", "nickname": "user", "remark": ""}},
	}
	if name == "PersonNormalMessageReceived" {
		event["text_message"], event["user_message_alter"], event["reply_message_chain"] = text, nil, nil
	}
	return M{"instance_uuid": nil, "workspace_uuid": nil, "placement_generation": nil, "query_id": 7, "query_uuid": "query-7", "eid": 1,
		"event_name": name, "event": event, "is_prevent_default": false, "is_prevent_postorder": false}
}

// Emit sends an event.
func (h *Host) Emit(ctx context.Context, on pluginwire.Context, event M, include []string) (Emission, error) {
	var out Emission
	err := h.ask(ctx, pluginwire.ActionEmitEvent, M{"event_context": event, "include_plugins": include}, on, &out)
	return out, err
}

// File is a file of a plugin.
type File struct {
	Bytes []byte
	Mime  string
}

// Icon returns the plugin's icon, as LangBot reads it.
func (h *Host) Icon(ctx context.Context, on pluginwire.Context, author, name string) (File, error) {
	return h.file(ctx, pluginwire.ActionGetPluginIcon, plugin(author, name, nil), on, "plugin_icon_file_key")
}

// Readme returns the plugin's readme; empty if it has none.
func (h *Host) Readme(ctx context.Context, on pluginwire.Context, author, name, language string) (File, error) {
	return h.file(ctx, pluginwire.ActionGetPluginReadme, plugin(author, name, M{"language": language}), on, "readme_file_key")
}

// Asset returns a file of the plugin; empty if it has none.
func (h *Host) Asset(ctx context.Context, on pluginwire.Context, author, name, path string) (File, error) {
	return h.file(ctx, pluginwire.ActionGetPluginAssetsFile, plugin(author, name, M{"file_path": path}), on, "file_file_key")
}

func (h *Host) file(ctx context.Context, action string, data M, on pluginwire.Context, field string) (File, error) {
	var out M
	if err := h.ask(ctx, action, data, on, &out); err != nil {
		return File{}, err
	}
	key, _ := out[field].(string)
	mime, _ := out["mime_type"].(string)
	if key == "" {
		return File{}, nil
	}
	b, err := h.Take(key, on)
	return File{b, mime}, err
}

// Logs returns the newest lines of a plugin's log.
func (h *Host) Logs(ctx context.Context, on pluginwire.Context, author, name string, limit int, level string) ([]pluginlog.Line, error) {
	var out struct{ Logs []pluginlog.Line }
	data := plugin(author, name, M{"limit": limit, "level": nil})
	if level != "" {
		data["level"] = level
	}
	err := h.ask(ctx, pluginwire.ActionGetPluginLogs, data, on, &out)
	return out.Logs, err
}

// DebugInfo is what a developer needs to connect.
type DebugInfo struct {
	Key     string `json:"plugin_debug_key"`
	Expires string `json:"expires_at"`
	Port    int    `json:"ws_debug_port"`
	Numbers M      `json:"resources"`
}

// DebugInfo asks for the debug token of a Workspace.
func (h *Host) DebugInfo(ctx context.Context, workspace pluginwire.Context) (DebugInfo, error) {
	var out DebugInfo
	err := h.ask(ctx, pluginwire.ActionGetDebugInfo, M{}, workspace, &out)
	return out, err
}

// ListRunners lists runners.
func (h *Host) ListRunners(ctx context.Context, on pluginwire.Context) ([]M, error) {
	var out struct{ Runners []M }
	err := h.ask(ctx, pluginwire.ActionListRunners, M{"include_plugins": nil}, on, &out)
	return out.Runners, err
}

// RunContext is the context of a run whose input is text.
func RunContext(runID, text string) M {
	return M{
		"run_id": runID, "trigger": M{"type": "message", "source": "host_adapter"},
		"event":    M{"event_id": "e-1", "event_type": "message.received", "source": "host_adapter", "data": M{}},
		"input":    M{"text": text, "contents": []any{}, "attachments": []any{}},
		"delivery": M{"surface": "chat", "supports_streaming": true, "supports_edit": false, "supports_reaction": false, "platform_capabilities": M{}},
		"resources": M{"models": []any{}, "tools": []any{}, "knowledge_bases": []any{}, "skills": []any{},
			"storage": M{"plugin_storage": false, "workspace_storage": false}, "platform_capabilities": M{}},
		"runtime": M{"metadata": M{}},
	}
}

// Run runs a runner and returns every result.
func (h *Host) Run(ctx context.Context, on pluginwire.Context, author, name, runner string, run M) ([]M, error) {
	frames, err := h.Frames(ctx, pluginwire.ActionRunRunner, plugin(author, name, M{"runner_name": runner, "context": run}), on)
	return decodeAll(frames), err
}

// Parse pushes a document and has a plugin parse it.
func (h *Host) Parse(ctx context.Context, on pluginwire.Context, author, name string, doc []byte, mime, filename string) (M, error) {
	key, err := h.Push(ctx, doc, "", on)
	if err != nil {
		return nil, err
	}
	var out M
	err = h.ask(ctx, pluginwire.ActionParseDocument, plugin(author, name, M{"context": M{"file_key": key, "mime_type": mime,
		"filename": filename, "metadata": M{}}}), on, &out)
	return out, err
}

// Ask asks anything and returns the answer as an object.
func (h *Host) Ask(ctx context.Context, action string, data any, on pluginwire.Context) (M, error) {
	var out M
	err := h.ask(ctx, action, data, on, &out)
	return out, err
}

// Of names a plugin in the data of a request, with more fields.
func Of(author, name string, more ...M) M {
	m := plugin(author, name, nil)
	for _, o := range more {
		for k, v := range o {
			m[k] = v
		}
	}
	return m
}

func decodeAll(frames []json.RawMessage) []M {
	out := make([]M, 0, len(frames))
	for _, f := range frames {
		var m M
		_ = json.Unmarshal(f, &m)
		out = append(out, m)
	}
	return out
}
