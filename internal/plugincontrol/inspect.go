package plugincontrol

import (
	"cmp"
	"context"
	"encoding/json"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginlog"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

func listPlugins(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
	var out []json.RawMessage
	for _, p := range s.control.cfg.Manager.Plugins(in.Context) {
		out = append(out, p.Container().JSON)
	}
	return build(field("plugins", array(out))), nil
}

func getPluginInfo(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	author, err := o.text("author")
	if err != nil {
		return nil, err
	}
	name, err := o.text("plugin_name")
	if err != nil {
		return nil, err
	}
	info := null
	if p, ok := s.control.find(in.Context, author, name); ok {
		info = p.Container().JSON
	}
	return build(field("plugin", info)), nil
}

// maxLogLines is all that a log keeps; see pluginlog.
const maxLogLines = 1000

func getPluginLogs(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, author, name, err := about(in)
	if err != nil {
		return nil, err
	}
	limit := pluginhost.DefaultLogs
	if o.has("limit") {
		// Anything but a sensible number is as if it were not there.
		if json.Unmarshal(o.get("limit"), &limit) != nil {
			limit = pluginhost.DefaultLogs
		}
	}
	lines := s.control.cfg.Manager.Logs(in.Context, author, name, min(max(limit, 0), maxLogLines), o.textOr("level", ""))
	if lines == nil {
		lines = []pluginlog.Line{}
	}
	return map[string]any{"logs": lines}, nil
}

func getDebugInfo(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
	c := s.control
	token, expires, err := c.cfg.Manager.IssueDebugToken(in.Context, time.Now())
	if err != nil {
		return nil, err
	}
	return map[string]any{
		"plugin_debug_key": token,
		"expires_at":       expires.UTC().Format("2006-01-02T15:04:05.000000Z"),
		"ws_debug_port":    c.cfg.DebugPort(),
		"resources":        c.cfg.Manager.Health(),
	}, nil
}

// pluginDiagnostic tells a plugin what went wrong with its answer. It never fails
// because of the plugin: LangBot does not wait for anything of it.
func pluginDiagnostic(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	ref := o.within("plugin")
	author := cmp.Or(ref.textOr("author", ""), ref.textOr("plugin_author", ""), o.textOr("plugin_author", ""))
	name := cmp.Or(ref.textOr("name", ""), ref.textOr("plugin_name", ""), o.textOr("plugin_name", ""))
	if author == "" || name == "" {
		s.control.log.Warn("a diagnostic names no plugin", "code", o.textOr("code", ""))
		return empty, nil
	}
	details := o.within("details")
	var more []pluginwire.Member
	for _, key := range []string{"query", "delivery", "message_chain"} {
		if o.has(key) && !details.has(key) {
			more = append(more, field(key, o.get(key)))
		}
	}
	if details, err = details.with(more...); err != nil {
		return nil, err
	}
	level, code, message := o.textOr("level", "ERROR"), o.textOr("code", ""), o.textOr("message", "")
	s.control.cfg.Manager.Note(in.Context, author, name, time.Now(), level, strings.TrimSpace("diagnostic "+code+": "+message))
	p, ok := s.control.find(in.Context, author, name)
	if !ok {
		s.control.log.Warn("a diagnostic is for a plugin that is not there", "plugin", author+"/"+name, "code", code)
		return empty, nil
	}
	_, err = p.Call(ctx, pluginwire.ActionPluginDiagnostic, build(field("level", quote(level)), field("code", quote(code)),
		field("message", quote(message)), field("details", details.raw)), pluginwire.WorkerTimeout(pluginwire.ActionPluginDiagnostic))
	if err != nil {
		s.control.log.Warn("a diagnostic did not reach its plugin", "plugin", id(p), "code", code, "err", err)
	}
	return empty, nil
}
