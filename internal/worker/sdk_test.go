package worker

import (
	"bufio"
	"io"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
)

// TestRegisters: a genuine plugin under a genuine SDK asks to be registered, with
// its capability, and ends when its input does.
func TestRegisters(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5", "0.6", "0.7"} {
		i := sdk(t, series)
		t.Run(series+" direct", func(t *testing.T) {
			t.Parallel()
			registers(t, newDirect(t, i))
		})
		if series != "0.7" {
			t.Run(series+" box", func(t *testing.T) {
				t.Parallel()
				registers(t, newBox(t, i))
			})
		}
	}
	i := sdk(t, "0.7")
	need.EachRuntime(t, func(t *testing.T, path string) {
		t.Parallel()
		registers(t, newBox(t, i, with(t, path)))
	})
}

func registers(t *testing.T, r rig) {
	t.Helper()
	r.spec.Code = need.Testdata(t, "plugins", "kit")
	p := start(t, r, r.spec)
	said := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(p.Stderr)
		said <- string(b)
	}()
	out := bufio.NewReader(p.Stdout)
	var req struct {
		Action string
		Data   struct {
			Capability string `json:"registration_capability"`
			Prod       bool   `json:"prod_mode"`
		}
	}
	first := ""
	for {
		s, err := out.ReadString('\n')
		if err != nil {
			t.Fatalf("%v, after %q; it said: %s", err, s, <-said)
		}
		if strings.HasPrefix(s, "{") {
			first = s
			break
		}
	}
	decode(t, first, &req)
	if req.Action != "register_plugin" || !strings.Contains(first, capability) {
		t.Errorf("the first request is %s", first)
	}
	go io.Copy(io.Discard, out)
	o := p.Stop(0)
	if o.Err != nil || o.How == Unreaped {
		t.Errorf("%+v", o)
	}
	text, _ := p.Exit()
	t.Logf("%s: %s; %s", o.How, text, <-said)
}
