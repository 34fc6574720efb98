package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

func marker(dir, id string) string { return filepath.Join(dir, keyOf(id)+markerSuffix) }

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// refusedHello says hello and must be refused as taken.
func refusedHello(t *testing.T, url, id string) {
	t.Helper()
	p := dial(t, url)
	p.raw(hello(id))
	if code, reason := p.closed(); code != relaywire.CloseRefused || reason != relaywire.ReasonTaken {
		t.Fatalf("%s was closed with %d %q", id, code, reason)
	}
}

func TestMarkerIsThereBeforeDispatchAndGoesAtTheEnd(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a", "state")
	h, url := newHub(t, func(c *HubConfig) { c.StateDir = dir })
	p := connect(t, url, "d")
	for range 3 {
		if exists(marker(dir, "d")) {
			t.Fatal("a marker before any job")
		}
		a := run(t, h, p, JobRequest{DaemonID: "d"})
		raw, err := os.ReadFile(marker(dir, "d"))
		if err != nil || string(raw) != "d" {
			t.Fatalf("when run.start came the marker was %q, %v", raw, err)
		}
		b := run(t, h, p, JobRequest{DaemonID: "d"})
		p.finish(a.ID())
		if _, err := collect(t, a); err != nil {
			t.Fatal(err)
		}
		if !exists(marker(dir, "d")) {
			t.Fatal("the marker went although a job runs")
		}
		p.finish(b.ID())
		if _, err := collect(t, b); err != nil {
			t.Fatal(err)
		}
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("the state directory is %v, %v", st.Mode(), err)
	}
	p.close()
	eventually(t, "nothing is left", func() bool {
		names, _ := filepath.Glob(filepath.Join(dir, "*"))
		return len(names) == 1 && filepath.Base(names[0]) == lockName
	})
}

func TestStateDirectoryBelongsToOneHub(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, _ := newHub(t, func(c *HubConfig) { c.StateDir = dir })
	_, err := NewHub(HubConfig{Token: token, StateDir: dir})
	wantCode(t, err, relaywire.CodeHubConflict)
	if !strings.Contains(err.Error(), dir) {
		t.Errorf("%q does not name the directory", err)
	}
	stop(t, h)
	again, err := NewHub(HubConfig{Token: token, StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	stop(t, again)
}

// No marker, no job.
func TestMarkerThatCannotBeWrittenStartsNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, url := newHub(t, func(c *HubConfig) { c.StateDir = dir })
	p := connect(t, url, "d")
	if err := os.WriteFile(marker(dir, "d"), []byte("d"), 0o600); err != nil { // somebody's
		t.Fatal(err)
	}
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeStateFailed)
	p.send(relaywire.Frame{Type: relaywire.Ping})
	if f := p.recv(); f.Type != relaywire.Pong {
		t.Errorf("the daemon got %v", f.Type)
	}
	if len(h.Jobs()) != 0 || !exists(marker(dir, "d")) {
		t.Error("the job is still there, or somebody's marker is not")
	}
	if err := os.Remove(marker(dir, "d")); err != nil {
		t.Fatal(err)
	}
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	p.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Fatal(err)
	}
}

// Whoever looked at a fence knows nothing of what came later: not of another job that was
// lost, nor of the daemon's next fence. What a hub has seen the next one knows again.
func TestAFenceThatNobodyLookedAtIsNotCleared(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	state := func(c *HubConfig) { c.StateDir, c.Limits.CancelTimeout = dir, 20*time.Millisecond }
	h, url := newHub(t, state)
	only := func() Fence {
		t.Helper()
		all := h.Fences()
		if len(all) != 1 {
			t.Fatalf("fences: %+v", all)
		}
		return all[0]
	}
	refused := func(seen Fence) {
		t.Helper()
		if _, err := h.ClearFence(context.Background(), seen, "me", "looked at ps"); !errdefs.Is(err, errdefs.Conflict) {
			t.Errorf("it was cleared: %v", err)
		}
		if only().ID() == seen.ID() {
			t.Error("it has the id of another")
		}
	}
	p := connect(t, url, "d")
	j1, j2 := run(t, h, p, JobRequest{DaemonID: "d"}), run(t, h, p, JobRequest{DaemonID: "d"})
	j1.Cancel(context.Background(), "test")
	first := only()
	p.close()
	<-j2.Done()
	refused(first)
	both := only()
	if len(both.Jobs) != 2 {
		t.Fatalf("%+v", both)
	}
	if _, err := h.ClearFence(context.Background(), both, "me", "looked at ps"); err != nil {
		t.Fatal(err)
	}
	p = connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	p.close()
	<-j.Done()
	refused(both)

	seen := only()
	stop(t, h)
	h, _ = newHub(t, state)
	if only().ID() != seen.ID() {
		t.Errorf("%+v became %+v", seen, only())
	}
	if _, err := h.ClearFence(context.Background(), seen, "me", "looked at ps"); err != nil {
		t.Error(err)
	}
}

