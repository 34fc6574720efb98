package pluginruntime

import (
	"context"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// shape is what a peer relies on in progress frames: the actions in their order, with
// the names of their metadata.
func shape(frames []json.RawMessage) []string {
	var out []string
	for _, f := range frames {
		var p struct {
			Action   string         `json:"current_action"`
			Metadata map[string]any `json:"metadata"`
		}
		if err := json.Unmarshal(f, &p); err != nil {
			out = append(out, err.Error())
			continue
		}
		line := p.Action
		if p.Metadata != nil {
			line += " {" + strings.Join(slices.Sorted(maps.Keys(p.Metadata)), " ") + "}"
		}
		out = append(out, line)
	}
	return out
}

// legacyStep is one action of the life of a plugin of data/plugins and what
// LangBot was told of it.
type legacyStep struct {
	what   string
	frames []string
	err    string
}

func oldProfile(t *testing.T, r *live) []legacyStep {
	t.Helper()
	script := lbhost.NewScript()
	script.Set("stockade/kit", M{"greeting": "old"})
	market := newMarket(t)
	market.add("stockade", "kit", "1.0.0", plugintest.Pack(t, "kit", "langbot-plugin", "# none"))
	market.add("stockade", "kit", "2.0.0", plugintest.Pack(t, "kit", "version: 1.0.0", "version: 2.0.0", "langbot-plugin", "# none"))
	h := r.connect(lbhost.Config{Script: script, CloudURL: market.url})
	bridge := lbhost.Bridge(h.Workspace("ws-1"))
	kit := lbhost.Of("stockade", "kit")
	var all []legacyStep
	do := func(what, action string, data M) {
		t.Helper()
		frames, err := h.Frames(t.Context(), action, data, bridge)
		one := legacyStep{what: what, frames: shape(frames)}
		if err != nil {
			one.err = err.Error()
		}
		all = append(all, one)
	}
	local := func(what string, pack []byte) {
		t.Helper()
		key, err := h.Push(t.Context(), pack, "lbpkg", bridge)
		if err != nil {
			t.Fatal(err)
		}
		do(what, pluginwire.ActionInstallPlugin, M{"install_source": "local", "install_info": M{"plugin_file_key": key, "workspace_uuid": "forged"}})
	}
	market1 := M{"install_source": "marketplace", "install_info": M{"plugin_author": "stockade", "plugin_name": "kit", "plugin_version": "1.0.0"}}

	do("delete what is not there", pluginwire.ActionDeletePlugin, kit)
	do("upgrade what is not there", pluginwire.ActionUpgradePlugin, kit)
	local("install", plugintest.Pack(t, "kit", "langbot-plugin", "toy-dep==1.0"))
	version := func(want string) {
		t.Helper()
		until(t, "version "+want, func() (bool, error) {
			list, err := h.ListPlugins(t.Context(), bridge)
			if err != nil || len(list) != 1 || list[0]["status"] != "initialized" {
				return false, err
			}
			b, err := json.Marshal(list[0]["manifest"])
			return strings.Contains(string(b), `"version":"`+want+`"`), err
		})
		if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "bots"}); err != nil || !strings.Contains(string(got), "bot-1") {
			t.Errorf("%s, %v", got, err)
		}
	}
	version("1.0.0")
	// Its settings were made from what was installed, without what looks like an authority.
	if a := script.Asked(pluginwire.ActionInitializePluginSettings); len(a) != 1 || a[0].Field("install_source") != "local" ||
		a[0].Context != bridge || strings.Contains(string(a[0].Data), "forged") {
		t.Errorf("the settings were made by %v", a)
	}
	// LM-21: what it asks, it asks under the installation that LangBot's settings name.
	if a := script.Asked(pluginwire.ActionGetBots); len(a) == 0 || a[0].Context.IsBinding() || a[0].Context.InstallationUUID == "" || a[0].Context.WorkspaceUUID != "ws-1" {
		t.Errorf("it asked %v", a)
	}
	// LF-01: LangBot's file for it comes under that context.
	script.File("/docs/a", []byte(strings.Repeat("x", 50000)))
	if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "file", "path": "/docs/a"}); err != nil || !strings.Contains(string(got), "50000") {
		t.Errorf("%.100s, %v", got, err)
	}
	local("install it again", plugintest.Pack(t, "kit", "langbot-plugin", "# none"))
	local("install garbage", []byte("no package"))
	local("install with a dependency that there is not", plugintest.Pack(t, "kit", "version: 1.0.0", "version: 1.6.0", "langbot-plugin", "toy-dep==1.0\ntoy-dep==9"))
	version("1.0.0")
	do("upgrade a local one", pluginwire.ActionUpgradePlugin, kit)
	do("restart", pluginwire.ActionRestartPlugin, kit)
	version("1.0.0")
	do("delete", pluginwire.ActionDeletePlugin, kit)
	if list, err := h.ListPlugins(t.Context(), bridge); err != nil || len(list) != 0 {
		t.Errorf("after its deletion: %v, %v", list, err)
	}
	do("install from the marketplace", pluginwire.ActionInstallPlugin, market1)
	version("1.0.0")
	script.SetAll("stockade/kit", lbhost.Settings{Enabled: true, Config: M{}, InstallSource: "marketplace", InstallInfo: market1["install_info"].(M)})
	do("restart with its new settings", pluginwire.ActionRestartPlugin, kit)
	do("upgrade", pluginwire.ActionUpgradePlugin, kit)
	version("2.0.0")
	do("upgrade the latest", pluginwire.ActionUpgradePlugin, kit)
	do("install what the marketplace has not", pluginwire.ActionInstallPlugin, M{"install_source": "marketplace",
		"install_info": M{"plugin_author": "stockade", "plugin_name": "kit", "plugin_version": "9"}})
	do("install from nowhere", pluginwire.ActionInstallPlugin, M{"install_source": "bogus", "install_info": M{}})
	version("2.0.0")
	do("delete", pluginwire.ActionDeletePlugin, kit)
	return all
}

