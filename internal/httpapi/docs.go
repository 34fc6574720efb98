package httpapi

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html"
	"html/template"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/api"
)

//go:embed docs.html
var docsHTML string

// The docs page is made once, from the OpenAPI document, by one template without
// any script: it works offline and in a text browser.

type docsPage struct {
	Title, Version string
	Intro          template.HTML
	Groups         []docsGroup
	Shapes         []docsShape
}

type docsGroup struct {
	Name, Description string
	Ops               []docsOp
}

type docsOp struct {
	ID, Method, Path, Summary string
	Description               template.HTML
	Params                    []docsField
	Body                      []docsField
	BodyType                  string
	Answers, Errors           []docsAnswer
	Curl                      string
}

type docsField struct {
	Name, In, Type, Rules string
	Ref                   string // a shape on this page
	Required              bool
	Doc                   template.HTML
}

type docsAnswer struct {
	Status, Type, Ref string
	Doc               template.HTML
}

type docsShape struct {
	Name   string
	Doc    template.HTML
	Fields []docsField
}

func renderDocs(o *huma.OpenAPI) ([]byte, error) {
	t, err := template.New("docs").Parse(docsHTML)
	if err != nil {
		return nil, err
	}
	p := docsPage{Title: o.Info.Title, Version: o.Info.Version, Intro: prose(o.Info.Description)}
	r := docsRenderer{schemas: o.Components.Schemas.Map()}
	for _, tag := range o.Tags {
		g := docsGroup{Name: tag.Name, Description: tag.Description}
		for _, path := range slices.Sorted(maps.Keys(o.Paths)) {
			item := o.Paths[path]
			for _, op := range []*huma.Operation{item.Post, item.Get, item.Put, item.Patch, item.Delete} {
				if op != nil && slices.Contains(op.Tags, tag.Name) {
					g.Ops = append(g.Ops, r.operation(op))
				}
			}
		}
		p.Groups = append(p.Groups, g)
	}
	for _, name := range slices.Sorted(maps.Keys(r.schemas)) {
		p.Shapes = append(p.Shapes, docsShape{Name: name, Doc: prose(r.schemas[name].Description), Fields: r.fields(r.schemas[name])})
	}
	var b bytes.Buffer
	if err := t.Execute(&b, p); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

type docsRenderer struct{ schemas map[string]*huma.Schema }

func (r docsRenderer) operation(op *huma.Operation) docsOp {
	d := docsOp{ID: op.OperationID, Method: op.Method, Path: op.Path, Summary: op.Summary, Description: prose(op.Description)}
	for _, p := range op.Parameters {
		f := r.field(p.Name, p.Schema, p.Required)
		f.In = p.In
		if p.Description != "" {
			f.Doc = prose(p.Description)
		}
		d.Params = append(d.Params, f)
	}
	if op.RequestBody != nil {
		for media, m := range op.RequestBody.Content {
			d.BodyType = media
			d.Body = r.fields(m.Schema)
		}
	}
	for _, st := range slices.Sorted(maps.Keys(op.Responses)) {
		resp := op.Responses[st]
		a := docsAnswer{Status: st, Doc: prose(resp.Description)}
		for _, media := range slices.Sorted(maps.Keys(resp.Content)) {
			if a.Type != "" {
				a.Type += ", "
			}
			a.Type += media
			if ref := refName(resp.Content[media].Schema); ref != "" {
				a.Ref = ref
			}
		}
		if st >= "400" {
			d.Errors = append(d.Errors, a)
		} else {
			d.Answers = append(d.Answers, a)
		}
	}
	d.Curl = r.curl(op)
	return d
}

func (r docsRenderer) resolve(s *huma.Schema) *huma.Schema {
	if name := refName(s); name != "" {
		return r.schemas[name]
	}
	return s
}

func (r docsRenderer) fields(s *huma.Schema) []docsField {
	s = r.resolve(s)
	if s == nil {
		return nil
	}
	var all []docsField
	for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
		all = append(all, r.field(name, s.Properties[name], slices.Contains(s.Required, name)))
	}
	slices.SortStableFunc(all, func(a, b docsField) int {
		switch {
		case a.Required == b.Required:
			return 0
		case a.Required:
			return -1
		}
		return 1
	})
	return all
}

func (r docsRenderer) field(name string, s *huma.Schema, required bool) docsField {
	f := docsField{Name: name, Required: required}
	if s == nil {
		return f
	}
	f.Doc = prose(s.Description)
	f.Type, f.Ref = typeName(s)
	f.Rules = rules(s)
	return f
}

func refName(s *huma.Schema) string {
	if s == nil {
		return ""
	}
	name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/")
	if !ok {
		return ""
	}
	return name
}

