package testagent

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	acp "github.com/coder/acp-go-sdk"

	"github.com/stockade-run/stockade/internal/need"
)

func TestMain(m *testing.M) { need.Main(m) }

// peer is the client side of a conversation; it records what it is told.
type peer struct {
	acp.Client // what the agent never calls is left out

	mu       sync.Mutex
	thoughts strings.Builder
	said     strings.Builder
	pieces   int
	calls    []string // title: status
	output   strings.Builder
	answer   acp.PermissionOptionId
	update   chan struct{} // gets a token per update, if there is room
}

func (p *peer) SessionUpdate(_ context.Context, n acp.SessionNotification) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	u := n.Update
	switch {
	case u.AgentThoughtChunk != nil:
		p.thoughts.WriteString(u.AgentThoughtChunk.Content.Text.Text)
	case u.AgentMessageChunk != nil:
		p.pieces++
		p.said.WriteString(u.AgentMessageChunk.Content.Text.Text)
	case u.ToolCall != nil:
		p.calls = append(p.calls, u.ToolCall.Title)
	case u.ToolCallUpdate != nil:
		p.calls = append(p.calls, string(*u.ToolCallUpdate.Status))
		p.output.WriteString(u.ToolCallUpdate.Content[0].Content.Content.Text.Text + "\n")
	}
	select {
	case p.update <- struct{}{}:
	default:
	}
	return nil
}

func (p *peer) RequestPermission(context.Context, acp.RequestPermissionRequest) (acp.RequestPermissionResponse, error) {
	return acp.RequestPermissionResponse{Outcome: acp.NewRequestPermissionOutcomeSelected(p.answer)}, nil
}

func (p *peer) log() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.calls, "|")
}

// converse starts an agent on pipes and returns the client's connection and a
// session in dir.
func converse(t *testing.T, p *peer, dir string, script *Script) (*acp.ClientSideConnection, acp.SessionId) {
	t.Helper()
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := Serve(context.WithoutCancel(t.Context()), Config{Script: script, In: inR, Out: outW})
		outW.Close()
		done <- err
	}()
	p.update = make(chan struct{}, 1)
	// The agent says nothing before it is asked, so the logger is set in time.
	c := acp.NewClientSideConnection(p, inW, outR)
	c.SetLogger(slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		inW.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
		<-c.Done()
	})
	res, err := c.Initialize(t.Context(), acp.InitializeRequest{ProtocolVersion: acp.ProtocolVersionNumber})
	if err != nil || res.ProtocolVersion != acp.ProtocolVersionNumber {
		t.Fatalf("initialize: %+v %v", res, err)
	}
	s, err := c.NewSession(t.Context(), acp.NewSessionRequest{Cwd: dir, McpServers: []acp.McpServer{}})
	if err != nil {
		t.Fatal(err)
	}
	return c, s.SessionId
}

func prompt(t *testing.T, c *acp.ClientSideConnection, id acp.SessionId) (acp.PromptResponse, error) {
	t.Helper()
	return c.Prompt(t.Context(), acp.PromptRequest{SessionId: id, Prompt: []acp.ContentBlock{acp.TextBlock("go")}})
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
		t.Fatal(err)
	}
}

func TestWorksTheScript(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "sum.sh"), "echo $((1 - 1))\n")
	script := &Script{Piece: 5, Steps: []Step{
		{Think: "hm – well"}, {Say: "Naïve, as always."}, {Read: "sum.sh"}, {Run: "test $(sh sum.sh) = 2", Exit: 1},
		{Edit: &Edit{Path: "sum.sh", Old: "1 - 1", New: "1 + 1"}}, {Run: "sh sum.sh; echo to stderr >&2"}, {Noise: 2001},
	}}
	p := &peer{answer: "allow"}
	c, id := converse(t, p, dir, script)
	res, err := prompt(t, c, id)
	if err != nil || res.StopReason != acp.StopReasonEndTurn {
		t.Fatalf("%+v %v", res, err)
	}
	if got := p.log(); got != "Read sum.sh|completed|test $(sh sum.sh) = 2|failed|Edit sum.sh|completed|sh sum.sh; echo to stderr >&2|completed" {
		t.Errorf("calls: %s", got)
	}
	if p.thoughts.String() != "hm – well\n" || !strings.HasPrefix(p.said.String(), "Naïve, as always.\n") {
		t.Errorf("thoughts %q, said %q", p.thoughts.String(), p.said.String())
	}
	if n := p.said.Len(); n != len("Naïve, as always.\n")+2001 || p.pieces < 6 {
		t.Errorf("%d bytes in %d pieces", n, p.pieces)
	}
	if !strings.Contains(p.output.String(), "2\nto stderr\nexit code 0") {
		t.Errorf("output: %s", p.output.String())
	}
	b, _ := os.ReadFile(filepath.Join(dir, "sum.sh"))
	info, _ := os.Stat(filepath.Join(dir, "sum.sh"))
	if string(b) != "echo $((1 + 1))\n" || info.Mode().Perm() != 0o640 {
		t.Errorf("the file: %q %v", b, info.Mode())
	}

	// The same again says the same noise, and the edit, not being there to make any more, fails.
	first := p.said.String()
	if _, err := prompt(t, c, id); err == nil || !strings.Contains(err.Error(), "the script expects 1") {
		t.Errorf("second prompt: %v", err)
	}
	if again := p.said.String()[len(first):]; !strings.HasPrefix(first, again) {
		t.Errorf("said again: %q", again)
	}
}

