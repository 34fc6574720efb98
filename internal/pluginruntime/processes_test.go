package pluginruntime

import (
	"archive/zip"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/lbhost"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/plugintest"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/serverproc"
	"github.com/stockade-run/stockade/internal/worker"
)

// served is a real stockade serve.
type served struct {
	*serverproc.Server
	exe, keyFile string
}

// brokerOf runs a real stockade serve until the test ends.
func brokerOf(t *testing.T, bin string) (*served, *client.Client) {
	t.Helper()
	need.Runc(t)
	state := filepath.Join(t.TempDir(), "state")
	s, err := serverproc.New(serverproc.Config{Exe: filepath.Join(bin, "stockade"), StateDir: state})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	c, err := s.Client("default")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { emptied(t, s, c) })
	return &served{s, filepath.Join(bin, "stockade"), filepath.Join(state, "default.key")}, c
}

// emptied removes every box, so that nothing is left on the machine.
func emptied(t *testing.T, s *serverproc.Server, c *client.Client) {
	defer c.CloseIdle()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if s.PID() == 0 {
		if err := s.Start(ctx); err != nil {
			t.Error(err)
			return
		}
	}
	boxes, err := c.Boxes(ctx, client.Page{Limit: 500})
	if err != nil {
		t.Error(err)
	}
	for _, b := range boxes.Items {
		for b.Run != "" {
			if _, err := c.FinishRun(ctx, b.Run, client.FinishRequest{}); err != nil {
				t.Error(err)
				break
			}
			if b, err = c.Box(ctx, b.ID); err != nil {
				t.Error(err)
				break
			}
		}
		if err := c.RemoveBox(ctx, b.ID); err != nil {
			t.Error(err)
		}
	}
}

// granting is a configuration that lets plugins run processes.
func granting(s *served, plugins ...string) func(*Config) {
	return func(c *Config) {
		c.BrokerURL, c.BrokerKeyFile, c.RunnerProcess = s.URL(), s.keyFile, plugins
	}
}

// runnerOf is an installation of the toy runner with the Python package for runner
// authors in it. Some replaced text makes it another artifact.
func runnerOf(t *testing.T, ws pluginwire.Context, uuid string, replace ...string) lbhost.Installation {
	t.Helper()
	pack := plugintest.Pack(t, "runner", replace...)
	zr, err := zip.NewReader(bytes.NewReader(pack), int64(len(pack)))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	zw := zip.NewWriter(&out)
	add := func(name string, b []byte) {
		w, err := zw.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Store})
		if err == nil {
			_, err = w.Write(b)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range zr.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		add(f.Name, b)
	}
	src := need.Testdata(t, "..", "sdk", "python", "src")
	if err := filepath.WalkDir(src, func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".py" {
			return err
		}
		name, err := filepath.Rel(src, path)
		if err != nil {
			return err
		}
		b, err := os.ReadFile(path)
		add(filepath.ToSlash(name), b)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	ws.InstallationUUID, ws.RuntimeRevision, ws.ArtifactDigest = uuid, 1, plugintest.Digest(out.Bytes())
	return lbhost.Installation{Binding: ws, Enabled: true, Package: out.Bytes()}
}

// runText runs the toy runner and returns the text of its last result.
func runText(t *testing.T, h *lbhost.Host, on pluginwire.Context, run M) string {
	t.Helper()
	out, err := h.Run(t.Context(), on, "stockade", "runner", "default", run)
	if err != nil || len(out) == 0 {
		t.Fatalf("%v, %v", out, err)
	}
	last := out[len(out)-1]
	if last["type"] != "run.completed" {
		t.Fatalf("the run ended with %v", last)
	}
	return fmt.Sprint(at(last, "data", "message", "content"))
}

// told is a run of a conversation.
func told(id, conversation, text string) M {
	run := lbhost.RunContext(id, text)
	run["conversation"] = M{"conversation_id": conversation, "bot_id": "bot-1"}
	return run
}

// callsOf has the toy runner make calls, and returns the answers.
func callsOf(t *testing.T, h *lbhost.Host, on pluginwire.Context, id string, calls ...[]any) []M {
	t.Helper()
	ask, err := json.Marshal(calls)
	if err != nil {
		t.Fatal(err)
	}
	var out []M
	text := runText(t, h, on, told(id, "talk", "calls "+string(ask)))
	if err := json.Unmarshal([]byte(text), &out); err != nil || len(out) != len(calls) {
		t.Fatalf("%v: %s", err, text)
	}
	return out
}

