package plugincontrol

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// emission is one event on its way through the plugins: what the last one made of
// it, and who had a part in it.
type emission struct {
	event   object // EventContext
	emitted []json.RawMessage
	sources []json.RawMessage
}

// emitEvent takes an event through the plugins that listen, one after another,
// those with a higher priority first; each sees what the ones before made of it. A
// plugin that fails, or that answers with what is not its to change, is passed over.
func emitEvent(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	var e emission
	if e.event, err = o.object("event_context"); err != nil {
		return nil, err
	}
	f, err := o.include()
	if err != nil {
		return nil, err
	}
	if err := e.claim(in.Context); err != nil {
		return nil, err
	}
	for _, p := range s.control.listeners(in.Context, f) {
		raw, err := p.Call(ctx, pluginwire.ActionEmitEvent, build(field("event_context", e.event.raw)),
			pluginwire.WorkerTimeout(pluginwire.ActionEmitEvent))
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err == nil {
			err = e.take(p, raw)
		}
		if err != nil {
			s.control.log.Warn("a plugin did not handle an event", "plugin", id(p), "err", err)
			continue
		}
		if e.event.truth("is_prevent_postorder") {
			break
		}
	}
	return build(field("emitted_plugins", array(e.emitted)), field("event_context", e.event.raw),
		field("response_sources", array(e.sources))), nil
}

// listeners are the plugins an event goes to: each identity once, in the order of
// priority, and of registration where that is equal.
func (c *Control) listeners(scope pluginwire.Context, f filter) []Plugin {
	var out []Plugin
	seen := map[string]bool{}
	for _, p := range c.ready(scope, f) {
		listens := slices.ContainsFunc(p.Container().Components, func(k pluginhost.Component) bool { return k.Kind == KindEventListener })
		if listens && !seen[id(p)] {
			seen[id(p)] = true
			out = append(out, p)
		}
	}
	slices.SortStableFunc(out, func(a, b Plugin) int { return cmp.Compare(b.Container().Priority, a.Container().Priority) })
	return out
}

// claim writes the request's scope into the event, which must not claim another.
func (e *emission) claim(scope pluginwire.Context) error {
	set, err := e.event.scope(scope, "event_context")
	if err != nil {
		return err
	}
	if e.event.has("event") {
		inner, err := e.event.object("event")
		if err != nil {
			return err
		}
		own, err := inner.scope(scope, "event_context.event")
		if err != nil {
			return err
		}
		if inner, err = inner.with(own...); err != nil {
			return err
		}
		set = append(set, field("event", inner.raw))
	}
	e.event, err = e.event.with(set...)
	return err
}

// LangBot's own fields of an event: which request of a user it belongs to, and in
// whose scope. A plugin cannot change them.
var (
	queryKeys = []string{"query_id", "query_uuid"}
	scopeKeys = []string{"instance_uuid", "workspace_uuid", "placement_generation"}
)

// take replaces the event by what a plugin made of it.
func (e *emission) take(p Plugin, raw json.RawMessage) error {
	answer, err := readObject(raw, "the answer")
	if err != nil {
		return err
	}
	next, err := answer.object("event_context")
	if err != nil {
		return err
	}
	set, err := keep(e.event, next, append(queryKeys, scopeKeys...))
	if err != nil {
		return err
	}
	var before, after object
	if e.event.has("event") {
		before = e.event.within("event")
		if after, err = next.object("event"); err != nil {
			return err
		}
		inner, err := keep(before, after, queryKeys)
		if err != nil {
			return err
		}
		if len(inner) > 0 {
			if after, err = after.with(inner...); err != nil {
				return err
			}
			set = append(set, field("event", after.raw))
		}
	}
	if len(set) > 0 {
		if next, err = next.with(set...); err != nil {
			return err
		}
	}
	if answer.truth("emitted") {
		e.emitted = append(e.emitted, p.Container().JSON)
		reply := "reply_message_chain"
		if after.has(reply) && !sameJSON(after.get(reply), before.get(reply)) {
			e.sources = append(e.sources, build(field("kind", quote(reply)),
				field("plugin", build(field("author", quote(p.Author())), field("name", quote(p.Name()))))))
		}
	}
	e.event = next
	return nil
}

// keep holds LangBot's own fields: one that is missing comes back, another value
// is refused.
func keep(before, after object, keys []string) (back []pluginwire.Member, err error) {
	for _, key := range keys {
		switch {
		case !after.has(key) && before.has(key):
			back = append(back, field(key, before.get(key)))
		case after.has(key) && before.has(key) && !sameJSON(after.get(key), before.get(key)):
			return nil, errdefs.New(errdefs.Denied, "the answer's %s is not the event's", key)
		case after.has(key) && !before.has(key) && key == "query_uuid":
			return nil, errdefs.New(errdefs.Denied, "the answer claims a %s that the event does not have", key)
		}
	}
	return back, nil
}
