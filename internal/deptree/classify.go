package deptree

import (
	"context"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Status says what an environment has of a requirement.
type Status string

// What an environment may have of a requirement.
const (
	Met          Status = "met"
	Idle         Status = "idle" // it does not apply to the interpreter
	Missing      Status = "missing"
	Mismatch     Status = "mismatch"      // another version is there
	Runtime      Status = "runtime"       // the plugin SDK, as asked; the Runtime brings it
	OtherRuntime Status = "other_runtime" // another version of the SDK is asked for than the Runtime brings
	Opaque       Status = "opaque"        // no PEP 508 requirement, such as a path: only an installer knows
	Variable     Status = "variable"      // it has a ${NAME}, which an installer would replace from its environment
)

// Requirement is one line of a requirements.txt.
type Requirement struct {
	Text   string `json:"text"` // without a comment
	Name   string `json:"name"` // of the distribution; Text if it is opaque
	Status Status `json:"status"`
	Have   string `json:"have"` // the version that is there; "" for none
}

// Classify holds a requirements.txt as people write it against the directories of
// an environment, first one first, and what the interpreter itself has. Unlike
// [Store.Prepare] it takes comments behind requirements, continued lines and what
// only an installer understands; lines with pip's options are left out. For the
// plugins of the legacy directory, whose files the published SDK 0.6.3 and 0.7
// read like this.
//
// Errors: exhausted beyond 1024 requirements, unavailable when the interpreter
// cannot tell.
func Classify(ctx context.Context, i Interpreter, text string, sites []string) ([]Requirement, error) {
	var r reply
	said, err := runRules(ctx, i.Path, question{Do: "classify", Text: text, SDK: i.SDK, Most: maxRequirements, Sites: sites}, &r)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case err != nil:
		return nil, errRules(err, i).(*errdefs.Error).WithNext("it said: %.300q", redact(said))
	case r.Error != nil:
		return nil, (&Store{cfg: Config{Interp: i}}).refusal(r)
	}
	return r.Classified, nil
}

// Redact takes the credentials and the queries out of the URLs of a text, such as an
// installer's output.
func Redact(text string) string { return redact(text) }
