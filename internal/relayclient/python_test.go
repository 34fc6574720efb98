package relayclient

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relay"
)

// pyHub is the hub in Python, written from the frame table alone.
type pyHub struct {
	t   *testing.T
	url string
	in  io.Writer
	out *bufio.Reader
}

// python returns an interpreter that has the websockets library.
func python(t *testing.T) string {
	t.Helper()
	need.Tool(t, "python3", "python3-venv")
	dir, err := filepath.Abs("../../.cache/relay-venv")
	if err != nil {
		t.Fatal(err)
	}
	var fault bytes.Buffer
	venv := exec.Command("sh", "../relay/testdata/venv.sh", dir)
	venv.Stderr = &fault
	out, err := venv.Output()
	need.That(t, err == nil, "this test needs the Python library websockets: apt-get install python3-venv, and a package index it can be had from: %v\n%s", err, fault.String())
	return strings.TrimSpace(string(out))
}

func newPyHub(t *testing.T) *pyHub {
	t.Helper()
	cmd := exec.Command(python(t), "../relay/testdata/hub.py", token, "10")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	h := &pyHub{t: t, in: in, out: bufio.NewReaderSize(out, 1<<20)}
	h.url = h.line()
	return h
}

func (h *pyHub) line() string {
	h.t.Helper()
	s, err := h.out.ReadString('\n')
	if err != nil {
		h.t.Fatal(err)
	}
	return strings.TrimSuffix(s, "\n")
}

func (h *pyHub) do(command map[string]any) {
	h.t.Helper()
	if _, err := h.in.Write(append(object(command), '\n')); err != nil {
		h.t.Fatal(err)
	}
}

// run starts a job.
func (h *pyHub) run(key string, payload json.RawMessage) {
	h.do(map[string]any{"do": "run", "key": key, "daemon_id": "d", "payload": payload})
}

// end reads up to the end of a job.
func (h *pyHub) end(key string) (events []json.RawMessage, end string) {
	h.t.Helper()
	for {
		var l struct {
			Key   string          `json:"key"`
			Event json.RawMessage `json:"event"`
			End   string          `json:"end"`
		}
		if err := json.Unmarshal([]byte(h.line()), &l); err != nil {
			h.t.Fatal(err)
		}
		switch {
		case l.Key != key:
		case l.End != "":
			return events, l.End
		default:
			events = append(events, l.Event)
		}
	}
}

// said reads up to a line with a field of a value.
func (h *pyHub) said(text string) {
	h.t.Helper()
	for !strings.Contains(h.line(), text) {
	}
}

func TestPythonHub(t *testing.T) {
	t.Parallel()
	h := newPyHub(t)
	connect(t, h.url, "d", nil)
	h.said(`"ready": "d"`)
	file := filepath.Join(t.TempDir(), "notes")
	for _, kind := range kinds {
		h.run(kind, payload(kind, "", file, nil))
		if got, end := h.end(kind); end != "finished" || !strings.HasSuffix(types(got), " run.completed") {
			t.Errorf("%s: %s %s", kind, end, types(got))
		}
	}
	h.run("tools", payload("claude", "tools", file, nil))
	if got, end := h.end("tools"); end != "finished" || !strings.Contains(string(got[len(got)-2]), `\"echo\": {\"jsonrpc\": \"2.0\", \"id\": 7`) {
		t.Errorf("tools: %s %s", end, got)
	}
	h.run("big", payload("claude", "big", file, nil))
	if got, end := h.end("big"); end != "finished" || !strings.HasSuffix(types(got), " run.completed") {
		t.Errorf("big: %s %s", end, types(got))
	}
	h.run("crash", payload("acp", "crash", file, nil))
	if got, end := h.end("crash"); end != "finished" || !strings.HasSuffix(types(got), "run.failed=acp.process_exited") {
		t.Errorf("crash: %s %s", end, types(got))
	}

	hanging := filepath.Join(t.TempDir(), "notes")
	h.run("hang", payload("codex", "hang", hanging, nil))
	agent, grandchild := pidOf(t, hanging, "agent"), pidOf(t, hanging, "stubborn")
	h.do(map[string]any{"do": "cancel", "key": "hang"})
	if _, end := h.end("hang"); end != "finished" || alive(agent) || alive(grandchild) {
		t.Errorf("cancel: %s, alive %v %v", end, alive(agent), alive(grandchild))
	}

	// A frame of an older hub, and a connection that is dropped, end the connection
	// and every job; it comes back, and a fenced one is refused by its hub.
	h.do(map[string]any{"do": "raw", "daemon_id": "d", "text": `{"type":"run.cleanup","job_id":"x"}`})
	h.said(`"gone": "d"`)
	h.said(`"ready": "d"`)
	lost := filepath.Join(t.TempDir(), "notes")
	h.run("lost", payload("claude", "hang", lost, nil))
	agent, grandchild = pidOf(t, lost, "agent"), pidOf(t, lost, "stubborn")
	h.do(map[string]any{"do": "drop", "daemon_id": "d"})
	if _, end := h.end("lost"); end != "fenced" {
		t.Errorf("lost: %s", end)
	}
	wait(t, func() bool { return !alive(agent) && !alive(grandchild) })
}

// A daemon in Python and one of ours on one hub, each with a job: cancelling one
// ends its processes and leaves the other's.
func TestPythonAndGoDaemonsSideBySide(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	connect(t, url, "go", nil)
	py := exec.Command(python(t), "../relay/testdata/daemon.py", "--url", url, "--daemon-id", "python", "--token", token)
	if err := py.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = py.Process.Kill()
		_ = py.Wait()
	})
	if err := h.WaitForDaemon(bg, "python", soon); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "notes")
	ours := runJob(t, h, relay.JobRequest{DaemonID: "go", Payload: payload("claude", "hang", file, nil)})
	theirs := runJob(t, h, relay.JobRequest{DaemonID: "python", Payload: json.RawMessage(`{"kind":"child"}`)})
	agent := pidOf(t, file, "agent")
	ctx, cancel := context.WithTimeout(bg, soon)
	defer cancel()
	e, err := theirs.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var child struct{ Data struct{ PID int } }
	if err := json.Unmarshal(e, &child); err != nil || !alive(child.Data.PID) {
		t.Fatalf("%s names no child: %v", e, err)
	}
	if o, err := theirs.Cancel(ctx, "test"); err != nil || !o.Acknowledged || alive(child.Data.PID) || !alive(agent) {
		t.Errorf("cancelling in Python: %+v, %v; theirs alive %v, ours alive %v", o, err, alive(child.Data.PID), alive(agent))
	}
	if o, err := ours.Cancel(ctx, "test"); err != nil || !o.Acknowledged || alive(agent) {
		t.Errorf("cancelling in Go: %+v, %v; alive %v", o, err, alive(agent))
	}
	if f := h.Fences(); len(f) != 0 {
		t.Errorf("fences %+v", f)
	}
}