func codeOf(answer M) any { return at(answer, "data", "error", "code") }

// ended waits until a run of an installation is finished in the ledger, and returns it
// with its processes.
func ended(t *testing.T, c *client.Client, installation string) (run client.Run, all []client.ProcessInfo) {
	t.Helper()
	until(t, "the end of the run of "+installation, func() (bool, error) {
		runs, err := c.Runs(t.Context(), client.Page{})
		for _, r := range runs.Items {
			if r.Installation != nil && r.Installation.InstallationUUID == installation {
				run = r
				break
			}
		}
		return run.State == "finished", err
	})
	list, err := c.Processes(t.Context(), client.ProcessFilter{Run: run.ID})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		info, err := c.Process(p.Handle).Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, info)
	}
	return run, all
}

// testRunnerProcesses: genuine runners run commands in the broker's boxes, as
// dedicated workers and in slots, and nobody else's.
func testRunnerProcesses(t *testing.T, programs string) {
	t.Parallel()
	s, c := brokerOf(t, programs)
	for _, sdk := range []string{"0.6", "0.7"} {
		t.Run(sdk, func(t *testing.T) {
			r := start(t, sdk, granting(s, "stockade/runner"))
			ws := workspace("ws-" + sdk)
			one, two := runnerOf(t, ws, "one-"+sdk), runnerOf(t, ws, "two-"+sdk)
			h := r.dial(lbhost.Config{})
			if _, err := h.Handshake(t.Context(), ws, one, two); err != nil {
				t.Fatal(err)
			}
			running(t, h, one)
			running(t, h, two)

			if got := runText(t, h, one.Binding, told("r-1", "talk", "process echo hello; echo problem >&2; pwd > where; exit 7")); got != "hello\nproblem\nexit 7" {
				t.Errorf("a command: %q", got)
			}
			run, all := ended(t, c, "one-"+sdk)
			if len(all) != 1 || all[0].Receipt == nil || all[0].Cleanup != "quiescent" || *all[0].Exit.Code != 7 {
				t.Errorf("the ledger has %+v", all)
			}
			if b := one.Binding; *run.Installation != (client.Installation{InstanceUUID: b.InstanceUUID, WorkspaceUUID: b.WorkspaceUUID, PlacementGeneration: b.PlacementGeneration,
				InstallationUUID: b.InstallationUUID, RuntimeRevision: b.RuntimeRevision, ArtifactDigest: b.ArtifactDigest}) {
				t.Errorf("the run is bound to %+v", run.Installation)
			}
			// Files stay with the conversation and its installation, and with nobody else.
			for _, look := range []struct {
				on   pluginwire.Context
				talk string
				want string
			}{{one.Binding, "talk", "kept"}, {one.Binding, "another", "none"}, {two.Binding, "talk", "none"}} {
				if got := runText(t, h, look.on, told("r-2", look.talk, "process test -f where && echo kept || echo none")); got != look.want+"\nexit 0" {
					t.Errorf("files of %s in %s: %q", look.on.InstallationUUID, look.talk, got)
				}
			}
			if got := runText(t, h, one.Binding, told("r-3", "talk", "sort pear apple fig")); got != "apple\nfig\npear\nexit 3 quiescent True" {
				t.Errorf("with input: %q", got)
			}
			if got := runText(t, h, one.Binding, told("r-3", "talk", "granted")); !strings.Contains(got, `"max_wait_ms": 20000`) {
				t.Errorf("what the runner is told: %s", got)
			}
			if got := runText(t, h, one.Binding, told("r-4", "talk", "bulk 8")); got != "same True" {
				t.Errorf("8 MiB through cat: %s", got)
			}
			t.Run("the same again", func(t *testing.T) { testSame(t, h, one.Binding) })
			t.Run("refusals", func(t *testing.T) { testRefusals(t, h, one.Binding) })
			t.Run("cancelled", func(t *testing.T) { testCancelled(t, h, s, c, one.Binding, two.Binding) })
		})
	}
}

