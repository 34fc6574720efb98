package plugincontrol

import (
	"context"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// pageAPI passes a request of a plugin's page on. What is wrong with it stands in
// the answer's error: LangBot hands that to the page as it is.
func pageAPI(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	failed := func(text string) any { return build(field("data", null), field("error", quote(text))) }
	fields := map[string]string{}
	for _, key := range []string{"plugin_author", "plugin_name", "page_id", "endpoint", "method"} {
		if fields[key] = o.textOr(key, ""); fields[key] == "" {
			return failed("Missing required field: " + key), nil
		}
	}
	p, ok := s.control.find(in.Context, fields["plugin_author"], fields["plugin_name"])
	if !ok {
		return failed("Plugin " + fields["plugin_author"] + "/" + fields["plugin_name"] + " not found"), nil
	}
	raw, err := p.Call(ctx, pluginwire.ActionPageAPI, build(field("page_id", quote(fields["page_id"])),
		field("endpoint", quote(fields["endpoint"])), field("method", quote(fields["method"])), field("body", o.or("body", null))),
		pluginwire.WorkerTimeout(pluginwire.ActionPageAPI))
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		return failed(textOf(err)), nil
	}
	return raw, nil
}
