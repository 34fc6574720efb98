package storetest_test

import (
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/store/storetest"
)

func TestMain(m *testing.M) { need.Main(m) }

// The model keeps the promises itself.
func TestMemory(t *testing.T) {
	t.Parallel()
	storetest.Run(t, storetest.Config{Open: func(testing.TB) store.Store { return storetest.NewMemory() }})
}
