package pluginhost

import (
	"bytes"
	"encoding/json"
	"strconv"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// Component is one component of a plugin: a tool, a command, a runner, a page.
type Component struct {
	Kind, Name string
	// Manifest is the ComponentManifest as peers read it (owner, manifest,
	// rel_path); its owner is always the plugin's "author/name", that of the plugin's
	// own manifest "builtin".
	Manifest json.RawMessage
	// Spec and Metadata are parts of the manifest, for the flat forms.
	Spec, Metadata json.RawMessage
}

// Container is a snapshot of what a plugin says it is, with what LangBot's
// settings say about it. It is a value: a registered plugin replaces it whole.
type Container struct {
	Author, Name string
	Debug        bool
	Enabled      bool
	Priority     int
	Status       string // unmounted, mounted, initialized
	Manifest     Component
	Components   []Component
	// JSON is the PluginContainer object as peers read it, with everything the
	// worker put there that is not rewritten.
	JSON json.RawMessage
}

// Statuses of a plugin container.
const (
	StatusMounted     = "mounted"
	StatusInitialized = "initialized"
)

// settings are the answer to get_plugin_settings; defaults as in the published
// LangBot 4.10 when there is no row. Values pass through as they are.
type settings struct {
	enabled          bool
	priority         int
	source, info     json.RawMessage
	installationUUID string // "" when it has none

	raw json.RawMessage
}

func decodeSettings(raw json.RawMessage) (settings, error) {
	if _, err := pluginwire.Edit(raw, nil); err != nil {
		return settings{}, errdefs.Wrap(err, errdefs.Invalid, "LangBot's plugin settings are not an object")
	}
	s := settings{enabled: true, raw: raw,
		source: given(pluginwire.Field(raw, "install_source"), `"local"`),
		info:   given(pluginwire.Field(raw, "install_info"), "{}"),
	}
	s.installationUUID, _ = pluginwire.StringField(raw, "installation_uuid")
	if b, err := strconv.ParseBool(string(pluginwire.Field(raw, "enabled"))); err == nil {
		s.enabled = b
	}
	s.priority, _ = strconv.Atoi(string(pluginwire.Field(raw, "priority")))
	return s, nil
}

// given is v, or a default for none or null.
func given(v json.RawMessage, def string) json.RawMessage {
	if len(v) == 0 || bytes.Equal(v, []byte("null")) {
		return json.RawMessage(def)
	}
	return v
}

type object = map[string]json.RawMessage

func quoted(s string) json.RawMessage { return jsonscan.AppendString(nil, s) }

func member(name string, v json.RawMessage) pluginwire.Member {
	return pluginwire.Member{Name: name, Value: v}
}

// decodeComponent reads a ComponentManifest and makes owner its owner.
func decodeComponent(raw json.RawMessage, owner string) (Component, error) {
	m := pluginwire.Field(raw, "manifest")
	c := Component{Spec: pluginwire.Field(m, "spec"), Metadata: pluginwire.Field(m, "metadata")}
	c.Kind, _ = pluginwire.StringField(m, "kind")
	c.Name, _ = pluginwire.StringField(c.Metadata, "name")
	var err error
	c.Manifest, err = pluginwire.Edit(raw, nil, member("owner", quoted(owner)))
	return c, err
}

// pluginOwner is the owner of a plugin's own manifest.
const pluginOwner = "builtin"

// decodeContainer reads a worker's PluginContainer, bare (the published SDK
// 0.5.5 and 0.6.3) or wrapped together with a slot's settings (0.7). The owner
// of the plugin and of every component is overwritten, as in the published runtimes
// 0.6.3 and 0.7; those leave the plugin's as the worker said it, which is this one.
func decodeContainer(raw json.RawMessage) (Container, error) {
	raw = bytes.Clone(raw) // the connection may use its buffer again
	if inner := pluginwire.Field(raw, "plugin_container"); len(inner) > 0 && inner[0] == '{' {
		raw = inner
	}
	meta := pluginwire.Field(pluginwire.Field(pluginwire.Field(raw, "manifest"), "manifest"), "metadata")
	var c Container
	c.Author, _ = pluginwire.StringField(meta, "author")
	c.Name, _ = pluginwire.StringField(meta, "name")
	c.Status, _ = pluginwire.StringField(raw, "status")
	if c.Author == "" || c.Name == "" {
		return Container{}, errdefs.New(errdefs.Invalid, "the worker's plugin container has no metadata.author and metadata.name in its manifest")
	}
	var err error
	if c.Manifest, err = decodeComponent(pluginwire.Field(raw, "manifest"), pluginOwner); err != nil {
		return Container{}, err
	}
	var parts []json.RawMessage
	if list := pluginwire.Field(raw, "components"); len(list) > 0 {
		if err := json.Unmarshal(list, &parts); err != nil {
			return Container{}, errdefs.Wrap(err, errdefs.Invalid, "the worker's plugin container has no list of components")
		}
	}
	list := []byte{'['}
	for i, part := range parts {
		comp, err := decodeComponent(pluginwire.Field(part, "manifest"), c.ID())
		if err != nil {
			return Container{}, err
		}
		if part, err = pluginwire.Edit(part, nil, member("manifest", comp.Manifest), member("component_instance", null)); err != nil {
			return Container{}, err
		}
		if i > 0 {
			list = append(list, ',')
		}
		list = append(list, part...)
		c.Components = append(c.Components, comp)
	}
	c.JSON, err = pluginwire.Edit(raw, nil, member("manifest", c.Manifest.Manifest), member("components", append(list, ']')), member("plugin_instance", null))
	return c, err
}

var null = json.RawMessage("null")

// ID is "author/name", how peers name a plugin.
func (c Container) ID() string { return c.Author + "/" + c.Name }

// with returns the container with what the settings say and whether it is a
// plugin under development. The plugin's configuration stays out of it: it may hold
// secrets, LangBot has it, and the published runtimes 0.6.3 and 0.7 tell an empty one.
func (c Container) with(s settings, debug bool) Container {
	c.Debug, c.Enabled, c.Priority = debug, s.enabled, s.priority
	if c.Status == "" {
		c.Status = StatusMounted
	}
	out, err := pluginwire.Edit(c.JSON, nil,
		member("debug", strconv.AppendBool(nil, debug)),
		member("install_source", s.source), member("install_info", s.info),
		member("enabled", strconv.AppendBool(nil, s.enabled)),
		member("priority", strconv.AppendInt(nil, int64(s.priority), 10)),
		member("plugin_config", json.RawMessage("{}")), member("status", quoted(c.Status)))
	if err == nil { // c.JSON is an object: it was made by Edit
		c.JSON = out
	}
	return c
}

// Named returns the component of a kind with a name.
func (c Container) Named(kind, name string) (Component, bool) {
	for _, comp := range c.Components {
		if comp.Kind == kind && comp.Name == name {
			return comp, true
		}
	}
	return Component{}, false
}

// Flat is a tool as list_tools answers it to a plugin.
func (c Component) Flat() map[string]json.RawMessage {
	out := object{"spec": given(c.Spec, "null")}
	for _, k := range []string{"name", "label", "description", "icon"} {
		out[k] = given(pluginwire.Field(c.Metadata, k), "null")
	}
	return out
}
