package demo

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// programs builds the three programs, once, as `make build` does.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "stockade-demo-programs-")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-trimpath", "-o", dir+"/", "../../cmd/stockade", "../../cmd/stockade-host", "../../cmd/testagent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		return "", &buildError{err, out}
	}
	return dir, nil
})

type buildError struct {
	err error
	out []byte
}

func (e *buildError) Error() string { return e.err.Error() + "\n" + string(e.out) }

// The whole demo, as a user sees it, with each agent, one after the other.
func TestDemo(t *testing.T) {
	need.Runc(t)
	dir, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
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
