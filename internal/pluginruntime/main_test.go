package pluginruntime

import (
	"flag"
	machine "runtime"
	"strconv"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) {
	// The test of a killed runtime does little but wait, for more than a minute: it does
	// not take the place of one that works.
	_ = flag.Set("test.parallel", strconv.Itoa(machine.GOMAXPROCS(0)+1))
	need.Main(m)
}