// TestLegacyProfile (LM-12, LM-35, LM-36, LM-37, LM-42): the whole life of a plugin of
// data/plugins, with each SDK; and with the newest, that the published runtime tells
// LangBot the same of it.
func TestLegacyProfile(t *testing.T) {
	t.Parallel()
	deps := "installing dependencies {current_dep deps_downloaded_size deps_failed deps_installed deps_remaining deps_speed deps_total failed_deps}"
	tail := []string{"installing dependencies", deps, "initializing plugin settings", "launching plugin"}
	each := "installing dependencies {already_installed current_dep deps_downloaded_size deps_installed deps_remaining deps_speed deps_total to_install}"
	download := []string{"downloading plugin package", "downloading plugin package {download_current download_speed download_total}"}
	deletion := []string{"shutting down plugin", "removing plugin container", "deleting plugin files", "plugin deleted", "plugin removed"}
	restart := []string{"shutting down plugin", "removing plugin container", "launching plugin", "plugin restarted", "plugin restarted"}
	want := []legacyStep{
		{"delete what is not there", nil, "ValueError: Plugin stockade/kit not found"},
		{"upgrade what is not there", nil, "ValueError: Plugin stockade/kit not found"},
		{"install", slices.Concat(download[:1], tail[:1], []string{each}, tail[1:], []string{"plugin installed"}), ""},
		{"install it again", download[:1], "ValueError: Plugin stockade/kit:1.0.0 already exists"},
		{"install garbage", download[:1], "*"},
		{"install with a dependency that there is not", []string{download[0], tail[0], each, each, deps},
			"DependencyInstallError: Plugin stockade/kit failed to install 1 dependencies: ['toy-dep==9']"},
		{"upgrade a local one", nil, "ValueError: Plugin stockade/kit is not installed from marketplace"},
		{"restart", restart, ""},
		{"delete", deletion, ""},
		{"install from the marketplace", slices.Concat(download, tail, []string{"plugin installed"}), ""},
		{"restart with its new settings", restart, ""},
		{"upgrade", slices.Concat([]string{"checking for latest version"}, download, tail, []string{"plugin upgraded", "plugin upgraded"}), ""},
		{"upgrade the latest", []string{"checking for latest version", "plugin is up to date", "plugin upgraded"}, ""},
		{"install what the marketplace has not", download[:1], "RuntimeError: Failed to download plugin: HTTP 404"},
		{"install from nowhere", nil, "*"},
		{"delete", deletion, ""},
	}
	check := func(t *testing.T, got []legacyStep) {
		t.Helper()
		if len(got) != len(want) {
			t.Fatalf("%d steps, want %d", len(got), len(want))
		}
		for i, w := range want {
			g := got[i]
			if g.what != w.what || !slices.Equal(g.frames, w.frames) || (w.err == "") != (g.err == "") || w.err != "*" && !strings.Contains(g.err, w.err) {
				t.Errorf("%s: told %q, %q; want %q, %q", g.what, g.frames, g.err, w.frames, w.err)
			}
		}
	}
	index := plugintest.NewIndex(t, plugintest.NewWheel(t, "toy_dep", "1.0"))
	for _, sdk := range series {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := start(t, sdk, func(c *Config) { c.Uv, c.IndexURL = need.UV(t), index.URL })
			check(t, oldProfile(t, r))
			for _, d := range []string{"plugins", ".plugin-staging", ".plugin-backups"} {
				if left, err := os.ReadDir(filepath.Join(r.dir, d)); err != nil || len(left) != 0 {
					t.Errorf("%s holds %v, %v", d, left, err)
				}
			}
		})
	}
	t.Run("the published runtime", func(t *testing.T) {
		t.Parallel()
		check(t, oldProfile(t, genuineIn(t, "0.7", t.TempDir(), "--pypi-index-url", index.URL)))
	})
}

