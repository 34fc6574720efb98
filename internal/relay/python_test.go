package relay

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// python returns an interpreter that has the websockets library.
func python(t *testing.T) string {
	t.Helper()
	need.Tool(t, "python3", "python3-venv")
	dir, err := filepath.Abs("../../.cache/relay-venv")
	if err != nil {
		t.Fatal(err)
	}
	var fault bytes.Buffer
	cmd := exec.Command("sh", "testdata/venv.sh", dir)
	cmd.Stderr = &fault
	out, err := cmd.Output()
	need.That(t, err == nil, "this test needs the Python library websockets: apt-get install python3-venv, and a package index it can be had from: %v\n%s", err, fault.String())
	return strings.TrimSpace(string(out))
}

// pyDaemon starts the daemon of testdata and waits until the hub has it.
func pyDaemon(t *testing.T, h *Hub, url, id string, args ...string) (end func() string) {
	t.Helper()
	cmd := exec.Command(python(t), append([]string{"testdata/daemon.py", "--url", url, "--daemon-id", id, "--token", token}, args...)...)
	var out, fault bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &fault
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	wait := func() { once.Do(func() { cmd.Wait() }) }
	t.Cleanup(func() { cmd.Process.Kill(); wait() })
	if err := h.WaitForDaemon(context.Background(), id, soon); err != nil {
		t.Fatalf("%v\n%s", err, fault.String())
	}
	return func() string { wait(); return out.String() + fault.String() }
}

func runPy(t *testing.T, h *Hub, id, payload string, tools Tools) *Job {
	t.Helper()
	j, err := h.RunJob(context.Background(), JobRequest{DaemonID: id, Payload: json.RawMessage(payload), Tools: tools})
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// childOf waits for the event that names the job's child.
func childOf(t *testing.T, j *Job) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), soon)
	defer cancel()
	e, err := j.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var child struct{ Data struct{ PID int } }
	if err := json.Unmarshal(e, &child); err != nil || child.Data.PID == 0 || !alive(child.Data.PID) {
		t.Fatalf("%s names no child: %v", e, err)
	}
	return child.Data.PID
}

func alive(pid int) bool { return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

func TestPythonDaemon(t *testing.T) {
	t.Parallel()
	for _, compressed := range []bool{false, true} {
		t.Run(fmt.Sprintf("compression offered and allowed %v", compressed), func(t *testing.T) {
			t.Parallel()
			h, url := newHub(t, func(c *HubConfig) { c.StateDir = t.TempDir(); c.Compression = compressed; c.Profile = Shared })
			end := pyDaemon(t, h, url, "pyth\u00f6n \"d\"", "--compression")
			id := "pyth\u00f6n \"d\""
			if d := h.Daemons(); len(d) != 1 || !strings.Contains(string(d[0].Metadata), `"platform"`) {
				t.Errorf("got %+v", d)
			}

			got, err := collect(t, runPy(t, h, id, `{"kind":"echo","events":300,"text":"\u00e9\ud83d\ude00\ud800"}`, nil))
			if err != nil || len(got) != 300 || !strings.Contains(got[299], `"n": 299`) || !strings.Contains(got[0], `\ud800`) {
				t.Errorf("got %d events, %v, first %.200q", len(got), err, got)
			}
			got, err = collect(t, runPy(t, h, id, `{"kind":"large","bytes":4000000}`, nil))
			if err != nil || len(got) != 1 || len(got[0]) < 4_000_000 {
				t.Errorf("got %d events, %v", len(got), err)
			}
			got, err = collect(t, runPy(t, h, id, `{"kind":"echo","events":1,"text":"`+strings.Repeat("x", 3<<20)+`"}`, nil))
			if err != nil || len(got) != 1 {
				t.Errorf("got %d events, %v", len(got), err)
			}
			got, err = collect(t, runPy(t, h, id, `{"kind":"fail"}`, nil))
			if err != nil || len(got) != 1 || !strings.Contains(got[0], "agent_runtime.daemon_unexpected") {
				t.Errorf("got %q, %v", got, err)
			}
			got, err = collect(t, runPy(t, h, id, `{"kind":"tool","calls":[{"id":1,"method":"a"},[{"id":2},{"method":"n"}],{"method":"n"},{"id":"x","method":"bad"}]}`,
				toolFunc(func(_ context.Context, in json.RawMessage) (json.RawMessage, error) {
					switch {
					case bytes.Contains(in, []byte("bad")):
						return nil, io.ErrUnexpectedEOF
					case !bytes.Contains(in, []byte(`"id"`)):
						return nil, nil
					}
					return json.RawMessage(`{"result":true}`), nil
				})))
			if err != nil || len(got) != 4 || !strings.Contains(got[0], `"result": true`) || !strings.Contains(got[2], `"answer": null`) ||
				!strings.Contains(got[3], `-32000`) || !strings.Contains(got[3], `"id": "x"`) {
				t.Errorf("got %q, %v", got, err)
			}

			// Cancel: the child is gone when it returns. Another job goes on.
			a, b := runPy(t, h, id, `{"kind":"child"}`, nil), runPy(t, h, id, `{"kind":"child"}`, nil)
			pidA, pidB := childOf(t, a), childOf(t, b)
			if o, err := a.Cancel(context.Background(), "test"); err != nil || !o.Acknowledged || o.Fence != nil || alive(pidA) {
				t.Errorf("got %+v, %v; alive %v", o, err, alive(pidA))
			}
			if !alive(pidB) {
				t.Error("cancelling one job ended another")
			}
			// Stop settles it, and the daemon is told.
			stop(t, h)
			if alive(pidB) || !b.Outcome().Acknowledged {
				t.Errorf("after Stop: %+v, alive %v", b.Outcome(), alive(pidB))
			}
			if said := end(); !strings.Contains(said, `"closed": 1001`) {
				t.Errorf("the daemon says %s", said)
			}
		})
	}
}

func TestPythonDaemonThatDoesNotAnswerIsFenced(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.CancelTimeout = 300_000_000 })
	pyDaemon(t, h, url, "deaf")
	j := runPy(t, h, "deaf", `{"kind":"deaf"}`, nil)
	childOf(t, j)
	if o, err := j.Cancel(context.Background(), "test"); err != nil || o.Acknowledged || o.Fence == nil {
		t.Errorf("got %+v, %v", o, err)
	}
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "deaf", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeFenced)
}

