package codex

import (
	"github.com/stockade-run/stockade/internal/agent"
)

// servers makes the thread's configuration of MCP servers, in the keys of Codex's
// own config file. The host's server wins over one of the same name.
func (c *codec) servers() (map[string]any, error) {
	all := map[string]any{}
	for _, s := range c.p.Config.Servers {
		if !plainName(s.Name) {
			return nil, agent.Invalid(prefix, "the MCP server name %q may hold A-Z a-z 0-9 _ - only", s.Name)
		}
		one := map[string]any{}
		for key, value := range s.Rest {
			switch key {
			case "type", "transport": // told by url or command
			case "headers", "http_headers":
				one["http_headers"] = texts(value)
			case "env":
				one["env"] = texts(value)
			default:
				if value == nil {
					return nil, agent.Invalid(prefix, "the MCP server %s has no value for %s", s.Name, key)
				}
				one[key] = value
			}
		}
		all[s.Name] = one
	}
	if c.mcp.URL != "" {
		all[c.mcp.Name] = map[string]any{"url": c.mcp.URL, "http_headers": map[string]any{"Authorization": "Bearer " + c.mcp.Token},
			"tool_timeout_sec": c.p.Config.Timeout.Or(defaultTimeout).Seconds()}
	}
	if len(all) == 0 {
		return nil, nil
	}
	return map[string]any{"mcp_servers": all}, nil
}

func plainName(s string) bool {
	for _, r := range s {
		if r != '_' && r != '-' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') {
			return false
		}
	}
	return s != ""
}

// texts reads pairs, as an object or as a list of names and values.
func texts(v any) map[string]any {
	if m, ok := v.(map[string]any); ok {
		return m
	}
	out := map[string]any{}
	list, _ := v.([]any)
	for _, one := range list {
		pair, _ := one.(map[string]any)
		if name, ok := pair["name"].(string); ok {
			out[name] = pair["value"]
		}
	}
	return out
}
