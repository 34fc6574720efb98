package pluginruntime

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
)

// raw is a program that writes to the worker's standard output, where the protocol
// runs, past the SDK: what follows it makes the bytes.
const raw = `
import os
async def main(self):
    os.set_blocking(1, True)
    try:
        os.write(1, data())
    except OSError as e:
        return str(e)
    return "written"
def data():
    return `

// call is a program that asks the runtime for an action through the SDK's connection.
const call = `
from langbot_plugin.entities.io.actions.enums import PluginToRuntimeAction as A
async def main(self):
    try:
        return await ask(self.plugin.plugin_runtime_handler)
    except Exception as e:
        return type(e).__name__ + ": " + str(e)
async def ask(h):
    return `

// troubles are what a worker may do to its runtime: each in a worker of its own, beside
// a plugin that goes on answering. The same with workers in memory, where the SDK does
// not stand in the way: TestHostileWorkers, TestDoubleAnswer, TestReadyLimit,
// TestPoolSlowSlot, TestStubbornWorkerIsKilled, TestUndeadWorkerIsLeftBehind,
// TestRefusedRegistrations, TestPoolCapabilityIsOfItsLaunch and TestAdmit of pluginhost;
// the processes alone: TestFlood, TestForksAndDies, TestForksForEver and TestForkBomb of
// worker.
var troubles = []struct {
	name string
	do   func(t *testing.T, s *scene, on lbhost.Installation)
}{
	{"malformed frames are ignored", func(t *testing.T, s *scene, on lbhost.Installation) {
		before := s.pid(t, on)
		got, err := s.py(t, on, raw+`b'x\n[]\nnull\n{}\n{"action":7}\n{"code":"x"}\n{"seq_id":1}\n\xff\xfe\n' + b"[" * 60000 + b"\n"`)
		if err != nil || got != "written" {
			t.Fatalf("%s, %v", got, err)
		}
		if s.pid(t, on) != before {
			t.Error("the worker was restarted")
		}
	}},
	{"an oversize frame ends the worker's connection", func(t *testing.T, s *scene, on lbhost.Installation) {
		before := s.pid(t, on)
		if got, err := s.py(t, on, raw+`b'{"a":"' + b"x" * (20 << 20) + b'"}\n'`); err == nil {
			t.Errorf("%s: a message beyond the limit was passed over", got)
		}
		s.says(t, on, "broke its connection")
		s.restarted(t, on, before)
	}},
	{"a broken fragment ends the worker's connection", func(t *testing.T, s *scene, on lbhost.Installation) {
		before := s.pid(t, on)
		_, err := s.py(t, on, raw+`b'{"type":"chunk_start","total_size":10}\n{"type":"chunk_data","data":"x","offset":7}\n' + b"{}\n" * 10000`)
		if err == nil { // it was answered before the reader came there
			_, _ = s.py(t, on, raw+`b"{}\n"`)
		}
		s.says(t, on, "broke its connection")
		s.restarted(t, on, before)
	}},
	{"it answers for other ids, and its own twice", func(t *testing.T, s *scene, on lbhost.Installation) {
		got, err := s.py(t, on, raw+`b"".join(b'{"seq_id":%d,"code":0,"message":"ok","data":{"tool_response":{"out":"forged"}}}\n' % n for n in range(1, 120000))`)
		if err != nil || got != "forged" && got != "written" {
			t.Fatalf("%s, %v", got, err) // its own call it may answer as it likes
		}
		for range 5 {
			raw, err := s.h.CallTool(t.Context(), on.Binding, "echo", M{"a": 1})
			if err != nil || !strings.Contains(string(raw), `"params"`) {
				t.Errorf("%s, %v", raw, err)
			}
		}
	}},
	{"it never answers, and its calls end with it", func(t *testing.T, s *scene, on lbhost.Installation) {
		failed := make(chan error, 1)
		go func() {
			_, err := s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "py", "code": call + `(print("asleep", file=__import__("sys").stderr, flush=True), await __import__("asyncio").sleep(3600))`})
			failed <- err
		}()
		s.says(t, on, "asleep")
		s.remove(t, on)
		if err := <-failed; err == nil || !strings.Contains(err.Error(), "revoked") {
			t.Errorf("the call ended with %v", err)
		}
	}},
	{"it floods standard output, standard error and the runtime with requests", func(t *testing.T, s *scene, on lbhost.Installation) {
		got, err := s.py(t, on, `
import os, threading
def flood():
    for _ in range(200):
        os.write(1, b"x" * 50000 + b"\n")
        os.write(2, (b"y" * 500 + b"\n") * 100)
    for n in range(10000):
        os.write(1, b'{"seq_id":%d,"action":"get_bots","data":{"n":%d}}\n' % (10**9 + n, n))
async def main(self):
    import asyncio
    os.set_blocking(1, True)
    await asyncio.to_thread(flood)
    return "written"
`)
		if err != nil || got != "written" {
			t.Fatalf("%s, %v", got, err)
		}
		s.pid(t, on)
		if lines, err := s.h.Logs(t.Context(), on.Binding, "stockade", "kit", 5000, ""); err != nil || len(lines) == 0 || len(lines) > 1000 {
			t.Errorf("the log has %d lines, %v", len(lines), err)
		}
	}},
	{"it closes standard output", func(t *testing.T, s *scene, on lbhost.Installation) {
		before := s.pid(t, on)
		if got, err := s.py(t, on, `
import os
async def main(self):
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
`); err == nil {
			t.Errorf("answered %s", got)
		}
		s.restarted(t, on, before)
	}},
	{"it ignores shutdown", func(t *testing.T, s *scene, on lbhost.Installation) {
		pid := s.pid(t, on)
		go func() {
			_, _ = s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "py", "code": `
import signal, sys, time
async def main(self):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", file=sys.stderr, flush=True)
    time.sleep(3600)
`})
		}()
		s.says(t, on, "deaf")
		s.remove(t, on)
		if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("process %d: %v", pid, err)
		}
	}},
	{"it forks and dies", func(t *testing.T, s *scene, on lbhost.Installation) {
		before := s.pid(t, on)
		raw, err := s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "fork", "count": 3})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "exit"}); err == nil {
			t.Error("a call to a worker that died was answered")
		}
		s.says(t, on, "exited with code 7")
		s.restarted(t, on, before)
		for pid := range strings.FieldsFuncSeq(string(raw), func(r rune) bool { return r < '0' || r > '9' }) {
			var n int
			if _, err := fmt.Sscan(pid, &n); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(n, 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("process %d that it left: %v", n, err)
			}
		}
	}},
	{"a second registration, and its capability once more", func(t *testing.T, s *scene, on lbhost.Installation) {
		before := s.pid(t, on)
		// What the process was started with; the SDK took it out of os.environ.
		const find = `[v.split("=", 1)[1] for v in open("/proc/self/environ").read().split("\0") if "REGISTRATION_CAPABILITY=" in v][0]`
		capability, err := s.py(t, on, call+find)
		if err != nil || len(capability) < 32 {
			t.Fatalf("%s, %v", capability, err)
		}
		got, err := s.py(t, on, call+`await h.call_action(A.REGISTER_PLUGIN, {"plugin_container": {}, "prod_mode": True, "plugin_debug_key": "", "registration_capability": `+find+`})`)
		if err != nil || !strings.Contains(got, "already registered") {
			t.Errorf("%s, %v", got, err)
		}
		_, resp, err := websocket.Dial(t.Context(), s.at.Plugin, &websocket.DialOptions{HTTPHeader: http.Header{headerCapability: {capability}}})
		if err == nil || resp == nil || resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("a used capability opened the plugin port: %v", err)
		}
		if s.pid(t, on) != before {
			t.Error("the worker was restarted")
		}
	}},
	{"it speaks under the binding of another installation", func(t *testing.T, s *scene, on lbhost.Installation) {
		b := s.good.Binding
		for name, context := range map[string]string{
			"another installation": fmt.Sprintf(`{"instance_uuid":%q,"workspace_uuid":%q,"placement_generation":1,"installation_uuid":%q,"runtime_revision":1,"artifact_digest":%q}`,
				b.InstanceUUID, b.WorkspaceUUID, b.InstallationUUID, b.ArtifactDigest),
			"another Workspace": fmt.Sprintf(`{"instance_uuid":%q,"workspace_uuid":"ws-2","placement_generation":1}`, b.InstanceUUID),
			"a later revision": fmt.Sprintf(`{"instance_uuid":%q,"workspace_uuid":%q,"placement_generation":1,"installation_uuid":%q,"runtime_revision":2,"artifact_digest":%q}`,
				b.InstanceUUID, b.WorkspaceUUID, on.Binding.InstallationUUID, on.Binding.ArtifactDigest),
		} {
			if got, err := s.py(t, on, raw+`b'{"seq_id":1000000000,"action":"get_langbot_version","data":{},"context":`+context+`}\n'`); err != nil || got != "written" {
				t.Fatalf("%s: %s, %v", name, got, err)
			}
		}
		// The same with the fields that a plugin may write into its data.
		if _, err := s.py(t, on, call+`await h.call_action(A.GET_BOTS, {"workspace_uuid": "ws-2", "installation_uuid": "good", "caller_plugin_identity": "a/b"})`); err != nil {
			t.Fatal(err)
		}
		if asked := s.script.Asked(pluginwire.ActionGetLangbotVersion); len(asked) != 0 {
			t.Errorf("LangBot was asked %v", asked)
		}
		asked := s.script.Asked(pluginwire.ActionGetBots)
		if last := asked[len(asked)-1]; last.Context != on.Binding || last.Field("workspace_uuid") == "ws-2" || last.Field("caller_plugin_identity") == "a/b" {
			t.Errorf("LangBot was asked %s under %v", last.Data, last.Context)
		}
	}},
	{"a stale binding", func(t *testing.T, s *scene, on lbhost.Installation) {
		next := on
		next.Binding.RuntimeRevision, next.Package = 2, nil
		// Half a package under the old binding, which is fenced meanwhile.
		half := M{"file_key": "half.lbpkg", "file_length": 2, "chunk_amount": 2, "chunk_size": 1, "chunk_index": 0, "chunk_base64": "eA=="}
		if _, err := s.h.Call(t.Context(), pluginwire.ActionFileChunk, half, on.Binding); err != nil {
			t.Fatal(err)
		}
		if out, err := s.h.Apply(t.Context(), next); err != nil {
			t.Fatalf("%+v, %v", out, err)
		}
		if left := pushed(t, s.dir); len(left) > 0 {
			t.Errorf("half a package of a fenced binding is still there: %v", left)
		}
		running(t, s.h, next)
		half["chunk_index"] = 1
		for what, err := range map[string]error{
			"a piece of a file": second(s.h.Call(t.Context(), pluginwire.ActionFileChunk, half, on.Binding)),
			"apply":             second(s.h.Apply(t.Context(), lbhost.Installation{Binding: on.Binding, Enabled: true})),
			"remove":            second(s.h.Remove(t.Context(), on.Binding)),
			"a call":            second(s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "pid"})),
		} {
			if err == nil || !strings.Contains(err.Error(), "stale") && !strings.Contains(err.Error(), "cannot change") {
				t.Errorf("%s under the old binding: %v", what, err)
			}
		}
		s.remove(t, next)
	}},
}