func typeName(s *huma.Schema) (text, ref string) {
	if name := refName(s); name != "" {
		return name, name
	}
	switch {
	case s.Type == huma.TypeArray && s.Items != nil:
		inner, ref := typeName(s.Items)
		return "list of " + inner, ref
	case s.Type == huma.TypeObject:
		if m, ok := s.AdditionalProperties.(*huma.Schema); ok {
			inner, ref := typeName(m)
			return "map of " + inner, ref
		}
	case s.ContentEncoding != "":
		return "string, " + s.ContentEncoding, ""
	case s.Format != "" && s.Type == huma.TypeString:
		return "string, " + s.Format, ""
	}
	return s.Type, ""
}

func rules(s *huma.Schema) string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if len(s.Enum) > 0 {
		var names []string
		for _, e := range s.Enum {
			names = append(names, fmt.Sprint(e))
		}
		add("one of %s", strings.Join(names, ", "))
	}
	number := func(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }
	if s.Minimum != nil {
		add("at least %s", number(*s.Minimum))
	}
	if s.Maximum != nil {
		add("at most %s", number(*s.Maximum))
	}
	if s.MinLength != nil {
		add("at least %d characters", *s.MinLength)
	}
	if s.MaxLength != nil {
		add("at most %d characters", *s.MaxLength)
	}
	if s.MinItems != nil {
		add("at least %d items", *s.MinItems)
	}
	if s.Default != nil {
		add("default %v", s.Default)
	}
	return strings.Join(all, "; ")
}

// curl makes an example that works once the names in capitals are filled in.
func (r docsRenderer) curl(op *huma.Operation) string {
	var b strings.Builder
	b.WriteString("curl")
	if len(op.Security) > 0 {
		b.WriteString(` -H "Authorization: Bearer $KEY"`)
	}
	if op.Method != "GET" {
		b.WriteString(" -X " + op.Method)
	}
	path, sep := op.Path, "?"
	for _, p := range op.Parameters {
		switch {
		case p.In == "path":
			path = strings.Replace(path, "{"+p.Name+"}", strings.ToUpper(p.Name), 1)
		case p.Required:
			path += sep + p.Name + "=" + sample(p.Schema, strings.ToUpper(p.Name))
			sep = "&"
		}
	}
	if op.OperationID == "attach-process" {
		return `websocat -b --protocol ` + api.AttachProtocol + ` -H "Authorization: Bearer $KEY" "ws://HOST:PORT` + path + `"`
	}
	if op.RequestBody != nil {
		if m := op.RequestBody.Content[jsonMedia]; m != nil {
			body, _ := json.Marshal(r.example(m.Schema))
			b.WriteString(" -H 'Content-Type: application/json' -d '" + string(body) + "'")
		} else {
			for media := range op.RequestBody.Content {
				b.WriteString(" -H 'Content-Type: " + media + "' -T FILE")
			}
		}
	}
	b.WriteString(` "$URL` + path + `"`)
	return b.String()
}

func sample(s *huma.Schema, name string) string {
	switch {
	case s != nil && s.Type == huma.TypeInteger:
		return "0"
	case s != nil && s.Type == huma.TypeBoolean:
		return "true"
	case s != nil && len(s.Enum) > 0:
		return fmt.Sprint(s.Enum[0])
	}
	return name
}

// example fills the required fields of a shape.
func (r docsRenderer) example(s *huma.Schema) any {
	s = r.resolve(s)
	out := map[string]any{}
	if s == nil {
		return out
	}
	for _, name := range s.Required {
		p := r.resolve(s.Properties[name])
		switch {
		case p == nil:
		case name == "argv":
			out[name] = []string{"echo", "hello"}
		case p.Type == huma.TypeArray:
			out[name] = []any{}
		case p.Type == huma.TypeObject:
			out[name] = r.example(p)
		case p.Type == huma.TypeInteger && p.Minimum != nil:
			out[name] = *p.Minimum
		case p.Type == huma.TypeInteger:
			out[name] = 0
		case p.Type == huma.TypeBoolean:
			out[name] = true
		default:
			out[name] = sample(p, strings.ToUpper(name))
		}
	}
	return out
}

// prose turns the little Markdown that descriptions use into HTML: paragraphs,
// `code`, **strong** and *emphasis*.
func prose(s string) template.HTML {
	if s == "" {
		return ""
	}
	var b strings.Builder
	for part := range strings.SplitSeq(s, "\n\n") {
		b.WriteString("<p>")
		for i, piece := range strings.Split(part, "`") {
			text := html.EscapeString(piece)
			if i%2 == 1 {
				b.WriteString("<code>" + text + "</code>")
				continue
			}
			text = pairs(text, "**", "strong")
			b.WriteString(pairs(text, "*", "em"))
		}
		b.WriteString("</p>")
	}
	return template.HTML(b.String()) //nolint:gosec // escaped above, and made of constants
}

func pairs(s, mark, tag string) string {
	parts := strings.Split(s, mark)
	if len(parts)%2 == 0 { // an odd mark stands for itself
		return s
	}
	var b strings.Builder
	for i, p := range parts {
		switch {
		case i%2 == 1:
			b.WriteString("<" + tag + ">" + p + "</" + tag + ">")
		default:
			b.WriteString(p)
		}
	}
	return b.String()
}
