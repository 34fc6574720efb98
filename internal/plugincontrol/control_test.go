package plugincontrol

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
	"github.com/stockade-run/stockade/internal/transfer"
)

// TestEveryActionHasAScopeAndAHandler (CH-10).
func TestEveryActionHasAScopeAndAHandler(t *testing.T) {
	t.Parallel()
	known := New(Config{}).known
	for _, action := range pluginwire.Actions() {
		_, handled := known[action]
		if scoped := pluginwire.ControlScope(action) != pluginwire.ScopeUnknown; scoped != handled {
			t.Errorf("%s: has a scope: %v, has a handler: %v", action, scoped, handled)
		}
	}
	for action := range known {
		if !slices.Contains(pluginwire.Actions(), action) {
			t.Errorf("%s is answered and is no action", action)
		}
	}
}

// TestApplyTakesThePackage (CH-07): the pushed package is read and gone before the
// manager is asked; a reconcile keeps its order.
func TestApplyTakesThePackage(t *testing.T) {
	t.Parallel()
	s := open(t, pluginwire.ProfileOSS)
	l := s.ready(t)
	key, err := transfer.Send(t.Context(), l.Conn, []byte("package"), "lbpkg", binding)
	if err != nil {
		t.Fatal(err)
	}
	data := `{"artifact_file_key":"` + key + `","enabled":true}`
	if out, err := l.ask(t, pluginwire.ActionApplyPluginInstallation, data); err != nil || !strings.Contains(out, "starting") || string(s.m.applied) != "package" {
		t.Errorf("%s, %v, %q", out, err, s.m.applied)
	}
	if _, err := l.ask(t, pluginwire.ActionApplyPluginInstallation, data); err == nil {
		t.Error("the package was there a second time")
	}
	b, _ := json.Marshal(binding)
	other := strings.Replace(string(b), `"u"`, `"v"`, 1)
	if _, err := l.Call(t.Context(), pluginwire.ActionReconcilePluginInstallations, json.RawMessage(`{"installations":[{"binding":`+other+`},{"binding":`+string(b)+`,"enabled":false}]}`), rpc.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := s.m.reconcil; len(got) != 2 || got[0].Binding.InstallationUUID != "v" || got[1].Enabled {
		t.Errorf("%v", got)
	}
}

// TestRefusedRequestsKeepNoFile: what LangBot pushed for a request goes with it, also
// where it is refused before anybody looks at the file; otherwise some hundred refusals
// would fill the connection for an installation.
func TestRefusedRequestsKeepNoFile(t *testing.T) {
	t.Parallel()
	stopped := plugin("stopped", 0)
	stopped.c.Enabled = false
	s := open(t, pluginwire.ProfileOSS, stopped)
	l := s.ready(t)
	for _, c := range []struct{ action, data string }{
		{pluginwire.ActionApplyPluginInstallation, `{"artifact_file_key":"KEY","enabled":"perhaps"}`},
		{pluginwire.ActionParseDocument, `{"plugin_author":"a","plugin_name":"none","context":{"file_key":"KEY"}}`},
		{pluginwire.ActionParseDocument, `{"plugin_author":"a","plugin_name":"stopped","context":{"file_key":"KEY"}}`},
		{pluginwire.ActionParseDocument, `{"context":{"file_key":"KEY"}}`},
		{pluginwire.ActionInstallPlugin, `{"install_source":"local","install_info":{"plugin_file_key":"KEY"}}`},
	} {
		key, err := transfer.Send(t.Context(), l.Conn, []byte("x"), "", binding)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.control.cfg.Transfers.Read(key, binding); err != nil {
			t.Fatal(err)
		}
		if _, err := l.frames(t, c.action, strings.Replace(c.data, "KEY", key, 1)); err == nil {
			t.Errorf("%s %s was not refused", c.action, c.data)
		}
		if _, err := s.control.cfg.Transfers.Read(key, binding); !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("%s %s: its file is still there: %v", c.action, c.data, err)
		}
	}
}

