package deptree

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/shelf"
)

// Store is a directory of trees. Its methods are safe for concurrent use, also by
// several processes.
type Store struct {
	cfg     Config
	shelf   *shelf.Shelf
	log     *slog.Logger
	step    func(string) error
	secrets []string // the parts of the index URL that are nobody's business

	mu    sync.Mutex
	count Counters
}

// Names in a tree's directory.
const (
	sitePackages  = "site-packages"
	scratchDir    = ".scratch"
	readyName     = ".ready.json"
	admissionName = ".admission.json"
)

const defaultTimeout = 600 * time.Second // published SDK 0.6.3

// Open opens the store, and sweeps what crashed attempts left.
func Open(cfg Config) (*Store, error) { return open(cfg, func(string) error { return nil }) }

// open is Open with the seam for tests of crashes, see shelf.Options.
func open(cfg Config, step func(string) error) (*Store, error) {
	if cfg.Timeout <= 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.Limits.Entries == 0 {
		cfg.Limits.Entries = 100_000
	}
	if cfg.Limits.Bytes == 0 {
		cfg.Limits.Bytes = 2 << 30
	}
	s := &Store{cfg: cfg, log: cfg.Logger, step: step}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if u, err := url.Parse(cfg.IndexURL); err != nil {
		return nil, errdefs.New(errdefs.Invalid, "the URL of the package index cannot be parsed")
	} else if u.User != nil {
		pass, _ := u.User.Password()
		for _, secret := range []string{pass, url.QueryEscape(pass)} {
			if len(secret) > 3 {
				s.secrets = append(s.secrets, secret)
			}
		}
	}
	var err error
	s.shelf, err = shelf.Open(filepath.Join(cfg.Dir, "sha256"), shelf.Options{ReadOnly: cfg.ReadOnly, Step: step})
	return s, err
}

// Counters returns what happened since Open.
func (s *Store) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// ready is what .ready.json holds: the parts of the key.
type ready struct {
	Artifact     string `json:"artifact_digest"`
	Digest       string `json:"digest"`
	Requirements string `json:"requirements_digest"`
	Runtime      string `json:"runtime_fingerprint"`
	Schema       int    `json:"schema_version"`
}

// admission is what .admission.json holds. Its absence means that another runtime
// made the tree, by rules of its own.
type admission struct {
	Relaxed string `json:"relaxed"` // the SDK requirement that needed the relaxation, "" for none
}

// schema is the version of the key: the published SDK counts 2 up to 0.6 and 3 from 0.7.
func schema(sdk string) int {
	major, rest, _ := strings.Cut(sdk, ".")
	minor, _, _ := strings.Cut(rest, ".")
	m, err := strconv.Atoi(minor)
	if sdk == "" || err != nil || major != "0" || m >= 7 {
		return 3
	}
	return 2
}

const installerSchema = 2

// key computes the digest of a tree and what .ready.json must say.
func (s *Store) key(artifactDigest string, requirements []byte) ready {
	i := s.cfg.Interp
	sdk := i.SDK
	if sdk == "" {
		sdk = "uninstalled"
	}
	r := ready{Artifact: artifactDigest, Requirements: hash(requirements), Schema: schema(i.SDK)}
	r.Runtime = hash(compact(map[string]any{
		"installer_schema": installerSchema, "python_cache_tag": i.CacheTag, "python_implementation": i.Implementation,
		"python_version": i.Version, "runtime_profile": s.cfg.Profile, "sdk_version": sdk,
	}))
	r.Digest = r.digest()
	return r
}

// digest is the key over the other parts.
func (r ready) digest() string {
	return hash(compact(map[string]any{
		"artifact_digest": r.Artifact, "requirements_digest": r.Requirements, "runtime_fingerprint": r.Runtime, "schema_version": r.Schema,
	}))
}

func hash(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// compact is JSON with sorted keys and without spaces; the values are ASCII.
func compact(v map[string]any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // strings and numbers
	}
	return bytes.TrimSpace(b.Bytes())
}

// tree is the place of a key.
func (s *Store) tree(digest string) Tree {
	root := s.shelf.Path(digest)
	return Tree{Digest: digest, Root: root, SitePackages: filepath.Join(root, sitePackages)}
}

// check says why a tree is not ready; "" is a ready one. The rule is the published
// SDK's: the mark says exactly what is expected, and nobody can write to the tree.
func (s *Store) check(want ready) string {
	root := s.shelf.Path(want.Digest)
	got, problem := s.mark(want.Digest)
	if problem != "" {
		return problem
	}
	if got != want {
		return "its mark says that it is another tree"
	}
	for _, dir := range []string{root, filepath.Join(root, sitePackages)} {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() {
			return "a directory of it is missing"
		}
		if info.Mode().Perm()&0o222 != 0 {
			return "it was not sealed"
		}
	}
	return ""
}

const missing = "it is not there"

// mark reads the mark of a tree.
func (s *Store) mark(digest string) (r ready, problem string) {
	b, err := readSmall(s.shelf.Path(digest), readyName, 64<<10)
	if err != nil {
		if _, err := os.Lstat(s.shelf.Path(digest)); os.IsNotExist(err) {
			return r, missing
		}
		return r, "its mark is missing or cannot be read"
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r); err != nil || r.Digest != digest || r.digest() != digest {
		return r, "its mark is damaged"
	}
	return r, ""
}

// readSmall reads a regular file of at most most bytes in a directory.
func readSmall(dir, name string, most int64) ([]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	info, err := root.Lstat(name)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fs.ErrInvalid
	}
	if info.Size() > most {
		return nil, errTooLarge
	}
	return root.ReadFile(name)
}

var errTooLarge = errors.New("too large")

// readRequirements reads requirements.txt of an artifact; without one there are none.
func readRequirements(code string) ([]byte, error) {
	b, err := readSmall(code, "requirements.txt", maxFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Stat(code); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Unavailable, "the dependency declarations are unavailable: the artifact's code is not there")
		}
		return nil, nil
	case errors.Is(err, errTooLarge):
		return nil, errdefs.New(errdefs.Exhausted, "requirements.txt is too large: the limit is %d bytes", maxFile)
	case err != nil:
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the dependency declarations are unavailable: requirements.txt cannot be read")
	case !utf8.Valid(b):
		return nil, errdefs.New(errdefs.Invalid, "requirements.txt is not UTF-8")
	}
	return b, nil
}

// List returns every tree, by digest, also those with a problem.
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
		r, problem := s.mark(name)
		if problem == "" {
			problem = s.check(r)
		}
		if problem == missing { // collected meanwhile
			continue
		}
		i := Item{Digest: name, Artifact: r.Artifact, LastUsed: s.shelf.LastUsed(name).UTC().Truncate(time.Second), Problem: problem}
		i.Bytes, i.Files = shelf.Usage(s.shelf.Path(name))
		items = append(items, i)
	}
	return items, nil
}

// Collect removes the trees that are not in used and were not asked for since
// before. It must not run beside a runtime of another process: what that one uses
// is not known here. After an error, removed still says what is gone.
func (s *Store) Collect(ctx context.Context, used map[string]bool, before time.Time) (removed []string, bytes int64, err error) {
	return s.shelf.Collect(ctx, func(name string) bool { return used[name] || !ident.IsDigest(name) }, before)
}
