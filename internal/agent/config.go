package agent

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"time"
)

// Kind is one of the payloads that daemons know.
type Kind string

// The kinds.
const (
	ACP    Kind = "acp"
	Claude Kind = "claude-code"
	Codex  Kind = "codex"
)

// KindOf tells what a payload is for. The protocol gives the kind of a payload
// nowhere, because each daemon knew one only: it is told from the fields that one
// kind alone has. A payload may say it, as "kind".
func KindOf(payload json.RawMessage) (Kind, error) {
	var p struct {
		Kind   *string                    `json:"kind"`
		Config map[string]json.RawMessage `json:"config"`

		PromptText json.RawMessage `json:"prompt_text"`
		InputText  json.RawMessage `json:"input_text"`
		Resume     json.RawMessage `json:"resume"`
		Grant      json.RawMessage `json:"approval_grant"`
		RunID      json.RawMessage `json:"run_id"`
		Prompt     json.RawMessage `json:"prompt"`
	}
	if err := json.Unmarshal(payload, &p); err != nil {
		return "", invalid("agent_runtime", "the payload is not a JSON object of the known form")
	}
	if p.Kind != nil {
		switch k := Kind(*p.Kind); k {
		case ACP, Claude, Codex:
			return k, nil
		}
		return "", invalid("agent_runtime", "the payload is for the agent %q, which is not known: acp, claude-code or codex", *p.Kind)
	}
	has := func(names ...string) bool {
		for _, n := range names {
			if _, ok := p.Config[n]; ok {
				return true
			}
		}
		return false
	}
	switch {
	case p.PromptText != nil || p.InputText != nil || has("acp_command", "provider", "permission_decision"):
		return ACP, nil
	case p.Grant != nil || has("approval_policy", "sandbox_mode"):
		return Codex, nil
	case p.Resume != nil || has("dangerously_skip_permissions"):
		return Claude, nil
	case p.Prompt != nil && p.RunID != nil:
		return Codex, nil
	}
	return "", invalid("agent_runtime", "the payload does not say which agent it is for: give it a kind of acp, claude-code or codex")
}

func invalid(prefix, format string, args ...any) *Failure {
	return &Failure{Code: prefix + ".config_invalid", Message: fmt.Sprintf(format, args...)}
}

// Invalid is the failure <prefix>.config_invalid.
func Invalid(prefix, format string, args ...any) *Failure { return invalid(prefix, format, args...) }

// Decode reads a payload into v.
func Decode(prefix string, payload json.RawMessage, v any) error {
	if err := json.Unmarshal(payload, v); err != nil {
		return invalid(prefix, "the payload cannot be read: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

// Words is a command line in a payload: a list of words, a string that holds such a
// list, or one that is split as a shell would, without being run by one.
type Words []string

// UnmarshalJSON reads either form; null is none.
func (w *Words) UnmarshalJSON(b []byte) error {
	var s *string
	if json.Unmarshal(b, &s) == nil {
		*w = nil
		if s == nil {
			return nil
		}
		if strings.HasPrefix(strings.TrimSpace(*s), "[") && json.Unmarshal([]byte(*s), (*[]string)(w)) == nil {
			return nil
		}
		words, err := Split(*s)
		*w = words
		return err
	}
	return json.Unmarshal(b, (*[]string)(w))
}

// Env is an environment in a payload; its values are made text.
type Env map[string]string

// UnmarshalJSON reads an object whose values are text, numbers or booleans.
func (e *Env) UnmarshalJSON(b []byte) error {
	var m map[string]json.RawMessage
	if err := json.Unmarshal(b, &m); err != nil {
		return err
	}
	*e = make(Env, len(m))
	for name, raw := range m {
		var s string
		if len(raw) > 0 && raw[0] != '"' {
			if raw[0] == '{' || raw[0] == '[' {
				return fmt.Errorf("the environment variable %s is neither text nor a number", name)
			}
			if s = string(raw); s == "null" {
				s = ""
			}
		} else if err := json.Unmarshal(raw, &s); err != nil {
			return err
		}
		(*e)[name] = s
	}
	return nil
}

// Seconds is a time in a payload; text with a number counts too.
type Seconds time.Duration

// maxSeconds is as long as a run may be told to take; more is as good as no
// bound.
const maxSeconds = 30 * 24 * 3600

// UnmarshalJSON reads a number of seconds.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	var n *json.Number
	if err := json.Unmarshal(b, &n); err != nil {
		return err
	}
	if n == nil {
		return nil
	}
	f, err := n.Float64()
	if err != nil || math.IsNaN(f) {
		return fmt.Errorf("%q is not a number of seconds", n.String())
	}
	*s = Seconds(min(max(f, 0), maxSeconds) * float64(time.Second))
	return nil
}

// Or returns the time, or d if none was given.
func (s Seconds) Or(d time.Duration) time.Duration {
	if s <= 0 {
		return d
	}
	return time.Duration(s)
}

// Server is an MCP server of the payload: its name, and the rest as it came.
type Server struct {
	Name string
	Rest map[string]any
}

// UnmarshalJSON reads one server.
func (s *Server) UnmarshalJSON(b []byte) error {
	if err := json.Unmarshal(b, &s.Rest); err != nil {
		return err
	}
	s.Name, _ = s.Rest["name"].(string)
	if s.Name == "" {
		return fmt.Errorf("an MCP server has no name")
	}
	delete(s.Rest, "name")
	return nil
}

// On is a boolean whose absence means true.
type On struct{ Off bool }

// UnmarshalJSON reads a boolean or null.
func (o *On) UnmarshalJSON(b []byte) error {
	v := true
	err := json.Unmarshal(b, &v)
	o.Off = !v
	return err
}

// Split splits a command line into words: space separates, quotes and backslashes
// keep together, as in a POSIX shell (2.2, Quoting). Nothing is expanded.
func Split(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	in, quote := false, byte(0)
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quote == '\'' && c != '\'', quote == '"' && c != '"' && c != '\\':
			word.WriteByte(c)
		case quote != 0 && c == quote:
			quote = 0
		case c == '\\':
			if i++; i == len(line) {
				return nil, fmt.Errorf("the command line ends in a backslash")
			}
			if quote == '"' && !strings.ContainsRune("$`\"\\\n", rune(line[i])) {
				word.WriteByte('\\')
			}
			if line[i] != '\n' {
				word.WriteByte(line[i])
				in = true
			}
		case c == '\'' || c == '"':
			quote, in = c, true
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			if in {
				words = append(words, word.String())
				word.Reset()
				in = false
			}
		default:
			word.WriteByte(c)
			in = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("the command line has a quote %c that does not end", quote)
	}
	if in {
		words = append(words, word.String())
	}
	return words, nil
}
