package tenant

import (
	"path/filepath"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/store/sqlite"
)

// BenchmarkAuthenticate is what every request pays.
func BenchmarkAuthenticate(b *testing.B) {
	s, err := sqlite.Open(b.Context(), sqlite.Config{Path: filepath.Join(b.TempDir(), "ledger.db")})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	svc := New(Config{Store: s})
	if _, err := svc.CreateWorkspace(b.Context(), admin, api.WorkspaceRequest{Name: "w"}); err != nil {
		b.Fatal(err)
	}
	k, err := svc.CreateKey(b.Context(), admin, "w", api.KeyRequest{})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := svc.Authenticate(b.Context(), k.Secret); err != nil {
			b.Fatal(err)
		}
	}
}
