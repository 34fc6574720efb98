// Package ident gives every record of Stockade its identifier: a kind prefix
// and 128 random bits, so that an id can neither be guessed nor mistaken for
// one of another kind.
package ident

import (
	"encoding/base32"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Kind is the prefix of an identifier.
type Kind string

// The kinds.
const (
	Box      Kind = "box"
	Run      Kind = "run"
	Process  Kind = "proc" // the handle of a process
	Fence    Kind = "fence"
	Receipt  Kind = "rcpt"
	Key      Kind = "key"
	Host     Kind = "host"
	Audit    Kind = "aud"
	Instance Kind = "inst"
)

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// From makes an identifier from 16 bytes, which the caller must have drawn from
// a cryptographic source. The form is KIND_ and 26 lower-case base-32 digits.
func From(kind Kind, random [16]byte) string {
	return string(kind) + "_" + encoding.EncodeToString(random[:])
}

// Valid reports whether s has the form of an identifier of this kind. It says
// nothing about whether such a record exists.
func Valid(kind Kind, s string) bool {
	rest, ok := strings.CutPrefix(s, string(kind)+"_")
	if !ok || len(rest) != 26 {
		return false
	}
	_, err := encoding.DecodeString(rest)
	return err == nil
}

// Name limits, for everything a caller names: workspaces, targets, reuse keys,
// request ids.
const MaxName = 128

// CheckName refuses a name that is empty, longer than [MaxName] bytes, or holds
// anything but letters, digits and "._:-"; "." and ".." are refused too, so that
// a name is always one harmless path element. what says whose name it is.
func CheckName(what, s string) error {
	if s == "" {
		return errdefs.New(errdefs.Invalid, "%s is empty", what).WithNext("give 1 to %d characters of A-Z a-z 0-9 . _ : -", MaxName)
	}
	if len(s) > MaxName {
		return errdefs.New(errdefs.Invalid, "%s has %d bytes, the limit is %d", what, len(s), MaxName)
	}
	for _, c := range []byte(s) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == ':' || c == '-') {
			return errdefs.New(errdefs.Invalid, "%s holds a character that is not allowed", what).WithNext("use only A-Z a-z 0-9 . _ : -")
		}
	}
	if s == "." || s == ".." {
		return errdefs.New(errdefs.Invalid, "%s may not be %q", what, s)
	}
	return nil
}

// IsDigest reports whether s is a SHA-256 as this project writes it: 64 lower-case
// hexadecimal digits.
func IsDigest(s string) bool {
	return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == ""
}
