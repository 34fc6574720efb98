package sqlite

import (
	"path/filepath"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/storetest"
)

func TestMain(m *testing.M) {
	if crashChild() {
		return
	}
	need.Main(m)
}

func open(t testing.TB, cfg Config) *Store {
	t.Helper()
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformance(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Config{
		Open: func(t testing.TB) store.Store {
			return open(t, Config{Path: filepath.Join(t.TempDir(), "state", "ledger.db")})
		},
		Reopen: func(t testing.TB, s store.Store) store.Store {
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			return open(t, Config{Path: s.(*Store).path})
		},
	})
}
