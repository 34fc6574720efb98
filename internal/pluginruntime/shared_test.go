package pluginruntime

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// testSharedProfile goes through the profile of many Workspaces with boxed workers:
// two slots of one pool beside a dedicated installation, under the SDKs that can.
func testSharedProfile(t *testing.T, programs string) {
	t.Parallel()
	need.Runc(t)
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := start(t, sdk, func(c *Config) { c.HostProgram = filepath.Join(programs, "stockade-host") })
			a, b := install(workspace("ws-a"), "slot-a", "pool")(t), install(workspace("ws-b"), "slot-b", "pool")(t)
			a.Mode, b.Mode = pluginwire.ModeShared, pluginwire.ModeShared
			kit := install(workspace("ws-a"), "kit-a", "kit")(t)
			script := lbhost.NewScript()
			script.Set("slot-a", M{"name": "a"})
			script.Set("slot-b", M{"name": "b"})
			h := r.dial(lbhost.Config{Profile: pluginwire.ProfileShared, Script: script})
			if _, err := h.Handshake(t.Context(), workspace("ws-a"), a, b, kit); err != nil {
				t.Fatal(err)
			}
			for _, i := range []lbhost.Installation{a, b, kit} {
				running(t, h, i)
			}
			pids := map[string]bool{}
			for _, i := range []lbhost.Installation{a, b} {
				raw, err := h.CallTool(t.Context(), i.Binding, "slot", M{})
				if err != nil {
					t.Fatal(err)
				}
				var got struct {
					Pid    json.Number
					Config map[string]string
				}
				if err := json.Unmarshal(raw, &got); err != nil {
					t.Fatal(err)
				}
				pids[got.Pid.String()] = true
				if want := strings.TrimPrefix(i.Binding.InstallationUUID, "slot-"); got.Config["name"] != want {
					t.Errorf("slot %s has the settings of %q", want, got.Config["name"])
				}
				if _, err := h.CallTool(t.Context(), i.Binding, "slot", M{"op": "bots"}); err != nil {
					t.Error(err)
				}
			}
			if len(pids) != 1 {
				t.Errorf("two slots of one digest run in processes %v", pids)
			}
			if asked := script.Asked(pluginwire.ActionGetBots); len(asked) != 2 || asked[0].Context != a.Binding || asked[1].Context != b.Binding {
				t.Errorf("LangBot was asked %v", asked)
			}
			if _, err := h.CallTool(t.Context(), kit.Binding, "probe", M{"op": "pid"}); err != nil {
				t.Error(err)
			}
			if got, err := h.CallTool(t.Context(), a.Binding, "probe", M{"op": "pid"}); err != nil || string(got) != "{}" {
				t.Errorf("a slot sees a tool of another installation: %s, %v", got, err)
			}
			for _, action := range []string{pluginwire.ActionInstallPlugin, pluginwire.ActionRestartPlugin, pluginwire.ActionDeletePlugin, pluginwire.ActionUpgradePlugin} {
				if _, err := h.Frames(t.Context(), action, M{}, a.Binding); err == nil || !strings.Contains(err.Error(), "shared") {
					t.Errorf("%s: %v", action, err)
				}
			}
			if _, err := h.ListPlugins(t.Context(), lbhost.Bridge(workspace("ws-a"))); err == nil {
				t.Error("a binding outside the desired state was admitted")
			}
			if out, err := h.Remove(t.Context(), a.Binding); err != nil || out.State != pluginwire.StateRemoved {
				t.Fatalf("%v, %v", out, err)
			}
			if _, err := h.ListPlugins(t.Context(), a.Binding); err == nil {
				t.Error("a removed binding was admitted")
			}
			if got, err := h.CallTool(t.Context(), b.Binding, "slot", M{}); err != nil || !strings.Contains(string(got), `"b"`) {
				t.Errorf("the sibling noticed: %s, %v", got, err)
			}
		})
	}
}

// TestRunners runs a runner through both hops, under the SDKs that know runners.
func TestRunners(t *testing.T) {
	t.Parallel()
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			r := start(t, sdk, nil)
			i := install(workspace("ws-1"), "runner-1", "runner")(t)
			h := r.connect(lbhost.Config{}, i)
			running(t, h, i)
			all, err := h.ListRunners(t.Context(), i.Binding)
			if err != nil || len(all) != 1 || at(all[0], "manifest", "id") != "plugin:stockade/runner/default" ||
				at(all[0], "manifest", "capabilities", "streaming") != true || at(all[0], "plugin_version") != "1.0.0" {
				t.Fatalf("%v, %v", all, err)
			}
			run := func(text string, change func(M)) []M {
				t.Helper()
				ctx := lbhost.RunContext("run-1", text)
				if change != nil {
					change(ctx)
				}
				out, err := h.Run(t.Context(), i.Binding, "stockade", "runner", "default", ctx)
				if err != nil {
					t.Fatalf("%s: %v", text, err)
				}
				for n, result := range out {
					if result["sequence"] != float64(n+1) || result["run_id"] != "run-1" {
						t.Errorf("%s: result %d is %v", text, n, result)
					}
				}
				return out
			}
			if out := run("stream 200", nil); len(out) != 201 || out[200]["type"] != "run.completed" {
				t.Errorf("%d results, the last %v", len(out), out[len(out)-1])
			}
			if out := run("fail as told", nil); len(out) != 1 || at(out[0], "data", "code") != "runner.exception" {
				t.Errorf("a runner that raises: %v", out)
			}
			for name, deadline := range map[string]any{"past": 1.0, "soon": float64(nowPlus(0.3))} {
				out := run("sleep 60", func(ctx M) { ctx["runtime"] = M{"deadline_at": deadline, "metadata": M{}} })
				if len(out) != 1 || at(out[0], "data", "code") != "runner.timeout" || at(out[0], "data", "retryable") != true {
					t.Errorf("%s: %v", name, out)
				}
			}
			if out := run("hi", func(ctx M) { ctx["runtime"] = M{"deadline_at": "soon", "metadata": M{}} }); len(out) != 1 {
				t.Errorf("a deadline that is none: %v", out)
			}
			ctx := lbhost.RunContext("run-1", "hi")
			ctx["runtime"] = M{"metadata": M{"component_kind": "Other"}}
			if _, err := h.Run(t.Context(), i.Binding, "stockade", "runner", "default", ctx); err == nil {
				t.Error("another kind of component was run")
			}
		})
	}
}
