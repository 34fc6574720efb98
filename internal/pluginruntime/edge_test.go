package pluginruntime

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

const token = "0123456789abcdef0123456789abcdef"

func get(t *testing.T, url string, header http.Header) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header = header
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func httpOf(ws string) string { return "http" + strings.TrimPrefix(ws, "ws") }

// TestHealth (CT-02, AP-02): both ports tell their health to anyone, before any header is looked at.
func TestHealth(t *testing.T) {
	t.Parallel()
	r := start(t, "", func(c *Config) { c.ControlToken = token })
	for _, ws := range []string{r.at.Control, r.at.Plugin} {
		base, _, _ := strings.Cut(httpOf(ws)[7:], "/")
		status, body := get(t, "http://"+base+"/healthz", nil)
		var health struct {
			Live      bool
			Resources map[string]any
			Runtime   map[string]any
		}
		if err := json.Unmarshal([]byte(body), &health); err != nil || status != http.StatusOK || !health.Live {
			t.Fatalf("%d %s: %v", status, body, err)
		}
		if !strings.HasSuffix(body, "}\n") || strings.Contains(body, ": ") || strings.Index(body, `"live"`) > strings.Index(body, `"resources"`) {
			t.Errorf("not compact, in order and with a newline: %q", body)
		}
		if health.Runtime["profile"] != "unknown" || health.Runtime["version"] != "test" || health.Runtime["rss_bytes"] == nil {
			t.Errorf("runtime: %v", health.Runtime)
		}
	}
	h := r.connect(lbhost.Config{Token: token})
	_ = h
	base, _, _ := strings.Cut(r.at.Control[5:], "/")
	if _, body := get(t, "http://"+base+"/healthz", nil); !strings.Contains(body, `"profile":"oss_dev"`) {
		t.Errorf("after the handshake: %s", body)
	}
}

// TestTokens (AP-01, AP-03, CT-02): what opens a connection, and what does not.
func TestTokens(t *testing.T) {
	t.Parallel()
	r := start(t, "", func(c *Config) { c.ControlToken = token })
	for name, header := range map[string]http.Header{
		"none": {}, "wrong": {"X-Langbot-Plugin-Runtime-Token": {"x" + token}}, "a debug key": {"X-Langbot-Plugin-Debug-Key": {token}},
	} {
		if status, body := get(t, httpOf(r.at.Control), header); status != http.StatusUnauthorized || body != "Unauthorized" {
			t.Errorf("control with %s: %d %q", name, status, body)
		}
		if status, body := get(t, httpOf(r.at.Plugin), header); status != http.StatusUnauthorized || body != "Unauthorized" {
			t.Errorf("plugin with %s: %d %q", name, status, body)
		}
	}
	_, err := lbhost.Dial(t.Context(), r.at.Control, lbhost.Config{Dir: r.dir, Token: "wrong"})
	var refused *lbhost.DialError
	if !errors.As(err, &refused) || refused.Status != http.StatusUnauthorized {
		t.Errorf("a wrong token: %v", err)
	}
	h := r.connect(lbhost.Config{Token: token})
	info, err := h.DebugInfo(t.Context(), h.Workspace("ws-1"))
	if err != nil {
		t.Fatal(err)
	}
	c, _, err := websocket.Dial(t.Context(), r.at.Plugin, &websocket.DialOptions{HTTPHeader: http.Header{headerDebugKey: {info.Key}}})
	if err != nil {
		t.Fatalf("a debug key did not open the plugin channel: %v", err)
	}
	_ = c.CloseNow()
	_, _, err = websocket.Dial(t.Context(), r.at.Control, &websocket.DialOptions{HTTPHeader: http.Header{
		headerControlToken: {token}, "Origin": {"http://elsewhere.example"}}})
	if err == nil {
		t.Error("a page of another site opened the control channel")
	}
}

// TestNoToken (AP-03): without a token anyone may connect, as with the published runtime.
func TestNoToken(t *testing.T) {
	t.Parallel()
	r := start(t, "", nil)
	r.connect(lbhost.Config{Token: "whatever"})
}

