package pluginruntime

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// market is a marketplace on the loopback: the newest release is the last one added.
type market struct {
	url      string
	mu       sync.Mutex
	packages map[string][]byte // by author/name/version
	latest   map[string]string // by author/name
}

func newMarket(t *testing.T) *market {
	m := &market{packages: map[string][]byte{}, latest: map[string]string{}}
	srv := httptest.NewServer(m)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	m.url = srv.URL
	return m
}

func (m *market) add(author, name, version string, pack []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.packages[author+"/"+name+"/"+version], m.latest[author+"/"+name] = pack, version
}

func (m *market) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	rest, ok := strings.CutPrefix(r.URL.Path, "/api/v1/marketplace/plugins/")
	if file, download := strings.CutPrefix(rest, "download/"); ok && download {
		if pack, ok := m.packages[file]; ok {
			_, _ = w.Write(pack)
			return
		}
	} else if version, ok := m.latest[rest]; ok {
		author, name, _ := strings.Cut(rest, "/")
		_ = json.NewEncoder(w).Encode(M{"code": 0, "msg": "ok", "data": M{"plugin": M{
			"plugin_id": rest, "author": author, "name": name, "latest_version": version, "label": M{"en_US": name}, "description": M{"en_US": ""},
			"icon": "", "repository": "", "tags": nil, "install_count": 0, "status": "live", "deleted_at": nil,
			"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}}})
		return
	}
	http.Error(w, `{"code":404,"msg":"not found"}`, http.StatusNotFound)
}

// testPlugin is a plugin of testdata that is there; it fails the test where it is not.
func testPlugin(t *testing.T, name string) string {
	t.Helper()
	dir := need.Testdata(t, "plugins", name)
	if _, err := os.Stat(filepath.Join(dir, "manifest.yaml")); err != nil {
		t.Fatal(err)
	}
	return dir
}
