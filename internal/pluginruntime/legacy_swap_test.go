package pluginruntime

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// TestLegacySwap: an operator swaps the runtimes and goes back: what one has installed in
// data/plugins the other starts, upgrades and deletes.
func TestLegacySwap(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	version := func(n string) []byte {
		return plugintest.Pack(t, "kit", "version: 1.0.0", "version: "+n+".0.0", "langbot-plugin", "# none")
	}
	runs := func(r *live, n string) (*lbhost.Host, pluginwire.Context) {
		t.Helper()
		// The Python runtime answers nobody while it makes a .venv for each plugin that has
		// none: LangBot gives up after ten seconds, and connects again.
		var h *lbhost.Host
		until(t, "the handshake", func() (bool, error) {
			h = r.dial(lbhost.Config{})
			_, err := h.Handshake(t.Context(), h.Workspace("ws-1"))
			if err != nil {
				_ = h.Close()
			}
			return err == nil, err
		})
		bridge := lbhost.Bridge(h.Workspace("ws-1"))
		if n != "" {
			until(t, "version "+n, func() (bool, error) {
				all, err := h.ListPlugins(t.Context(), bridge)
				b, _ := json.Marshal(all)
				return len(all) == 1 && all[0]["status"] == "initialized" && strings.Contains(string(b), `"version":"`+n+`.0.0"`), err
			})
		}
		return h, bridge
	}
	end := func(r *live, h *lbhost.Host) {
		t.Helper()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	}
	ours := func() *live { return start(t, "0.7", func(c *Config) { c.DataDir = filepath.Join(dir, "data") }) }
	put := func(h *lbhost.Host, on pluginwire.Context, n string) {
		t.Helper()
		if frames, err := installLocal(t, h, on, version(n)); err != nil {
			t.Errorf("version %s: %s, %v", n, frames, err)
		}
	}

	r := ours()
	h, on := runs(r, "")
	put(h, on, "1")
	end(r, h)
	r = genuineIn(t, "0.7", dir)
	h, on = runs(r, "1")
	put(h, on, "2")
	end(r, h)
	r = ours()
	h, on = runs(r, "2")
	put(h, on, "3")
	end(r, h)
	r = genuineIn(t, "0.7", dir)
	h, on = runs(r, "3")
	if _, err := h.Frames(t.Context(), pluginwire.ActionDeletePlugin, lbhost.Of("stockade", "kit"), on); err != nil {
		t.Error(err)
	}
	end(r, h)
	r = ours()
	h, on = runs(r, "")
	if all, err := h.ListPlugins(t.Context(), on); err != nil || len(all) != 0 {
		t.Errorf("a deleted plugin is back: %v, %v", all, err)
	}
	end(r, h)
}
