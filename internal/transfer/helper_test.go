package transfer

import (
	"encoding/base64"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childDir); dir != "" {
		child(dir)
	}
	need.Main(m)
}

var (
	slotA = binding("a", 1)
	slotB = binding("b", 1)
)

func binding(installation string, revision int64) pluginwire.Context {
	return pluginwire.Context{InstanceUUID: "i", WorkspaceUUID: "w", PlacementGeneration: 1,
		InstallationUUID: installation, RuntimeRevision: revision, ArtifactDigest: strings.Repeat("0", 64)}
}

// legacy is what an older worker says of the same installation.
func legacy(b pluginwire.Context) pluginwire.Context {
	b.RuntimeRevision, b.ArtifactDigest = 0, ""
	return b
}

func open(t testing.TB, dir string, most int64) *Store {
	t.Helper()
	s, err := Open(Config{Dir: dir, MaxFileBytes: most})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func newKey(t testing.TB) string {
	t.Helper()
	key, err := NewKey("bin")
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// message is the data of a chunk as the published SDK writes it.
func message(key string, index, amount int, data []byte) json.RawMessage {
	raw, err := json.Marshal(map[string]any{"file_key": key, "file_length": 7, "chunk_base64": base64.StdEncoding.EncodeToString(data),
		"chunk_index": index, "chunk_amount": amount, "chunk_size": ChunkBytes})
	if err != nil {
		panic(err)
	}
	return raw
}

// push sends a whole file.
func push(h *Holder, key string, data []byte, from pluginwire.Context) error {
	amount := max(1, (len(data)+ChunkBytes-1)/ChunkBytes)
	for i := range amount {
		part := data[i*ChunkBytes : min(len(data), (i+1)*ChunkBytes)]
		if err := h.Chunk(message(key, i, amount, part), from); err != nil {
			return err
		}
	}
	return nil
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantCode(t testing.TB, what string, err error, code errdefs.Code) {
	t.Helper()
	if errdefs.CodeOf(err) != code {
		t.Errorf("%s: %v (%q), want %q", what, err, errdefs.CodeOf(err), code)
	}
}

func wantFile(t testing.TB, s *Store, key string, as pluginwire.Context, want string) {
	t.Helper()
	if got, err := s.Read(key, as); err != nil || string(got) != want {
		t.Errorf("read %s: %.40q, %v; want %.40q", key, got, err, want)
	}
}

// files is every name below a directory but the two that a store makes at once.
func files(t testing.TB, dir string) (names []string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if name, _ := filepath.Rel(dir, path); name != "." && name != ownersDir {
			names = append(names, name)
		}
		return err
	}))
	return names
}
