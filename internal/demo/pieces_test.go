package demo

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"pgregory.net/rapid"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/testagent"
)

func TestMain(m *testing.M) { need.Main(m) }

// unpack writes the repository into a directory.
func unpack(t *testing.T, agent string) string {
	t.Helper()
	dir := t.TempDir()
	r, err := repositoryTar(agent)
	if err != nil {
		t.Fatal(err)
	}
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return dir
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(tr)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, h.Name), b, os.FileMode(h.Mode))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func record(out *bytes.Buffer) *events {
	return &events{say: newTeller(out), spoke: func() {}, acted: func(int) {}}
}

// sessionIn lets the agent work in a directory of this machine.
type sessionIn struct {
	io.WriteCloser
	dir string
}

func (s sessionIn) Write(b []byte) (int, error) {
	if _, err := s.WriteCloser.Write(bytes.Replace(b, []byte(`"cwd":"`+workspace+`"`), []byte(`"cwd":"`+s.dir+`"`), 1)); err != nil {
		return 0, err
	}
	return len(b), nil
}

// The agent's script works on the repository as it is uploaded, driven as in the demo.
func TestTheTaskCanBeDone(t *testing.T) {
	t.Parallel()
	dir := unpack(t, agentTest)
	inR, inW := io.Pipe()
	outR, outW := io.Pipe()
	served := make(chan error, 1)
	go func() {
		err := testagent.Serve(context.WithoutCancel(t.Context()), testagent.Config{In: inR, Out: outW})
		outW.Close()
		served <- err
	}()
	var story bytes.Buffer
	acted := 0
	ev := record(&story)
	ev.acted = func(n int) { acted = n }
	if err := driveACP(t.Context(), sessionIn{inW, dir}, outR, task, ev); err != nil {
		t.Fatalf("%v\n%s", err, story.String())
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	out, err := exec.Command("sh", filepath.Join(dir, testFile)).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "all tests pass") {
		t.Errorf("%v\n%s", err, out)
	}
	for _, want := range []string{"$ sh test.sh", "2 tests fail", "may I? Edit stats.sh – allowed", "all tests pass", "[256.0 KiB of generated text]"} {
		if !strings.Contains(story.String(), want) {
			t.Errorf("the story lacks %q:\n%s", want, story.String())
		}
	}
	if acted != 4 {
		t.Errorf("%d tool calls", acted)
	}
}

func TestModelScriptDoesTheTask(t *testing.T) {
	t.Parallel()
	dir := unpack(t, agentCodex)
	for i, turn := range modelScript() {
		if turn.Call == nil || turn.Call.Shell == "" {
			continue
		}
		err := exec.Command("sh", filepath.Join(dir, testFile)).Run()
		if failed := err != nil; failed != (i == 0) {
			t.Errorf("turn %d: %v", i, err)
		}
		b, err := os.ReadFile(filepath.Join(dir, programFile))
		if err != nil || bytes.Count(b, []byte(brokenExpr)) > 1 {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, programFile), bytes.Replace(b, []byte(brokenExpr), []byte(mendedExpr), 1), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTeller(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	tl := newTeller(&out)
	tl.chapter("One")
	tl.step("doing %d", 1)
	for _, w := range strings.SplitAfter(strings.Repeat("word and ", 20)+"\x1b[31mred", " ") {
		tl.words(false, w)
	}
	tl.words(true, "a thought\n")
	tl.words(false, strings.Repeat("x", 1024))
	tl.words(false, strings.Repeat("x", 1024))
	tl.words(false, "after\n")
	tl.did("ls\x07", strings.Repeat("line\n", 20))
	tl.note("noted")
	want := "\nOne\n→ doing 1\n" +
		"  │ word and word and word and word and word and word and word and word and\n" +
		"  │ word and word and word and word and word and word and word and word and\n" +
		"  │ word and word and word and word and [31mred\n" +
		"  │ … a thought\n  │ [2048 bytes of generated text]\n  │ after\n  │ $ ls\n" +
		strings.Repeat("  │   line\n", 12) + "  │   … 8 lines more\n  noted\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// Whatever the pieces, the words that come out are the words that went in.
func TestTellerLosesNoWord(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var out bytes.Buffer
		tl := newTeller(&out)
		var in strings.Builder
		for range rapid.IntRange(0, 30).Draw(t, "n") {
			p := rapid.StringOfN(rapid.RuneFrom([]rune("aé–\n   b")), 0, 60, -1).Draw(t, "piece")
			in.WriteString(p)
			tl.words(false, p)
		}
		tl.note("end")
		got := strings.ReplaceAll(strings.TrimSuffix(out.String(), "  end\n"), "  │ ", "")
		bare := func(s string) string { return strings.Join(strings.Fields(s), "") }
		if bare(got) != bare(in.String()) {
			t.Fatalf("%q became %q", in.String(), got)
		}
		for l := range strings.Lines(got) {
			if len(l) > textWidth+1 {
				t.Fatalf("a line of %d bytes: %q", len(l), l)
			}
		}
	})
}

func TestGateHoldsBack(t *testing.T) {
	t.Parallel()
	var in strings.Builder
	const n = 2000 // beyond what the SDK can hold
	for i := range n {
		fmt.Fprintf(&in, `{"jsonrpc":"2.0","method":"session/update","params":{"sessionId":"s","update":{"sessionUpdate":"agent_message_chunk","content":{"type":"text","text":"%d "}}}}`+"\n", i)
	}
	var out bytes.Buffer
	ev := record(&out)
	seen, all := 0, make(chan struct{})
	ev.spoke = func() {
		if seen++; seen == n {
			close(all)
		}
	}
	g := newGate(strings.NewReader(in.String()))
	c := connect(&acpPeer{ev: ev, gate: g}, io.Discard, g)
	<-all // not reached if the SDK gives the connection up
	<-c.Done()
}

func TestSearch(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringOfN(rapid.RuneFrom([]rune("ab")), 3, 6, -1).Draw(t, "text")
		before := strings.Repeat("c", rapid.IntRange(0, 70<<10).Draw(t, "before"))
		hay := before + rapid.SampledFrom([]string{text, "", text[1:]}).Draw(t, "needle") + "cc"
		for _, r := range []io.Reader{strings.NewReader(hay), iotest.HalfReader(strings.NewReader(hay)), iotest.DataErrReader(strings.NewReader(hay))} {
			found, err := contains(r, text)
			if err != nil || found != strings.Contains(hay, text) {
				t.Fatalf("%d bytes: found %v %v", len(hay), found, err)
			}
		}
	})
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, text := range map[string]string{"a": "nothing", "b": "the key-1 is here"} {
		_ = w.WriteHeader(&tar.Header{Name: name, Size: int64(len(text)), Mode: 0o600})
		_, _ = io.WriteString(w, text)
	}
	w.Close()
	if n, err := searchTar(bytes.NewReader(b.Bytes()), "key-2"); err != nil || n != 2 {
		t.Errorf("%d %v", n, err)
	}
	if _, err := searchTar(bytes.NewReader(b.Bytes()), "key-1"); err == nil || !strings.HasSuffix(err.Error(), "in b") {
		t.Errorf("got %v", err)
	}
}

