package ident

import (
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestFromIsValidForItsKindOnly(t *testing.T) {
	t.Parallel()
	kinds := []Kind{Box, Run, Process, Fence, Receipt, Key, Host, Audit, Instance}
	rapid.Check(t, func(t *rapid.T) {
		var raw [16]byte
		copy(raw[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "raw"))
		kind := rapid.SampledFrom(kinds).Draw(t, "kind")
		id := From(kind, raw)
		for _, k := range kinds {
			if Valid(k, id) != (k == kind) {
				t.Fatalf("Valid(%s, %s) is wrong", k, id)
			}
		}
		if err := CheckName("id", id); err != nil {
			t.Fatalf("an id must be a valid name: %v", err)
		}
	})
}

func TestCheckName(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"a", "A.b_c:d-9", strings.Repeat("x", MaxName), "...", "-"} {
		if err := CheckName("name", ok); err != nil {
			t.Errorf("%q: %v", ok, err)
		}
	}
	for _, bad := range []string{"", ".", "..", "a/b", "a b", "a\x00", "ä", strings.Repeat("x", MaxName+1), "a\n"} {
		if err := CheckName("name", bad); !errdefs.Is(err, errdefs.Invalid) {
			t.Errorf("%q: got %v, want invalid", bad, err)
		}
	}
}

func FuzzValid(f *testing.F) {
	f.Add("box_aaaaaaaaaaaaaaaaaaaaaaaaaa")
	f.Add("box_")
	f.Fuzz(func(t *testing.T, s string) {
		if Valid(Box, s) && (len(s) != 30 || CheckName("id", s) != nil) {
			t.Errorf("%q counts as an id", s)
		}
	})
}
