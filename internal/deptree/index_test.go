package deptree

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
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

// dist is one file of an index.
type dist struct {
	file    string // as "toy-1.0-py3-none-any.whl"
	content []byte
	hash    string // said; "" is the true one
}

// wheel makes a wheel by hand (binary distribution format, PEP 427). Files are
// besides the module and the metadata.
func wheel(t testing.TB, name, version string, requires []string, files map[string]string) dist {
	t.Helper()
	all := map[string]string{
		name + "/__init__.py":                        "VERSION = '" + version + "'\n",
		name + "-" + version + ".dist-info/METADATA": "Metadata-Version: 2.1\nName: " + name + "\nVersion: " + version + "\n" + requiresLines(requires),
		name + "-" + version + ".dist-info/WHEEL":    "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
	}
	for f, c := range files {
		all[f] = c
	}
	var record strings.Builder
	for f, c := range all {
		sum := sha256.Sum256([]byte(c))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f, base64.RawURLEncoding.EncodeToString(sum[:]), len(c))
	}
	self := name + "-" + version + ".dist-info/RECORD"
	all[self] = record.String() + self + ",,\n"
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for f, c := range all {
		w, err := z.Create(f)
		if err == nil {
			_, err = w.Write([]byte(c))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return dist{file: name + "-" + version + "-py3-none-any.whl", content: b.Bytes()}
}

func requiresLines(requires []string) string {
	var b strings.Builder
	for _, r := range requires {
		if _, extra, ok := strings.Cut(r, "extra == "); ok {
			b.WriteString("Provides-Extra: " + strings.Trim(extra, "'") + "\n")
		}
		b.WriteString("Requires-Dist: " + r + "\n")
	}
	return b.String()
}

// sdist makes a source distribution with a build backend of its own that puts the
// given wheel out, so that nothing else is needed to build it (PEP 517).
func sdist(t testing.TB, name, version string, built dist) dist {
	t.Helper()
	backend := `import os, shutil
HERE = os.path.dirname(os.path.abspath(__file__))
def get_requires_for_build_wheel(config_settings=None):
    return []
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    shutil.copy(os.path.join(HERE, "built.whl"), os.path.join(wheel_directory, "` + built.file + `"))
    return "` + built.file + `"
`
	var b bytes.Buffer
	gz := gzip.NewWriter(&b)
	w := tar.NewWriter(gz)
	root := name + "-" + version + "/"
	for f, c := range map[string]string{
		"PKG-INFO":       "Metadata-Version: 2.1\nName: " + name + "\nVersion: " + version + "\n",
		"pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = \"backend\"\nbackend-path = [\".\"]\n[project]\nname = \"" + name + "\"\nversion = \"" + version + "\"\n",
		"backend.py":     backend,
		"built.whl":      string(built.content),
	} {
		if err := w.WriteHeader(&tar.Header{Name: root + f, Mode: 0o644, Size: int64(len(c)), Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(c)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := gz.Close(); err != nil {
		t.Fatal(err)
	}
	return dist{file: name + "-" + version + ".tar.gz", content: b.Bytes()}
}

// index is a simple repository (PEP 503) on the loopback.
type index struct {
	url   string // of the repository, without credentials
	addr  string
	hits  atomic.Int64
	dists map[string]dist
	stall chan struct{} // if not nil, files are not sent before it is closed
	auth  string        // "user:password" that is asked for; "" for none
	// onFile is called when a file is asked for; set while nobody asks.
	onFile func()
}

func newIndex(t testing.TB, dists ...dist) *index {
	t.Helper()
	x := &index{dists: map[string]dist{}}
	for _, d := range dists {
		x.dists[d.file] = d
	}
	srv := httptest.NewServer(x)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	x.addr = srv.Listener.Addr().String()
	x.url = "http://" + x.addr + "/simple/"
	return x
}

// downIndex is the URL of an index that refuses connections.
const downIndex = "http://127.0.0.1:1/simple/" // tcpmux, which nobody serves

func (x *index) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	x.hits.Add(1)
	if user, pass, _ := r.BasicAuth(); x.auth != "" && user+":"+pass != x.auth {
		w.Header().Set("WWW-Authenticate", `Basic realm="index"`)
		http.Error(w, "who are you", http.StatusUnauthorized)
		return
	}
	if file, ok := strings.CutPrefix(r.URL.Path, "/files/"); ok {
		d, ok := x.dists[file]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if x.onFile != nil {
			x.onFile()
		}
		if x.stall != nil {
			select {
			case <-x.stall:
			case <-r.Context().Done():
			}
		}
		_, _ = w.Write(d.content)
		return
	}
	name := path.Base(r.URL.Path)
	w.Header().Set("Content-Type", "text/html")
	found := false
	for _, d := range x.dists {
		dn, _, _ := strings.Cut(d.file, "-")
		if strings.ReplaceAll(dn, "_", "-") != name {
			continue
		}
		found = true
		hash := d.hash
		if hash == "" {
			sum := sha256.Sum256(d.content)
			hash = hex.EncodeToString(sum[:])
		}
		fmt.Fprintf(w, "<a href=\"/files/%s#sha256=%s\">%s</a>\n", d.file, hash, d.file)
	}
	if !found {
		http.NotFound(w, r)
	}
}
