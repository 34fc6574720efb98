package pluginruntime

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/rpc"
)

// The rest of what may go wrong, by its kind, and where it is tried:
//
//	frames of the control WebSocket       TestGarbageFrames
//	frames of control over stdio          TestGarbageOnStdio
//	frames of the plugin port             TestGarbageOnThePluginPort
//	frames of a worker                    TestTroubleWithWorkers; FuzzMessage, FuzzLines of pluginwire
//	half-open connections                 TestHalfOpenConnection, TestSlowHeaders
//	wrong and stale bindings              TestHandshakeComesFirst, TestTroubleWithWorkers; TestAdmit of pluginhost
//	slots and siblings                    testSharedProfile, TestSlotTraffic; TestAdmit, TestPoolRevision, TestDetachCancelsOwnRequestsOnly of pluginhost
//	capabilities, second registrations    TestTroubleWithWorkers; TestCapabilities, TestSecondRegistration of pluginhost
//	LangBot comes and goes                TestSupersession, TestReconnectInTheMiddleOfEverything, TestReconnectMidway
//	package index                         TestLyingIndex; TestIndexTrouble, TestFailures of deptree
//	full disk                             TestFullDisk, here, of artifact, of deptree and of pluginlegacy; TestDiskFull of transfer
//	clock                                 TestClockJumps of registration and of plugincontrol; TestTimeRunsForward of restart
//	two runtimes                          TestTwoRuntimesOnOneDirectory
//	a crash while something is published  TestKilledAtEveryStep of artifact and of deptree, TestSweepAfterAKill of transfer,
//	                                      TestKilledRuntime of worker, TestKilledRuntimeLeavesNoRun

// TestGarbageOnStdio: over standard input, what is no message is ignored, what a
// request must not say is answered, and what breaks the framing ends the connection,
// and with it the runtime, with the reason.
func TestGarbageOnStdio(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ last, why string }{
		"the end":    {"", ""},
		"too large":  {`{"a":"` + strings.Repeat("x", pluginwire.MaxMessage+1) + `"}` + "\n", "16"},
		"broken":     {`{"type":"chunk_start","total_size":10}` + "\n" + `{"type":"chunk_data","data":"x","offset":7}` + "\n", "do not fit"},
		"cut in two": {`{"seq_id":1,"action":"__ping","da`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Default()
			cfg.DataDir, cfg.Listen, cfg.PluginPort, cfg.Stdio, cfg.Python = t.TempDir(), "127.0.0.1", 0, true, need.SDK(t, "0.7")
			inR, inW := io.Pipe()
			outR, outW := io.Pipe()
			ended := make(chan error, 1)
			go func() {
				ended <- Run(context.Background(), Options{Config: cfg, Version: "test", Logger: logger(t), Stdin: inR, Stdout: outW})
			}()
			// LangBot's end: what is to come, and then the rest.
			answers, rest := make(chan string, 1), make(chan struct{})
			go func() {
				defer close(rest)
				got, lines := "", bufio.NewScanner(outR)
				for (!strings.Contains(got, "pong") || strings.Count(got, `"code":1`) < 3) && lines.Scan() {
					got += lines.Text() + "\n"
				}
				answers <- got
				_, _ = io.Copy(io.Discard, outR)
			}()
			write := func(s string) { _, _ = io.WriteString(inW, s) }
			write("x\n\n[]\nnull\n{}\n{\"action\":7}\n\xff\xfe\n" + strings.Repeat("[", 200_000) + "\n")
			write(`{"seq_id":5,"action":"__ping","data":null}` + "\n")
			write(`{"seq_id":"6","action":"list_plugins","data":{},"context":{"nonsense":1}}` + "\n")
			write(`{"seq_id":7,"action":"__ping","data":{}}` + "\n")
			t.Log(<-answers) // three refusals, one of them of {"action":7}, and a pong
			write(c.last)
			_ = inW.Close()
			err := <-ended
			_ = outW.Close()
			if c.why == "" && err != nil || c.why != "" && (err == nil || !strings.Contains(err.Error(), c.why)) {
				t.Errorf("the runtime ended with %v", err)
			}
			<-rest
		})
	}
}

