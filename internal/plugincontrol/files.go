package plugincontrol

import (
	"context"
	"encoding/json"
	"path"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// uiTimeout is how long a worker may take to hand out a file of its user interface.
const uiTimeout = 15 * time.Second

// fetch asks a worker for a file of its user interface and hands it on to LangBot
// under a new key, "" where the worker has none. The worker's copy is read and
// deleted, whatever becomes of the other.
func (s *session) fetch(ctx context.Context, p Plugin, action string, ask json.RawMessage, keyField string, to pluginwire.Context) (key string, mime json.RawMessage, err error) {
	raw, err := p.Call(ctx, action, ask, uiTimeout)
	if err != nil {
		return "", nil, err
	}
	o, err := readObject(raw, "the plugin's answer")
	if err != nil {
		return "", nil, err
	}
	mime = o.or("mime_type", null)
	if key = o.textOr(keyField, ""); key == "" {
		return "", mime, nil
	}
	data, err := p.ReadFile(key)
	if err != nil {
		return "", nil, err
	}
	if err := p.DeleteFile(key); err != nil {
		s.control.log.Warn("a file of a plugin stays behind", "plugin", id(p), "err", err)
	}
	key, err = s.sendFile(ctx, data, extension(key), to)
	return key, mime, err
}

// extension is a key's extension without the dot, "" if there is none that the
// protocol allows.
func extension(key string) string {
	ext := strings.TrimPrefix(path.Ext(key), ".")
	if len(ext) > 32 {
		return ""
	}
	for i, c := range ext {
		switch {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		case (c == '_' || c == '-') && i > 0:
		default:
			return ""
		}
	}
	return ext
}

// getPluginIcon answers with an empty file where there is no icon or no such plugin,
// as the published runtime does for the latter: LangBot has no word for "none" and
// fails on an empty key.
func getPluginIcon(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	_, p, err := s.plugin(in)
	if err != nil {
		return nil, err
	}
	key, mime := "", json.RawMessage(`""`)
	if p != nil {
		if key, mime, err = s.fetch(ctx, p, pluginwire.ActionGetPluginIcon, empty, "plugin_icon_file_key", in.Context); err != nil {
			return nil, err
		}
	}
	if key == "" {
		if key, err = s.sendFile(ctx, nil, "", in.Context); err != nil {
			return nil, err
		}
	}
	return build(field("plugin_icon_file_key", quote(key)), field("mime_type", mime)), nil
}

func getPluginReadme(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, p, err := s.plugin(in)
	if err != nil {
		return nil, err
	}
	key := ""
	if p != nil {
		ask := build(field("language", quote(o.textOr("language", "en"))))
		if key, _, err = s.fetch(ctx, p, pluginwire.ActionGetPluginReadme, ask, "plugin_readme_file_key", in.Context); err != nil {
			return nil, err
		}
	}
	if key == "" {
		return build(field("readme_file_key", null)), nil
	}
	return build(field("readme_file_key", quote(key))), nil
}

func getPluginAssetsFile(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, p, err := s.plugin(in)
	if err != nil {
		return nil, err
	}
	file, err := o.text("file_path")
	if err != nil {
		return nil, err
	}
	key, mime := "", null
	if p != nil {
		ask := build(field("file_key", quote(file)))
		if key, mime, err = s.fetch(ctx, p, pluginwire.ActionGetPluginAssetsFile, ask, "file_file_key", in.Context); err != nil {
			return nil, err
		}
	}
	if key == "" {
		return build(field("file_file_key", null), field("mime_type", null)), nil
	}
	return build(field("file_file_key", quote(key)), field("mime_type", mime)), nil
}