func TestVerify(t *testing.T) {
	t.Parallel()
	pub, priv, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	payload := []byte(`{"handle":"proc_a","method":"pid_namespace","empty_at":"0001-01-01T00:00:00Z"}`)
	good := client.Receipt{Handle: "proc_a", Method: "pid_namespace", Payload: payload, PublicKey: pub, Signature: ed25519.Sign(priv, payload)}
	if err := verify(good, "proc_a"); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*client.Receipt){
		"handle":    func(r *client.Receipt) { r.Handle = "proc_b" },
		"method":    func(r *client.Receipt) { r.Method = "cgroup" },
		"payload":   func(r *client.Receipt) { r.Payload = bytes.ReplaceAll(r.Payload, []byte("proc_a"), []byte("proc_c")) },
		"time":      func(r *client.Receipt) { r.EmptyAt = r.EmptyAt.Add(1) },
		"signature": func(r *client.Receipt) { r.Signature = bytes.Repeat([]byte{1}, ed25519.SignatureSize) },
		"key":       func(r *client.Receipt) { r.PublicKey = nil },
	} {
		r := good
		change(&r)
		if verify(r, "proc_a") == nil {
			t.Errorf("a receipt with another %s passed", name)
		}
	}
}

func TestFindLeftovers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if left := findLeftovers(dir, "box_none", "host_none"); len(left) != 0 {
		t.Errorf("on nothing: %v", left)
	}
	cmd := exec.Command("sleep", "1000")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	left := findLeftovers(dir, "box_none", "host_none")
	if len(left) != 1 || !strings.Contains(left[0], "sleep 1000") {
		t.Errorf("with a process: %v", left)
	}
	// What is used by something that is left is not deleted under it.
	s := &story{dir: dir, say: newTeller(io.Discard)}
	over, cancel := context.WithCancel(t.Context())
	cancel() // it is not waited for
	if err := s.cleanup(over); !errdefs.Is(err, errdefs.Internal) {
		t.Errorf("with a process: %v", err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Error(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if err := s.cleanup(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  Config
		code errdefs.Code
	}{
		"unknown agent":       {Config{Agent: "nobody"}, errdefs.Invalid},
		"state dir not empty": {Config{StateDir: full}, errdefs.Conflict},
		"no agent program":    {Config{Stockade: "/nonexistent/stockade"}, errdefs.Unavailable},
		"no vendor CLI":       {Config{Agent: agentCodex, AgentsDir: full}, errdefs.Unavailable},
	} {
		err := Run(t.Context(), c.cfg)
		if os.Geteuid() != 0 && name != "unknown agent" {
			c.code = errdefs.Denied
		}
		if !errdefs.Is(err, c.code) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := FindCheckout(full); !errdefs.Is(err, errdefs.NotFound) {
		t.Errorf("no checkout: %v", err)
	}
	if root, err := FindCheckout(""); err != nil {
		t.Error(err)
	} else if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Error(err)
	}
}

func TestAgentsInstalled(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	put := func(name, text string, age time.Duration) {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		at := time.Now().Add(-age)
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
	}
	is := func(want bool, when string) {
		t.Helper()
		if _, ok := AgentsInstalled(root); ok != want {
			t.Errorf("%s: installed is %v", when, ok)
		}
	}
	is(false, "nothing there")
	put(agentsSource+"/package-lock.json", "1", 0)
	put(agentsCache+"/package-lock.json", "1", 2*time.Minute)
	is(false, "begun")
	put(agentsCache+"/"+doneFile, "", time.Minute)
	is(true, "ended")
	put(agentsSource+"/package-lock.json", "2", 0)
	is(false, "another lock file")
	put(agentsCache+"/package-lock.json", "2", 0)
	is(false, "begun again")
}
