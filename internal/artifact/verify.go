package artifact

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// maxProblems bounds what one verification tells.
const maxProblems = 100

// Verification is what Verify found.
type Verification struct {
	Digest string `json:"digest"`
	Files  int    `json:"files"`
	Bytes  int64  `json:"bytes"`
	// Listed tells whether the listing of the publication was there. Without one
	// (a tree of the Python runtime) every file was read, but there is nothing to
	// compare it with: the archive it came from is not kept.
	Listed   bool     `json:"listed"`
	Problems []string `json:"problems,omitempty"` // what differs, at most 100
}

// Verify hashes every file of an artifact again and compares it with what was
// published: content, missing and additional files, kinds, write bits. The
// listing itself is as trustworthy as the disk: a person who can write there can
// change both. Errors: invalid, not_found, the cause of ctx.
func (s *Store) Verify(ctx context.Context, digest string) (Verification, error) {
	v := Verification{Digest: digest}
	if err := CheckDigest(digest); err != nil {
		return v, err
	}
	_, problem := s.check(digest)
	if problem == missing {
		return v, errdefs.New(errdefs.NotFound, "there is no artifact %s", digest).WithNext("see stockade artifact ls")
	}
	if problem != "" {
		v.say("%s", problem)
	}
	root, err := os.OpenRoot(s.shelf.Path(digest))
	if err != nil {
		return v, nil // check has said that it cannot be read
	}
	defer root.Close()
	want := map[string]listed{}
	b, err := readSmall(root, listingName, maxListing)
	switch {
	case os.IsNotExist(err):
	case err != nil:
		v.say("its listing cannot be read")
	default:
		var l listing
		if err := json.Unmarshal(b, &l); err != nil || l.Schema != listingSchema || l.Digest != digest {
			v.say("its listing is damaged or that of another artifact")
			break
		}
		v.Listed = true
		for _, f := range l.Files {
			want[f.Path] = f
		}
	}
	if err := v.walk(ctx, root, want); err != nil {
		return v, err
	}
	for path := range want {
		v.say("%q is missing", clip(path))
	}
	slices.Sort(v.Problems)
	return v, nil
}

func (v *Verification) say(format string, args ...any) {
	if len(v.Problems) < maxProblems {
		v.Problems = append(v.Problems, fmt.Sprintf(format, args...))
	}
}

// walk compares every file with want, from which it takes what it finds.
func (v *Verification) walk(ctx context.Context, root *os.Root, want map[string]listed) error {
	code, err := root.OpenRoot(codeDir)
	if err != nil {
		return nil // check has said that it is missing
	}
	defer code.Close()
	return fs.WalkDir(code.FS(), ".", func(path string, d fs.DirEntry, err error) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			v.say("%q cannot be read", clip(path))
			return nil
		}
		info, err := d.Info()
		switch {
		case err != nil:
			v.say("%q cannot be read", clip(path))
			return nil
		case info.IsDir():
			if info.Mode().Perm()&0o222 != 0 {
				v.say("the directory %q can be written", clip(path))
			}
			return nil
		case !info.Mode().IsRegular():
			v.say("%q is neither a file nor a directory", clip(path))
			return nil
		case info.Mode().Perm()&0o222 != 0:
			v.say("%q can be written", clip(path))
		}
		v.Files++
		v.Bytes += info.Size()
		sum, err := hashFile(code, path)
		if err != nil {
			v.say("%q cannot be read", clip(path))
			return nil
		}
		w, ok := want[path]
		delete(want, path)
		switch {
		case !v.Listed:
		case !ok:
			v.say("%q was not in the package", clip(path))
		case w.Size != info.Size() || w.SHA256 != sum:
			v.say("%q has another content than it was published with", clip(path))
		case w.Exec != (info.Mode().Perm()&0o111 != 0):
			v.say("%q has other execute bits than it was published with", clip(path))
		}
		return nil
	})
}

func hashFile(root *os.Root, path string) (string, error) {
	f, err := root.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
