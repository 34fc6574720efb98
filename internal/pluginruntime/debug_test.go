package pluginruntime

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// TestPluginUnderDevelopment: an author's "lbp run" connects with the key that
// LangBot was told, is called under the bridge of the Workspace, and is gone with
// its process; a wrong key opens nothing.
func TestPluginUnderDevelopment(t *testing.T) {
	t.Parallel()
	for _, sdk := range series {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := start(t, sdk, nil)
			script := lbhost.NewScript()
			script.Set("stockade/kit", M{"greeting": "debug"})
			h := r.connect(lbhost.Config{Script: script})
			bridge := lbhost.Bridge(h.Workspace("ws-1"))
			info, err := h.DebugInfo(t.Context(), h.Workspace("ws-1"))
			if err != nil {
				t.Fatal(err)
			}
			stop := author(t, sdk, r.at.Plugin, info.Key)
			seen := func() (int, error) {
				all, err := h.ListPlugins(t.Context(), bridge)
				if len(all) == 1 && (all[0]["debug"] != true || all[0]["status"] != "initialized") {
					return 0, err
				}
				return len(all), err
			}
			until(t, "the plugin under development", func() (bool, error) { n, err := seen(); return n == 1, err })
			if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "bots"}); err != nil || !strings.Contains(string(got), "bot-1") {
				t.Errorf("%s, %v", got, err)
			}
			asked := script.Asked(pluginwire.ActionGetBots)
			if len(asked) != 1 || asked[0].Context.WorkspaceUUID != "ws-1" || asked[0].Context.InstallationUUID == "" || asked[0].Context.IsBinding() {
				t.Errorf("LangBot was asked %v", asked)
			}
			if first := script.Asked(pluginwire.ActionInitializePluginSettings); len(first) != 1 || first[0].Field("install_source") != "debug" {
				t.Errorf("its settings were made by %v", first)
			}
			// A file that LangBot pushes under the plugin's own context.
			script.File("/docs/a", []byte(strings.Repeat("x", 50000)))
			if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "file", "path": "/docs/a"}); err != nil || !strings.Contains(string(got), "50000") {
				t.Errorf("%.100s, %v", got, err)
			}
			stop()
			until(t, "the plugin gone", func() (bool, error) { n, err := seen(); return n == 0, err })
		})
	}
}

// author runs "lbp run" in a copy of the kit, as its author does, until stop.
func author(t *testing.T, sdk, url, key string) (stop func()) {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS(need.Testdata(t, "plugins", "kit"))); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(need.SDK(t, sdk), "-m", "langbot_plugin.cli.__init__", "run")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBUG_RUNTIME_WS_URL="+url, "PLUGIN_DEBUG_KEY="+key, "PYTHONDONTWRITEBYTECODE=1",
		"HOME="+filepath.Join(dir, "home"))
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("lbp run said: %s", said.String())
		}
	})
	return stop
}
