package plugincontrol

import (
	"context"
	"encoding/json"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// enginesAtOnce is how many plugins are asked at a time what their engines can. LangBot
// waits 60 s for the list and each plugin has 10 s: one after another, six that hang
// would leave it without any.
const enginesAtOnce = 16

// listKnowledgeEngines lists the engines of all plugins. A plugin that does not
// say what it can is listed without capabilities.
func listKnowledgeEngines(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	plugins := s.control.ready(in.Context, nil)
	lists := make([][]json.RawMessage, len(plugins)) // in the order of the plugins
	var asks errgroup.Group
	asks.SetLimit(enginesAtOnce)
	for i, p := range plugins {
		components := slices.DeleteFunc(slices.Clone(p.Container().Components), func(c pluginhost.Component) bool { return c.Kind != KindKnowledgeEngine })
		if len(components) == 0 {
			continue
		}
		asks.Go(func() error {
			lists[i] = s.engines(ctx, p, components)
			return nil
		})
	}
	_ = asks.Wait()
	return build(field("engines", array(slices.Concat(lists...)))), nil
}

// engines asks a plugin what its engines can, and describes them.
func (s *session) engines(ctx context.Context, p Plugin, components []pluginhost.Component) []json.RawMessage {
	capabilities := s.capabilities(ctx, p)
	var out []json.RawMessage
	for _, comp := range components {
		meta := object{comp.Metadata}
		out = append(out, build(
			field("plugin_id", quote(id(p))),
			field("name", label(meta)),
			field("description", meta.or("description", null)),
			field("capabilities", capabilities),
			field("creation_schema", build(field("schema", schema(comp, "creation_schema")))),
			field("retrieval_schema", build(field("schema", schema(comp, "retrieval_schema")))),
		))
	}
	return out
}

func (s *session) capabilities(ctx context.Context, p Plugin) json.RawMessage {
	raw, err := p.Call(ctx, pluginwire.ActionGetRAGCapabilities, empty, pluginwire.WorkerTimeout(pluginwire.ActionGetRAGCapabilities))
	if err == nil {
		var o object
		if o, err = readObject(raw, "the answer"); err == nil && o.has("capabilities") {
			return o.get("capabilities")
		}
	}
	s.control.log.Warn("a knowledge engine did not say what it can", "plugin", id(p), "err", err)
	return list
}

// label is what people read: the label, or the name where there is none.
func label(meta object) json.RawMessage {
	return meta.or("label", meta.or("name", null))
}

func schema(comp pluginhost.Component, key string) json.RawMessage {
	return object{comp.Spec}.or(key, list)
}

// settingsSchema answers with one schema of a plugin's engine, an empty one where
// there is none.
func settingsSchema(key string) handler {
	return func(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
		_, p, err := s.plugin(in)
		if err != nil {
			return nil, err
		}
		found := list
		if p != nil {
			for _, comp := range p.Container().Components {
				if comp.Kind == KindKnowledgeEngine {
					found = schema(comp, key)
					break
				}
			}
		}
		return build(field("schema", found)), nil
	}
}

// engine returns the data of a request and the plugin it names.
func (s *session) engine(in *rpc.Inbound) (object, Plugin, error) {
	o, author, name, err := about(in)
	if err != nil {
		return object{}, nil, err
	}
	p, ok := s.control.find(in.Context, author, name)
	if !ok {
		return object{}, nil, notFound(author, name)
	}
	if !p.Ready() {
		return object{}, nil, errdefs.New(errdefs.Unavailable, "Plugin %s is not initialized", id(p)).
			WithNext("it is disabled or still starting")
	}
	return o, p, nil
}

// defaults are the values of fields that may be missing.
type defaults map[string]json.RawMessage

// forward passes fields of a request on to the plugin it names, and the plugin's
// answer back as it is. A field with a default may be missing.
func forward(action string, fields []string, def defaults) handler {
	return func(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
		o, p, err := s.engine(in)
		if err != nil {
			return nil, err
		}
		ask := make([]pluginwire.Member, 0, len(fields))
		for _, key := range fields {
			v := o.get(key)
			if d, ok := def[key]; ok {
				v = o.or(key, d)
			} else if len(v) == 0 {
				return nil, pluginwire.MissingKey(key)
			}
			ask = append(ask, field(key, v))
		}
		return raw(p.Call(ctx, action, build(ask...), pluginwire.WorkerTimeout(action)))
	}
}

func raw(b json.RawMessage, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return b, nil
}
