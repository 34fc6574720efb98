package artifact

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/shelf"
)

const (
	codeDir     = "code"
	markerName  = ".verified-sha256"
	listingName = ".files.json"
)

// maxListing bounds the listing that is read back: 512 names of 1 KiB, escaped.
const maxListing = 8 << 20

// Store is a directory of artifacts. Its methods are safe for concurrent use,
// also by several processes.
type Store struct {
	shelf  *shelf.Shelf
	limits Limits
	log    *slog.Logger
	step   func(string) error
}

// listing is what .files.json holds.
type listing struct {
	Schema int      `json:"schema"`
	Digest string   `json:"digest"`
	Files  []listed `json:"files"`
}

const listingSchema = 1

// Open opens the store, and sweeps what crashed attempts left.
func Open(cfg Config) (*Store, error) { return open(cfg, func(string) error { return nil }) }

// open is Open with the seam for tests of crashes, see shelf.Options.
func open(cfg Config, step func(string) error) (*Store, error) {
	s := &Store{limits: cfg.Limits.withDefaults(), log: cfg.Logger, step: step}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	var err error
	s.shelf, err = shelf.Open(filepath.Join(cfg.Dir, "sha256"), shelf.Options{ReadOnly: cfg.ReadOnly, Step: step})
	return s, err
}

// CheckDigest reports whether s is 64 lower-case hex digits.
func CheckDigest(s string) error {
	if !ident.IsDigest(s) {
		return errdefs.New(errdefs.Invalid, "%q is not the digest of an artifact: that is 64 lower-case hex digits", clip(s)).
			WithNext("see stockade artifact ls")
	}
	return nil
}

// Install publishes an archive and returns it. The digest is compared with the
// archive before anything else; an artifact that is already there is returned as
// it is; a damaged one is replaced. Errors: invalid (digest, archive, manifest),
// exhausted (a limit, a full disk), the cause of ctx.
func (s *Store) Install(ctx context.Context, digest string, archive []byte) (Artifact, error) {
	if err := CheckDigest(digest); err != nil {
		return Artifact{}, err
	}
	if n := int64(len(archive)); n > s.limits.Archive {
		return Artifact{}, exceeds("it has %d bytes, the limit is %d", n, s.limits.Archive)
	}
	sum := sha256.Sum256(archive)
	if got := hex.EncodeToString(sum[:]); subtle.ConstantTimeCompare([]byte(got), []byte(digest)) != 1 {
		return Artifact{}, errdefs.New(errdefs.Invalid, "artifact digest mismatch: the package has %s, %s was announced", got, digest)
	}
	done, err := s.shelf.Turn(ctx, digest)
	if err != nil {
		return Artifact{}, err
	}
	defer done()
	if a, problem := s.check(digest); problem == "" {
		s.shelf.Touch(digest)
		return a, nil
	} else if problem != missing {
		s.log.Warn("a damaged artifact is replaced", "digest", digest, "problem", problem)
	}
	if err := s.publish(ctx, digest, archive); err != nil {
		return Artifact{}, err
	}
	a, problem := s.check(digest)
	if problem != "" {
		return Artifact{}, errdefs.New(errdefs.Internal, "the artifact %s cannot be used right after its publication: %s", digest, problem)
	}
	return a, nil
}

func (s *Store) publish(ctx context.Context, digest string, archive []byte) (err error) {
	p, err := read(archive, s.limits)
	if err != nil {
		return err
	}
	stage, err := s.shelf.Stage(digest)
	if err != nil {
		return err
	}
	defer func() {
		if e := stage.Discard(); e != nil {
			s.log.Warn("a failed publication left files until the next start", "digest", digest, "error", e)
		}
	}()
	if err := s.step("staged"); err != nil {
		return err
	}
	code := filepath.Join(stage.Path, codeDir)
	if err := os.Mkdir(code, 0o700); err != nil {
		return shelf.Refusal(err, "the plugin package cannot be unpacked")
	}
	files, err := p.extract(ctx, code, 0o700, 0o400)
	if err != nil {
		return err
	}
	if err := s.step("extracted"); err != nil {
		return err
	}
	b, err := json.Marshal(listing{Schema: listingSchema, Digest: digest, Files: files})
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the listing of the artifact cannot be encoded")
	}
	if err := writeNew(filepath.Join(stage.Path, listingName), b); err != nil {
		return err
	}
	if err := s.step("listed"); err != nil {
		return err
	}
	if err := writeNew(filepath.Join(stage.Path, markerName), []byte(digest)); err != nil {
		return err
	}
	if err := s.step("marked"); err != nil {
		return err
	}
	// extract has set the execute bits of the owner for what keeps them.
	if err := stage.Seal(ctx, func(_ string, now fs.FileMode) fs.FileMode { return 0o444 | now>>6&1*0o111 }); err != nil {
		return err
	}
	return stage.Publish(func(string) bool { _, problem := s.check(digest); return problem == "" })
}

