package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
)

// maxDepth is how deep a JSON body may be nested. The deepest shape of the API
// has four levels.
const maxDepth = 16

// checkJSON refuses what a lenient decoder would quietly change: bytes that are
// not UTF-8, a field given twice, several values; and nesting no shape has.
func checkJSON(b []byte) error {
	if !utf8.Valid(b) {
		return errors.New("the body is not valid UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var stack []map[string]bool // nil for an array
	key := false                // the next string is a field name
	for first := true; ; first = false {
		if !first && len(stack) == 0 {
			if _, err := d.Token(); !errors.Is(err, io.EOF) {
				return errors.New("the body holds more than one JSON value")
			}
			return nil
		}
		t, err := d.Token()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("the body is not JSON: %w", err)
		}
		switch v := t.(type) {
		case json.Delim:
			switch v {
			case '{', '[':
				if len(stack) == maxDepth {
					return fmt.Errorf("the body is nested deeper than %d levels", maxDepth)
				}
				var fields map[string]bool
				if v == '{' {
					fields = map[string]bool{}
				}
				stack = append(stack, fields)
			default:
				stack = stack[:len(stack)-1]
			}
			key = len(stack) > 0 && stack[len(stack)-1] != nil
		case string:
			if key {
				fields := stack[len(stack)-1]
				if fields[v] {
					return fmt.Errorf("the field %q is given twice", printable(v, 100))
				}
				fields[v] = true
				key = false
				continue
			}
			key = len(stack) > 0 && stack[len(stack)-1] != nil
		default:
			key = len(stack) > 0 && stack[len(stack)-1] != nil
		}
	}
}

// checkNames refuses fields whose names differ from the shape's in case only,
// which decoders of Go take for the same. Unknown names are left to the
// validation, which reports them with the other findings.
func checkNames(schemas map[string]*huma.Schema, s *huma.Schema, v any) error {
	if name := refName(s); name != "" {
		s = schemas[name]
	}
	if s == nil {
		return nil
	}
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			if err := checkNames(schemas, s.Items, item); err != nil {
				return err
			}
		}
	case map[string]any:
		for name, inner := range v {
			p := s.Properties[name]
			if p == nil && len(s.Properties) > 0 {
				for known := range s.Properties {
					if strings.EqualFold(known, name) {
						return fmt.Errorf("there is no field %q, only %q", printable(name, 100), known)
					}
				}
			}
			if err := checkNames(schemas, p, inner); err != nil {
				return err
			}
		}
	}
	return nil
}
