// Package plugintest packs the plugins of testdata/plugins for tests, as their
// author's tools would.
package plugintest

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// Pack returns the package (.lbpkg) of testdata/plugins/NAME: a zip without
// compression whose first member is manifest.yaml. Equal calls give equal bytes.
// replace is pairs of old and new text that are replaced in manifest.yaml and
// requirements.txt, such as "version: 1.0.0", "version: 1.0.1".
func Pack(t testing.TB, name string, replace ...string) []byte {
	t.Helper()
	root := need.Testdata(t, "plugins", name)
	var names []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err == nil && !strings.Contains(rel, "__pycache__") {
			names = append(names, filepath.ToSlash(rel))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(names, func(a, b string) int {
		switch {
		case a == "manifest.yaml":
			return -1
		case b == "manifest.yaml":
			return 1
		}
		return strings.Compare(a, b)
	})
	edit := strings.NewReplacer(replace...)
	var out bytes.Buffer
	zw := zip.NewWriter(&out)
	for _, n := range names {
		data, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(n)))
		if err != nil {
			t.Fatal(err)
		}
		if n == "manifest.yaml" || n == "requirements.txt" {
			data = []byte(edit.Replace(string(data)))
		}
		w, err := zw.CreateHeader(&zip.FileHeader{Name: n, Method: zip.Store})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// Digest is the artifact digest of a package.
func Digest(archive []byte) string {
	sum := sha256.Sum256(archive)
	return hex.EncodeToString(sum[:])
}
