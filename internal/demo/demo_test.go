package demo

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// The whole demo, as a user sees it, with each agent, one after the other.
func TestDemo(t *testing.T) {
	need.Runc(t)
	dir := t.TempDir()
	need.Programs(t, dir)
	for _, agent := range Agents() {
		t.Run(agent, func(t *testing.T) {
			if agent != agentTest {
				agents(t)
			}
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			var out bytes.Buffer
			err := Run(t.Context(), Config{
				Agent: agent, Stockade: filepath.Join(dir, "stockade"), Out: &out,
				Env: func(string) string { return "" }, // never a real account
			})
			t.Log(out.String())
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{"all tests pass", "not one byte is missing", "has taken over: same handle", "the signature is good", "nothing is left", "In short"} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("the story lacks %q", want)
				}
			}
			if strings.Contains(out.String(), "\x1b") || strings.Contains(out.String(), "demo-key-") {
				t.Error("the story holds colour or a key")
			}
			if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
				t.Errorf("left in the temporary directory: %v %v", left, err)
			}
		})
	}
}