// TestHandshakeComesFirst (CH-01, CH-03, CH-04, CH-05): what is admitted in which
// order, and that the configuration is fixed by the first and repeated by others.
func TestHandshakeComesFirst(t *testing.T) {
	t.Parallel()
	r := start(t, "", nil)
	h := r.dial(lbhost.Config{})
	ws, none := h.Workspace("ws-1"), pluginwire.Context{}
	bridge := lbhost.Bridge(ws)
	refused := func(what, action string, data any, on pluginwire.Context, text string) {
		t.Helper()
		_, err := h.Call(t.Context(), action, data, on)
		if peer, ok := errors.AsType[*rpc.PeerError](err); !ok || !strings.Contains(peer.Message, text) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := h.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	refused("ping with a context", pluginwire.ActionPing, M{}, ws, "context")
	refused("before the configuration", pluginwire.ActionListPlugins, M{}, bridge, "set_runtime_config")
	refused("a reconcile before it", pluginwire.ActionReconcilePluginInstallations, M{"installations": []any{}}, none, "set_runtime_config")
	refused("a configuration with a context", pluginwire.ActionSetRuntimeConfig, M{}, ws, "context")
	refused("half a configuration", pluginwire.ActionSetRuntimeConfig, M{"runtime_identity": M{"instance_uuid": "i", "runtime_id": "r"}}, none, "ValidationError")
	refused("still before the configuration", pluginwire.ActionListPlugins, M{}, bridge, "set_runtime_config")
	for range 2 {
		if err := h.Configure(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	other := r.dial(lbhost.Config{Identity: pluginwire.RuntimeIdentity{InstanceUUID: "instance-1", RuntimeID: "another"}})
	if err := other.Configure(t.Context()); err == nil || !strings.Contains(err.Error(), "cannot be changed") {
		t.Errorf("another identity: %v", err)
	}
	h = r.dial(lbhost.Config{})
	refused("a new connection before its own configuration", pluginwire.ActionListPlugins, M{}, bridge, "set_runtime_config")
	if err := h.Configure(t.Context()); err != nil {
		t.Fatal(err)
	}
	refused("no context", pluginwire.ActionListPlugins, M{}, none, "InstallationBinding")
	refused("a Workspace", pluginwire.ActionListPlugins, M{}, ws, "InstallationBinding")
	foreign := bridge
	foreign.InstanceUUID = "instance-2"
	refused("another instance", pluginwire.ActionListPlugins, M{}, foreign, "instance")
	refused("another instance's debug key", pluginwire.ActionGetDebugInfo, M{}, foreign.Workspace(), "instance")
	refused("a reconcile with a context", pluginwire.ActionReconcilePluginInstallations, M{"installations": []any{}}, bridge, "context")
	refused("a file without a binding", pluginwire.ActionFileChunk, M{}, ws, "InstallationBinding")
	if _, err := h.ListPlugins(t.Context(), bridge); err != nil {
		t.Fatal(err)
	}
	refused("another Workspace", pluginwire.ActionListPlugins, M{}, lbhost.Bridge(h.Workspace("ws-2")), "Workspace")
	later := bridge
	later.RuntimeRevision = 2
	refused("another revision", pluginwire.ActionListPlugins, M{}, later, "cannot change")
}

// TestTwoRuntimesOnOneDirectory: the second says who holds it, and the first goes on.
func TestTwoRuntimesOnOneDirectory(t *testing.T) {
	t.Parallel()
	r := start(t, "", nil)
	c := Default()
	c.DataDir, c.Listen, c.ControlPort, c.PluginPort = r.dir, "127.0.0.1", 0, 0
	c.Python = need.SDK(t, "0.7")
	if _, err := run(t, c); !errdefs.Is(err, errdefs.Conflict) || !strings.Contains(err.Error(), "process") {
		t.Errorf("the second: %v", err)
	}
	r.connect(lbhost.Config{})
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	again := start(t, "", func(c *Config) { c.DataDir = r.dir })
	again.connect(lbhost.Config{})
}

// TestTakenPort (AP-09): a port that is taken ends the start with its name.
func TestTakenPort(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := Default()
	c.DataDir, c.Listen, c.PluginPort, c.ControlPort = t.TempDir(), "127.0.0.1", 0, l.Addr().(*net.TCPAddr).Port
	c.Python = need.SDK(t, "0.7")
	if _, err := run(t, c); !errdefs.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("%v", err)
	}
}

// TestGarbageFrames: what is no message is no answer and no end; what breaks the
// framing ends the connection and nothing else.
func TestGarbageFrames(t *testing.T) {
	t.Parallel()
	r := start(t, "", nil)
	c, _, err := websocket.Dial(t.Context(), r.at.Control, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseNow()
	for _, garbage := range []string{"", "x", "[]", "null", "{}", `{"action":7}`, `{"code":"x"}`, strings.Repeat("[", 100000), `{"seq_id":1}`, "\xff\xfe"} {
		kind := websocket.MessageText
		if strings.ContainsRune(garbage, '\ufffd') {
			kind = websocket.MessageBinary
		}
		if err := c.Write(t.Context(), kind, []byte(garbage)); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []struct{ send, want string }{
		{`{"seq_id":5,"action":"__ping","data":null}`, "ValidationError"},
		{`{"seq_id":"6","action":"__ping","data":{},"context":{"nonsense":1}}`, `"code":1`},
		{`{"seq_id":7,"action":"__ping","data":{}}`, "pong"},
	} {
		if err := c.Write(t.Context(), websocket.MessageText, []byte(bad.send)); err != nil {
			t.Fatal(err)
		}
	}
	got := ""
	for !strings.Contains(got, "pong") || strings.Count(got, `"code"`) < 3 { // in any order
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, b, err := c.Read(ctx)
		cancel()
		if err != nil {
			t.Fatalf("after %s: %v", got, err)
		}
		got += string(b)
	}
	if !strings.Contains(got, "Validation") || strings.Count(got, `"code"`) < 3 {
		t.Errorf("answers: %s", got)
	}
	big, _, err := websocket.Dial(t.Context(), r.at.Control, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer big.CloseNow()
	_ = big.Write(t.Context(), websocket.MessageText, make([]byte, pluginwire.MaxMessage+1))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, _, err := big.Read(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("a message beyond the limit: %v", err)
	}
	r.connect(lbhost.Config{})
}

// TestHalfOpenConnection: a peer that is gone without a word is found out, and its
// place is free.
func TestHalfOpenConnection(t *testing.T) {
	t.Parallel()
	r := start(t, "", func(c *Config) { c.PingInterval = 50 * time.Millisecond })
	raw, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(r.at.Control, "ws://"), "/control/ws"))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := io.WriteString(raw, "GET /control/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	// It reads and never answers a ping; in the end the runtime hangs up.
	if err := raw.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(raw)
	if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 101") {
		t.Errorf("%.40q, %v", b, err)
	}
}
