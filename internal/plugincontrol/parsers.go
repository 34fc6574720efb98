package plugincontrol

import (
	"context"
	"encoding/json"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

func listParsers(_ context.Context, s *session, in *rpc.Inbound) (any, error) {
	var parsers []json.RawMessage
	for _, p := range s.control.ready(in.Context, nil) {
		for _, comp := range p.Container().Components {
			if comp.Kind != KindParser {
				continue
			}
			meta := object{comp.Metadata}
			parsers = append(parsers, build(
				field("plugin_id", quote(id(p))),
				field("plugin_author", quote(p.Author())),
				field("plugin_name", quote(p.Name())),
				field("name", label(meta)),
				field("description", meta.or("description", null)),
				field("supported_mime_types", schema(comp, "supported_mime_types")),
			))
		}
	}
	return build(field("parsers", array(parsers))), nil
}

// parseDocument hands LangBot's file on to the plugin under a new key. The plugin
// deletes its copy when it has read it; ours goes before it is asked.
func parseDocument(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	defer s.discard(in, "context", "file_key")
	o, p, err := s.engine(in)
	if err != nil {
		return nil, err
	}
	doc, err := o.object("context")
	if err != nil {
		return nil, err
	}
	if key := doc.textOr("file_key", ""); key != "" {
		data, err := s.take(key, in.Context)
		if err != nil {
			return nil, err
		}
		if key, err = p.SendFile(ctx, data, extension(key)); err != nil {
			return nil, err
		}
		if doc, err = doc.with(field("file_key", quote(key))); err != nil {
			return nil, err
		}
	}
	return raw(p.Call(ctx, pluginwire.ActionParseDocument, build(field("context", doc.raw)), pluginwire.WorkerTimeout(pluginwire.ActionParseDocument)))
}
