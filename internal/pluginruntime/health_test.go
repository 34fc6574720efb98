package pluginruntime

import "testing"

// TestProcessNumbers (OM-01): memory and processor time are read whatever the process
// calls itself, and left out where they cannot be read.
func TestProcessNumbers(t *testing.T) {
	t.Parallel()
	const rest = " S 1 2 3 0 -1 0 0 0 0 0 100 50 0 0 20 0 8 0 12345 1000000 700 18446744073709551615"
	for line, want := range map[string]struct {
		rss int64
		cpu float64
		ok  bool
	}{
		"7 (stockade)" + rest:          {700 * 4096, 1.5, true},
		"7 (a b) c) (d)" + rest:        {700 * 4096, 1.5, true},
		"7 (\xff\n)" + rest + " 1 2\n": {700 * 4096, 1.5, true},
		"":                             {},
		"7 (stockade":                  {},
		"7 (stockade) S 1 2":           {},
		"7 (x) S 1 2 3 0 -1 0 0 0 0 0 many 50 0 0 20 0 8 0 12345 1000000 700": {},
	} {
		rss, cpu, ok := parseStat([]byte(line), 4096)
		if ok != want.ok || ok && (rss != want.rss || cpu != want.cpu) {
			t.Errorf("%q: %d, %v, %v", line, rss, cpu, ok)
		}
	}
	if rss, cpu, ok := usage(); !ok || rss <= 0 || cpu < 0 {
		t.Errorf("of this process: %d, %v, %v", rss, cpu, ok)
	}
}
