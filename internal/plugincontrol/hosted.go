package plugincontrol

import (
	"context"
	"time"

	"github.com/stockade-run/stockade/internal/pluginhost"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Hosted makes the [Manager] of a real plugin host.
func Hosted(m *pluginhost.Manager) Manager { return hosted{m} }

// hosted gives interfaces where the host has types.
type hosted struct{ *pluginhost.Manager }

func (h hosted) Plugins(c pluginwire.Context) []Plugin {
	all := h.Manager.Plugins(c)
	out := make([]Plugin, len(all))
	for i, p := range all {
		out[i] = hostedPlugin{p}
	}
	return out
}

type hostedPlugin struct{ *pluginhost.Plugin }

func (p hostedPlugin) Stream(ctx context.Context, action string, data any, timeout time.Duration) (Stream, error) {
	s, err := p.Plugin.Stream(ctx, action, data, timeout)
	if err != nil {
		return nil, err // not s: a nil *Stream would be a non-nil interface
	}
	return s, nil
}
