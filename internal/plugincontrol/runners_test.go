package plugincontrol

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"
	"unsafe"
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
		later := jump(t, now.Add(20*time.Second), by)
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

// jump is what time.Now would have returned had the wall clock been set by d before:
// the monotonic reading is the same.
func jump(t *testing.T, now time.Time, d time.Duration) time.Time {
	t.Helper()
	out := now
	// The first word of a time.Time with a monotonic reading holds the seconds of the
	// wall clock from bit 30 on.
	wall := (*uint64)(unsafe.Pointer(&out))
	*wall += uint64(d/time.Second) << 30
	if out.Sub(now) != 0 || out.Round(0).Sub(now.Round(0)) != d {
		t.Skip("this Go keeps its time otherwise")
	}
	return out
}
