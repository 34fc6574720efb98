package transfer

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// The numbers of the protocol, from the published SDK 0.5.5, 0.6.3 and 0.7.
const (
	// ChunkBytes is the most a chunk carries, before base64.
	ChunkBytes = 16 << 10
	// chunkText is the longest text of a chunk in base64.
	chunkText = 21848
	// MaxHeld is how many files of one owner a [Holder] has at once: those that come,
	// and those that came and are not deleted. One slot of a pool fills up no other's.
	MaxHeld = 128
	// MaxOfAll is how many a Holder has of all owners together. Ours.
	MaxOfAll = 1024
	// Stalled is how long a file that comes may stand still before it is dropped for
	// another, where a bound is reached. A peer gives a chunk up after 15 s. Ours.
	Stalled = 2 * time.Minute
	// Unclaimed is how long a file that came may wait for somebody to delete it before
	// it makes way for another, where a bound is reached. The longest request that
	// names a file takes 20 min. Ours.
	Unclaimed = time.Hour

	keyMark   = "ft1_" // of keys that are unguessable, so that their owner is found by the key alone
	keyDigits = 64
	maxKey    = 255
	maxExt    = 32
)

// NewKey makes the key of a file to send: ft1_, 64 random hexadecimal digits, and
// the extension, if there is one. The extension has at most 32 of the characters
// A-Z a-z 0-9 _ -; dots around it are cut off. Errors: Invalid.
func NewKey(ext string) (string, error) {
	ext = strings.Trim(ext, ".")
	if ext != "" && !isExt(ext) {
		return "", errdefs.New(errdefs.Invalid, "the file extension is not 1 to %d letters, digits, _ or -", maxExt).
			WithNext("send the file without an extension")
	}
	var b [keyDigits / 2]byte
	rand.Read(b[:])
	key := keyMark + hex.EncodeToString(b[:])
	if ext != "" {
		key += "." + ext
	}
	return key, nil
}

// checkKey is the rule for a key that a peer names. It is one name of a file, and
// no name that this package makes itself.
func checkKey(key string) error {
	ok := len(key) > 0 && len(key) <= maxKey && alnum(key[0]) && !strings.Contains(key, "..")
	for i := 0; ok && i < len(key); i++ {
		ok = alnum(key[i]) || key[i] == '.' || key[i] == '_' || key[i] == '-'
	}
	if !ok {
		return errdefs.New(errdefs.Invalid, "Invalid file transfer key")
	}
	return nil
}

// isMinted reports whether a key has the form of [NewKey].
func isMinted(key string) bool {
	rest, ok := strings.CutPrefix(key, keyMark)
	if !ok || len(rest) < keyDigits {
		return false
	}
	for i := range keyDigits {
		if c := rest[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	ext, dotted := strings.CutPrefix(rest[keyDigits:], ".")
	return rest[keyDigits:] == "" || dotted && isExt(ext)
}

func isExt(s string) bool {
	ok := len(s) > 0 && len(s) <= maxExt && alnum(s[0])
	for i := 0; ok && i < len(s); i++ {
		ok = alnum(s[i]) || s[i] == '_' || s[i] == '-'
	}
	return ok
}

func alnum(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// space is the name of an owner's directory.
func space(owner pluginwire.Context) string {
	if owner.IsZero() {
		return unbound
	}
	return digest(string(owner.Append(nil)))
}

// recordName is the name of a file's record. A minted key has one owner; other
// keys are each owner's own.
func recordName(key, space string) string {
	if isMinted(key) {
		return digest(key) + ".json"
	}
	return digest(space+"/"+key) + ".json"
}

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// mayRead is who sees a file: its owner, whoever speaks for no context (the
// runtime itself), and the installation of an owner whose revision and artifact
// it does not say.
func mayRead(owner, as pluginwire.Context) bool {
	if as.IsZero() || as == owner {
		return true
	}
	return owner.IsBinding() && !as.IsBinding() && as.SameWorkspace(owner) && as.InstallationUUID == owner.InstallationUUID
}

// Errors of a state that is not what it must be. They say no more to a peer: a key
// is a capability, and another's must look like none.
func errCapability() error {
	return errdefs.New(errdefs.Invalid, "Invalid file transfer capability")
}

func errNotFound() error {
	return pluginwire.WithClass("FileNotFoundError", errdefs.New(errdefs.NotFound, "no such transferred file"))
}
