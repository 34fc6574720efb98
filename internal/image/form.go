package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// refName is the annotation of OCI image-spec that names an image of a layout;
// containerdName is what Docker and containerd write beside it, with the
// repository.
const (
	refName        = "org.opencontainers.image.ref.name"
	containerdName = "io.containerd.image.name"
)

// fromLayout finds the images of an OCI layout whose blobs were checked.
func fromLayout(dir string) ([]candidate, error) {
	if err := smallMetadata(filepath.Join(dir, "index.json")); err != nil {
		return nil, err
	}
	idx, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, err
	}
	var found []candidate
	if err := walkIndex(dir, idx, "", 0, &found); err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errdefs.New(errdefs.Invalid, "the layout holds no image for %s/%s", runtime.GOOS, runtime.GOARCH).
			WithNext("make it for this platform")
	}
	return found, nil
}

func walkIndex(dir string, idx v1.ImageIndex, inherited string, depth int, found *[]candidate) error {
	if depth > 4 {
		return errdefs.New(errdefs.Invalid, "the layout's indexes are nested too deeply")
	}
	m, err := idx.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range m.Manifests {
		name := inherited
		if n := d.Annotations[containerdName]; n != "" {
			name = n
		} else if n := d.Annotations[refName]; n != "" {
			name = n
		}
		if !d.MediaType.IsIndex() && !d.MediaType.IsImage() || d.Annotations["vnd.docker.reference.type"] != "" {
			continue // attestations and other artifacts
		}
		if p := d.Platform; p != nil && !(p.OS == runtime.GOOS && p.Architecture == runtime.GOARCH) {
			continue
		}
		if err := blob(dir, d.Digest); err != nil {
			return err
		}
		if d.MediaType.IsIndex() {
			sub, err := idx.ImageIndex(d.Digest)
			if err != nil {
				return err
			}
			if err := walkIndex(dir, sub, name, depth+1, found); err != nil {
				return err
			}
			continue
		}
		img, err := idx.Image(d.Digest)
		if err != nil {
			return err
		}
		if err := add(found, img, d.Digest.String(), name); err != nil {
			return err
		}
		man, err := img.Manifest()
		if err != nil {
			return err
		}
		if err := blob(dir, man.Config.Digest); err != nil {
			return err
		}
	}
	return nil
}

// blob checks a document of the layout. Only blobs named by SHA-256 were compared
// with their names.
func blob(dir string, h v1.Hash) error {
	if h.Algorithm != "sha256" {
		return errdefs.New(errdefs.Invalid, "the image uses %q digests; only sha256 is supported", clip(h.Algorithm))
	}
	return smallMetadata(filepath.Join(dir, "blobs", h.Algorithm, h.Hex))
}

// add adds a candidate; one that stands under several names becomes one.
func add(found *[]candidate, img v1.Image, digest string, names ...string) error {
	at := -1
	for i, c := range *found {
		if c.digest == digest {
			at = i
		}
	}
	if at < 0 {
		if len(*found) == maxImages {
			return errdefs.New(errdefs.Exhausted, "the archive holds more than %d images, the limit", maxImages)
		}
		*found = append(*found, candidate{image: img, digest: digest})
		at = len(*found) - 1
	}
	for _, n := range names {
		if n != "" {
			(*found)[at].names = append((*found)[at].names, n)
		}
	}
	return nil
}

