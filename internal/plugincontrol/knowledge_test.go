package plugincontrol

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"

	"github.com/stockade-run/stockade/internal/pluginwire"
)

// The plugins with engines are asked at the same time: one that hangs costs LangBot no
// more than itself. The list keeps their order, and who fails is in it.
func TestKnowledgeEnginesAreAskedAtTheSameTime(t *testing.T) {
	t.Parallel()
	const n = 4
	var all sync.WaitGroup
	all.Add(n)
	var plugins []Plugin
	for i := range n {
		p := plugin(string(rune('k'+i)), 0, KindTool, KindKnowledgeEngine)
		p.answer = func(_ context.Context, _ string, _ json.RawMessage) (string, error) {
			all.Done()
			all.Wait()
			if i == 1 {
				return "", errors.New("it hung")
			}
			return `{"capabilities":["` + p.name + `"]}`, nil
		}
		plugins = append(plugins, p, plugin("none"+p.name, 0, KindTool))
	}
	raw, err := open(t, pluginwire.ProfileOSS, plugins...).ready(t).ask(t, pluginwire.ActionListKnowledgeEngines, `{}`)
	if err != nil {
		t.Fatal(err)
	}
	var out struct {
		Engines []struct {
			ID           string   `json:"plugin_id"`
			Capabilities []string `json:"capabilities"`
		}
	}
	if err := json.Unmarshal([]byte(raw), &out); err != nil || len(out.Engines) != n {
		t.Fatalf("%s %v", raw, err)
	}
	for i, e := range out.Engines {
		name := string(rune('k' + i))
		if e.ID != "a/"+name || (i == 1) != (len(e.Capabilities) == 0) || i != 1 && e.Capabilities[0] != name {
			t.Errorf("engine %d: %+v", i, e)
		}
	}
}
