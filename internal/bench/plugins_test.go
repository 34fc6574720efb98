package bench

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
)

// TestRuntimeBenchMeasures runs the whole bench of the Plugin Runtime with small
// numbers: every figure is there and measured, of both runtimes.
func TestRuntimeBenchMeasures(t *testing.T) {
	t.Parallel()
	need.Runc(t)
	python := need.SDK(t, "0.7")
	programs := t.TempDir()
	need.Programs(t, programs)
	r, err := RunRuntime(t.Context(), RuntimeConfig{
		Stockade: filepath.Join(programs, "stockade"), Dir: t.TempDir(), Python: python,
		Calls: 40, Dedicated: 2, Slots: 3, Events: 5, Frames: 50, FileBytes: 256 << 10, Idle: 100 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 14 {
		t.Errorf("%d figures", len(r.Results))
	}
	for _, x := range r.Results {
		switch x.Unit {
		case "/s", "MiB/s", "MiB":
			if x.Value <= 0 || x.Baseline <= 0 {
				t.Errorf("%s: %v against %v", x.Name, x.Value, x.Baseline)
			}
		}
	}
}

// TestRuntimeBenchSaysWhatItNeeds: an interpreter without the SDK is refused with
// what to do.
func TestRuntimeBenchSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	_, err := RunRuntime(t.Context(), RuntimeConfig{Stockade: "stockade", Dir: t.TempDir(), Python: filepath.Join(t.TempDir(), "python")})
	if err == nil {
		t.Fatal("it ran without Python")
	}
}