// TestGarbageOnThePluginPort: a developer's connection that breaks the protocol ends
// alone, and one that LangBot fills with more than it reads disturbs nobody.
func TestGarbageOnThePluginPort(t *testing.T) {
	t.Parallel()
	// LangBot's connection is asked as often, and has to answer on a busy machine.
	s := newScene(t, "0.7", func(c *Config) { c.PingInterval = 5 * time.Second })
	info, err := s.h.DebugInfo(t.Context(), s.h.Workspace("ws-1"))
	if err != nil {
		t.Fatal(err)
	}
	dial := func() *websocket.Conn {
		c, _, err := websocket.Dial(t.Context(), s.at.Plugin, &websocket.DialOptions{HTTPHeader: http.Header{headerDebugKey: {info.Key}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.CloseNow() })
		return c
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := dial()
	for _, garbage := range []string{"", "x", "[]", "null", "{}", `{"action":7}`, strings.Repeat("[", 100000), "\xff\xfe",
		`{"seq_id":1,"action":"get_bots","data":{}}`, `{"seq_id":2,"action":"register_plugin","data":{"plugin_container":[],"prod_mode":"x"}}`} {
		if err := c.Write(ctx, websocket.MessageBinary, []byte(garbage)); err != nil {
			t.Fatal(err)
		}
	}
	for n := 1; n <= 2; n++ {
		_, b, err := c.Read(ctx)
		if err != nil || !strings.Contains(string(b), `"code":1`) {
			t.Errorf("%s, %v", b, err)
		}
	}
	big := dial()
	_ = big.Write(ctx, websocket.MessageText, make([]byte, pluginwire.MaxMessage+1))
	if _, _, err := big.Read(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("a message beyond the limit: %v", err)
	}
	// One that is there and says nothing is found out by its silence.
	raw, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(s.at.Plugin, "ws://"), "/plugin/debug/ws"))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := fmt.Fprintf(raw, "GET /plugin/debug/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
		"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n%s: %s\r\n\r\n", headerDebugKey, info.Key); err != nil {
		t.Fatal(err)
	}
	if err := raw.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(raw); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 101") {
		t.Errorf("a silent connection: %.40q, %v", b, err)
	}
	s.undisturbed(t)
	s.quiet()
	s.nothingLeft(t)
}

// TestSlowHeaders: connections that say nothing, or never finish, are bounded, and
// keep nobody out.
func TestSlowHeaders(t *testing.T) {
	t.Parallel()
	r := start(t, "", nil)
	h := r.connect(lbhost.Config{})
	for _, url := range []string{r.at.Control, r.at.Plugin} {
		address, _, _ := strings.Cut(strings.TrimPrefix(url, "ws://"), "/")
		var conns []net.Conn
		for range maxPending + 50 {
			c, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
			conns = append(conns, c)
		}
		if status, _ := get(t, "http://"+address+"/healthz", nil); status != http.StatusOK {
			t.Errorf("health among them: %d", status)
		}
		// The oldest made room for the others.
		for _, c := range conns[:50] {
			if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
				t.Fatalf("one of the oldest is still open: %v", err)
			}
		}
	}
	if err := h.Ping(t.Context()); err != nil {
		t.Errorf("LangBot, which was there before: %v", err)
	}
	r.connect(lbhost.Config{})
}

func isTimeout(err error) bool {
	n, ok := err.(net.Error)
	return ok && n.Timeout()
}

