package secret

import (
	"crypto/sha256"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/ident"
)

func TestIDs(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, kind := range []ident.Kind{ident.Box, ident.Run, ident.Process, ident.Fence, ident.Receipt, ident.Key, ident.Host, ident.Audit, ident.Instance} {
		for range 100 {
			id := ID(kind)
			if !ident.Valid(kind, id) || seen[id] {
				t.Fatalf("%q is not a new id of a %s", id, kind)
			}
			seen[id] = true
		}
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	for kind, prefix := range map[ident.Kind]string{ident.Key: "stk_", ident.Run: "str_"} {
		id := ID(kind)
		text, hash := NewKey(id)
		if !strings.HasPrefix(text, prefix+strings.TrimPrefix(id, string(kind)+"_")+"_") || len(text) != MaxText || MaxText != 83 {
			t.Errorf("the form of %q", text)
		}
		gotKind, gotID, gotHash, ok := Parse(text)
		if !ok || gotKind != kind || gotID != id || !Equal(gotHash, hash) || Hash(text) != hash {
			t.Errorf("%q comes back as %s %s %v", text, gotKind, gotID, ok)
		}
		other, otherHash := NewKey(id)
		if other == text || Equal(otherHash, hash) {
			t.Error("two secrets of one id are the same")
		}
		// Any other character is another secret or none.
		for i := range text {
			for _, c := range []byte("a7_A=\x00") {
				if text[i] == c {
					continue
				}
				changed := text[:i] + string(c) + text[i+1:]
				if _, _, h, ok := Parse(changed); ok && Equal(h, hash) {
					t.Fatalf("%q passes for %q", changed, text)
				}
			}
		}
	}
}

func TestKeyOfNothing(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "key_short", ID(ident.Box), strings.ToUpper(ID(ident.Key))} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%q got a credential", id)
				}
			}()
			NewKey(id)
		}()
	}
}

func TestEqual(t *testing.T) {
	t.Parallel()
	a := sha256.Sum256([]byte("a"))
	b := a
	b[31] ^= 1
	if !Equal(a, a) || Equal(a, b) || Equal(a, [32]byte{}) {
		t.Error("the comparison is wrong")
	}
}

func FuzzParse(f *testing.F) {
	key, _ := NewKey(ID(ident.Key))
	token, _ := NewKey(ID(ident.Run))
	for _, s := range []string{"", "stk_", "str_", key, token, key + "\n", " " + key, "Bearer " + key, key[:82], key + "a", strings.ToUpper(key),
		strings.Replace(key, "stk_", "str_", 1), strings.Repeat("a", MaxText), strings.Repeat("\xff", MaxText), strings.Repeat("x", 1<<20),
		strings.Replace(key, key[30:31], "0", 1), key[:30] + "-" + key[31:]} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		kind, id, hash, ok := Parse(text)
		if !ok {
			if kind != "" || id != "" || hash != ([32]byte{}) {
				t.Fatalf("a refused text gave %q %q", kind, id)
			}
			return
		}
		if !ident.Valid(kind, id) || hash != sha256.Sum256([]byte(text)) || len(text) != MaxText {
			t.Fatalf("%q was taken as %q %q", text, kind, id)
		}
		prefix := map[ident.Kind]string{ident.Key: "stk_", ident.Run: "str_"}[kind]
		if prefix == "" || !strings.HasPrefix(text, prefix+id[len(kind)+1:]+"_") {
			t.Fatalf("%q was taken as %q %q", text, kind, id)
		}
	})
}
