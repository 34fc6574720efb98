package plugincontrol

import (
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }
