package bench

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
)

// The test binary is also the hub that is measured.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "bench" && os.Args[2] == "relay-hub" {
		cfg := RelayHubConfig{Token: benchToken, ToolTime: time.Second}
		for i, a := range os.Args {
			if a == "--state" {
				cfg.StateDir = os.Args[i+1]
			}
		}
		if err := ServeRelayHub(context.Background(), cfg, os.Stdin, os.Stdout); err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	need.Main(m)
}

func small(t *testing.T) RelayConfig {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return RelayConfig{Stockade: exe, Dir: t.TempDir(), Events: 2000, Daemons: 5, Idle: 20, Empty: 20, Stalled: 1 << 20, ToolTime: time.Second}
}

// TestRelayBenchMeasures runs the whole bench with small numbers: every figure is
// there, what must hold whatever the machine does holds, and nothing is left.
func TestRelayBenchMeasures(t *testing.T) {
	t.Parallel()
	cfg := small(t)
	cfg.Python = filepath.Join(cfg.Dir, "no-python")
	r, err := RunRelay(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 18 {
		t.Errorf("%d figures", len(r.Results))
	}
	for _, x := range r.Results {
		switch {
		case strings.HasPrefix(x.Name, "daemons fenced"):
			if x.Value != 0 {
				t.Errorf("%s: %v", x.Name, x.Value)
			}
		case strings.HasPrefix(x.Name, "an event and a payload"):
			if x.Value != 1 {
				t.Errorf("%s: %v", x.Name, x.Value)
			}
		case strings.Contains(x.Name, "/s"), strings.HasPrefix(x.Name, "events"), strings.HasPrefix(x.Name, "empty"):
			if x.Value <= 0 {
				t.Errorf("%s: %v", x.Name, x.Value)
			}
		}
		if x.Baseline != 0 || !strings.Contains(x.Note, "no baseline") {
			t.Errorf("%s: a baseline without an interpreter: %+v", x.Name, x)
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(filepath.Join(cfg.Dir, "state-stockade")); strings.Contains(names(left), ".pending") {
		t.Errorf("a marker was left: %s", names(left))
	}
}

// TestPythonHubIsMeasured runs the baseline through the same, and sees the faults
// it is there to show.
func TestPythonHubIsMeasured(t *testing.T) {
	t.Parallel()
	need.Tool(t, "python3", "python3-venv")
	dir, err := filepath.Abs("../../.cache/relay-venv")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("sh", "../relay/testdata/venv.sh", dir).Output()
	need.That(t, err == nil, "this test needs the Python library websockets: apt-get install python3-venv, and a package index it can be had from: %v", err)
	cfg := small(t).withDefaults()
	cfg.Python = strings.TrimSpace(string(out))
	argv, err := pythonHub(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	f, err := measureRelay(t.Context(), cfg, "Python", argv)
	if err != nil {
		t.Fatal(err)
	}
	if f.carried || f.rate[200] <= 0 || f.durable <= 0 || f.cancel <= 0 {
		t.Errorf("%+v", f)
	}
}

func names(entries []os.DirEntry) string {
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return strings.Join(all, " ")
}

func TestAHubThatDoesNotStartSaysWhy(t *testing.T) {
	t.Parallel()
	_, err := startHub(t.Context(), "broken", []string{"sh", "-c", "echo it is broken >&2; exit 3"})
	if err == nil || !strings.Contains(err.Error(), "it is broken") {
		t.Errorf("%v", err)
	}
}