// TestReconnectMidway: LangBot's connection is replaced in the middle of a push, of an
// installation, of an attach and of a stream. What was half done is gone or finished,
// and in the end everything runs as the new connection wants it.
func TestReconnectMidway(t *testing.T) {
	t.Parallel()
	r := start(t, "0.7", nil)
	script := lbhost.NewScript()
	kit := install(workspace("ws-1"), "kit-1", "kit")(t)
	slot := install(workspace("ws-1"), "slot-1", "pool")(t)
	slot.Mode = pluginwire.ModeShared
	h := r.connect(lbhost.Config{Script: script}, kit)
	running(t, h, kit)
	pid, err := h.CallTool(t.Context(), kit.Binding, "probe", M{"op": "pid"})
	if err != nil {
		t.Fatal(err)
	}
	again := func(all ...lbhost.Installation) {
		t.Helper()
		old := h
		h = r.connect(lbhost.Config{Script: script}, all...)
		<-old.Gone()
	}

	// A push: half of it goes with its connection.
	half := M{"file_key": "half.lbpkg", "file_length": 2, "chunk_amount": 2, "chunk_size": 1, "chunk_index": 0, "chunk_base64": "eA=="}
	if _, err := h.Call(t.Context(), pluginwire.ActionFileChunk, half, slot.Binding); err != nil {
		t.Fatal(err)
	}
	again(kit)
	until(t, "the half file gone", func() (bool, error) { return len(pushed(t, r.dir)) == 0, nil })

	// An installation and an attach: LangBot does not answer for the settings, and goes.
	script.On(pluginwire.ActionGetPluginSettings, func(ctx context.Context, _ *lbhost.Host, _ *rpc.Inbound) (any, error) {
		<-ctx.Done()
		return nil, context.Cause(ctx)
	})
	n := len(script.Asked(pluginwire.ActionGetPluginSettings))
	if out, err := h.Apply(t.Context(), slot); err != nil {
		t.Fatalf("%+v, %v", out, err)
	}
	if err := script.Wait(t.Context(), pluginwire.ActionGetPluginSettings, n+1); err != nil {
		t.Fatal(err)
	}
	script.On(pluginwire.ActionGetPluginSettings, nil)
	again(kit, slot)
	running(t, h, slot)
	second := install(workspace("ws-1"), "kit-2", "kit")(t)
	applied := make(chan error, 1)
	old := h
	go func() { _, err := old.Apply(t.Context(), second); applied <- err }()
	again(kit, slot, second)
	<-applied // it was answered or not; the new connection wants it, too
	running(t, h, second)

	// A stream: its reader sees an end that is no end in order, and the next one works.
	stream, err := h.Stream(t.Context(), pluginwire.ActionExecuteCommand,
		M{"command_context": lbhost.CommandContext("say", "many", "100000"), "include_plugins": nil}, kit.Binding)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	again(kit, slot, second)
	for err = nil; err == nil; {
		_, err = stream.Next(t.Context())
	}
	if err == io.EOF {
		t.Error("a stream that was cut ended in order")
	}
	stream.Close()
	if frames, err := h.Command(t.Context(), kit.Binding, "say", "many", "100"); err != nil || len(frames) != 100 {
		t.Errorf("%d frames, %v", len(frames), err)
	}
	if got, err := h.CallTool(t.Context(), kit.Binding, "probe", M{"op": "pid"}); err != nil || string(got) != string(pid) {
		t.Errorf("the worker is another one: %s, was %s, %v", got, pid, err)
	}
	for _, i := range []lbhost.Installation{second, slot} {
		if _, err := h.Remove(t.Context(), i.Binding); err != nil {
			t.Error(err)
		}
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	r.nothingLeft(t)
}

// TestLyingIndex: an index that is down, or says what is not so, fails the
// installation with the reason, not the others; applied again when the index is
// right, or without the need, it runs.
func TestLyingIndex(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	body := ""
	index := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if body == "" {
			http.Error(w, "down", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, body)
	}))
	t.Cleanup(index.Close)
	s := newScene(t, "0.7", func(c *Config) { c.IndexURL = index.URL + "/simple/" })
	for _, lie := range []string{"", `<a href="../toy-9-py3-none-any.whl#sha256=` + strings.Repeat("0", 64) + `">toy-9-py3-none-any.whl</a>`, "<html>\x00"} {
		mu.Lock()
		body = lie
		mu.Unlock()
		b := workspace("ws-1")
		pack := plugintest.Pack(t, "kit", "langbot-plugin", "toy-that-is-nowhere==9")
		b.InstallationUUID, b.RuntimeRevision, b.ArtifactDigest = "needy", 1, plugintest.Digest(pack)
		i := lbhost.Installation{Binding: b, Enabled: true, Package: pack}
		out, err := s.h.Apply(t.Context(), i)
		if err != nil || out.State != pluginwire.StateFailed || out.ErrorCode != pluginwire.ErrorDependencyPrepare || out.Message == "" {
			t.Errorf("with %.10q: %+v, %v", lie, out, err)
		}
		s.undisturbed(t)
	}
	s.quiet()
	s.nothingLeft(t)
}