// testSame: what is repeated with the same ids is done once.
func testSame(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
	open := []any{"open_run_process", M{"request_id": "q", "argv": []string{"sh", "-c", "echo once >> count; cat; cat count"}, "stdin": true, "cwd": "", "env": M{}}}
	other := []any{"open_run_process", M{"request_id": "q", "argv": []string{"true"}}}
	write := []any{"write_run_process", M{"handle": "$handle", "offset": 0, "data_base64": base64.StdEncoding.EncodeToString([]byte("in\n")), "eof": true}}
	read := []any{"read_run_process", M{"handle": "$handle", "cursor": "", "wait_ms": 10000}}
	got := callsOf(t, h, on, "same-1", open, open, other, write, write, read,
		[]any{"get_run_process", M{"request_id": "q"}},
		[]any{"close_run_process", M{"handle": "$handle", "reason": "enough", "grace_ms": 0}},
		[]any{"close_run_process", M{"request_id": "q"}},
		read, read)
	if got[0]["handle"] == nil || got[0]["handle"] != got[1]["handle"] {
		t.Fatalf("opened twice: %v, %v", got[0], got[1])
	}
	if codeOf(got[2]) != "conflict" {
		t.Errorf("the same id with other arguments: %v", got[2])
	}
	if got[3]["accepted"] != 3.0 || got[4]["accepted"] != 3.0 || got[4]["eof"] != true {
		t.Errorf("written twice: %v, %v", got[3], got[4])
	}
	if got[6]["handle"] != got[0]["handle"] {
		t.Errorf("by its request id: %v", got[6])
	}
	for _, closed := range got[7:9] {
		if closed["quiescent"] != true || at(closed, "receipt", "signature") == nil {
			t.Errorf("closed: %v", closed)
		}
	}
	out, _ := json.Marshal(got[9])
	if again, _ := json.Marshal(got[10]); !bytes.Equal(out, again) {
		t.Errorf("read twice: %s, %s", out, again)
	}
	if ran := runText(t, h, on, told("same-2", "talk", "process cat count")); ran != "once\nexit 0" {
		t.Errorf("it ran more than once: %q", ran)
	}
}

// testRefusals: each wrong request is refused with a code, as data.
func testRefusals(t *testing.T, h *lbhost.Host, on pluginwire.Context) {
	for _, c := range []struct {
		name, action string
		payload      M
		code, text   string
	}{
		{"another run", "open_run_process", M{"run_id": "r-1", "request_id": "x", "argv": []string{"true"}}, "not_found", "active run"},
		{"no process", "get_run_process", M{"handle": "proc_00000000000000000000000000"}, "not_found", ""},
		{"a box of its choice", "open_run_process", M{"request_id": "x", "argv": []string{"true"}, "box": "box_1"}, "invalid", `"box"`},
		{"who it is", "open_run_process", M{"request_id": "x", "argv": []string{"true"}, "installation_uuid": "i"}, "invalid", "installation_uuid"},
		{"a target", "open_run_process", M{"request_id": "x", "argv": []string{"true"}, "target_ref": "elsewhere"}, "not_found", "elsewhere"},
		{"no argv", "open_run_process", M{"request_id": "x", "argv": []string{}}, "invalid", "argv"},
		{"argv of numbers", "open_run_process", M{"request_id": "x", "argv": []any{1}}, "invalid", "argv"},
		{"a path above", "open_run_process", M{"request_id": "x", "argv": []string{"true"}, "cwd": "../.."}, "invalid", "cwd"},
		{"a reserved variable", "open_run_process", M{"request_id": "x", "argv": []string{"true"}, "env": M{"LD_PRELOAD": "x"}}, "", "LD_PRELOAD"},
		{"not base64", "write_run_process", M{"handle": "h", "offset": 0, "data_base64": "!"}, "invalid", "base64"},
		{"two names", "get_run_process", M{"handle": "h", "request_id": "x"}, "invalid", "exactly one"},
		{"a wait below 0", "read_run_process", M{"handle": "h", "wait_ms": -1}, "invalid", "wait_ms"},
	} {
		got := callsOf(t, h, on, "refused", []any{c.action, c.payload})[0]
		if code := codeOf(got); code == nil || c.code != "" && code != c.code || !strings.Contains(fmt.Sprint(got["text"]), c.text) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// testCancelled: LangBot cancels a run; what it started is proven gone, and no one
// else could ever see it.
func testCancelled(t *testing.T, h *lbhost.Host, s *served, c *client.Client, on, other pluginwire.Context) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// The child and what it leaves behind ignore SIGTERM.
	stream, err := h.Stream(ctx, pluginwire.ActionRunRunner, lbhost.Of("stockade", "runner", M{"runner_name": "default",
		"context": told("held", "talk", `hold trap "" TERM; (setsid sh -c 'trap "" TERM; while :; do sleep 1; done' &); while :; do sleep 1; done`)}), on)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := stream.Next(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var delta M
	if err := json.Unmarshal(raw, &delta); err != nil {
		t.Fatal(err)
	}
	handle := fmt.Sprint(at(delta, "data", "chunk", "content"))
	var info client.ProcessInfo
	until(t, "the process running", func() (bool, error) {
		info, err = c.Process(handle).Get(t.Context())
		return info.State == client.StateRunning, err
	})
	// The other installation knows the handle and the run's id, and has a run of the same conversation.
	got := callsOf(t, h, other, "spy", []any{"get_run_process", M{"handle": handle}}, []any{"close_run_process", M{"handle": handle}},
		[]any{"read_run_process", M{"handle": handle}}, []any{"get_run_process", M{"handle": handle, "run_id": "held"}})
	for i, answer := range got {
		if codeOf(answer) != "not_found" {
			t.Errorf("the other's call %d: %v", i, answer)
		}
	}
	// So does another run of the same installation.
	if got := callsOf(t, h, on, "beside", []any{"get_run_process", M{"handle": handle}}); codeOf(got[0]) != "not_found" {
		t.Errorf("another run's call: %v", got[0])
	}
	stream.Close()
	until(t, "the proof that the run's processes are gone", func() (bool, error) {
		info, err = c.Process(handle).Get(t.Context())
		return info.Cleanup == "quiescent", err
	})
	if info.Receipt == nil || info.State != client.StateClosed || info.Exit == nil || info.Exit.Kind != client.ExitSignalled {
		t.Errorf("%+v", info)
	}
	until(t, "the end of the run", func() (bool, error) {
		run, err := c.Run(t.Context(), info.Run)
		return run.State == "finished", err
	})
	// An operator sees the same.
	cmd := exec.CommandContext(t.Context(), s.exe, "get", handle, "--json", "--url", s.URL(), "--key-file", s.keyFile)
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), info.Receipt.ID) {
		t.Errorf("stockade get: %s, %v", out, err)
	}
}

