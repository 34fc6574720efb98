package api

import (
	"errors"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestProblemRoundTrip(t *testing.T) {
	t.Parallel()
	for _, code := range errdefs.Codes() {
		in := errdefs.New(code, "what").WithNext("next").With("limit", "1")
		p := ProblemOf(in, "ref")
		if p.Status < 400 || p.Title == "" || p.Code != code {
			t.Errorf("%s: %+v", code, p)
		}
		out, ok := errors.AsType[*errdefs.Error](p.Err())
		if !ok || out.Code != code || out.Message != "what" || out.Next != "next" || out.Detail["limit"] != "1" {
			t.Errorf("%s came back as %+v", code, out)
		}
	}
}

func TestProblemOfForeignErrorTellsNothing(t *testing.T) {
	t.Parallel()
	p := ProblemOf(errors.New("password=hunter2"), "r1")
	if p.Code != errdefs.Internal || strings.Contains(p.Detail+p.Next, "hunter2") || !strings.Contains(p.Next, "r1") {
		t.Errorf("got %+v", p)
	}
	if c := errdefs.CodeOf(Problem{Code: "made_up"}.Err()); c != errdefs.Internal {
		t.Errorf("an unknown code became %s", c)
	}
}
