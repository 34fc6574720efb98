package pluginruntime

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/artifact"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// installLocal installs a package as LangBot does with a file.
func installLocal(t *testing.T, h *lbhost.Host, on pluginwire.Context, pack []byte) ([]json.RawMessage, error) {
	t.Helper()
	key, err := h.Push(t.Context(), pack, "lbpkg", on)
	if err != nil {
		t.Fatal(err)
	}
	return h.Frames(t.Context(), pluginwire.ActionInstallPlugin, M{"install_source": "local", "install_info": M{"plugin_file_key": key}}, on)
}

// TestBuiltPackages: what "lbp build" of each SDK makes is installed as it is, and its
// requirement of the SDK is met by the runtime's: nothing is asked of an index. Over the
// last of them a version that does not start is undone, and the old one runs again
// (LM-17).
func TestBuiltPackages(t *testing.T) {
	t.Parallel()
	for _, sdk := range series {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(testPlugin(t, "kit"))); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(need.SDK(t, sdk), "-m", "langbot_plugin.cli.__init__", "build")
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("lbp build: %v: %s", err, out)
			}
			built, err := filepath.Glob(filepath.Join(dir, "dist", "*.lbpkg"))
			if err != nil || len(built) != 1 {
				t.Fatalf("lbp build made %v, %v", built, err)
			}
			pack, err := os.ReadFile(built[0])
			if err != nil {
				t.Fatal(err)
			}
			r := start(t, sdk, func(c *Config) { c.IndexURL = "http://127.0.0.1:1/simple/" })
			h := r.connect(lbhost.Config{})
			bridge := lbhost.Bridge(h.Workspace("ws-1"))
			if frames, err := installLocal(t, h, bridge, pack); err != nil || !strings.Contains(string(frames[2]), `"already_installed":1`) {
				t.Fatalf("%s, %v", frames, err)
			}
			answers := func() {
				t.Helper()
				if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "bots"}); err != nil || !strings.Contains(string(got), "bot-1") {
					t.Errorf("%s, %v", got, err)
				}
			}
			answers()
			if sdk != "0.7" {
				return
			}
			_, err = installLocal(t, h, bridge, plugintest.Pack(t, "kit", "version: 1.0.0", "version: 2.0.0", "main.py", "nomain.py"))
			if err == nil || !strings.Contains(err.Error(), "RuntimeError: Plugin stockade/kit did not become ready within 30s: ") {
				t.Errorf("a version that does not start: %v", err)
			}
			until(t, "the old version running", func() (bool, error) {
				all, err := h.ListPlugins(t.Context(), bridge)
				b, _ := json.Marshal(all)
				return len(all) == 1 && all[0]["status"] == "initialized" && strings.Contains(string(b), `"version":"1.0.0"`), err
			})
			answers()
			for _, d := range []string{".plugin-staging", ".plugin-backups"} {
				if left, err := os.ReadDir(filepath.Join(r.dir, d)); err != nil || len(left) != 0 {
					t.Errorf("%s holds %v, %v", d, left, err)
				}
			}
		})
	}
}

// TestLegacyDependencies: dependencies come from the index by the runtime's installer;
// one that cannot be had is told by name, with its class, and the old version runs on
// (LM-18).
func TestLegacyDependencies(t *testing.T) {
	t.Parallel()
	index := plugintest.NewIndex(t, plugintest.NewWheel(t, "toy_dep", "1.0"))
	r := start(t, "0.7", func(c *Config) {
		c.IndexURL, c.Uv = index.URL, "none" // pip
	})
	h := r.connect(lbhost.Config{})
	bridge := lbhost.Bridge(h.Workspace("ws-1"))
	if frames, err := installLocal(t, h, bridge, plugintest.Pack(t, "kit", "langbot-plugin", "langbot-plugin\ntoy-dep==1.0")); err != nil {
		t.Fatalf("%s, %v", frames, err)
	}
	site, err := filepath.Glob(filepath.Join(r.dir, "plugins/stockade__kit/.venv/lib/python*/site-packages/toy_dep"))
	if err != nil || len(site) != 1 {
		t.Errorf("the dependency is not in the plugin's environment: %v, %v", site, err)
	}
	if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "env"}); err != nil || !strings.Contains(string(got), "stockade__kit/.venv/lib/python") {
		t.Errorf("the worker does not see it: %s, %v", got, err)
	}
	_, err = installLocal(t, h, bridge, plugintest.Pack(t, "kit", "version: 1.0.0", "version: 2.0.0", "langbot-plugin", "toy-dep==9"))
	if err == nil || !strings.Contains(err.Error(), "DependencyInstallError: Plugin stockade/kit failed to install 1 dependencies: ['toy-dep==9']") {
		t.Errorf("%v", err)
	}
	if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "bots"}); err != nil || !strings.Contains(string(got), "bot-1") {
		t.Errorf("%s, %v", got, err)
	}
}

// TestUseIsRecorded: what installations used is known when the runtime has ended, so
// that "stockade artifact gc" keeps it and nothing else.
func TestUseIsRecorded(t *testing.T) {
	t.Parallel()
	r := start(t, "0.7", nil)
	kept, gone := install(workspace("ws-1"), "kit-1", "kit")(t), install(workspace("ws-1"), "pool-1", "pool")(t)
	h := r.connect(lbhost.Config{}, kept, gone)
	state, err := h.Apply(t.Context(), kept)
	if err != nil || state.ErrorCode != "" {
		t.Fatalf("%+v, %v", state, err)
	}
	if _, err := h.Remove(t.Context(), gone.Binding); err != nil {
		t.Fatal(err)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	use, ok, err := artifact.LoadUse(filepath.Join(r.dir, "plugin-runtime"))
	if err != nil || !ok || len(use.Artifacts) != 1 || use.Artifacts[0] != kept.Binding.ArtifactDigest ||
		len(use.Trees) != 1 || use.Trees[0] != state.DependencyEnvironmentDigest {
		t.Errorf("%+v, %v, %v", use, ok, err)
	}
}
