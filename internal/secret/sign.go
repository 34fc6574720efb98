package secret

import (
	"crypto/ed25519"
	"crypto/rand"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// signerHeader marks a file that holds the seed of an Ed25519 key, so that no
// other secret is ever taken for one.
const signerHeader = "stockade-ed25519-1 "

// Signer signs receipts with Ed25519. It is safe for concurrent use.
type Signer struct{ key ed25519.PrivateKey }

// NewSigner makes a signer with a new key that is kept nowhere.
func NewSigner() *Signer {
	var seed [ed25519.SeedSize]byte
	rand.Read(seed[:])
	return &Signer{key: ed25519.NewKeyFromSeed(seed[:])}
}

// LoadSigner reads the signing key at path, with the rules of [ReadFile0600].
// A file that holds something else is invalid.
func LoadSigner(path string) (*Signer, error) {
	data, err := ReadFile0600(path)
	if err != nil {
		return nil, err
	}
	s, ok := parseSigner(data)
	if !ok {
		return nil, errdefs.New(errdefs.Invalid, "%s does not hold a signing key of this program", path).
			WithNext("restore it from a backup; or move it away, and receipts signed before can then only be checked with the public key they carry")
	}
	return s, nil
}

// OpenSigner reads the signing key at path and makes one there if there is none.
// Two programs that do so at once end up with the same key.
func OpenSigner(path string) (*Signer, error) {
	s, err := LoadSigner(path)
	if !errdefs.Is(err, errdefs.NotFound) {
		return s, err
	}
	s = NewSigner()
	text := signerHeader + encoding.EncodeToString(s.key.Seed()) + "\n"
	err = CreateFile0600(path, []byte(text))
	if errdefs.Is(err, errdefs.Conflict) {
		return LoadSigner(path)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

func parseSigner(data []byte) (*Signer, bool) {
	digits, ok := strings.CutPrefix(strings.TrimSuffix(string(data), "\n"), signerHeader)
	if !ok || len(digits) != keyDigits {
		return nil, false
	}
	seed, err := encoding.DecodeString(digits)
	if err != nil || len(seed) != ed25519.SeedSize || encoding.EncodeToString(seed) != digits {
		return nil, false
	}
	return &Signer{key: ed25519.NewKeyFromSeed(seed)}, true
}

// Sign returns the signature of payload.
func (s *Signer) Sign(payload []byte) []byte { return ed25519.Sign(s.key, payload) }

// Public returns the public key, 32 bytes.
func (s *Signer) Public() []byte {
	return append([]byte(nil), s.key.Public().(ed25519.PublicKey)...)
}

// String hides the key from a careless log line.
func (s *Signer) String() string { return "ed25519 signer" }

// Verify reports whether signature is that of payload under a public key. It
// may be given anything.
func Verify(public, payload, signature []byte) bool {
	return len(public) == ed25519.PublicKeySize && ed25519.Verify(public, payload, signature)
}