// testRunnerProcessesOfBoxedWorkers: the same for slots of a boxed pool, of two
// Workspaces: what is granted is the broker's box, never the worker's.
func testRunnerProcessesOfBoxedWorkers(t *testing.T, programs string) {
	t.Parallel()
	s, c := brokerOf(t, programs)
	r := start(t, "0.7", func(cfg *Config) {
		granting(s, "stockade/runner")(cfg)
		cfg.HostProgram, cfg.WorkerNetwork = filepath.Join(programs, "stockade-host"), worker.NetworkNone
	})
	left, right := runnerOf(t, workspace("ws-a"), "left", slots...), runnerOf(t, workspace("ws-b"), "right", slots...)
	left.Mode, right.Mode = pluginwire.ModeShared, pluginwire.ModeShared
	h := r.dial(lbhost.Config{Profile: pluginwire.ProfileShared})
	if _, err := h.Handshake(t.Context(), workspace("ws-a"), left, right); err != nil {
		t.Fatal(err)
	}
	running(t, h, left)
	running(t, h, right)
	if got := runText(t, h, left.Binding, told("r", "talk", "process echo left > mine; ls")); got != "mine\nexit 0" {
		t.Errorf("%q", got)
	}
	if got := runText(t, h, right.Binding, told("r", "talk", "process ls")); got != "exit 0" {
		t.Errorf("the other Workspace finds %q", got)
	}
	if got := runText(t, h, left.Binding, told("r", "talk", "process cat mine")); got != "left\nexit 0" {
		t.Errorf("%q", got)
	}
	run, all := ended(t, c, "right")
	if len(all) != 1 || all[0].Cleanup != "quiescent" || run.Installation.WorkspaceUUID != "ws-b" {
		t.Errorf("%+v, %+v", run, all)
	}
}

// slots makes the toy runner one whose worker is shared among installations.
var slots = []string{"execution:\n", "execution:\n  sharedRuntime: shared-runtime-v1\n  componentModel: stateless-v1\n"}
