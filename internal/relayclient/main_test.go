package relayclient

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/osproc"
)

// The test binary is also the keeper, the agents that the tests run, and a whole
// client.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case osproc.KeeperCommand:
			os.Exit(osproc.KeeperMain())
		case "stubborn":
			signal.Ignore(unix.SIGTERM)
			note("stubborn", os.Getpid())
			time.Sleep(time.Hour)
		case "client":
			os.Exit(clientMain(os.Args[2:]))
		case "fake":
			fake(os.Args[2], os.Args[3:])
			os.Exit(0)
		}
	}
	need.Main(m)
}

func exe() string {
	e, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return e
}

// note appends a line to the file that FAKE_NOTES names, so that a test knows who
// is there.
func note(what string, value any) {
	f, err := os.OpenFile(os.Getenv("FAKE_NOTES"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	fmt.Fprintln(f, what, value)
}

// fake is an agent: kind is how it speaks, FAKE_MODE what it does.
func fake(kind string, args []string) {
	mode := os.Getenv("FAKE_MODE")
	note("agent", os.Getpid())
	wd, _ := os.Getwd()
	note("cwd", wd)
	note("args", strings.Join(args, " "))
	note("foreign", os.Getenv("FOREIGN_HOST_SECRET"))
	switch kind {
	case "claude":
		fakeClaude(mode, args)
	case "codex":
		fakeCodex(mode)
	case "acp":
		fakeACP(mode)
	}
}

// hang starts a child that ignores SIGTERM, in another session, and ignores it
// too.
func hang() {
	signal.Ignore(unix.SIGTERM)
	_, err := os.StartProcess("/proc/self/exe", []string{"x", "stubborn"}, &os.ProcAttr{
		Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		panic(err)
	}
	time.Sleep(time.Hour)
}

// end does what the modes of all kinds have in common, before the answer.
func end(mode string) {
	switch mode {
	case "hang":
		hang()
	case "leave", "leave and crash": // leaves somebody who holds the output
		_, err := os.StartProcess("/proc/self/exe", []string{"x", "stubborn"}, &os.ProcAttr{
			Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: true}})
		if err != nil {
			panic(err)
		}
		if mode != "leave" {
			os.Exit(3)
		}
	case "crash":
		fmt.Fprintln(os.Stderr, "it broke, Authorization: Bearer secret-of-the-user")
		os.Exit(3)
	}
}

func fakeClaude(mode string, args []string) {
	prompt, _ := io.ReadAll(os.Stdin)
	fmt.Println(`{"type":"system","subtype":"init","session_id":"s-1"}`)
	fmt.Println(`{"type":"assistant","message":{"content":[{"type":"text","text":"I think"}]}}`)
	end(mode)
	if mode == "tools" {
		i := slices.Index(args, "--mcp-config")
		raw, err := os.ReadFile(args[i+1])
		if err != nil {
			panic(err)
		}
		var cfg struct {
			Servers map[string]struct {
				URL     string            `json:"url"`
				Headers map[string]string `json:"headers"`
			} `json:"mcpServers"`
		}
		if err := json.Unmarshal(raw, &cfg); err != nil {
			panic(err)
		}
		prompt = []byte(callTool(cfg.Servers[serverName].URL, cfg.Servers[serverName].Headers["Authorization"]))
	}
	if mode == "big" {
		prompt = bytes.Repeat([]byte("b"), 3<<20)
	}
	out, _ := json.Marshal(map[string]any{"type": "result", "result": "answer: " + string(prompt)})
	fmt.Println(string(out))
}

func callTool(url, authorization string) string {
	req, err := http.NewRequest("POST", url, strings.NewReader(`{"jsonrpc":"2.0","id":7,"method":"tools/list"}`))
	if err != nil {
		panic(err)
	}
	req.Header.Set("Authorization", authorization)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err.Error()
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return fmt.Sprint(res.StatusCode, " ", string(b))
}

type rpc struct {
	ID     json.RawMessage `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
}

func serveRPC(on func(m rpc)) {
	sc := bufio.NewScanner(os.Stdin)
	sc.Buffer(nil, 32<<20)
	for sc.Scan() {
		var m rpc
		if json.Unmarshal(sc.Bytes(), &m) == nil {
			on(m)
		}
	}
}

func fakeCodex(mode string) {
	serveRPC(func(m rpc) {
		switch m.Method {
		case "initialize":
			fmt.Printf(`{"id":%s,"result":{}}`+"\n", m.ID)
		case "thread/start":
			fmt.Printf(`{"id":%s,"result":{"thread":{"id":"th-1"}}}`+"\n", m.ID)
		case "turn/start":
			fmt.Printf(`{"id":%s,"result":{"turn":{"id":"tu-1"}}}`+"\n", m.ID)
			fmt.Println(`{"method":"turn/started","params":{"threadId":"th-1","turn":{"id":"tu-1"}}}`)
			fmt.Println(`{"method":"item/completed","params":{"threadId":"th-1","item":{"id":"i1","type":"agentMessage","text":"I think"}}}`)
			end(mode)
			fmt.Println(`{"method":"item/completed","params":{"threadId":"th-1","item":{"id":"i2","type":"agentMessage","text":"answer: codex","phase":"final_answer"}}}`)
			fmt.Println(`{"method":"turn/completed","params":{"threadId":"th-1","turn":{"id":"tu-1","status":"completed"}}}`)
		}
	})
}

func fakeACP(mode string) {
	serveRPC(func(m rpc) {
		switch m.Method {
		case "initialize":
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":1}}`+"\n", m.ID)
		case "session/new":
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,"result":{"sessionId":"se-1"}}`+"\n", m.ID)
		case "session/cancel":
			note("cancelled", "session")
		case "session/prompt":
			say := func(id, text string) {
				fmt.Printf(`{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"se-1","update":{"sessionUpdate":"agent_message_chunk","messageId":%q,"content":{"type":"text","text":%q}}}}`+"\n", id, text)
			}
			say("m1", "I think")
			if mode == "flood" {
				for {
					say("m2", strings.Repeat("f", 16<<10))
				}
			}
			if mode == "hang" {
				go hang()
				return
			}
			end(mode)
			say("m2", "answer: ")
			say("m2", "acp")
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,"result":{"stopReason":"end_turn"}}`+"\n", m.ID)
		}
	})
}

