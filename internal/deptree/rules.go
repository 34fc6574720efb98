package deptree

import (
	"bytes"
	"context"
	_ "embed" // the rules
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

//go:embed rules.py
var rules string

// Bounds of a requirements.txt and of a question about one.
const (
	maxFile         = 1 << 20          // bytes of requirements.txt (published SDK 0.6.3)
	maxRequirements = 1024             // third-party requirements (published SDK 0.6.3)
	maxMetadata     = 4 << 20          // bytes of the metadata of one distribution
	maxAnswer       = 8 << 20          // bytes of an answer
	rulesTime       = 60 * time.Second // it takes about 50 ms
)

// question is what rules.py is asked.
type question struct {
	Do           string   `json:"do"` // "parse", "validate" or "classify"
	Text         string   `json:"text,omitempty"`
	SDK          string   `json:"sdk"`
	Most         int      `json:"most"`
	Site         string   `json:"site,omitempty"`
	Sites        []string `json:"sites"`
	Requirements []string `json:"requirements"`
}

// reply is what it answers.
type reply struct {
	Requirements []string      `json:"requirements"` // normalised, without the SDK
	Relaxed      string        `json:"relaxed"`      // the SDK requirement that needs the relaxation; "" for none
	Missing      []string      `json:"missing"`      // names that are not installed as asked
	Classified   []Requirement `json:"classified"`
	Error        *struct {
		Kind        string `json:"kind"`
		Line        int    `json:"line"` // 1-based
		Requirement string `json:"requirement"`
	} `json:"error"`
}

// ask runs the rules with the interpreter, isolated from the environment and the
// working directory.
func (s *Store) ask(ctx context.Context, q question) (reply, error) {
	var r reply
	said, err := runRules(ctx, s.cfg.Interp.Path, q, &r)
	if ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	if err != nil {
		s.log.Warn("the interpreter could not check requirements", "error", err, "output", redact(said))
		return r, errRules(err, s.cfg.Interp)
	}
	return r, s.refusal(r)
}

func errRules(err error, i Interpreter) error {
	return errdefs.Wrap(err, errdefs.Unavailable, "the interpreter %s cannot check the plugin's requirements", i.Path).
		WithNext("see the runtime's log")
}

// runRules asks rules.py one question and decodes the answer into r. said is the
// end of what the interpreter complained of.
func runRules(ctx context.Context, python string, q question, r *reply) (said string, err error) {
	in, err := json.Marshal(q)
	if err != nil {
		return "", err
	}
	limited, cancel := context.WithTimeout(ctx, rulesTime)
	defer cancel()
	cmd := exec.CommandContext(limited, python, "-I", "-B", "-c", rules)
	cmd.Dir = "/"
	cmd.Env = []string{"LC_ALL=C.UTF-8"}
	cmd.Stdin = bytes.NewReader(in)
	var out, complaint bounded
	out.most, complaint.most = maxAnswer, 4<<10
	cmd.Stdout, cmd.Stderr = &out, &complaint
	cmd.WaitDelay = time.Second
	if err = cmd.Run(); err == nil {
		if out.over {
			return "", errors.New("its answer is too long")
		}
		err = json.Unmarshal(out.b, r)
	}
	return string(complaint.b), err
}

// refusal puts an error of the rules into words. The fragments that a control
// plane may look for are those of the published SDK.
func (s *Store) refusal(r reply) error {
	if r.Error == nil {
		return nil
	}
	e := r.Error
	switch e.Kind {
	case "no_library":
		return errdefs.New(errdefs.Unavailable, "the interpreter %s has neither pip nor packaging, so that requirements cannot be read", s.cfg.Interp.Path).
			WithNext("%s -m ensurepip", s.cfg.Interp.Path)
	case "option":
		return errdefs.New(errdefs.Invalid, "requirements.txt cannot contain pip options (line %d)", e.Line)
	case "invalid":
		return errdefs.New(errdefs.Invalid, "requirements.txt has an invalid requirement (line %d)", e.Line).
			WithNext("write one PEP 508 requirement per line, without a comment behind it")
	case "variable":
		return errdefs.New(errdefs.Invalid, "requirements.txt has a variable or a backslash in a requirement, which the installer would replace (line %d)", e.Line)
	case "too_many":
		return errdefs.New(errdefs.Exhausted, "requirements.txt has too many requirements: the limit is %d (line %d)", maxRequirements, e.Line)
	case "sdk_url":
		return errdefs.New(errdefs.Invalid, "the Runtime-provided langbot-plugin cannot be a direct URL requirement (line %d)", e.Line)
	case "sdk_unknown":
		return errdefs.New(errdefs.Unavailable, "langbot-plugin is required, but the version of the Runtime's SDK is unavailable (line %d)", e.Line)
	case "sdk_mismatch":
		return s.mismatch(e.Requirement)
	case "metadata_too_large":
		return errdefs.New(errdefs.Exhausted, "the dependency tree has metadata of more than %d bytes, the limit", maxMetadata)
	}
	return errdefs.New(errdefs.Internal, "the requirements were refused for an unknown reason %q", e.Kind)
}

func (s *Store) mismatch(requirement string) error {
	return errdefs.New(errdefs.Invalid, "plugin requires %s, but the Runtime provides langbot-plugin==%s", redact(requirement), s.cfg.Interp.SDK).
		WithNext("ask for a range that holds it, or run another SDK in the runtime")
}

// bounded keeps the first bytes written to it and forgets the rest.
type bounded struct {
	b    []byte
	most int
	over bool
}

func (w *bounded) Write(p []byte) (int, error) {
	keep := min(len(p), w.most-len(w.b))
	w.b = append(w.b, p[:keep]...)
	w.over = w.over || keep < len(p)
	return len(p), nil
}

// short joins names for a message.
func short(names []string) string {
	const most = 5
	if len(names) > most {
		return strings.Join(names[:most], ", ") + ", …"
	}
	return strings.Join(names, ", ")
}