func TestClearFenceIsAuditedAndLetsTheDaemonConnect(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	state := func(c *HubConfig) { c.StateDir, c.Limits.CancelTimeout = dir, 20*time.Millisecond }
	h, url := newHub(t, state)
	for round, connected := range []bool{false, true} {
		id := fmt.Sprintf("daemon-%d", round)
		p := connect(t, url, id)
		j := run(t, h, p, JobRequest{DaemonID: id})
		if connected {
			j.Cancel(context.Background(), "test")
		} else {
			p.close()
			<-j.Done()
			refusedHello(t, url, id)
		}
		for _, bad := range [][2]string{{"", "why"}, {"me", " "}, {"me", strings.Repeat("x", maxText+1)}} {
			if _, err := clearFence(h, id, bad[0], bad[1]); !errdefs.Is(err, errdefs.Invalid) {
				t.Errorf("%q was accepted: %v", bad, err)
			}
		}
		if _, err := clearFence(h, "nobody", "me", "why"); !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("got %v", err)
		}
		f, err := clearFence(h, id, "me", "looked at ps")
		if err != nil || f.DaemonID != id || len(f.Jobs) != 1 || f.Jobs[0] != j.ID() {
			t.Fatalf("got %+v, %v", f, err)
		}
		if len(h.Fences()) != 0 || exists(marker(dir, id)) {
			t.Error("the fence is not gone")
		}
		if !connected {
			p = connect(t, url, id)
		}
		j = run(t, h, p, JobRequest{DaemonID: id})
		p.finish(j.ID())
		if _, err := collect(t, j); err != nil {
			t.Fatal(err)
		}
		if _, err := clearFence(h, id, "me", "again"); !errdefs.Is(err, errdefs.NotFound) {
			t.Errorf("got %v", err)
		}
	}
	raw, err := os.ReadFile(filepath.Join(dir, auditFile))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	if len(lines) != 2 {
		t.Fatalf("the audit log is %q", raw)
	}
	for i, line := range lines {
		var c cleared
		if err := json.Unmarshal([]byte(line), &c); err != nil || c.Operator != "me" || c.Reason != "looked at ps" ||
			c.Fence.DaemonID != fmt.Sprintf("daemon-%d", i) || c.At.IsZero() {
			t.Errorf("line %s: %v", line, err)
		}
	}
	stop(t, h)
	again, err := NewHub(HubConfig{Token: token, StateDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if f := again.Fences(); len(f) != 0 {
		t.Errorf("after a restart %+v", f)
	}
	stop(t, again)
}

func TestFenceIsNotClearedWhileAJobRuns(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, url := newHub(t, func(c *HubConfig) { c.StateDir, c.Limits.CancelTimeout = dir, 20*time.Millisecond })
	p := connect(t, url, "d")
	a, b := run(t, h, p, JobRequest{DaemonID: "d"}), run(t, h, p, JobRequest{DaemonID: "d"})
	if o, _ := a.Cancel(context.Background(), "test"); o.Fence == nil {
		t.Fatalf("got %+v", o)
	}
	_, err := clearFence(h, "d", "me", "why")
	wantCode(t, err, relaywire.CodeCancelling)
	if exists(filepath.Join(dir, auditFile)) || !exists(marker(dir, "d")) {
		t.Error("a refused act was carried out")
	}
	p.event(b.ID(), `{"type":"x"}`) // b goes on, nothing new may start
	p.finish(b.ID())
	if got, err := collect(t, b); err != nil || len(got) != 1 {
		t.Fatalf("got %q, %v", got, err)
	}
	if _, err := clearFence(h, "d", "me", "why"); err != nil {
		t.Fatal(err)
	}
}

// Two operators clear a fence at once. What one of them lifted may be used at once, and
// the other must not touch what came after it: neither the marker of a job that runs,
// nor a fence that nobody has seen.
func TestFenceIsClearedOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	h, url := newHub(t, func(c *HubConfig) { c.StateDir, c.Limits.CancelTimeout = dir, time.Millisecond })
	p := connect(t, url, "d")
	for range 100 {
		j := run(t, h, p, JobRequest{DaemonID: "d"})
		if o, _ := j.Cancel(context.Background(), "test"); o.Fence == nil {
			t.Fatalf("got %+v", o)
		}
		var cleared atomic.Int32
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				f, err := clearFence(h, "d", "me", "looked at ps")
				switch {
				case err == nil && slices.Contains(f.Jobs, j.ID()):
					cleared.Add(1)
				case err == nil:
					t.Errorf("lifted %+v", f)
				case !errdefs.Is(err, errdefs.NotFound) && !errdefs.Is(err, errdefs.Cancelling):
					t.Error(err)
				}
			})
		}
		over := make(chan struct{})
		go func() { wg.Wait(); close(over) }()
		var next *Job
		for next == nil {
			var err error
			if next, err = h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)}); err != nil {
				wantCode(t, err, relaywire.CodeFenced)
			}
		}
		for running := true; running; {
			select {
			case <-over:
				running = false
			default:
			}
			if !exists(marker(dir, "d")) {
				t.Error("a job runs and there is no marker")
			}
		}
		if n := cleared.Load(); n != 1 {
			t.Errorf("one fence was cleared %d times", n)
		}
		p.want(relaywire.Start)
		p.finish(next.ID())
		if _, err := collect(t, next); err != nil {
			t.Fatal(err)
		}
		if t.Failed() {
			return
		}
	}
}

