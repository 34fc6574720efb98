package pluginruntime

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// TestGrants: what an operator may write, and that half of it is refused.
func TestGrants(t *testing.T) {
	t.Parallel()
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("a-key\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		url, key string
		plugins  []string
		text     string // of the refusal
	}{
		"nothing":                 {},
		"a broker and no one":     {url: "http://127.0.0.1:7717", key: key},
		"two plugins":             {url: "http://127.0.0.1:7717", key: key, plugins: []string{"a/b", "c/d"}},
		"all":                     {url: "http://127.0.0.1:7717", key: key, plugins: []string{"all"}},
		"no broker":               {plugins: []string{"a/b"}, text: "--broker-url"},
		"no key":                  {url: "http://127.0.0.1:7717", plugins: []string{"a/b"}, text: "--broker-key-file"},
		"a key for nobody":        {key: key, text: "--broker-url"},
		"no author":               {url: "http://127.0.0.1:7717", key: key, plugins: []string{"b"}, text: `"b"`},
		"a name with a stroke":    {url: "http://127.0.0.1:7717", key: key, plugins: []string{"a/b/c"}, text: `"a/b/c"`},
		"a key that is not there": {url: "http://127.0.0.1:7717", key: key + "x", plugins: []string{"a/b"}, text: key + "x"},
		"no address":              {url: "127.0.0.1:7717", key: key, plugins: []string{"a/b"}, text: "address"},
	} {
		cfg := Default()
		cfg.BrokerURL, cfg.BrokerKeyFile, cfg.RunnerProcess = c.url, c.key, c.plugins
		err := cfg.Validate()
		if err == nil {
			k, perr := cfg.processes("test", slog.New(slog.DiscardHandler))
			if (k != nil) != (perr == nil && len(c.plugins) > 0) {
				t.Errorf("%s: %v, %v", name, k, perr)
			}
			if err = perr; k != nil {
				if err := k.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}
		if c.text == "" && err != nil || c.text != "" && (err == nil || !strings.Contains(err.Error(), c.text) || errdefs.CodeOf(err) == errdefs.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
