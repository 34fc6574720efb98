package bench

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"io/fs"
	"strings"
)

// pluginFiles is the plugin that is measured with: an echo tool, a command that
// counts, and a handler that does nothing.
//
//go:embed plugin
var pluginFiles embed.FS

// benchPlugin packs the plugin as an author's tools do and returns it with its digest.
func benchPlugin() (archive []byte, digest string, err error) {
	var out bytes.Buffer
	zw := zip.NewWriter(&out)
	add := func(path string) error {
		data, err := pluginFiles.ReadFile(path)
		if err != nil {
			return err
		}
		w, err := zw.CreateHeader(&zip.FileHeader{Name: strings.TrimPrefix(path, "plugin/"), Method: zip.Store})
		if err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	}
	const manifest = "plugin/manifest.yaml"
	if err := add(manifest); err != nil {
		return nil, "", err
	}
	err = fs.WalkDir(pluginFiles, "plugin", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || path == manifest {
			return err
		}
		return add(path)
	})
	if err != nil {
		return nil, "", err
	}
	if err := zw.Close(); err != nil {
		return nil, "", err
	}
	sum := sha256.Sum256(out.Bytes())
	return out.Bytes(), hex.EncodeToString(sum[:]), nil
}