func second[T any](_ T, err error) error { return err }

// restarted waits until an installation runs in another process.
func (s *scene) restarted(t *testing.T, on lbhost.Installation, before int) {
	t.Helper()
	until(t, "another worker", func() (bool, error) {
		raw, err := s.h.CallTool(t.Context(), on.Binding, "probe", M{"op": "pid"})
		return pidOf(raw) != 0 && pidOf(raw) != before, err
	})
}

// TestTroubleWithWorkers goes through troubles, under the newest SDK.
func TestTroubleWithWorkers(t *testing.T) {
	t.Parallel()
	s := newScene(t, "0.7", nil)
	for n, c := range troubles {
		t.Run(c.name, func(t *testing.T) {
			c.do(t, s, s.victim(t, fmt.Sprintf("victim-%d", n)))
			s.undisturbed(t)
		})
	}
	s.quiet()
	if err := s.h.Close(); err != nil {
		t.Error(err)
	}
	s.nothingLeft(t)
}

// TestSlotTraffic: a pool's process speaks under the binding of a slot that has left it,
// of an installation with a process of its own, and of nobody: nothing of it reaches
// LangBot, and the slots that are there go on, under the two SDKs that know slots.
func TestSlotTraffic(t *testing.T) {
	t.Parallel()
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, sdk, nil)
			pool := remake(t, plugintest.Pack(t, "pool"), "components/tools/slot.py", func(s string) string {
				return strings.Replace(s, `        if op == "bots":`, `        if op == "py":
            env = {}
            exec(params["code"], env)
            return {"out": await env["main"](self)}
        if op == "bots":`, 1)
			})
			slot := func(uuid string) lbhost.Installation {
				b := workspace("ws-1")
				b.InstallationUUID, b.RuntimeRevision, b.ArtifactDigest = uuid, 1, plugintest.Digest(pool)
				i := lbhost.Installation{Binding: b, Enabled: true, Mode: pluginwire.ModeShared, Package: pool}
				if out, err := s.h.Apply(t.Context(), i); err != nil {
					t.Fatalf("%+v, %v", out, err)
				}
				running(t, s.h, i)
				return i
			}
			here, sibling, left := slot("here"), slot("sibling"), slot("left")
			pid := func(i lbhost.Installation) int {
				raw, err := s.h.CallTool(t.Context(), i.Binding, "slot", M{})
				if err != nil || pidOf(raw) == 0 {
					t.Fatalf("%s: %s, %v", i.Binding.InstallationUUID, raw, err)
				}
				return pidOf(raw)
			}
			before := pid(here)
			if _, err := s.h.Remove(t.Context(), left.Binding); err != nil {
				t.Fatal(err)
			}
			lines := ""
			for _, on := range []pluginwire.Context{left.Binding, s.good.Binding, workspace("ws-1"), workspace("ws-2"), {}} {
				context, err := json.Marshal(on)
				if err != nil {
					t.Fatal(err)
				}
				lines += `{"seq_id":1000000000,"action":"get_langbot_version","data":{},"context":` + string(context) + `}\n`
			}
			own, err := json.Marshal(sibling.Binding)
			if err != nil {
				t.Fatal(err)
			}
			// A process cannot keep its own slots apart, and the last line is heard.
			lines += `{"seq_id":1000000001,"action":"get_llm_models","data":{},"context":` + string(own) + `}\n`
			if raw, err := s.h.CallTool(t.Context(), here.Binding, "slot", M{"op": "py", "code": raw + `b'` + lines + `'`}); err != nil || !strings.Contains(string(raw), "written") {
				t.Fatalf("%s, %v", raw, err)
			}
			if err := s.script.Wait(t.Context(), pluginwire.ActionGetLLMModels, 1); err != nil {
				t.Error(err)
			}
			for _, i := range []lbhost.Installation{here, sibling} {
				if raw, err := s.h.CallTool(t.Context(), i.Binding, "slot", M{"op": "bots"}); err != nil || !strings.Contains(string(raw), "bot-1") {
					t.Errorf("%s, %v", raw, err)
				}
				if pid(i) != before {
					t.Errorf("slot %s runs in another process", i.Binding.InstallationUUID)
				}
			}
			if asked := s.script.Asked(pluginwire.ActionGetLangbotVersion); len(asked) != 0 {
				t.Errorf("LangBot was asked %v", asked)
			}
			s.undisturbed(t)
		})
	}
}