// TestLegacyStart: what lies in data/plugins is started once LangBot's Workspace is
// known (LM-06), with its own .env, unless a managed installation has its identity
// (LS-01, LS-03); a directory that is no plugin stops nobody; --debug-only starts nothing.
func TestLegacyStart(t *testing.T) {
	t.Parallel()
	lay := func(c *Config) {
		for _, name := range []string{"stockade__kit", "wrong__name"} {
			dir := filepath.Join(c.DataDir, "plugins", name)
			if err := os.CopyFS(dir, os.DirFS(testPlugin(t, "kit"))); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, ".env"), []byte("KIT_MARK=from-dotenv\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.MkdirAll(filepath.Join(c.DataDir, "plugins", "empty__dir"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("runs", func(t *testing.T) {
		t.Parallel()
		r := start(t, "0.7", lay)
		h := r.connect(lbhost.Config{})
		bridge := lbhost.Bridge(h.Workspace("ws-1"))
		count := func(want int) {
			t.Helper()
			until(t, "plugins", func() (bool, error) {
				all, err := h.ListPlugins(t.Context(), bridge)
				return len(all) == want && (want == 0 || all[0]["status"] == "initialized"), err
			})
		}
		count(1)
		if got, err := h.CallTool(t.Context(), bridge, "probe", M{"op": "env"}); err != nil || !strings.Contains(string(got), "KIT_MARK") {
			t.Errorf("it did not load its .env: %s, %v", got, err)
		}
		managed := install(workspace("ws-1"), "kit-1", "kit")(t)
		if _, err := h.Apply(t.Context(), managed); err != nil {
			t.Fatal(err)
		}
		count(0)
		if _, err := h.Remove(t.Context(), managed.Binding); err != nil {
			t.Fatal(err)
		}
		count(1)
		lines, err := h.Logs(t.Context(), bridge, "stockade", "kit", 50, "")
		if err != nil || len(lines) == 0 {
			t.Errorf("its log: %v, %v", lines, err)
		}
	})
	t.Run("debug only", func(t *testing.T) {
		t.Parallel()
		r := start(t, "0.7", func(c *Config) { lay(c); c.DebugOnly = true })
		h := r.connect(lbhost.Config{})
		bridge := lbhost.Bridge(h.Workspace("ws-1"))
		// What is asked for by name runs nevertheless.
		if _, err := h.Frames(t.Context(), pluginwire.ActionRestartPlugin, lbhost.Of("stockade", "kit"), bridge); err != nil {
			t.Error(err)
		}
		if asked := h.Script.Asked(pluginwire.ActionGetPluginSettings); len(asked) != 1 {
			t.Errorf("LangBot was asked for settings %d times, of the restarted plugin once", len(asked))
		}
	})
}

// TestLegacyUnderDevelopment (LM-34, LM-35, LM-37): a plugin that its author runs is told
// to shut down by a restart, and comes back by itself; it is neither installed over,
// upgraded nor deleted.
func TestLegacyUnderDevelopment(t *testing.T) {
	t.Parallel()
	r := start(t, "0.7", nil)
	h := r.connect(lbhost.Config{})
	bridge := lbhost.Bridge(h.Workspace("ws-1"))
	info, err := h.DebugInfo(t.Context(), h.Workspace("ws-1"))
	if err != nil {
		t.Fatal(err)
	}
	author(t, "0.7", r.at.Plugin, info.Key)
	there := func() (bool, error) {
		all, err := h.ListPlugins(t.Context(), bridge)
		return len(all) == 1 && all[0]["status"] == "initialized", err
	}
	until(t, "the plugin under development", there)
	key, err := h.Push(t.Context(), plugintest.Pack(t, "kit"), "lbpkg", bridge)
	if err != nil {
		t.Fatal(err)
	}
	for action, data := range map[string]M{
		pluginwire.ActionInstallPlugin: {"install_source": "github", "install_info": M{"plugin_file_key": key}},
		pluginwire.ActionDeletePlugin:  lbhost.Of("stockade", "kit"), pluginwire.ActionUpgradePlugin: lbhost.Of("stockade", "kit"),
	} {
		if _, err := h.Frames(t.Context(), action, data, bridge); err == nil || !strings.Contains(err.Error(), "is being debugged") {
			t.Errorf("%s: %v", action, err)
		}
	}
	before := len(h.Script.Asked(pluginwire.ActionGetPluginSettings))
	frames, err := h.Frames(t.Context(), pluginwire.ActionRestartPlugin, lbhost.Of("stockade", "kit"), bridge)
	if want := []string{"shutting down plugin", "removing plugin container", "plugin restarted", "plugin restarted"}; err != nil || !slices.Equal(shape(frames), want) {
		t.Errorf("%v, %v", shape(frames), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := h.Script.Wait(ctx, pluginwire.ActionGetPluginSettings, before+1); err != nil {
		t.Error(err)
	}
	until(t, "the plugin back", there)
}
