package plugincontrol

import (
	"context"
	"encoding/json"
	"path"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// uiTimeout is how long a worker may take to hand out a file of its user interface.
const uiTimeout = 15 * time.Second

// pass hands a file of a worker on to LangBot, under a new key: the worker's copy
// is read and deleted, whatever becomes of the other.
func (s *session) pass(ctx context.Context, p Plugin, key string, to pluginwire.Context) (string, error) {
	data, err := p.ReadFile(key)
	if err != nil {
		return "", err
	}
	if err := p.DeleteFile(key); err != nil {
		s.control.log.Warn("a file of a plugin stays behind", "plugin", id(p), "err", err)
	}
	return s.sendFile(ctx, data, extension(key), to)
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
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	author, name, err := o.identity()
	if err != nil {
		return nil, err
	}
	key, mime := "", json.RawMessage(`""`)
	p, ok := s.control.find(in.Context, author, name)
	if ok {
		if key, mime, err = s.uiFile(ctx, p, pluginwire.ActionGetPluginIcon, empty, "plugin_icon_file_key"); err != nil {
			return nil, err
		}
	}
	if key == "" {
		key, err = s.sendFile(ctx, nil, "", in.Context)
	} else {
		key, err = s.pass(ctx, p, key, in.Context)
	}
	if err != nil {
		return nil, err
	}
	return build(field("plugin_icon_file_key", quote(key)), field("mime_type", mime)), nil
}

func getPluginReadme(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	author, name, err := o.identity()
	if err != nil {
		return nil, err
	}
	none := build(field("readme_file_key", null))
	p, ok := s.control.find(in.Context, author, name)
	if !ok {
		return none, nil
	}
	ask := build(field("language", quote(o.textOr("language", "en"))))
	key, _, err := s.uiFile(ctx, p, pluginwire.ActionGetPluginReadme, ask, "plugin_readme_file_key")
	if err != nil {
		return nil, err
	}
	if key == "" {
		return none, nil
	}
	if key, err = s.pass(ctx, p, key, in.Context); err != nil {
		return nil, err
	}
	return build(field("readme_file_key", quote(key))), nil
}

func getPluginAssetsFile(ctx context.Context, s *session, in *rpc.Inbound) (any, error) {
	o, err := payload(in)
	if err != nil {
		return nil, err
	}
	author, name, err := o.identity()
	if err != nil {
		return nil, err
	}
	file, err := o.text("file_path")
	if err != nil {
		return nil, err
	}
	none := build(field("file_file_key", null), field("mime_type", null))
	p, ok := s.control.find(in.Context, author, name)
	if !ok {
		return none, nil
	}
	key, mime, err := s.uiFile(ctx, p, pluginwire.ActionGetPluginAssetsFile, build(field("file_key", quote(file))), "file_file_key")
	if err != nil {
		return nil, err
	}
	if key == "" {
		return none, nil
	}
	if key, err = s.pass(ctx, p, key, in.Context); err != nil {
		return nil, err
	}
	return build(field("file_file_key", quote(key)), field("mime_type", mime)), nil
}

// uiFile asks a worker for a file and returns the key it pushed it under, "" for none.
func (s *session) uiFile(ctx context.Context, p Plugin, action string, ask json.RawMessage, keyField string) (key string, mime json.RawMessage, err error) {
	raw, err := p.Call(ctx, action, ask, uiTimeout)
	if err != nil {
		return "", nil, err
	}
	o, err := readObject(raw, "the plugin's answer")
	if err != nil {
		return "", nil, err
	}
	return o.textOr(keyField, ""), o.or("mime_type", null), nil
}

func notFound(author, name string) error {
	return errdefs.New(errdefs.NotFound, "Plugin %s/%s not found", author, name).
		WithNext("it is not installed in this scope, or its worker is not running; see get_plugin_logs")
}
