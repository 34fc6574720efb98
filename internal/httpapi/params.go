package httpapi

import (
	"net/http"
	"strconv"

	"github.com/danielgtaylor/huma/v2"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Parameters of operations that read their request themselves: described here,
// parsed by the functions below. admit has refused unknown and repeated ones.

func pathParam(name, doc string) *huma.Param {
	return &huma.Param{Name: name, In: "path", Required: true, Description: doc, Schema: &huma.Schema{Type: "string"}}
}

func stringParam(name, doc string, required bool) *huma.Param {
	return &huma.Param{Name: name, In: "query", Required: required, Description: doc, Schema: &huma.Schema{Type: "string"}}
}

func boolParam(name, doc string) *huma.Param {
	return &huma.Param{Name: name, In: "query", Description: doc, Schema: &huma.Schema{Type: "boolean", Default: false}}
}

func intParam(name, doc string, most int64, required bool) *huma.Param {
	least, top := 0.0, float64(most)
	return &huma.Param{Name: name, In: "query", Required: required, Description: doc,
		Schema: &huma.Schema{Type: "integer", Format: "int64", Minimum: &least, Maximum: &top}}
}

// query reads the parameters of one request; the first that is wrong is kept.
type query struct {
	r   *http.Request
	err error
}

func (q *query) fail(name, format string, args ...any) {
	if q.err == nil {
		e := errdefs.New(errdefs.Invalid, "the query parameter "+name+" "+format, args...)
		q.err = e.With("query."+name, e.Message)
	}
}

// text returns a string of at most most bytes.
func (q *query) text(name string, most int) string {
	s := q.r.URL.Query().Get(name)
	if len(s) > most {
		q.fail(name, "has %d bytes, the limit is %d", len(s), most)
		return ""
	}
	return s
}

// number returns an integer of 0 to most.
func (q *query) number(name string, most int64, required bool) int64 {
	values, ok := q.r.URL.Query()[name]
	if !ok || len(values) == 0 {
		if required {
			q.fail(name, "is missing")
		}
		return 0
	}
	n, err := strconv.ParseInt(values[0], 10, 64)
	switch {
	case err != nil:
		q.fail(name, "is not a whole number")
	case n < 0 || n > most:
		q.fail(name, "is %d, allowed is 0 to %d", n, most)
	default:
		return n
	}
	return 0
}

// flag returns a boolean: true or false.
func (q *query) flag(name string) bool {
	switch q.r.URL.Query().Get(name) {
	case "true", "1":
		return true
	case "false", "0", "":
		return false
	}
	q.fail(name, "is neither true nor false")
	return false
}