// fromDocker finds the images of a docker-save archive of the old form, whose
// files are in dir.
func fromDocker(dir string) ([]candidate, error) {
	b, err := document(dir, "manifest.json")
	if err != nil {
		return nil, err
	}
	var all tarball.Manifest
	if err := json.Unmarshal(b, &all); err != nil {
		return nil, err
	}
	if len(all) == 0 || len(all) > maxImages {
		return nil, errdefs.New(errdefs.Invalid, "the archive holds %d images, allowed are 1 to %d", len(all), maxImages)
	}
	var found []candidate
	for _, d := range all {
		if !fs.ValidPath(path.Clean(d.Config)) || len(d.Layers) > maxLayers {
			return nil, errdefs.New(errdefs.Invalid, "the archive's manifest.json is not valid")
		}
		img, err := openSaved(dir, d)
		if err != nil {
			return nil, err
		}
		raw, err := img.RawConfigFile()
		if err != nil {
			return nil, err
		}
		digest, _, err := v1.SHA256(bytes.NewReader(raw))
		if err != nil {
			return nil, err
		}
		cfg, err := img.ConfigFile()
		if err != nil {
			return nil, err
		}
		if cfg.OS != "" && cfg.OS != runtime.GOOS || cfg.Architecture != "" && cfg.Architecture != runtime.GOARCH {
			return nil, errdefs.New(errdefs.Invalid, "the image is for %s/%s, this machine is %s/%s", clip(cfg.OS), clip(cfg.Architecture), runtime.GOOS, runtime.GOARCH)
		}
		if err := add(&found, img, digest.String(), d.RepoTags...); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// document reads a small file of an archive, which may hold links.
func document(dir, name string) ([]byte, error) {
	f, err := os.OpenInRoot(dir, name)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the image archive lacks the file %s", clip(name))
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxMetadata+1))
	if err == nil && len(b) > maxMetadata {
		err = errdefs.New(errdefs.Exhausted, "a document of the image has more than %d bytes, the limit", maxMetadata)
	}
	return b, err
}

// smallMetadata refuses a document that a decoder would read whole into memory.
func smallMetadata(file string) error {
	st, err := os.Stat(file)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the image archive lacks the file %s", clip(filepath.Base(file))).
			WithNext("the archive is incomplete; make it again")
	}
	if !st.Mode().IsRegular() || st.Size() > maxMetadata {
		return errdefs.New(errdefs.Exhausted, "a document of the image has %d bytes, the limit is %d", st.Size(), maxMetadata)
	}
	return nil
}

// saved is one image of a docker-save archive, read from the files of the
// archive: the library's own reader scans the whole archive for each of them.
type saved struct {
	dir    string
	config []byte
	layers map[v1.Hash]string // file of each layer by its diff id
}

func openSaved(dir string, d tarball.Descriptor) (v1.Image, error) {
	s := &saved{dir: dir, layers: map[v1.Hash]string{}}
	var err error
	if s.config, err = document(dir, path.Clean(d.Config)); err != nil {
		return nil, err
	}
	cfg, err := v1.ParseConfigFile(bytes.NewReader(s.config))
	if err != nil {
		return nil, err
	}
	if len(cfg.RootFS.DiffIDs) != len(d.Layers) {
		return nil, errdefs.New(errdefs.Invalid, "the image has %d layers, its configuration names %d", len(d.Layers), len(cfg.RootFS.DiffIDs))
	}
	for i, id := range cfg.RootFS.DiffIDs {
		s.layers[id] = path.Clean(d.Layers[i])
	}
	return partial.UncompressedToImage(s)
}

func (s *saved) RawConfigFile() ([]byte, error) { return s.config, nil }

func (s *saved) MediaType() (types.MediaType, error) { return types.DockerManifestSchema2, nil }

func (s *saved) LayerByDiffID(id v1.Hash) (partial.UncompressedLayer, error) {
	file, ok := s.layers[id]
	if !ok {
		return nil, fmt.Errorf("no layer %s", id)
	}
	return &savedLayer{dir: s.dir, file: file, id: id}, nil
}

type savedLayer struct {
	dir, file string
	id        v1.Hash
}

func (l *savedLayer) DiffID() (v1.Hash, error) { return l.id, nil }

func (l *savedLayer) MediaType() (types.MediaType, error) { return types.DockerLayer, nil }

// Uncompressed opens the layer. The archive may hold links, so it is opened
// below the archive's own directory.
func (l *savedLayer) Uncompressed() (io.ReadCloser, error) {
	f, err := os.OpenInRoot(l.dir, l.file)
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Invalid, "the image archive lacks the layer %s", clip(l.file))
	}
	br := bufio.NewReaderSize(f, 64<<10)
	if head, _ := br.Peek(2); len(head) == 2 && head[0] == 0x1f && head[1] == 0x8b {
		z, err := gzip.NewReader(br)
		if err != nil {
			f.Close()
			return nil, err
		}
		return readCloser{z, f}, nil
	}
	return readCloser{br, f}, nil
}

type readCloser struct {
	io.Reader
	io.Closer
}
