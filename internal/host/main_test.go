package host_test

import (
	"os"
	"testing"

	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) {
	os.Exit(hosttest.Main(func() int { return need.Run(m) }))
}