// TestFencedWhileItsFileIsTaken: an apply that a newer one overtakes after it was admitted
// is refused as stale, not for its file, which the newer one had swept.
func TestFencedWhileItsFileIsTaken(t *testing.T) {
	t.Parallel()
	s := open(t, pluginwire.ProfileOSS)
	key, err := transfer.NewKey("lbpkg")
	if err != nil {
		t.Fatal(err)
	}
	in := &rpc.Inbound{Action: pluginwire.ActionApplyPluginInstallation, Data: json.RawMessage(`{"artifact_file_key":"` + key + `"}`), Context: binding}
	late := &session{control: s.control, files: s.control.cfg.Transfers.Holder(nil)}
	for want, refuse := range map[errdefs.Code]error{errdefs.NotFound: nil, errdefs.Conflict: errdefs.New(errdefs.Conflict, "stale")} {
		s.m.refuse = refuse
		if _, err := apply(t.Context(), late, in); !errdefs.Is(err, want) {
			t.Errorf("%v, not %s", err, want)
		}
	}
}

// TestLegacyFile (LF-01): a file without a full binding is for a live plugin of
// data/plugins, and never in the shared profile.
func TestLegacyFile(t *testing.T) {
	t.Parallel()
	scope := binding.Workspace()
	scope.InstallationUUID = "u"
	push := func(l *langbot, on pluginwire.Context) error {
		_, err := transfer.Send(t.Context(), l.Conn, []byte("x"), "", on)
		return err
	}
	oss, shared := open(t, pluginwire.ProfileOSS), open(t, pluginwire.ProfileShared)
	a, b := oss.ready(t), shared.ready(t)
	if err := push(a, scope); err == nil {
		t.Error("admitted without a live plugin")
	}
	oss.m.legacy, shared.m.legacy = true, true
	if err := push(a, scope); err != nil {
		t.Error(err)
	}
	foreign := scope
	foreign.InstanceUUID = "j"
	for name, on := range map[string]pluginwire.Context{"a Workspace": binding.Workspace(), "another instance": foreign, "nothing": {}} {
		if err := push(a, on); err == nil {
			t.Errorf("admitted under %s", name)
		}
	}
	if err := push(b, scope); err == nil {
		t.Error("admitted in the shared profile")
	}
}

// TestDeniedScopeNeverReachesThePlugin (CH-03, CH-05).
func TestDeniedScopeNeverReachesThePlugin(t *testing.T) {
	t.Parallel()
	p := plugin("p", 0, KindTool)
	s := open(t, pluginwire.ProfileOSS, p)
	l := s.ready(t)
	s.m.refuse = errdefs.New(errdefs.Fenced, "stale")
	_, err := l.ask(t, pluginwire.ActionCallTool, `{"tool_name":"p-Tool","tool_parameters":{},"session":{},"query_id":1}`)
	if err == nil || !strings.Contains(err.Error(), "stale") || len(p.asked) != 0 {
		t.Errorf("%v, asked %v", err, p.asked)
	}
}

// TestSupersededIsRefused (CH-06): the older connection ends, and its calls with it.
func TestSupersededIsRefused(t *testing.T) {
	t.Parallel()
	s := open(t, pluginwire.ProfileOSS)
	old := s.ready(t)
	newer := s.ready(t)
	<-old.Done()
	if _, err := old.Call(t.Context(), pluginwire.ActionPing, struct{}{}, rpc.CallOptions{}); !errors.Is(err, rpc.ErrClosed) {
		t.Errorf("the older: %v", err)
	}
	if _, err := newer.Call(t.Context(), pluginwire.ActionPing, struct{}{}, rpc.CallOptions{}); err != nil {
		t.Errorf("the newer: %v", err)
	}
	if !s.link.Connected() {
		t.Error("the link lost the newer connection with the older one")
	}
}

// TestLinkWithoutLangBot: what a plugin asks waits a little and then says why it failed.
func TestLinkWithoutLangBot(t *testing.T) {
	t.Parallel()
	s := open(t, pluginwire.ProfileOSS)
	if _, err := s.link.Call(t.Context(), "get_bots", struct{}{}, binding, time.Millisecond); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.link.Call(ctx, "get_bots", struct{}{}, binding, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := s.link.DeleteFile("key", binding); err != nil {
		t.Errorf("%v", err)
	}
	l := s.connect(t) // connected, and not configured: not yet LangBot
	if _, err := s.link.Call(t.Context(), "get_bots", struct{}{}, binding, time.Millisecond); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("before the handshake: %v", err)
	}
	got := make(chan error, 1)
	go func() {
		_, err := s.link.Call(t.Context(), "get_bots", struct{}{}, binding, 0)
		got <- err
	}()
	if _, err := l.Call(t.Context(), pluginwire.ActionSetRuntimeConfig, json.RawMessage(config+`oss_dev"}`), rpc.CallOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("it did not reach LangBot: %v", err)
	}
}

