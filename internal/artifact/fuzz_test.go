package artifact

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// Whatever the bytes are: an install either refuses them and leaves nothing, or
// publishes a tree within the limits that verifies; and nothing is written outside.
func FuzzInstall(f *testing.F) {
	for _, c := range refusals(f, 64<<10) {
		if len(c.archive) < 4<<10 {
			f.Add(c.archive)
		}
	}
	f.Add(toy(f))
	limits := Limits{Archive: 1 << 20, File: 64 << 10, Total: 256 << 10}
	f.Fuzz(func(t *testing.T, archive []byte) {
		outer := t.TempDir()
		s := openStore(t, Config{Dir: filepath.Join(outer, "in", "artifacts"), Limits: limits})
		a, err := s.Install(t.Context(), digestOf(archive), archive)
		if err != nil {
			nothingIn(t, s)
			return
		}
		if entries, err := os.ReadDir(outer); err != nil || len(entries) != 1 {
			t.Fatalf("outside: %v, %v", entries, err)
		}
		if v, err := s.Verify(t.Context(), a.Digest); err != nil || len(v.Problems) != 0 || v.Bytes > limits.Total {
			t.Fatalf("%+v, %v", v, err)
		}
		err = filepath.WalkDir(a.Root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() && !d.Type().IsRegular() {
				t.Errorf("%s is %v", path, d.Type())
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if a.Manifest.Author == "" || a.Manifest.Name == "" || a.Manifest.Version == "" {
			t.Fatalf("%+v", a.Manifest)
		}
	})
}

func FuzzManifest(f *testing.F) {
	f.Add([]byte(goodManifest))
	f.Add([]byte("b: &b {x: 1}\nm: {<<: [*b, *b]}\n" + goodManifest))
	f.Add([]byte(goodManifest + "x: &a [*a]\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := parseManifest(b, DefaultLimits()); err == nil && (m.Author == "" || m.Raw == nil) {
			t.Errorf("%+v", m)
		}
	})
}
