package host_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/stockade-run/stockade/internal/host/hosttest"
)

func TestMain(m *testing.M) {
	os.Exit(hosttest.Main(func() int {
		code := m.Run()
		if err := goleak.Find(); code == 0 && err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			return 1
		}
		return code
	}))
}
