// Package deptree keeps dependency trees: what a plugin's requirements.txt asks
// for, installed once per artifact and interpreter, validated and read-only.
//
//	DIR/sha256/KEY/site-packages/    read-only
//	              .ready.json        what the key was made of: the mark of a whole tree
//	              .admission.json    how the SDK requirement was admitted; ours
//
// The key and the layout are those of the published SDK 0.6.3 and 0.7, so that
// either runtime reuses the other's trees. The key is a digest over the artifact,
// its requirements.txt, the interpreter, the SDK and the profile: two plugins
// never share a tree, and neither do two profiles.
//
// What a requirement means is asked of the packaging library that pip itself uses
// (rules.py, run isolated by the interpreter): requirements are parsed, the pin of
// the SDK is admitted or refused and never installed, and the installed metadata
// is held against every requirement that applies. Between the two an [Installer]
// runs pip or uv. A failure leaves nothing behind and is no memory: the next
// Prepare tries again.
//
// Stricter than the published SDK, each for a reason: ${NAME} in a requirement is
// refused, because the installer would put a variable of the host's environment, a
// proxy's password for example, into a URL of the plugin's choice; so is a
// backslash that would join lines, and a hard link in a tree, which would stay
// writable under its other name. The few packages that later upstream sources
// admit by their digest, whatever they pin, are held to the rule like any other.
package deptree

import (
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/python"
)

// Interpreter is the Python that trees are made for.
type Interpreter = python.Interpreter

// Config says how trees are made.
type Config struct {
	Dir          string // …/plugin-runtime/environments; made if missing
	Interp       Interpreter
	Install      Installer
	Profile      string   // "oss_dev" or "shared"; part of the key
	IndexURL     string   // "" is the installer's own default
	TrustedHosts []string // see InstallSpec
	Uv           string   // path of uv; "" installs with pip
	// RelaxedPin admits a single "==X" of series 0.6 on a newer Runtime of series
	// 0.6, as later upstream sources do. False is strict, which is what the published
	// SDK 0.6.3 is, when asked; under SDK 0.7 the two are the same.
	RelaxedPin bool
	Timeout    time.Duration // of one installation; 0 = 600 s
	Logger     *slog.Logger  // nil discards
	Limits     Limits
	ReadOnly   bool // look only: nothing is made, no leftover swept; Interp may be zero
}

// Limits bounds a tree. Zero fields take the defaults.
type Limits struct {
	Entries int   // files and directories of a tree, 100 000
	Bytes   int64 // of all regular files, 2 GiB
}

// Tree is a ready tree.
type Tree struct {
	Digest       string // 64 lower-case hex digits
	Root         string // absolute
	SitePackages string // Root/site-packages
}

// Counters are numbers for health, under the names of the published SDK 0.7.
type Counters struct {
	CacheHits           int64   `json:"cache_hits_total"`
	Misses              int64   `json:"misses_total"`
	Failures            int64   `json:"failures_total"`
	PrepareSecondsTotal float64 `json:"prepare_seconds_total"`
	PrepareSecondsLast  float64 `json:"prepare_seconds_last"`
}

// Item is one line of a listing.
type Item struct {
	Digest   string    `json:"digest"`
	Artifact string    `json:"artifact_digest,omitempty"`
	Bytes    int64     `json:"bytes"`
	Files    int       `json:"files"`
	LastUsed time.Time `json:"last_used"`
	Problem  string    `json:"problem,omitempty"`
}
