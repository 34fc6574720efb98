package pluginhost

import (
	"context"
	"encoding/json"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// langbot is LangBot at the other end of a real connection; it is the Host.
type langbot struct {
	near, far *rpc.Conn
	files     *transfer.Store // what it pushed to the runtime
	holder    *transfer.Holder
	group     sync.WaitGroup

	mu    sync.Mutex
	calls []hostCall
	// on takes the place of an action's answer when it returns true.
	on func(ctx context.Context, in *rpc.Inbound) (any, error, bool)
	// config is the plugin_config of an installation.
	config map[string]string
}

type hostCall struct {
	action string
	data   string
	from   pluginwire.Context
}

func newLangbot(t *testing.T, dir string) *langbot {
	t.Helper()
	store, err := transfer.Open(transfer.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	h := &langbot{files: store, config: map[string]string{}}
	h.holder = store.Holder(nil)
	aR, aW := io.Pipe()
	bR, bW := io.Pipe()
	h.near = rpc.New(rpc.Stdio(aR, bW, func() error { aR.Close(); return bW.Close() }), rpc.Config{Handle: func(ctx context.Context, in *rpc.Inbound) (any, error) {
		return nil, h.holder.Chunk(in.Data, in.Context)
	}})
	h.far = rpc.New(rpc.Stdio(bR, aW, func() error { bR.Close(); return aW.Close() }), rpc.Config{Handle: h.handle})
	h.group.Go(func() { _ = h.near.Run(context.Background()) })
	h.group.Go(func() { _ = h.far.Run(context.Background()) })
	return h
}

func (h *langbot) close() {
	h.near.Close(nil)
	h.far.Close(nil)
	h.group.Wait()
	h.holder.Close()
	h.files.Close()
}

func (h *langbot) handle(ctx context.Context, in *rpc.Inbound) (any, error) {
	h.mu.Lock()
	h.calls = append(h.calls, hostCall{in.Action, string(in.Data), in.Context})
	on, config := h.on, h.config[in.Context.InstallationUUID]
	h.mu.Unlock()
	if on != nil {
		if out, err, done := on(ctx, in); done {
			return out, err
		}
	}
	if config == "" {
		config = "{}"
	}
	switch in.Action {
	case pluginwire.ActionGetPluginSettings:
		s := map[string]any{"enabled": true, "priority": 1, "plugin_config": json.RawMessage(config), "install_source": "local", "install_info": map[string]any{}}
		s["installation_uuid"] = in.Context.InstallationUUID
		if in.Context.InstallationUUID == "" {
			s["installation_uuid"] = "inst-from-host"
		}
		return s, nil
	case pluginwire.ActionInitializePluginSettings:
		return nil, nil
	case pluginwire.ActionGetBots:
		return map[string]any{"bots": []string{}}, nil
	}
	return nil, pluginwire.UnknownAction(in.Action)
}

func (h *langbot) set(config map[string]string) {
	h.mu.Lock()
	h.config = config
	h.mu.Unlock()
}

func (h *langbot) answer(on func(ctx context.Context, in *rpc.Inbound) (any, error, bool)) {
	h.mu.Lock()
	h.on = on
	h.mu.Unlock()
}

// made returns the calls of an action.
func (h *langbot) made(action string) []hostCall {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(h.calls), func(c hostCall) bool { return c.action != action })
}

func (h *langbot) Call(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (json.RawMessage, error) {
	return h.near.Call(ctx, action, data, rpc.CallOptions{Context: from, Timeout: timeout})
}

func (h *langbot) Stream(ctx context.Context, action string, data any, from pluginwire.Context, timeout time.Duration) (*rpc.Stream, error) {
	return h.near.Stream(ctx, action, data, rpc.CallOptions{Context: from, Timeout: timeout})
}

func (h *langbot) ReadFile(_ context.Context, key string, as pluginwire.Context) ([]byte, error) {
	return h.files.Read(key, as)
}

func (h *langbot) DeleteFile(key string, as pluginwire.Context) error { return h.files.Delete(key, as) }

func (h *langbot) SendFile(ctx context.Context, data []byte, ext string, from pluginwire.Context) (string, error) {
	return transfer.Send(ctx, h.near, data, ext, from)
}
