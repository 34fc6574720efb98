package plugincontrol

import "github.com/stockade-run/stockade/internal/pluginwire"

// Kinds of components, as manifests name them.
const (
	KindTool            = "Tool"
	KindCommand         = "Command"
	KindEventListener   = "EventListener"
	KindKnowledgeEngine = "KnowledgeEngine"
	KindParser          = "Parser"
)

// filter is include_plugins: nil admits every plugin.
type filter map[string]bool

func (f filter) admits(p Plugin) bool { return f == nil || f[id(p)] }

// id is "author/name", as LangBot names a plugin.
func id(p Plugin) string { return p.Author() + "/" + p.Name() }

// ready lists the visible plugins that can be called and pass the filter.
func (c *Control) ready(scope pluginwire.Context, f filter) []Plugin {
	var out []Plugin
	for _, p := range c.cfg.Manager.Plugins(scope) {
		if f.admits(p) && p.Ready() {
			out = append(out, p)
		}
	}
	return out
}

// find returns the visible plugin of a name, ready or not.
func (c *Control) find(scope pluginwire.Context, author, name string) (Plugin, bool) {
	for _, p := range c.cfg.Manager.Plugins(scope) {
		if p.Author() == author && p.Name() == name {
			return p, true
		}
	}
	return nil, false
}
