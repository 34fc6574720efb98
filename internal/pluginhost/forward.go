package pluginhost

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// handle answers a worker's message; in.Context is the admitted one.
func (l *link) handle(ctx context.Context, in *rpc.Inbound) (any, error) {
	switch in.Action {
	case pluginwire.ActionRegisterPlugin:
		return l.register(ctx, in)
	case pluginwire.ActionFileChunk:
		return struct{}{}, l.holder.Chunk(in.Data, in.Context)
	case pluginwire.ActionListCommands:
		return map[string]any{"commands": l.listed(in.Context, "Command", Component.full)}, nil
	case pluginwire.ActionListTools:
		return map[string]any{"tools": l.listed(in.Context, "Tool", Component.flat)}, nil
	case pluginwire.ActionListPluginsManifest:
		var all []json.RawMessage
		for _, p := range l.m.Plugins(in.Context) {
			all = append(all, p.Container().Manifest.Manifest)
		}
		return map[string]any{"plugins": orEmpty(all)}, nil
	}
	f, ok := pluginwire.ForwardOf(in.Action)
	if !ok {
		if ps := l.m.cfg.Processes; ps != nil {
			return ps.Answer(ctx, l.conn, l.identity(), in.Context, in.Action, in.Data)
		}
		return nil, pluginwire.UnknownAction(in.Action)
	}
	return l.forward(ctx, in, f)
}

// full and flat are the two shapes a component is listed in.
func (c Component) full() any { return c.Manifest }
func (c Component) flat() any { return c.Flat() }

// listed returns the components of a kind that a context may see.
func (l *link) listed(c pluginwire.Context, kind string, shape func(Component) any) []any {
	out := []any{}
	for _, p := range l.m.Plugins(c) {
		if !p.Ready() {
			continue
		}
		for _, comp := range p.Container().Components {
			if comp.Kind == kind {
				out = append(out, shape(comp))
			}
		}
	}
	return out
}

// forward sends a plugin's message on to LangBot: without anything it says about
// whom it speaks for, with the identity its connection registered under, and in
// its admitted context.
func (l *link) forward(ctx context.Context, in *rpc.Inbound, f pluginwire.Forward) (any, error) {
	id := l.identity()
	timeout, payload := f.Timeout, in.Data
	var err error
	if f.FromPayload {
		timeout = pluginwire.PayloadTimeout(in.Data, f.Timeout)
		if payload, err = pluginwire.Edit(payload, isTimeout); err != nil {
			return nil, err
		}
	}
	var more []pluginwire.Member
	switch f.Owner {
	case pluginwire.OwnerPlugin:
		more = owner("plugin", id)
	case pluginwire.OwnerWorkspace:
		if in.Context.WorkspaceUUID == "" {
			return nil, errdefs.New(errdefs.Denied, "Workspace storage needs a Workspace, and this plugin has none")
		}
		more = owner("workspace", in.Context.WorkspaceUUID)
	}
	data, err := pluginwire.ForHost(payload, id, more...)
	if err != nil {
		return nil, err
	}
	host := l.m.cfg.Host
	if f.Stream {
		return nil, l.forwardStream(ctx, in, f.Host, data, timeout)
	}
	answer, err := host.Call(ctx, f.Host, data, in.Context, timeout)
	if err != nil {
		if local, ok := l.localAnswer(ctx, in, err); ok {
			return local()
		}
		return nil, err
	}
	if f.File {
		return l.pushOn(ctx, in, answer)
	}
	return answer, nil
}

func isTimeout(name []byte) bool { return string(name) == "timeout" }

func owner(kind, who string) []pluginwire.Member {
	return []pluginwire.Member{{Name: "owner_type", Value: quoted(kind)}, {Name: "owner", Value: quoted(who)}}
}

func (l *link) forwardStream(ctx context.Context, in *rpc.Inbound, action string, data json.RawMessage, timeout time.Duration) error {
	s, err := l.m.cfg.Host.Stream(ctx, action, data, in.Context, timeout)
	if err != nil {
		return err
	}
	defer s.Close()
	for {
		frame, err := s.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := in.Send(ctx, frame); err != nil {
			return err
		}
	}
}

// pushOn gives the plugin a file that LangBot has just pushed to the runtime,
// under a key of its own, and forgets ours.
func (l *link) pushOn(ctx context.Context, in *rpc.Inbound, answer json.RawMessage) (any, error) {
	host := l.m.cfg.Host
	key, _ := pluginwire.StringField(answer, "file_key")
	if key == "" {
		return answer, nil
	}
	content, err := host.ReadFile(ctx, key, in.Context)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err := host.DeleteFile(key, in.Context); err != nil {
			l.m.log.Warn("a file from LangBot stays behind", "err", err)
		}
	}()
	ext := ""
	if i := strings.LastIndexByte(key, '.'); i >= 0 {
		ext = key[i+1:]
	}
	fresh, err := transfer.Send(ctx, l.conn, content, ext, in.Context)
	if err != nil {
		return nil, err
	}
	return pluginwire.Edit(answer, nil, pluginwire.Member{Name: "file_key", Value: quoted(fresh)})
}

// localAnswer is for the two tool actions that LangBot 4.10 does not know because
// the runtime of its time answered them: they are forwarded first, and answered
// here when the host says that it does not know the action. They reach the
// caller's own plugins only.
func (l *link) localAnswer(ctx context.Context, in *rpc.Inbound, hostErr error) (func() (any, error), bool) {
	if in.Action != pluginwire.ActionCallTool && in.Action != pluginwire.ActionGetToolDetail {
		return nil, false
	}
	if !unknownAction(hostErr, in.Action) {
		return nil, false
	}
	return func() (any, error) {
		name, _ := pluginwire.StringField(in.Data, "tool_name")
		for _, p := range l.m.Plugins(in.Context) {
			c, ok := p.Container().Named("Tool", name)
			if !ok || !p.Ready() {
				continue
			}
			if in.Action == pluginwire.ActionGetToolDetail {
				return map[string]any{"tool": c.Flat()}, nil
			}
			data, err := pluginwire.Edit(in.Data, isScope)
			if err != nil {
				return nil, err
			}
			return p.Call(ctx, pluginwire.ActionCallTool, data, pluginwire.WorkerTimeout(pluginwire.ActionCallTool))
		}
		return nil, errdefs.New(errdefs.NotFound, "Tool %s not found", name)
	}, true
}

// isScope names what a plugin must not say about whom it speaks for.
func isScope(name []byte) bool {
	probe := object{string(name): nil}
	pluginwire.Scrub(probe)
	return len(probe) == 0
}

// unknownAction reports whether a peer said that it does not know an action, in
// the words all published SDKs use.
func unknownAction(err error, action string) bool {
	peer, ok := errors.AsType[*rpc.PeerError](err)
	return ok && strings.Contains(peer.Message, "Action "+action+" not found")
}

// identity is "author/name" of the connection's plugin; all slots of a pool have
// the same.
func (l *link) identity() string {
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	return l.id
}

func orEmpty(list []json.RawMessage) []json.RawMessage {
	if list == nil {
		return []json.RawMessage{}
	}
	return list
}
