package artifact

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/shelf"
)

const manifestName = "manifest.yaml"

// Bounds of a manifest, so that aliases cannot make a small document large.
const (
	maxNodes     = 100_000
	maxNesting   = 100
	maxIdentity  = 256 // bytes of author, name and version
	kindOfPlugin = "Plugin"
)

// ReadManifest reads the manifest.yaml of an unpacked plugin. Errors: not_found
// where there is none, invalid for one that a package could not have.
func ReadManifest(dir string) (Manifest, error) {
	f, err := os.Open(filepath.Join(dir, manifestName))
	if errors.Is(err, fs.ErrNotExist) {
		return Manifest{}, errdefs.New(errdefs.NotFound, "%s has no manifest.yaml", dir)
	}
	if err != nil {
		return Manifest{}, shelf.Refusal(err, "the manifest of %s cannot be read", dir)
	}
	defer f.Close()
	lim := DefaultLimits()
	b, err := io.ReadAll(io.LimitReader(f, lim.Manifest+1))
	if err != nil {
		return Manifest{}, shelf.Refusal(err, "the manifest of %s cannot be read", dir)
	}
	return parseManifest(b, lim)
}

func (p *plan) readManifest(lim Limits) error {
	for _, f := range p.files {
		if f.path != manifestName {
			continue
		}
		var b bytes.Buffer
		if err := f.content(&b); err != nil {
			return err
		}
		m, err := parseManifest(b.Bytes(), lim)
		p.manifest = m
		return err
	}
	return refuse("it has no manifest.yaml at the top").WithNext("build it with lbp build")
}

// parseManifest decodes manifest.yaml: one mapping with kind Plugin and an author,
// a name and a version.
func parseManifest(b []byte, lim Limits) (m Manifest, err error) {
	if int64(len(b)) > lim.Manifest {
		return m, exceeds("manifest.yaml has more than %d bytes, the limit", lim.Manifest)
	}
	if !utf8.Valid(b) {
		return m, refuse("manifest.yaml is not UTF-8")
	}
	defer func() {
		if r := recover(); r != nil { // the decoder is handed foreign bytes
			m, err = Manifest{}, refuse("manifest.yaml is not valid YAML")
		}
	}()
	dec := yaml.NewDecoder(bytes.NewReader(b))
	var doc, more yaml.Node
	if err := dec.Decode(&doc); err != nil {
		return m, errdefs.Wrap(err, errdefs.Invalid, "the plugin package is refused: manifest.yaml is not valid YAML: %s", clip(err.Error()))
	}
	if err := dec.Decode(&more); !errors.Is(err, io.EOF) {
		return m, refuse("manifest.yaml holds more than one document")
	}
	c := converter{left: maxNodes}
	v, err := c.value(&doc, 0)
	if err != nil {
		return m, err
	}
	raw, ok := v.(map[string]any)
	if !ok {
		return m, refuse("manifest.yaml is not a mapping")
	}
	if kind, _ := raw["kind"].(string); kind != kindOfPlugin {
		return m, refuse("manifest.yaml has kind %q, not %q", clip(kind), kindOfPlugin)
	}
	m.Raw = raw
	for _, f := range []struct {
		key  string
		into *string
	}{{"author", &m.Author}, {"name", &m.Name}, {"version", &m.Version}} {
		*f.into = scalar(&doc, "metadata", f.key)
		if strings.TrimSpace(*f.into) == "" {
			return m, refuse("manifest.yaml has no metadata.%s", f.key)
		}
		if len(*f.into) > maxIdentity || strings.ContainsFunc(*f.into, func(r rune) bool { return r < ' ' || r == 0x7f || r == '/' || r == '\\' }) {
			return m, refuse("metadata.%s in manifest.yaml is longer than %d bytes or has a slash or a control character", f.key, maxIdentity)
		}
	}
	return m, nil
}

// scalar is the text of a scalar as it is written, so that version 1.10 is not 1.1.
func scalar(n *yaml.Node, path ...string) string {
	if n.Kind == yaml.DocumentNode && len(n.Content) > 0 {
		n = n.Content[0]
	}
	for _, key := range path {
		n = resolve(n)
		if n == nil || n.Kind != yaml.MappingNode {
			return ""
		}
		var found *yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				found = n.Content[i+1] // the last of several wins, as with PyYAML
			}
		}
		n = found
	}
	if n = resolve(n); n == nil || n.Kind != yaml.ScalarNode || n.ShortTag() == "!!null" {
		return ""
	}
	return n.Value
}

func resolve(n *yaml.Node) *yaml.Node {
	for i := 0; n != nil && n.Kind == yaml.AliasNode && i < maxNesting; i++ {
		n = n.Alias
	}
	return n
}

// converter turns nodes into values with string keys. Unlike the decoder it takes
// the last of several equal keys, as PyYAML does.
type converter struct{ left int }

func (c *converter) value(n *yaml.Node, depth int) (any, error) {
	if c.left--; c.left < 0 || depth > maxNesting {
		return nil, exceeds("manifest.yaml has more than %d values, or they are nested deeper than %d", maxNodes, maxNesting)
	}
	switch n.Kind {
	case yaml.DocumentNode:
		if len(n.Content) == 0 {
			return nil, nil
		}
		return c.value(n.Content[0], depth+1)
	case yaml.AliasNode:
		return c.value(n.Alias, depth+1)
	case yaml.SequenceNode:
		list := []any{}
		for _, e := range n.Content {
			v, err := c.value(e, depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		return list, nil
	case yaml.MappingNode:
		return c.mapping(n, depth)
	case yaml.ScalarNode:
		var v any
		switch n.ShortTag() {
		case "!!null", "!!bool", "!!int", "!!float":
			if err := n.Decode(&v); err != nil {
				return n.Value, nil
			}
			return v, nil
		}
		// A tag of its own is no safe YAML for the published SDK either.
		if tag := n.ShortTag(); strings.HasPrefix(tag, "!") && !strings.HasPrefix(tag, "!!") {
			return nil, refuse("manifest.yaml uses the tag %q", clip(tag))
		}
		return n.Value, nil
	}
	return nil, nil
}

func (c *converter) mapping(n *yaml.Node, depth int) (any, error) {
	out, merged := map[string]any{}, map[string]any{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, err := c.value(n.Content[i], depth+1)
		if err != nil {
			return nil, err
		}
		v, err := c.value(n.Content[i+1], depth+1)
		if err != nil {
			return nil, err
		}
		if n.Content[i].ShortTag() == "!!merge" {
			from, ok := v.([]any)
			if !ok {
				from = []any{v}
			}
			for _, f := range from {
				f, _ := f.(map[string]any)
				for k, v := range f {
					if _, ok := merged[k]; !ok {
						merged[k] = v
					}
				}
			}
			continue
		}
		switch k := k.(type) {
		case string:
			out[k] = v
		default:
			out[fmt.Sprint(k)] = v
		}
	}
	for k, v := range merged {
		if _, ok := out[k]; !ok {
			out[k] = v
		}
	}
	return out, nil
}
