package pluginhost

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// A plugin's author runs the SDK's own command against the debug port: the plugin
// registers, answers, and after a change of its source the SDK's reloader brings
// the new code.
func TestGenuineDebug(t *testing.T) {
	t.Parallel()
	for _, series := range []string{"0.5.5", "0.6.3", "0.7"} {
		t.Run(series, func(t *testing.T) {
			t.Parallel()
			python := need.SDK(t, series)
			r := genuine(t, series, pluginwire.ProfileOSS)
			key, _, err := r.m.IssueDebugToken(workspace, time.Now())
			if err != nil {
				t.Fatal(err)
			}
			var conns sync.WaitGroup
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				adm, err := r.m.CheckAdmission(q.Header.Get("X-LangBot-Plugin-Debug-Key"), q.Header.Get("X-LangBot-Plugin-Registration-Capability"))
				if err != nil {
					http.Error(w, "Unauthorized", http.StatusUnauthorized)
					return
				}
				c, err := websocket.Accept(w, q, nil)
				if err != nil {
					return
				}
				conns.Add(1)
				defer conns.Done()
				_ = r.m.ServeWorker(q.Context(), rpc.WebSocket(c), adm)
			}))
			defer srv.Close()
			code := t.TempDir()
			if err := os.CopyFS(code, os.DirFS(need.Testdata(t, "plugins", "kit"))); err != nil {
				t.Fatal(err)
			}
			var said bytes.Buffer
			cmd := exec.Command(python, "-m", "langbot_plugin.cli.__init__", "run")
			cmd.Dir = code
			cmd.Env = append(os.Environ(), "DEBUG_RUNTIME_WS_URL=ws"+strings.TrimPrefix(srv.URL, "http")+"/plugin/debug/ws", "PLUGIN_DEBUG_KEY="+key, "PYTHONDONTWRITEBYTECODE=1")
			cmd.Stdout, cmd.Stderr = &said, &said
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
				_ = cmd.Wait()
				conns.Wait()
				if t.Failed() {
					t.Log(said.String())
				}
			}()
			bridge := pack(t, "x", "1").bind("bridge", 1, 1)
			if err := r.m.Authorise(bridge); err != nil {
				t.Fatal(err)
			}
			greets := func(want string) func() bool {
				return func() bool {
					ps := r.m.Plugins(bridge)
					if len(ps) != 1 || !ps[0].Ready() {
						return false
					}
					out, err := r.tool(bridge, "echo", map[string]any{})
					return err == nil && out["greeting"] == want
				}
			}
			r.until(greets("hello"))
			file := filepath.Join(code, "components", "tools", "echo.py")
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, bytes.ReplaceAll(text, []byte(`"hello"`), []byte(`"changed"`)), 0o644); err != nil {
				t.Fatal(err)
			}
			r.until(greets("changed"))
		})
	}
}