func TestRefusedAndOutside(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "a"), "x")
	write(t, filepath.Join(filepath.Dir(dir), "outside"), "secret")
	for name, c := range map[string]struct {
		answer acp.PermissionOptionId
		step   Step
		calls  string
		fails  bool
	}{
		"refused":  {"reject", Step{Edit: &Edit{"a", "x", "y"}}, "Edit a|failed", false},
		"twice":    {"allow", Step{Edit: &Edit{"a", "", "y"}}, "Edit a|failed", true},
		"outside":  {"allow", Step{Read: "../outside"}, "Read ../outside|failed", true},
		"absolute": {"allow", Step{Read: "/etc/passwd"}, "Read /etc/passwd|failed", true},
	} {
		p := &peer{answer: c.answer}
		conn, id := converse(t, p, dir, &Script{Steps: []Step{c.step}})
		_, err := prompt(t, conn, id)
		if (err != nil) != c.fails || p.log() != c.calls || strings.Contains(p.output.String(), "secret") {
			t.Errorf("%s: %v, calls %s", name, err, p.log())
		}
	}
	if b, _ := os.ReadFile(filepath.Join(dir, "a")); string(b) != "x" {
		t.Errorf("the file was changed to %q", b)
	}
}

func TestCancel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	pid := filepath.Join(dir, "pid")
	for name, step := range map[string]Step{
		"a command with a grandchild": {Run: "sleep 1000 & echo $! >pid.new; mv pid.new pid; wait"},
		"text without end":            {Noise: 1 << 60},
	} {
		p := &peer{}
		c, id := converse(t, p, dir, &Script{Steps: []Step{step}})
		type result struct {
			res acp.PromptResponse
			err error
		}
		done := make(chan result, 1)
		go func() {
			res, err := prompt(t, c, id)
			done <- result{res, err}
		}()
		<-p.update
		var child string
		for step.Run != "" && child == "" { // its grandchild exists when the file does
			b, _ := os.ReadFile(pid)
			child = strings.TrimSpace(string(b))
		}
		if err := c.Cancel(t.Context(), acp.CancelNotification{SessionId: id}); err != nil {
			t.Fatal(err)
		}
		if r := <-done; r.err != nil || r.res.StopReason != acp.StopReasonCancelled {
			t.Errorf("%s: %+v", name, r)
		}
		// It was killed. The kernel closes its files first, which is what the agent waits
		// for, so for a moment it is still to be seen.
		for end := time.Now().Add(time.Minute); child != ""; {
			b, err := os.ReadFile("/proc/" + child + "/stat")
			if err != nil || strings.Contains(string(b), ") Z ") || strings.Contains(string(b), ") X ") {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s: the grandchild lives: %s", name, b)
			}
		}
	}
}

// The end of the input ends the agent, a prompt under way included.
func TestEndOfInput(t *testing.T) {
	t.Parallel()
	p := &peer{}
	c, id := converse(t, p, t.TempDir(), &Script{Steps: []Step{{Run: "sleep 1000"}}})
	done := make(chan error, 1)
	go func() { _, err := prompt(t, c, id); done <- err }()
	<-p.update
	t.Cleanup(func() { // runs before converse's own, which ends the input
		go func() { <-done }()
	})
}

func TestScriptOfTheWorkingDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "here"), "")
	p := &peer{}
	c, id := converse(t, p, dir, nil)
	if _, err := prompt(t, c, id); err != nil || !strings.Contains(p.output.String(), "here") {
		t.Errorf("default script: %v %s", err, p.output.String())
	}
	write(t, filepath.Join(dir, ScriptFile), `{"steps":[{"say":"from the file"}]}`)
	s, err := c.NewSession(t.Context(), acp.NewSessionRequest{Cwd: dir, McpServers: []acp.McpServer{}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := prompt(t, c, s.SessionId); err != nil || !strings.HasSuffix(p.said.String(), "from the file\n") {
		t.Errorf("script file: %v %s", err, p.said.String())
	}
	if _, err := prompt(t, c, "session_none"); err == nil {
		t.Error("a session that is not there was prompted")
	}
}

func FuzzParseScript(f *testing.F) {
	b, _ := json.Marshal(DefaultScript())
	for _, s := range []string{string(b), `{}`, `{"steps":[{}]}`, `{"steps":[{"say":"a","run":"b"}]}`, `{"other":1}`, `[`, `{"steps":[{"noise":-1}]}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		s, err := ParseScript([]byte(in))
		if err != nil {
			return
		}
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParseScript(b); err != nil {
			t.Fatalf("%q was taken, %s was not: %v", in, b, err)
		}
	})
}