func writeNew(path string, b []byte) error {
	if err := os.WriteFile(path, b, 0o400); err != nil {
		return shelf.Refusal(err, "the artifact's %s cannot be written", filepath.Base(path))
	}
	return nil
}

// Lookup returns an artifact that was published whole. It does not hash the files
// again; see Verify. What is missing or damaged is not found, and no error; the
// next Install replaces it.
func (s *Store) Lookup(digest string) (Artifact, bool, error) {
	if err := CheckDigest(digest); err != nil {
		return Artifact{}, false, err
	}
	a, problem := s.check(digest)
	if problem != "" {
		if problem != missing {
			s.log.Warn("a damaged artifact is not used", "digest", digest, "problem", problem)
		}
		return Artifact{}, false, nil
	}
	s.shelf.Touch(digest)
	return a, true, nil
}

const missing = "it is not there"

// check says why an artifact is not trusted; "" is a trusted one. The rule is the
// published SDK's: the marker, a code directory, a manifest that can be read.
func (s *Store) check(digest string) (a Artifact, problem string) {
	root := s.shelf.Path(digest)
	info, err := os.Lstat(root)
	switch {
	case os.IsNotExist(err):
		return a, missing
	case err != nil || !info.IsDir():
		return a, "it is not a directory that can be read"
	}
	r, err := os.OpenRoot(root)
	if err != nil {
		return a, "it is not a directory that can be read"
	}
	defer r.Close()
	marker, err := readSmall(r, markerName, 256)
	if err != nil || strings.TrimSpace(string(marker)) != digest {
		return a, "its mark of a verified publication is missing or another"
	}
	if info, err := r.Lstat(codeDir); err != nil || !info.IsDir() {
		return a, "its directory code is missing"
	}
	b, err := readSmall(r, codeDir+"/"+manifestName, s.limits.Manifest)
	if err != nil {
		return a, "its manifest.yaml cannot be read"
	}
	m, err := parseManifest(b, s.limits)
	if err != nil {
		return a, "its manifest.yaml is damaged"
	}
	return Artifact{Digest: digest, Root: root, Code: filepath.Join(root, codeDir), Manifest: m}, ""
}

// readSmall reads a regular file of at most most bytes.
func readSmall(r *os.Root, name string, most int64) ([]byte, error) {
	info, err := r.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, fs.ErrInvalid
	}
	return r.ReadFile(name)
}

// List returns every artifact, by digest, also those with a problem.
func (s *Store) List() ([]Item, error) {
	names, err := s.shelf.Names()
	if err != nil {
		return nil, err
	}
	items := []Item{}
	for _, name := range names {
		if !ident.IsDigest(name) {
			continue
		}
		a, problem := s.check(name)
		if problem == missing { // collected meanwhile
			continue
		}
		i := Item{Digest: name, Author: a.Manifest.Author, Name: a.Manifest.Name, Version: a.Manifest.Version,
			LastUsed: s.shelf.LastUsed(name).UTC().Truncate(time.Second), Problem: problem}
		i.Bytes, i.Files = shelf.Usage(s.shelf.Path(name))
		items = append(items, i)
	}
	return items, nil
}

// Remove removes an artifact, whatever uses it, so that the next Install publishes
// it anew. A missing one is no error.
func (s *Store) Remove(ctx context.Context, digest string) error {
	if err := CheckDigest(digest); err != nil {
		return err
	}
	done, err := s.shelf.Turn(ctx, digest)
	if err != nil {
		return err
	}
	defer done()
	return s.shelf.Remove(digest)
}

// Collect removes the artifacts that are not in used and were not asked for since
// before (Install and Lookup ask). It must not run beside a runtime of another
// process: what that one uses is not known here. After an error, removed still
// says what is gone.
func (s *Store) Collect(ctx context.Context, used map[string]bool, before time.Time) (removed []string, bytes int64, err error) {
	return s.shelf.Collect(ctx, func(name string) bool { return used[name] || !ident.IsDigest(name) }, before)
}
