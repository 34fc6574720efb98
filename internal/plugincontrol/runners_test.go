package plugincontrol

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/plugintest"
)

// TestClockJumps: a run's deadline, which LangBot says by the wall clock, is as far
// away as it was when the run began, wherever that clock jumps meanwhile.
func TestClockJumps(t *testing.T) {
	t.Parallel()
	now := time.Now()
	run, err := readObject(json.RawMessage(fmt.Sprintf(`{"runtime":{"deadline_at":%f}}`, float64(now.UnixMicro())/1e6+60)), "the test")
	if err != nil {
		t.Fatal(err)
	}
	at := deadline(run, now)
	for _, by := range []time.Duration{-48 * time.Hour, 0, 48 * time.Hour} {
		later := plugintest.Jump(t, now.Add(20*time.Second), by)
		if left := frameTimeout(at, later); left < 40*time.Second || left > 42*time.Second {
			t.Errorf("after a jump by %s %s are left", by, left)
		}
	}
	for _, none := range []string{`{}`, `{"runtime":{"deadline_at":null}}`, `{"runtime":{"deadline_at":"x"}}`, `{"runtime":{"deadline_at":-1}}`, `{"runtime":{"deadline_at":1e300}}`} {
		run, err := readObject(json.RawMessage(none), "the test")
		if err != nil {
			t.Fatal(err)
		}
		if at := deadline(run, now); !at.IsZero() {
			t.Errorf("%s: %s", none, at)
		}
	}
}
