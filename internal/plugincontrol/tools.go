package plugincontrol

import (
	"context"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// listComponents answers with what describe says of all components of a kind that can
// be called. One that it refuses is left out.
func listComponents(kind, name string, describe func(Plugin, pluginhost.Component) (json.RawMessage, error)) handler {
	return func(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
		o, err := payload(in)
		if err != nil {
			return nil, err
		}
		f, err := o.include()
		if err != nil {
			return nil, err
		}
		var out []json.RawMessage
		for _, p := range s.control.ready(in.Context, f) {
			for _, comp := range p.Container().Components {
				if comp.Kind != kind {
					continue
				}
				entry, err := describe(p, comp)
				if err != nil {
					s.control.log.Warn("a component is left out", "plugin", id(p), "kind", kind, "component", comp.Name, "err", err)
					continue
				}
				out = append(out, entry)
			}
		}
		return build(field(name, array(out))), nil
	}
}

// manifestOf describes a component by its manifest as it is.
func manifestOf(_ Plugin, comp pluginhost.Component) (json.RawMessage, error) {
	return comp.Manifest, nil
}

// owner returns the first ready plugin that has a component of the name.
func (c *Control) owner(scope pluginwire.Context, f filter, kind, name string) (Plugin, bool) {
	for _, p := range c.ready(scope, f) {
		if _, ok := p.Container().Named(kind, name); ok {
			return p, true
		}
	}
	return nil, false
}

// callTool calls a tool for LangBot. A tool that nobody has is an empty answer.
func callTool(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	name, err := o.text("tool_name")
	if err != nil {
		return nil, err
	}
	params, err := o.must("tool_parameters")
	if err != nil {
		return nil, err
	}
	sess, err := o.object("session")
	if err != nil {
		return nil, err
	}
	query, err := o.must("query_id")
	if err != nil {
		return nil, err
	}
	f, err := o.include()
	if err != nil {
		return nil, err
	}
	set, err := sess.scope(in.Context, "session")
	if err != nil {
		return nil, err
	}
	if sess, err = sess.with(set...); err != nil {
		return nil, err
	}
	p, ok := s.control.owner(in.Context, f, KindTool, name)
	if !ok {
		return build(field("tool_response", empty)), nil
	}
	ask := []pluginwire.Member{field("tool_name", quote(name)), field("tool_parameters", params), field("session", sess.raw), field("query_id", query)}
	if o.has("query_uuid") {
		ask = append(ask, field("query_uuid", o.get("query_uuid")))
	}
	raw, err := p.Call(ctx, pluginwire.ActionCallTool, build(ask...), pluginwire.WorkerTimeout(pluginwire.ActionCallTool))
	if err != nil {
		return nil, err
	}
	answer, err := readObject(raw, "the tool's answer")
	if err != nil {
		return nil, err
	}
	return build(field("tool_response", answer.or("tool_response", null))), nil
}