// TestOddNumbersAndTexts: what Python's json writes and reads beyond the standard, NaN,
// infinities and halves of surrogate pairs, passes unchanged, both ways and through
// both connections.
func TestOddNumbersAndTexts(t *testing.T) {
	t.Parallel()
	const odd = `{"n":NaN,"i":Infinity,"m":-Infinity,"s":"\ud800 and \udfff","o":"\ud83d\ude00","big":123456789012345678901234567890}`
	const python = `__import__("json").loads(r'` + odd + `')`
	for _, sdk := range series {
		t.Run(sdk, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, sdk, nil)
			on := s.victim(t, "odd")
			holds := func(what string, raw []byte) {
				t.Helper()
				for _, part := range []string{"NaN", "Infinity", "-Infinity", `\ud800 and \udfff`, "123456789012345678901234567890"} {
					if !strings.Contains(string(raw), part) {
						t.Errorf("%s: no %s in %s", what, part, raw)
					}
				}
			}
			ask := func(params string) (json.RawMessage, error) {
				session, err := json.Marshal(lbhost.Session())
				if err != nil {
					t.Fatal(err)
				}
				return s.h.Call(t.Context(), pluginwire.ActionCallTool, json.RawMessage(`{"tool_name":"probe","tool_parameters":`+params+
					`,"session":`+string(session)+`,"query_id":1,"include_plugins":null}`), on.Binding)
			}
			program := func(code string) string {
				b, err := json.Marshal(code)
				if err != nil {
					t.Fatal(err)
				}
				return `{"op":"py","odd":` + odd + `,"code":` + string(b) + `}`
			}
			// LangBot to worker and back.
			raw, err := ask(program("async def main(self):\n    return params['odd']\n"))
			if err != nil {
				t.Fatal(err)
			}
			holds("to the worker and back", raw)
			// Worker to LangBot and back.
			s.script.On(pluginwire.ActionGetBotInfo, func(context.Context, *lbhost.Host, *rpc.Inbound) (any, error) {
				return json.RawMessage(`{"bot":` + odd + `}`), nil
			})
			raw, err = ask(program(call + `await h.call_action(A.GET_BOT_INFO, {"bot_uuid": "b", "odd": ` + python + `})`))
			if err != nil {
				t.Fatal(err)
			}
			holds("LangBot's answer", raw)
			asked := s.script.Asked(pluginwire.ActionGetBotInfo)
			if len(asked) != 1 {
				t.Fatalf("LangBot was asked %d times", len(asked))
			}
			holds("what LangBot was asked", asked[0].Data)
			s.undisturbed(t)
		})
	}
}

// TestFullDisk: a disk that fills up while a package is pushed, or unpacked, costs that
// installation its attempt and leaves nothing of it; what runs goes on, and what fits
// is installed afterwards.
func TestFullDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	need.Disk(t, dir, "size=8m")
	s := newScene(t, "0.7", func(c *Config) { c.DataDir = dir })
	free := func() uint64 {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			t.Fatal(err)
		}
		return fs.Bfree * uint64(fs.Bsize) >> 20
	}
	before := free()
	for name, filler := range map[string]func() string{
		"pushed":   func() string { return rand.Text() + "\n#" }, // which no packing makes small
		"unpacked": func() string { return rand.Text() + strings.Repeat("x", 300) + "\n#" },
	} {
		pack := remake(t, plugintest.Pack(t, "kit"), "components/tools/probe.py", func(s string) string {
			b := []byte(s + "\n#")
			for len(b) < 15<<20 {
				b = append(b, filler()...)
			}
			return string(b)
		})
		b := workspace("ws-1")
		b.InstallationUUID, b.RuntimeRevision, b.ArtifactDigest = name, 1, plugintest.Digest(pack)
		out, err := s.h.Apply(t.Context(), lbhost.Installation{Binding: b, Enabled: true, Package: pack})
		if err == nil || !strings.Contains(err.Error(), "no space") && !strings.Contains(err.Error(), "full") {
			t.Errorf("%s: %+v, %v", name, out, err)
		}
		if after := free(); after != before {
			t.Errorf("%s: %d MiB are free, before %d", name, after, before)
		}
		s.undisturbed(t)
	}
	s.pid(t, s.victim(t, "fits"))
	s.quiet()
	s.nothingLeft(t)
}
