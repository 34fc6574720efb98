package cli

import (
	"archive/tar"
	"bytes"
	"os"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/rogpeppe/go-internal/testscript"
)

// makeImageCmd is the script command "make-image layout DIR" or "make-image
// docker-save FILE": an image around the machine's static busybox.
func makeImageCmd(busybox string) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, neg bool, args []string) {
		if len(args) != 2 || neg {
			ts.Fatalf("usage: make-image layout|docker-save PATH")
		}
		img, err := busyboxImage(busybox)
		ts.Check(err)
		path := ts.MkAbs(args[1])
		switch args[0] {
		case "layout":
			p, err := layout.Write(path, empty.Index)
			ts.Check(err)
			ts.Check(p.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": "tools"})))
		case "docker-save":
			tag, err := name.NewTag("example.test/busy:1")
			ts.Check(err)
			ts.Check(tarball.WriteToFile(path, tag, img))
		default:
			ts.Fatalf("unknown form %q", args[0])
		}
	}
}

func busyboxImage(busybox string) (v1.Image, error) {
	bin, err := os.ReadFile(busybox)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range []tar.Header{
		{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(bin))},
		{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		{Name: "bin/cat", Typeflag: tar.TypeSymlink, Linkname: "busybox"},
		{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "etc/from-image", Typeflag: tar.TypeReg, Mode: 0o644, Size: 6},
	} {
		if err := w.WriteHeader(&h); err != nil {
			return nil, err
		}
		content := bin
		if h.Name == "etc/from-image" {
			content = []byte("image\n")
		}
		if h.Size > 0 {
			if _, err := w.Write(content); err != nil {
				return nil, err
			}
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, static.NewLayer(b.Bytes(), types.DockerUncompressedLayer))
	if err != nil {
		return nil, err
	}
	return mutate.Config(img, v1.Config{Env: []string{"PATH=/bin"}})
}