// The evidence of a fence that was lifted is never shown as that of the next one, also
// when the hub died between the two removals, and a fence whose evidence cannot be
// removed stands.
func TestEvidenceDoesNotOutliveItsFence(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	state := func(c *HubConfig) { c.StateDir, c.Limits.CancelTimeout = dir, time.Millisecond }
	h, url := newHub(t, state)
	p := connect(t, url, "d")
	run(t, h, p, JobRequest{DaemonID: "d"}).Cancel(context.Background(), "test")
	evidence := filepath.Join(dir, keyOf("d")+evidenceSuffix)
	old, err := os.ReadFile(evidence)
	if err != nil {
		t.Fatal(err)
	}
	// A directory that is not empty cannot be removed like a file.
	if err := errors.Join(os.Remove(evidence), os.MkdirAll(filepath.Join(evidence, "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, err := clearFence(h, "d", "me", "looked at ps"); err == nil {
		t.Error("the evidence is there and the fence was lifted")
	}
	if len(h.Fences()) != 1 || !exists(marker(dir, "d")) {
		t.Error("the fence does not stand")
	}
	if err := os.RemoveAll(evidence); err != nil {
		t.Fatal(err)
	}
	if _, err := clearFence(h, "d", "me", "looked at ps"); err != nil {
		t.Fatal(err)
	}
	stop(t, h)
	// What a hub leaves that dies between the removal of the marker and of the evidence.
	if err := errors.Join(os.WriteFile(evidence, old, 0o600), os.WriteFile(evidence+".tmp", old, 0o600)); err != nil {
		t.Fatal(err)
	}
	h, _ = newHub(t, state)
	if exists(evidence) || exists(evidence+".tmp") {
		t.Error("it is kept for the next fence")
	}
	stop(t, h)
}

// A daemon whose damaged marker is being cleared has its name as soon as it connects.
func TestDaemonOfADamagedMarkerHasItsName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(marker(dir, "d"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	h, url := newHub(t, func(c *HubConfig) { c.StateDir = dir })
	h.mu.Lock()
	damaged := h.targets[keyOf("d")]
	damaged.use() // as somebody does who is not through with its files
	h.mu.Unlock()
	if _, err := clearFence(h, keyOf("d"), "me", "looked at ps"); err != nil {
		t.Fatal(err)
	}
	p := connect(t, url, "d")
	h.unuse(damaged)
	if d := h.Daemons(); len(d) != 1 || d[0].ID != "d" {
		t.Errorf("got %+v", d)
	}
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	if raw, err := os.ReadFile(marker(dir, "d")); err != nil || string(raw) != "d" {
		t.Errorf("the marker is %q, %v", raw, err)
	}
	p.finish(j.ID())
	collect(t, j)
}

// Markers that another hub left, in the form the Python hub writes and in forms that
// somebody damaged.
func TestForeignAndDamagedMarkers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, content string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(keyOf("python")+markerSuffix, "python")
	write(keyOf("emptied")+markerSuffix, "")
	write(keyOf("wrong")+markerSuffix, "right")
	write("by-hand"+markerSuffix, "handmade\n")
	write(keyOf("python")+evidenceSuffix, "{damaged")
	write(keyOf("idle")+spareSuffix, "idle")
	h, url := newHub(t, func(c *HubConfig) { c.StateDir = dir })
	for _, id := range []string{"python", "emptied", "wrong", "right", "handmade"} {
		refusedHello(t, url, id)
		_, err := h.RunJob(context.Background(), JobRequest{DaemonID: id, Payload: json.RawMessage(`{}`)})
		wantCode(t, err, relaywire.CodeFenced)
	}
	if f := h.Fences(); len(f) != 5 {
		t.Errorf("got %d fences: %+v", len(f), f)
	}
	// A fence whose id is lost has the key that is the hash of it.
	for _, id := range []string{keyOf("emptied"), "wrong", "right", "handmade", "python"} {
		if _, err := clearFence(h, id, "me", "why"); err != nil {
			t.Error(err)
		}
	}
	for _, id := range []string{"python", "emptied", "wrong", "right", "handmade", "idle"} {
		connect(t, url, id)
	}
	stop(t, h)
	write("nameless"+markerSuffix, "")
	if _, err := NewHub(HubConfig{Token: token, StateDir: dir}); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("a marker that fences nobody: %v", err)
	}
}

// The hub is a process of its own here and is killed at each moment of a job.
func TestFenceSurvivesHubDeath(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		when   string
		fenced bool
	}{{"idle", false}, {"running", true}, {"cancelling", true}, {"finished", false}, {"fenced", true}} {
		t.Run(c.when, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			cmd := exec.Command(os.Args[0], "-test.run=^TestHubProcess$")
			cmd.Env = append(os.Environ(), "RELAY_TEST_HUB="+dir, "TMPDIR="+t.TempDir()) // it is killed
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
			defer func() { cmd.Process.Kill(); cmd.Wait() }()
			lines := bufio.NewScanner(out)
			read := func() string {
				if !lines.Scan() {
					t.Fatal("the hub process ended")
				}
				return lines.Text()
			}
			url := read()
			p := connect(t, url, "d")
			say := func(s string) {
				if _, err := fmt.Fprintln(in, s); err != nil {
					t.Fatal(err)
				}
			}
			if c.when != "idle" {
				say("run")
				job := p.want(relaywire.Start).JobID
				switch c.when {
				case "cancelling", "fenced":
					say("cancel")
					p.want(relaywire.Cancel)
					if c.when == "fenced" {
						if got := read(); got != "fenced" {
							t.Fatal(got)
						}
					}
				case "finished":
					p.finish(job)
					if got := read(); got != "finished" {
						t.Fatal(got)
					}
				}
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			cmd.Wait()
			h, url := newHub(t, func(c *HubConfig) { c.StateDir = dir })
			if !c.fenced {
				connect(t, url, "d")
				return
			}
			refusedHello(t, url, "d")
			f := h.Fences()
			if len(f) != 1 || f[0].DaemonID != "d" || f[0].Since.IsZero() || f[0].Cause == "" {
				t.Errorf("the evidence is %+v", f)
			}
			if c.when == "fenced" && (f[0].Code != FenceUnacknowledged || len(f[0].Jobs) != 1) {
				t.Errorf("the evidence of the dead hub is lost: %+v", f)
			}
		})
	}
}

// TestHubProcess is the hub of TestFenceSurvivesHubDeath.
func TestHubProcess(t *testing.T) {
	dir := os.Getenv("RELAY_TEST_HUB")
	if dir == "" {
		t.Skip("only as a child of TestFenceSurvivesHubDeath")
	}
	cfg := HubConfig{Token: token, StateDir: dir}
	if cfg.Limits.CancelTimeout = time.Minute; strings.Contains(dir, "fenced") {
		cfg.Limits.CancelTimeout = time.Millisecond
	}
	h, err := NewHub(cfg)
	if err != nil {
		t.Fatal(err)
	}
	url, err := h.Start(context.Background(), Endpoint{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println(url)
	var j *Job
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "run":
			if j, err = h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)}); err != nil {
				t.Fatal(err)
			}
			go func() {
				if _, err := j.Next(context.Background()); err != nil && j.Outcome().Code == "" {
					fmt.Println("finished")
				}
			}()
		case "cancel":
			go func() {
				if o, _ := j.Cancel(context.Background(), "test"); o.Fence != nil {
					fmt.Println("fenced")
				}
			}()
		}
	}
}
