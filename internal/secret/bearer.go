package secret

import (
	"crypto/rand"
	"encoding/base64"
)

// Bearer mints the text of a credential that peers outside Stockade know by its
// form only: 48 random bytes as 64 URL-safe characters, which is what the Plugin
// Runtime's registration capabilities and debug keys look like. Keep its Hash.
func Bearer() string {
	b := make([]byte, 48)
	rand.Read(b) //nolint:errcheck // never fails: crypto/rand ends the program instead
	return base64.RawURLEncoding.EncodeToString(b)
}
