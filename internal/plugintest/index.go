package plugintest

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync/atomic"
	"testing"
)

// Wheel is a built distribution for an [Index].
type Wheel struct {
	File    string // as toy-1.0-py3-none-any.whl
	Content []byte
}

// NewWheel makes a wheel (PEP 427) of one module that has the distribution's name and
// a VERSION.
func NewWheel(t testing.TB, name, version string) Wheel {
	t.Helper()
	info := name + "-" + version + ".dist-info/"
	files := [][2]string{
		{name + "/__init__.py", "VERSION = '" + version + "'\n"},
		{info + "METADATA", "Metadata-Version: 2.1\nName: " + name + "\nVersion: " + version + "\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
	}
	record := ""
	for _, f := range files {
		sum := sha256.Sum256([]byte(f[1]))
		record += fmt.Sprintf("%s,sha256=%s,%d\n", f[0], base64.RawURLEncoding.EncodeToString(sum[:]), len(f[1]))
	}
	files = append(files, [2]string{info + "RECORD", record + info + "RECORD,,\n"})
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range files {
		w, err := z.Create(f[0])
		if err == nil {
			_, err = w.Write([]byte(f[1]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return Wheel{File: name + "-" + version + "-py3-none-any.whl", Content: b.Bytes()}
}

// Index is a package index on the loopback (PEP 503).
type Index struct {
	URL   string
	Files atomic.Int64 // how many files were handed out
}

// NewIndex serves wheels until the test ends.
func NewIndex(t testing.TB, wheels ...Wheel) *Index {
	t.Helper()
	x := &Index{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if file, ok := strings.CutPrefix(r.URL.Path, "/files/"); ok {
			for _, d := range wheels {
				if d.File == file {
					x.Files.Add(1)
					_, _ = w.Write(d.Content)
					return
				}
			}
		}
		w.Header().Set("Content-Type", "text/html")
		found := false
		for _, d := range wheels {
			name, _, _ := strings.Cut(d.File, "-")
			if strings.ReplaceAll(name, "_", "-") == path.Base(r.URL.Path) {
				found = true
				sum := sha256.Sum256(d.Content)
				fmt.Fprintf(w, "<a href=\"/files/%s#sha256=%s\">%s</a>\n", d.File, hex.EncodeToString(sum[:]), d.File)
			}
		}
		if !found {
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	x.URL = srv.URL + "/simple/"
	return x
}
