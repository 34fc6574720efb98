package plugincontrol

import (
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

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

// about returns the data of a request and the two names of the plugin it is about.
func about(in *rpc.Inbound) (o object, author, name string, err error) {
	if o, err = payload(in); err != nil {
		return object{}, "", "", err
	}
	if author, err = o.text("plugin_author"); err != nil {
		return object{}, "", "", err
	}
	if name, err = o.text("plugin_name"); err != nil {
		return object{}, "", "", err
	}
	return o, author, name, nil
}

// plugin returns the data of a request and the visible plugin it is about, nil if
// there is none.
func (s *session) plugin(in *rpc.Inbound) (object, Plugin, error) {
	o, author, name, err := about(in)
	if err != nil {
		return object{}, nil, err
	}
	p, _ := s.control.find(in.Context, author, name)
	return o, p, nil
}

func notFound(author, name string) error {
	return errdefs.New(errdefs.NotFound, "Plugin %s/%s not found", author, name).
		WithNext("it is not installed in this scope, or its worker is not running; see get_plugin_logs")
}
