// Package artifact keeps plugin packages unpacked, by the SHA-256 of the archive
// they came in.
//
//	DIR/sha256/HEX/code/             the package, read-only, shared by all installations of the digest
//	              .verified-sha256   the digest: the mark of a whole, verified tree
//	              .files.json        path, size and SHA-256 of every file, to verify the tree later
//
// The layout is that of the published SDK 0.6.3 and 0.7, so that either runtime
// can take over the other's directory; .files.json is ours and ignored there.
//
// A package appears at once, by rename, after its digest, its names, its types
// and its sizes were checked (see [Limits] and package comment of archive.go),
// and was written through to the disk. A crash between any two steps leaves
// nothing that is trusted, and nothing that stops the next attempt.
//
// Files are 0444. A file that the archive marks executable stays executable
// (0555) only if it begins as an ELF program or with "#!": what cannot be
// executed has no use for the bit. set-user-ID and like bits never survive.
package artifact

import (
	"log/slog"
	"time"
)

// Limits bounds an archive. Zero fields take the values of [DefaultLimits].
type Limits struct {
	Archive  int64 // bytes of the archive itself
	Entries  int   // files and directories
	File     int64 // bytes of one file, uncompressed
	Total    int64 // bytes of all files, uncompressed
	Manifest int64 // bytes of manifest.yaml
	Ratio    int64 // uncompressed to compressed bytes, of a file and of all
}

// Artifact is a verified, unpacked package.
type Artifact struct {
	Digest   string // 64 lower-case hex digits
	Root     string // absolute directory of the artifact
	Code     string // Root/code
	Manifest Manifest
}

// Manifest is what manifest.yaml says. Resource wishes in it are never acted upon.
type Manifest struct {
	Author, Name, Version string
	Raw                   map[string]any // the whole document; keys are strings at every depth
}

// Config says where artifacts are kept.
type Config struct {
	Dir      string       // …/plugin-runtime/artifacts; made if missing
	Logger   *slog.Logger // nil discards
	Limits   Limits
	ReadOnly bool // look and verify only: nothing is made and no leftover swept
}

// Item is one line of a listing.
type Item struct {
	Digest   string    `json:"digest"`
	Author   string    `json:"author,omitempty"`
	Name     string    `json:"name,omitempty"`
	Version  string    `json:"version,omitempty"`
	Bytes    int64     `json:"bytes"`
	Files    int       `json:"files"`
	LastUsed time.Time `json:"last_used"`
	// Problem is empty for an artifact that Lookup trusts, else why it does not.
	Problem string `json:"problem,omitempty"`
}