// notes waits for a line of the fakes' notes and returns its value.
func notes(t *testing.T, file, what string) string {
	t.Helper()
	var found string
	wait(t, func() bool {
		b, _ := os.ReadFile(file)
		for line := range strings.Lines(string(b)) {
			if name, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " "); ok && name == what {
				found = value
				return true
			}
		}
		return false
	})
	return found
}

func pidOf(t *testing.T, file, what string) int {
	t.Helper()
	var pid int
	if _, err := fmt.Sscan(notes(t, file, what), &pid); err != nil {
		t.Fatal(err)
	}
	return pid
}

// soon is how long a test waits for what must happen.
const soon = time.Minute

func wait(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not come true")
		}
	}
}

// alive reports whether a process is there and no zombie.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	return len(f) > 0 && string(f[0]) != "Z" && string(f[0]) != "X"
}

// clientMain is a client as a process of its own: URL, daemon id, token, workspace.
func clientMain(args []string) int {
	ctx, stop := signal.NotifyContext(bg, syscall.SIGTERM)
	defer stop()
	cfg := Config{URL: args[0], DaemonID: args[1], Token: args[2], AllowWorkspace: []string{args[3]}, AllowCommand: []string{"*"}, AllowEnv: []string{"FAKE_*"}}
	if err := Run(ctx, cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 3
	}
	return 0
}

func startClient(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(exe(), append([]string{"client"}, args...)...)
	cmd.Env, cmd.Stderr = env, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}
