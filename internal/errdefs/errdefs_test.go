package errdefs

import (
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestCodeTravelsThroughWrapping(t *testing.T) {
	t.Parallel()
	for _, code := range Codes() {
		err := fmt.Errorf("outer: %w", Wrap(io.EOF, code, "inner"))
		if CodeOf(err) != code || !Is(err, code) || !errors.Is(err, &Error{Code: code}) || !errors.Is(err, io.EOF) {
			t.Errorf("%s was lost in wrapping: %v", code, err)
		}
		for _, other := range Codes() {
			if other != code && (Is(err, other) || errors.Is(err, &Error{Code: other})) {
				t.Errorf("%s also counts as %s", code, other)
			}
		}
	}
	if CodeOf(nil) != "" || CodeOf(io.EOF) != Internal {
		t.Error("nil has no code, a foreign error is internal")
	}
}

func TestWithLeavesTheOriginal(t *testing.T) {
	t.Parallel()
	base := New(Exhausted, "too many").With("limit", "3")
	more := base.With("now", "4").WithNext("close one")
	if len(base.Detail) != 1 || base.Next != "" {
		t.Errorf("the original changed: %+v", base)
	}
	if len(more.Detail) != 2 || more.Error() != "too many; close one" {
		t.Errorf("got %+v", more)
	}
}
