package image

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path"
	"runtime"
	"slices"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// The documents are decoded into shapes of our own, with no more than what is
// used: the libraries that have them all take 120 KiB of private memory at the
// start of every program that links them, and each shim is one.

// descriptor points to a blob (OCI image-spec, "Content Descriptors").
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Annotations map[string]string `json:"annotations"`
	Platform    *platform         `json:"platform"`
}

type platform struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
}

// here reports whether a platform is this machine's; an unnamed one is.
func (p platform) here() bool {
	return (p.OS == "" || p.OS == runtime.GOOS) && (p.Architecture == "" || p.Architecture == runtime.GOARCH)
}

// config is an image's configuration (OCI image-spec, "Image Configuration").
type config struct {
	platform
	Config struct {
		Env []string `json:"Env"`
	} `json:"config"`
	RootFS struct {
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// Media types of OCI and of Docker's registry protocol.
var (
	indexTypes = [...]string{"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
	imageTypes = [...]string{"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
)

// refName is the annotation of OCI image-spec that names an image of a layout;
// containerdName is what Docker and containerd write beside it, with the
// repository. dockerReference marks attestations.
const (
	refName         = "org.opencontainers.image.ref.name"
	containerdName  = "io.containerd.image.name"
	dockerReference = "vnd.docker.reference.type"
)

// fromLayout finds the images of an OCI layout in dir, whose SHA-256 blobs were
// compared with their names.
func fromLayout(dir string) ([]candidate, error) {
	var found []candidate
	if err := walkIndex(dir, "index.json", "", 0, &found); err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errdefs.New(errdefs.Invalid, "the layout holds no image for %s/%s", runtime.GOOS, runtime.GOARCH).
			WithNext("make it for this platform")
	}
	return found, nil
}

func walkIndex(dir, file, inherited string, depth int, found *[]candidate) error {
	if depth > 4 {
		return errdefs.New(errdefs.Invalid, "the layout's indexes are nested too deeply")
	}
	var index struct {
		Manifests []descriptor `json:"manifests"`
	}
	if err := decode(dir, file, &index); err != nil {
		return err
	}
	for _, d := range index.Manifests {
		isIndex := slices.Contains(indexTypes[:], d.MediaType)
		if !isIndex && !slices.Contains(imageTypes[:], d.MediaType) || d.Annotations[dockerReference] != "" {
			continue // attestations and other artifacts
		}
		if d.Platform != nil && !d.Platform.here() {
			continue
		}
		name := inherited
		if n := d.Annotations[containerdName]; n != "" {
			name = n
		} else if n := d.Annotations[refName]; n != "" {
			name = n
		}
		at, err := blob(d.Digest)
		if err != nil {
			return err
		}
		if isIndex {
			if err := walkIndex(dir, at, name, depth+1, found); err != nil {
				return err
			}
			continue
		}
		c, err := fromManifest(dir, at)
		if err != nil {
			return err
		}
		// An index of a single platform may leave the platform out; the
		// configuration always has it.
		if !c.config.here() {
			continue
		}
		c.digest, c.names = d.Digest, []string{name}
		if err := add(found, c); err != nil {
			return err
		}
	}
	return nil
}

// fromManifest reads an image of a layout.
func fromManifest(dir, file string) (candidate, error) {
	var manifest struct {
		Config descriptor   `json:"config"`
		Layers []descriptor `json:"layers"`
	}
	if err := decode(dir, file, &manifest); err != nil {
		return candidate{}, err
	}
	at, err := blob(manifest.Config.Digest)
	if err != nil {
		return candidate{}, err
	}
	var c candidate
	if err := decode(dir, at, &c.config); err != nil {
		return candidate{}, err
	}
	for _, l := range manifest.Layers {
		at, err := blob(l.Digest)
		if err != nil {
			return candidate{}, err
		}
		c.layers = append(c.layers, layerFile(dir, at))
	}
	return c, nil
}

// blob returns the file of a digest. Only blobs named by SHA-256 were compared
// with their names.
func blob(digest string) (string, error) {
	if folder(digest) == "" {
		return "", errdefs.New(errdefs.Invalid, "the image uses the digest %q; only sha256 is supported", clip(digest))
	}
	return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:"), nil
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
	var all []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := decode(dir, "manifest.json", &all); err != nil {
		return nil, err
	}
	if len(all) == 0 || len(all) > maxImages {
		return nil, errdefs.New(errdefs.Invalid, "the archive holds %d images, allowed are 1 to %d", len(all), maxImages)
	}
	var found []candidate
	for _, d := range all {
		raw, err := document(dir, path.Clean(d.Config))
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(raw)
		c := candidate{digest: "sha256:" + hex.EncodeToString(sum[:]), names: d.RepoTags}
		if err := unmarshal(raw, &c.config); err != nil {
			return nil, err
		}
		if !c.config.here() {
			return nil, errdefs.New(errdefs.Invalid, "the image is for %s/%s, this machine is %s/%s",
				clip(c.config.OS), clip(c.config.Architecture), runtime.GOOS, runtime.GOARCH)
		}
		for _, file := range d.Layers {
			c.layers = append(c.layers, layerFile(dir, path.Clean(file)))
		}
		if err := add(&found, c); err != nil {
			return nil, err
		}
	}
	return found, nil
}

func decode(dir, file string, into any) error {
	raw, err := document(dir, file)
	if err != nil {
		return err
	}
	return unmarshal(raw, into)
}

func unmarshal(raw []byte, into any) error {
	if err := json.Unmarshal(raw, into); err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "a document of the image archive is not valid: %s", clip(err.Error()))
	}
	return nil
}
