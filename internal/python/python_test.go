package python

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

func pretend(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python3")
	need.Program(t, path, "#!/bin/sh\n"+body)
	return path
}

func TestProbe(t *testing.T) {
	t.Parallel()
	path := need.Tool(t, "python3", "python3")
	i, err := Probe(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if !filepath.IsAbs(i.Path) || !filepath.IsAbs(i.Prefix) || !filepath.IsAbs(i.BasePrefix) || !strings.HasPrefix(i.Version, "3.") ||
		!strings.HasPrefix(i.FullVersion, i.Version+".") || i.Implementation == "" || i.CacheTag == "" {
		t.Errorf("%+v", i)
	}
	again, err := Probe(t.Context(), i.Path)
	if err != nil || again != i {
		t.Errorf("asked by its own path it says %+v, %v; not %+v", again, err, i)
	}
	if (i.SDK == "") != (i.CheckSDK() != nil) {
		t.Errorf("SDK %q, %v", i.SDK, i.CheckSDK())
	}
	if !strings.HasPrefix(i.String(), "Python 3.") {
		t.Error(i)
	}
}

func TestProbeRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ path, word string }{
		"missing":      {filepath.Join(t.TempDir(), "none"), "no Python interpreter"},
		"fails":        {pretend(t, "echo broken installation >&2; exit 3"), "broken installation"},
		"says nothing": {pretend(t, "exit 0"), "does not answer as"},
		"says another": {pretend(t, `echo '{"executable":"python3"}'`), "where it is"},
		"no version":   {pretend(t, `echo '{"executable":"/p","prefix":"/p","base_prefix":"/p"}'`), "version"},
		"floods":       {pretend(t, "while echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; do n=$((n+1)); [ $n -gt 5000 ] && exit; done"), "does not answer as"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Probe(t.Context(), c.path)
			if !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), c.word) {
				t.Errorf("%v", err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Probe(ctx, pretend(t, "sleep 60")); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("%v", err)
	}
	if err := (Interpreter{Path: "/p"}).CheckSDK(); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("%v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"executable":"/usr/bin/python3","prefix":"/usr","base_prefix":"/usr","version":"3.11","implementation":"cpython","import_root":"/usr/lib","sdk":"0.7.18"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := parse(b)
		if err == nil && (!filepath.IsAbs(i.Path) || i.ImportRoot != "" && !filepath.IsAbs(i.ImportRoot)) {
			t.Errorf("%+v", i)
		}
	})
}