// TestLangBotConnectsAnewMeanwhile: a plugin whose question was under way hears what
// became of it, and nothing of connections.
func TestLangBotConnectsAnewMeanwhile(t *testing.T) {
	t.Parallel()
	s := open(t, pluginwire.ProfileOSS)
	s.ready(t)
	old, err := s.link.current(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	s.ready(t)
	_, err = old.conn.Call(t.Context(), "get_bots", struct{}{}, rpc.CallOptions{})
	if err = old.missed(err); !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "ask again") {
		t.Errorf("%v", err)
	}
}

// TestLangBotIsGoneAndSomethingStillRuns: what a plugin asks waits for LangBot to come
// back, though the connection that has ended still has an action that does not end.
func TestLangBotIsGoneAndSomethingStillRuns(t *testing.T) {
	t.Parallel()
	p := plugin("p", 0, KindTool)
	entered, release := make(chan struct{}), make(chan struct{})
	p.answer = func(context.Context, string, json.RawMessage) (string, error) {
		close(entered)
		<-release
		return `{}`, nil
	}
	s := open(t, pluginwire.ProfileOSS, p)
	l := s.ready(t)
	old, err := s.link.current(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		_, _ = l.ask(t, pluginwire.ActionCallTool, `{"tool_name":"p-Tool","tool_parameters":{},"session":{},"query_id":1}`)
	}()
	<-entered
	l.Close(nil)
	<-old.conn.Done()
	if s.link.Connected() {
		t.Error("LangBot is connected after its connection ended")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.link.Call(ctx, "get_bots", struct{}{}, binding, 0); !errors.Is(err, context.Canceled) {
		t.Errorf("it did not wait for LangBot: %v", err)
	}
	s.ready(t)
	if _, err := s.link.Call(t.Context(), "get_bots", struct{}{}, binding, 0); err == nil || !strings.Contains(err.Error(), "Action get_bots not found") {
		t.Errorf("it did not reach LangBot: %v", err)
	}
	close(release)
}

// TestNothingConnectsAfterTheEnd: a connection that was accepted before the runtime's end
// and comes after it is not served.
func TestNothingConnectsAfterTheEnd(t *testing.T) {
	t.Parallel()
	s := open(t, pluginwire.ProfileOSS)
	first := s.ready(t)
	s.control.Close(errdefs.New(errdefs.Unavailable, "the plugin runtime is shutting down"))
	<-first.Done()
	<-s.connect(t).Done()
	if s.link.Connected() {
		t.Error("LangBot is connected after the end")
	}
}

// TestPageThatFails: the page hears the plugin's own words.
func TestPageThatFails(t *testing.T) {
	t.Parallel()
	p := plugin("p", 0)
	p.answer = func(context.Context, string, json.RawMessage) (string, error) {
		return "", &rpc.PeerError{Message: "ValueError: the board is locked"}
	}
	l := open(t, pluginwire.ProfileOSS, p).ready(t)
	got, err := l.ask(t, pluginwire.ActionPageAPI, `{"plugin_author":"a","plugin_name":"p","page_id":"x","endpoint":"/","method":"GET"}`)
	if want := `{"data":null,"error":"ValueError: the board is locked"}`; err != nil || got != want {
		t.Errorf("%s, %v", got, err)
	}
}

// TestIncludeFilters (LM-07, LM-29): who may be asked for tools and commands.
func TestIncludeFilters(t *testing.T) {
	t.Parallel()
	p, q, off := plugin("p", 0, KindTool, KindCommand), plugin("q", 0, KindTool), plugin("off", 0, KindTool)
	off.c.Enabled = false
	l := open(t, pluginwire.ProfileOSS, p, q, off).ready(t)
	for data, want := range map[string]string{
		`{}`:                               `{"tools":[{"owner":"a/p","kind":"Tool"},{"owner":"a/q","kind":"Tool"}]}`,
		`{"include_plugins":null}`:         `{"tools":[{"owner":"a/p","kind":"Tool"},{"owner":"a/q","kind":"Tool"}]}`,
		`{"include_plugins":["a/q"]}`:      `{"tools":[{"owner":"a/q","kind":"Tool"}]}`,
		`{"include_plugins":["a/off"]}`:    `{"tools":[]}`,
		`{"include_plugins":[],"x":NaN}`:   `{"tools":[]}`,
		`{"include_plugins":["\ud800"]}`:   `{"tools":[]}`,
		`{"include_plugins":["q","a/qq"]}`: `{"tools":[]}`,
	} {
		if got, err := l.ask(t, pluginwire.ActionListTools, data); err != nil || got != want {
			t.Errorf("%s: %s, %v", data, got, err)
		}
	}
	call := `{"tool_name":"q-Tool","tool_parameters":{"n":NaN,"s":"\ud800"},"session":{},"query_id":1,"query_uuid":"u","include_plugins":["a/p"]}`
	if got, err := l.ask(t, pluginwire.ActionCallTool, call); err != nil || got != `{"tool_response":{}}` || len(q.asked) != 0 {
		t.Errorf("%s, %v, asked %v", got, err, q.asked)
	}
	q.answer = func(context.Context, string, json.RawMessage) (string, error) {
		return `{"tool_response":{"n":Infinity}}`, nil
	}
	got, err := l.ask(t, pluginwire.ActionCallTool, strings.Replace(call, "a/p", "a/q", 1))
	if err != nil || got != `{"tool_response":{"n":Infinity}}` {
		t.Errorf("%s, %v", got, err)
	}
	want := `call_tool {"tool_name":"q-Tool","tool_parameters":{"n":NaN,"s":"\ud800"},"session":{"instance_uuid":"i","workspace_uuid":"w","placement_generation":1},"query_id":1,"query_uuid":"u"}`
	if len(q.asked) != 1 || q.asked[0] != want {
		t.Errorf("the worker was asked %s", q.asked)
	}
}

// TestFilesOfThePluginsInterface (LM-38): the worker's file is gone when LangBot has it.
func TestFilesOfThePluginsInterface(t *testing.T) {
	t.Parallel()
	p := plugin("p", 0)
	p.files["key.svg"] = []byte("<svg/>")
	p.answer = func(context.Context, string, json.RawMessage) (string, error) {
		return `{"plugin_icon_file_key":"key.svg","mime_type":"image/svg+xml"}`, nil
	}
	l := open(t, pluginwire.ProfileOSS, p).ready(t)
	out, err := l.ask(t, pluginwire.ActionGetPluginIcon, `{"plugin_author":"a","plugin_name":"p"}`)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Key  string `json:"plugin_icon_file_key"`
		Mime string `json:"mime_type"`
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatal(err)
	}
	b, err := l.files.Read(got.Key, binding)
	if err != nil || string(b) != "<svg/>" || got.Mime != "image/svg+xml" || !strings.HasSuffix(got.Key, ".svg") {
		t.Errorf("%s: %q, %v", out, b, err)
	}
	if len(p.files) != 0 {
		t.Errorf("the worker's copy stays: %v", p.files)
	}
	if out, err := l.ask(t, pluginwire.ActionGetPluginIcon, `{"plugin_author":"a","plugin_name":"p"}`); err == nil {
		t.Errorf("a key that is not there: %s", out)
	}
}

// TestDiagnostics (LM-08, LM-09).
func TestDiagnostics(t *testing.T) {
	t.Parallel()
	p := plugin("p", 0)
	s := open(t, pluginwire.ProfileOSS, p)
	l := s.ready(t)
	for _, data := range []string{
		`{"plugin":{"author":"a","name":"p"},"code":"c","message":"m","details":{"d":1},"query":{"q":2},"delivery":{},"message_chain":[]}`,
		`{"plugin_author":"a","plugin_name":"none"}`, `{}`, `{"plugin":[]}`, `{"plugin":{"author":1}}`,
	} {
		if out, err := l.ask(t, pluginwire.ActionPluginDiagnostic, data); err != nil || out != "{}" {
			t.Errorf("%s: %s, %v", data, out, err)
		}
	}
	want := `plugin_diagnostic {"level":"ERROR","code":"c","message":"m","details":{"d":1,"query":{"q":2},"delivery":{},"message_chain":[]}}`
	if len(p.asked) != 1 || p.asked[0] != want {
		t.Errorf("the plugin was told %s", p.asked)
	}
	if len(s.m.noted) != 2 || s.m.noted[0] != "a/p ERROR diagnostic c: m" {
		t.Errorf("noted: %q", s.m.noted)
	}
}
