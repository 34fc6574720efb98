// Package secret makes and checks everything that must not be guessed or read
// by others: identifiers, keys and run tokens, the files that hold them, and
// the key that signs receipts. It is the only place that draws randomness for
// credentials, and it keeps none of them.
package secret

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"strings"

	"github.com/stockade-run/stockade/internal/ident"
)

const (
	keyPrefix   = "stk_"
	tokenPrefix = "str_"
	idDigits    = 26 // ident: 128 bits in base 32
	keyDigits   = 52 // 256 bits in base 32
)

// MaxText is the length in bytes of every key and run token. [Parse] looks at
// nothing longer.
const MaxText = len(keyPrefix) + idDigits + 1 + keyDigits

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// ID mints an identifier of a kind from 128 random bits.
func ID(kind ident.Kind) string {
	var random [16]byte
	rand.Read(random[:]) // never fails: the runtime ends the program instead
	return ident.From(kind, random)
}

// NewKey makes the credential that belongs to an id: a key for the id of a key,
// a run token for the id of a run. It returns the text, which is shown once and
// kept nowhere, and its SHA-256, which the ledger keeps. The text has 256 random
// bits, so a fast hash without salt is enough. It panics if id is of neither
// kind: a credential for anything else is a mistake in the caller.
func NewKey(id string) (text string, hash [32]byte) {
	var prefix, digits string
	switch {
	case ident.Valid(ident.Key, id):
		prefix, digits = keyPrefix, strings.TrimPrefix(id, string(ident.Key)+"_")
	case ident.Valid(ident.Run, id):
		prefix, digits = tokenPrefix, strings.TrimPrefix(id, string(ident.Run)+"_")
	default:
		panic("secret: a credential was asked for something that is neither a key nor a run")
	}
	var random [32]byte
	rand.Read(random[:])
	text = prefix + digits + "_" + encoding.EncodeToString(random[:])
	return text, sha256.Sum256([]byte(text))
}

// Parse reads a credential given by anybody. ok says that it has the form of a
// key (kind ident.Key) or run token (kind ident.Run) and nothing more; id is
// whose it claims to be and hash what must equal the recorded one. The hash
// covers the whole text, so a text that decodes to the same bits is another
// credential.
func Parse(text string) (kind ident.Kind, id string, hash [32]byte, ok bool) {
	if len(text) != MaxText {
		return "", "", hash, false
	}
	switch text[:len(keyPrefix)] {
	case keyPrefix:
		kind = ident.Key
	case tokenPrefix:
		kind = ident.Run
	default:
		return "", "", hash, false
	}
	digits, random := text[len(keyPrefix):len(keyPrefix)+idDigits], text[len(keyPrefix)+idDigits:]
	id = string(kind) + "_" + digits
	if random[0] != '_' || !ident.Valid(kind, id) || !wellFormed(random[1:]) {
		return "", "", hash, false
	}
	return kind, id, sha256.Sum256([]byte(text)), true
}

func wellFormed(digits string) bool {
	for _, c := range []byte(digits) {
		if !(c >= 'a' && c <= 'z' || c >= '2' && c <= '7') {
			return false
		}
	}
	return true
}

// Hash returns what the ledger keeps of a credential.
func Hash(text string) [32]byte { return sha256.Sum256([]byte(text)) }

// Equal compares two hashes in constant time.
func Equal(a, b [32]byte) bool { return subtle.ConstantTimeCompare(a[:], b[:]) == 1 }
