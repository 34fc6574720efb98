package acp

import (
	"maps"
	"slices"

	"github.com/stockade-run/stockade/internal/agent"
)

// sessionParams adds the working directory and the MCP servers. The host's own
// comes last.
func (c *codec) sessionParams(params map[string]any) map[string]any {
	params["cwd"] = c.cwd
	if c.p.Config.Provider == "claude-code" {
		params["mcpServers"] = []any{}
		params["_meta"] = map[string]any{"claudeCode": map[string]any{"options": map[string]any{
			"strictMcpConfig": true, "mcpServers": c.claudeServers(), "tools": claudeTools,
		}}}
		return params
	}
	servers := []any{}
	for _, s := range c.p.Config.Servers {
		servers = append(servers, protocolServer(s))
	}
	if m := c.mcp; m.URL != "" {
		servers = append(servers, map[string]any{"name": m.Name, "type": "http", "url": m.URL,
			"headers": []any{map[string]any{"name": "Authorization", "value": "Bearer " + m.Token}}})
	}
	params["mcpServers"] = servers
	return params
}

// protocolServer writes a server of the payload in the protocol's words: pairs are
// lists there, and those lists are required.
func protocolServer(s agent.Server) map[string]any {
	out := maps.Clone(s.Rest)
	out["name"] = s.Name
	if out["url"] != nil {
		out["headers"] = pairs(out["headers"])
		if out["type"] == nil {
			out["type"] = "http"
		}
		return out
	}
	if out["args"] == nil {
		out["args"] = []any{}
	}
	out["env"] = pairs(out["env"])
	delete(out, "type") // a server without one is on standard input and output
	return out
}

func pairs(v any) []any {
	if list, ok := v.([]any); ok {
		return list
	}
	out := []any{}
	m, _ := v.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(m)) {
		out = append(out, map[string]any{"name": name, "value": m[name]})
	}
	return out
}

// claudeServers writes all servers in the words of Claude Code's options.
func (c *codec) claudeServers() map[string]any {
	out := map[string]any{}
	for _, s := range c.p.Config.Servers {
		one := maps.Clone(s.Rest)
		for _, name := range []string{"env", "headers"} {
			if list, ok := one[name].([]any); ok {
				one[name] = object(list)
			}
		}
		if one["type"] == nil {
			one["type"] = "stdio"
			if one["url"] != nil {
				one["type"] = "http"
			}
		}
		one["alwaysLoad"] = true
		out[s.Name] = one
	}
	if m := c.mcp; m.URL != "" {
		out[m.Name] = map[string]any{"type": "http", "url": m.URL, "alwaysLoad": true,
			"headers": map[string]any{"Authorization": "Bearer " + m.Token}}
	}
	return out
}

func object(list []any) map[string]any {
	out := map[string]any{}
	for _, v := range list {
		pair, _ := v.(map[string]any)
		if name, ok := pair["name"].(string); ok {
			out[name] = pair["value"]
		}
	}
	return out
}
