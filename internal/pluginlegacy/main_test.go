package pluginlegacy

import (
	"os"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashAt) != "" {
		crash() // does not return
	}
	need.Main(m)
}
