package secret

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestSigner(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "receipt.key")
	_, err := LoadSigner(path)
	refused(t, err, errdefs.NotFound)
	a, err := OpenSigner(path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := OpenSigner(path)
	if err != nil {
		t.Fatal(err)
	}
	payload := []byte("the tree is gone")
	signature := a.Sign(payload)
	if !bytes.Equal(a.Public(), b.Public()) || !Verify(b.Public(), payload, signature) {
		t.Fatal("the key did not come back")
	}
	a.Public()[0] ^= 1 // is a copy
	if !bytes.Equal(a.Public(), b.Public()) {
		t.Error("a caller changed the public key")
	}
	for name, ok := range map[string]bool{
		"another payload":   Verify(a.Public(), []byte("the tree is gone!"), signature),
		"another signature": Verify(a.Public(), payload, append([]byte{signature[0] ^ 1}, signature[1:]...)),
		"another key":       Verify(NewSigner().Public(), payload, signature),
		"no key":            Verify(nil, payload, signature),
		"no signature":      Verify(a.Public(), payload, nil),
	} {
		if ok {
			t.Errorf("%s passed", name)
		}
	}
	if text := fmt.Sprintf("%v %s %+v", a, a, a); strings.Contains(text, string(a.key.Seed())) || !strings.Contains(text, "ed25519 signer") {
		t.Errorf("printing shows %q", text)
	}
}

func TestSignerOpenedAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "receipt.key")
	keys := make([][]byte, 8)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			s, err := OpenSigner(path)
			if err != nil {
				t.Error(err)
				return
			}
			keys[i] = s.Public()
		})
	}
	wg.Wait()
	for _, k := range keys {
		if !bytes.Equal(k, keys[0]) {
			t.Fatal("two programs sign with two keys")
		}
	}
}

func TestDamagedSignerIsKept(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "receipt.key")
	if _, err := OpenSigner(path); err != nil {
		t.Fatal(err)
	}
	good, err := ReadFile0600(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"", "garbage", string(good[:len(good)-3]), string(good) + "x", strings.ToUpper(string(good)), string(good) + "\n"} {
		if err := WriteFile0600(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		_, err := OpenSigner(path)
		refused(t, err, errdefs.Invalid, "signing key")
		if got, _ := os.ReadFile(path); string(got) != text {
			t.Fatalf("%q was replaced", text)
		}
	}
}

func FuzzParseSigner(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte(signerHeader + strings.Repeat("a", keyDigits) + "\n"))
	f.Add([]byte(signerHeader + strings.Repeat("a", keyDigits-1) + "b\n"))
	f.Add([]byte(signerHeader + strings.Repeat("\xff", keyDigits)))
	f.Fuzz(func(t *testing.T, data []byte) {
		s, ok := parseSigner(data)
		if !ok {
			return
		}
		// What is accepted has one form only.
		text := signerHeader + encoding.EncodeToString(s.key.Seed())
		if got := strings.TrimSuffix(string(data), "\n"); got != text {
			t.Fatalf("%q was accepted for %q", got, text)
		}
		if !Verify(s.Public(), data, s.Sign(data)) {
			t.Fatal("the key does not sign")
		}
	})
}
