package image

import (
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/tartree"
	"github.com/stockade-run/stockade/internal/wire"
)

// Limits of one load.
const (
	maxName     = 256     // bytes of an image's name
	maxMetadata = 8 << 20 // bytes of an index, manifest or configuration
	maxImages   = 64      // images in one archive
	maxLayers   = 512     // layers of one image; Docker makes at most 127
)

// Config says where images are kept.
type Config struct {
	Dir string // is made if missing
	// Limits bounds the files of one unpacked image, and the archive it comes in.
	Limits tartree.Limits
	Logger *slog.Logger // may be nil
}

// Image is an unpacked image.
type Image struct {
	wire.ImageInfo
	Rootfs string // directory on this machine
	Path   string // PATH of the image's configuration; "" if it has none
}

// Store owns the images below one directory. Only one Store may be open on it.
type Store struct {
	dir    string
	limits tartree.Limits
	log    *slog.Logger

	loading sync.Mutex // one load at a time: they are disk-bound
	mu      sync.Mutex // guards the directory's entries and their image.json
}

// record is image.json.
type record struct {
	Digest  string    `json:"digest"`
	Names   []string  `json:"names,omitempty"`
	Size    int64     `json:"size"`
	Created time.Time `json:"created"`
	Path    string    `json:"path,omitempty"`
}

// Open opens the store and deletes what interrupted loads and removals left.
func Open(cfg Config) (*Store, error) {
	s := &Store{dir: cfg.Dir, limits: cfg.Limits, log: cfg.Logger}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.limits.Bytes == 0 {
		s.limits.Bytes = tartree.DefaultBytes
	}
	if s.limits.Entries == 0 {
		s.limits.Entries = tartree.DefaultEntries
	}
	if err := os.MkdirAll(s.dir, 0o711); err != nil {
		return nil, fmt.Errorf("make the image directory: %w", err)
	}
	ents, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("read the image directory: %w", err)
	}
	for _, e := range ents {
		if strings.HasPrefix(e.Name(), ".tmp-") {
			if err := os.RemoveAll(filepath.Join(s.dir, e.Name())); err != nil {
				return nil, fmt.Errorf("delete an interrupted load: %w", err)
			}
		}
	}
	return s, nil
}

// folder is the directory name of a digest, or "" if it is not one.
func folder(digest string) string {
	hex, ok := strings.CutPrefix(digest, "sha256:")
	if !ok || len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "" {
		return ""
	}
	return "sha256-" + hex
}

// CheckName refuses a name for an image that is over-long or holds anything but
// letters, digits and "._:/@-".
func CheckName(name string) error {
	if name == "" || len(name) > maxName {
		return errdefs.New(errdefs.Invalid, "an image's name has %d bytes, allowed are 1 to %d", len(name), maxName)
	}
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("._:/@-", c) >= 0) {
			return errdefs.New(errdefs.Invalid, "the image's name holds a character that is not allowed").
				WithNext("use only A-Z a-z 0-9 . _ : / @ -")
		}
	}
	if folder(name) != "" {
		return errdefs.New(errdefs.Invalid, "an image's name may not look like a digest")
	}
	return nil
}

func (s *Store) read(dir string) (record, error) {
	var r record
	b, err := os.ReadFile(filepath.Join(s.dir, dir, "image.json"))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil || folder(r.Digest) != dir {
		return record{}, errdefs.Wrap(err, errdefs.Internal, "the record of image %s is damaged", dir).
			WithNext("delete the directory %s and load the image again", filepath.Join(s.dir, dir))
	}
	return r, nil
}

func (s *Store) image(r record) Image {
	return Image{
		ImageInfo: wire.ImageInfo{Digest: r.Digest, Names: r.Names, Size: r.Size, Created: r.Created},
		Rootfs:    filepath.Join(s.dir, folder(r.Digest), "rootfs"),
		Path:      r.Path,
	}
}

// all reads every record, oldest first. The caller holds mu. A damaged record
// is logged and left out.
func (s *Store) all() ([]record, error) {
	ents, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("read the image directory: %w", err)
	}
	var rs []record
	for _, e := range ents {
		if !strings.HasPrefix(e.Name(), "sha256-") {
			continue
		}
		r, err := s.read(e.Name())
		if err != nil {
			s.log.Warn("image left out of the list", "image", e.Name(), "error", err)
			continue
		}
		rs = append(rs, r)
	}
	slices.SortFunc(rs, func(a, b record) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Digest, b.Digest))
	})
	return rs, nil
}

// List returns every image, oldest first.
func (s *Store) List() ([]wire.ImageInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	rs, err := s.all()
	infos := make([]wire.ImageInfo, 0, len(rs))
	for _, r := range rs {
		infos = append(infos, s.image(r).ImageInfo)
	}
	return infos, err
}

// Get returns an image by digest or, failing that, by one of its names. An
// unknown one is not_found.
func (s *Store) Get(ref string) (Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.get(ref)
}

func (s *Store) get(ref string) (Image, error) {
	unknown := errdefs.New(errdefs.NotFound, "no image %q is loaded here", clip(ref)).WithNext("load it: stockade image load")
	if dir := folder(ref); dir != "" {
		r, err := s.read(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return Image{}, unknown
		}
		return s.image(r), err
	}
	rs, err := s.all()
	if err != nil {
		return Image{}, err
	}
	for _, r := range rs {
		if slices.Contains(r.Names, ref) {
			return s.image(r), nil
		}
	}
	return Image{}, unknown
}

// Remove takes an image away, by digest or name. inUse, called with the digest and
// with no load under way to the same image, may refuse it; nil never does. The
// image is gone when Remove returns; its files are deleted by clean, which the
// caller calls and nobody waits for.
func (s *Store) Remove(ref string, inUse func(digest string) error) (clean func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	img, err := s.get(ref)
	if err != nil {
		return nil, err
	}
	if inUse != nil {
		if err := inUse(img.Digest); err != nil {
			return nil, err
		}
	}
	gone := filepath.Join(s.dir, ".tmp-removed-"+rand.Text())
	if err := os.Rename(filepath.Join(s.dir, folder(img.Digest)), gone); err != nil {
		return nil, fmt.Errorf("remove an image: %w", err)
	}
	return func() {
		if err := os.RemoveAll(gone); err != nil {
			s.log.Warn("a removed image's files are still there until the next start", "image", img.Digest, "error", err)
		}
	}, nil
}

// name gives names to an image that is there, taking them from others.
func (s *Store) name(digest string, names []string) (record, error) {
	rs, err := s.all()
	if err != nil {
		return record{}, err
	}
	var out record
	for _, r := range rs {
		before := len(r.Names)
		if r.Digest == digest {
			for _, n := range names {
				if !slices.Contains(r.Names, n) {
					r.Names = append(r.Names, n)
				}
			}
			out = r
		} else {
			r.Names = slices.DeleteFunc(r.Names, func(n string) bool { return slices.Contains(names, n) })
		}
		if len(r.Names) != before {
			if err := s.write(folder(r.Digest), r); err != nil {
				return record{}, err
			}
		}
	}
	return out, nil
}

func (s *Store) write(dir string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := durable.Write(filepath.Join(s.dir, dir), "image.json", b); err != nil {
		return fmt.Errorf("record an image: %w", err)
	}
	return nil
}

func clip(s string) string {
	s = strings.ToValidUTF8(s, "?")
	if len(s) > 200 {
		return strings.ToValidUTF8(s[:200], "") + "…"
	}
	return s
}