func TestPythonDaemonRefused(t *testing.T) {
	t.Parallel()
	_, url := newHub(t, nil)
	cmd := exec.Command(python(t), "testdata/daemon.py", "--url", url, "--daemon-id", "x", "--token", "wrong")
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "1008") || !strings.Contains(string(out), relaywire.ReasonToken) {
		t.Errorf("%v: %s", err, out)
	}
}

// The two programs of testdata understand each other: what they show about ours is
// worth something.
func TestPythonHubWithPythonDaemon(t *testing.T) {
	t.Parallel()
	py := python(t)
	hub := exec.Command(py, "testdata/hub.py", token, "5")
	in, err := hub.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := hub.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	hub.Stderr = os.Stderr
	if err := hub.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { hub.Process.Kill(); hub.Wait() }()
	lines := bufio.NewScanner(out)
	read := func() string {
		if !lines.Scan() {
			t.Fatal("the hub ended")
		}
		return lines.Text()
	}
	daemon := exec.Command(py, "testdata/daemon.py", "--url", read(), "--daemon-id", "d", "--token", token)
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { daemon.Process.Kill(); daemon.Wait() }()
	for _, want := range []string{`{"ready": "d"}`} {
		if got := read(); got != want {
			t.Errorf("got %s", got)
		}
	}
	fmt.Fprintln(in, `{"do":"run","key":1,"daemon_id":"d","payload":{"kind":"echo","events":1,"text":"hi"}}`)
	for _, want := range []string{`{"key": 1, "event": {"type": "message.delta", "data": {"n": 0, "text": "hi"}}}`, `{"key": 1, "end": "finished"}`} {
		if got := read(); got != want {
			t.Errorf("got %s", got)
		}
	}
	fmt.Fprintln(in, `{"do":"run","key":2,"daemon_id":"d","payload":{"kind":"child"}}`)
	if got := read(); !strings.Contains(got, `"pid"`) {
		t.Errorf("got %s", got)
	}
	fmt.Fprintln(in, `{"do":"cancel","key":2}`)
	if got := read(); got != `{"key": 2, "end": "finished"}` {
		t.Errorf("got %s", got)
	}
	fmt.Fprintln(in, `{"do":"stop"}`)
}
