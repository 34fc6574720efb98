package image

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

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
		c, err := fromManifest(dir, img)
		if err != nil {
			return err
		}
		c.digest, c.names = d.Digest.String(), []string{name}
		if err := add(found, c); err != nil {
			return err
		}
	}
	return nil
}

// fromManifest reads an image of a layout.
func fromManifest(dir string, img v1.Image) (candidate, error) {
	man, err := img.Manifest()
	if err != nil {
		return candidate{}, err
	}
	if err := blob(dir, man.Config.Digest); err != nil {
		return candidate{}, err
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return candidate{}, err
	}
	layers, err := img.Layers()
	if err != nil {
		return candidate{}, err
	}
	c := candidate{config: cfg}
	for _, l := range layers {
		c.layers = append(c.layers, l.Uncompressed)
	}
	return c, nil
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
func add(found *[]candidate, c candidate) error {
	if n := len(c.layers); n > maxLayers {
		return errdefs.New(errdefs.Exhausted, "the image has %d layers, the limit is %d", n, maxLayers)
	} else if n != len(c.config.RootFS.DiffIDs) {
		return errdefs.New(errdefs.Invalid, "the image has %d layers, its configuration names %d", n, len(c.config.RootFS.DiffIDs))
	}
	c.names = slices.DeleteFunc(c.names, func(n string) bool { return n == "" })
	for i := range *found {
		if have := &(*found)[i]; have.digest == c.digest {
			have.names = append(have.names, c.names...)
			return nil
		}
	}
	if len(*found) == maxImages {
		return errdefs.New(errdefs.Exhausted, "the archive holds more than %d images, the limit", maxImages)
	}
	*found = append(*found, c)
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
		c, err := fromSaved(dir, d)
		if err != nil {
			return nil, err
		}
		if os, arch := c.config.OS, c.config.Architecture; os != "" && os != runtime.GOOS || arch != "" && arch != runtime.GOARCH {
			return nil, errdefs.New(errdefs.Invalid, "the image is for %s/%s, this machine is %s/%s", clip(os), clip(arch), runtime.GOOS, runtime.GOARCH)
		}
		if err := add(&found, c); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// fromSaved reads an image of a docker-save archive from the archive's files:
// the library's own reader scans the whole archive for each of them.
func fromSaved(dir string, d tarball.Descriptor) (candidate, error) {
	raw, err := document(dir, path.Clean(d.Config))
	if err != nil {
		return candidate{}, err
	}
	cfg, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return candidate{}, err
	}
	digest, _, err := v1.SHA256(bytes.NewReader(raw))
	if err != nil {
		return candidate{}, err
	}
	c := candidate{digest: digest.String(), names: d.RepoTags, config: cfg}
	for _, file := range d.Layers {
		c.layers = append(c.layers, savedLayer(dir, path.Clean(file)))
	}
	return c, nil
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

// savedLayer opens a layer, which some programs save compressed. The archive may
// hold links, so it is opened below the archive's own directory.
func savedLayer(dir, file string) opener {
	return func() (io.ReadCloser, error) {
		f, err := os.OpenInRoot(dir, file)
		if err != nil {
			return nil, errdefs.Wrap(err, errdefs.Invalid, "the image archive lacks the layer %s", clip(file))
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
}

type readCloser struct {
	io.Reader
	io.Closer
}
