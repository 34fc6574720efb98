package pluginlegacy

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashAt) != "" {
		crash() // does not return
	}
	goleak.VerifyTestMain(m)
}
