package httpapi

import "encoding/base64"

// validKey reports whether a Sec-WebSocket-Key is 16 bytes in base 64 (RFC 6455
// section 4.1).
func validKey(s string) bool {
	b, err := base64.StdEncoding.DecodeString(s)
	return err == nil && len(b) == 16
}
