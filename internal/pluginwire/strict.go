package pluginwire

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/jsonscan"
)

// strict reads one object of which every member is known, and gathers what is wrong.
type strict struct {
	model    string
	fields   map[string][]byte
	problems []string
	broken   bool // it is no object: nothing more can be said
}

// maxProblems bounds how many faults one error names.
const maxProblems = 16

func readStrict(raw []byte, model string, names ...string) *strict {
	s := &strict{model: model, fields: map[string][]byte{}}
	o := jsonscan.Open(raw, 0, true)
	for {
		quoted, value, _, ok := o.Next()
		if !ok {
			break
		}
		name := string(jsonscan.Name(quoted))
		if !slices.Contains(names, name) {
			s.bad(clip(name), "it is not permitted here")
			continue
		}
		s.fields[name] = value
	}
	if o.Err() != nil {
		s.problems, s.broken = append(s.problems[:0], o.Err().Error()), true
	}
	return s
}

func (s *strict) bad(name, format string, args ...any) {
	if len(s.problems) < maxProblems && !s.broken {
		s.problems = append(s.problems, name+": "+fmt.Sprintf(format, args...))
	}
}

// err returns what was gathered as one Invalid error of the class ValidationError.
func (s *strict) err() error {
	if len(s.problems) == 0 {
		return nil
	}
	return WithClass(ClassValidation, errdefs.New(errdefs.Invalid, "%s", problemText(s.problems, s.model)))
}

func (s *strict) has(name string) bool { return !isNull(s.fields[name]) }

// id is a non-empty string, trimmed. An absent one is an error when it is required.
func (s *strict) id(name string, must bool) string {
	raw, there := s.fields[name]
	if !there || !must && isNull(raw) {
		if must {
			s.bad(name, "the field is required")
		}
		return ""
	}
	text, ok := jsonscan.Unquote(raw)
	switch text = strings.TrimSpace(text); {
	case !ok || jsonscan.LoneSurrogate(raw):
		s.bad(name, "it must be a string")
	case text == "":
		s.bad(name, "it must not be empty")
	case len(text) > MaxID:
		s.bad(name, "it has %d bytes, the limit is %d", len(text), MaxID)
	default:
		return text
	}
	return ""
}

// number is an integer of at least 1; def 0 means that it is required.
func (s *strict) number(name string, read func([]byte) (int64, bool), def int64) int64 {
	raw, there := s.fields[name]
	if !there {
		if def == 0 {
			s.bad(name, "the field is required")
		}
		return def
	}
	n, ok := read(raw)
	if !ok {
		s.bad(name, "it must be an integer")
		return def
	}
	if n < 1 {
		s.bad(name, "it must be at least 1")
	}
	return n
}

// count is a strict number that fits an int of 32 bits.
func (s *strict) count(name string, def int64) int {
	n := s.number(name, strictInt, def)
	if n > math.MaxInt32 {
		s.bad(name, "it must be at most %d", math.MaxInt32)
		return 1
	}
	return int(n)
}

// real is a finite number above 0, neither a text nor a truth value.
func (s *strict) real(name string, def float64) float64 {
	raw, there := s.fields[name]
	if !there {
		if def == 0 {
			s.bad(name, "the field is required")
		}
		return def
	}
	if len(raw) == 0 || raw[0] != '-' && raw[0]-'0' > 9 || len(raw) > 400 {
		s.bad(name, "it must be a finite number")
		return def
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	switch {
	case err != nil || math.IsInf(f, 0):
		s.bad(name, "it must be a finite number")
	case f <= 0:
		s.bad(name, "it must be greater than 0")
	}
	return f
}

func (s *strict) truth(name string, def bool) bool {
	raw, there := s.fields[name]
	switch {
	case !there:
		return def
	case raw[0] == 't':
		return true
	case raw[0] == 'f':
		return false
	}
	s.bad(name, "it must be true or false")
	return def
}
