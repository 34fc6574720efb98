package relay

import (
	"context"
	"encoding/json"
	"io"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// The tests of this file are paired by name with the ones that the Python relay was
// certified with. What they assert there they assert here; the children and the
// client of some of them are in internal/relayclient.

func TestSerializedStartAndConflicts(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"acp", "claude_code", "codex"} {
		h, err := NewHub(HubConfig{Token: token, Prefix: prefix})
		if err != nil {
			t.Fatal(err)
		}
		urls := make([]string, 8)
		var wg sync.WaitGroup
		for i := range urls {
			wg.Go(func() {
				u, err := h.Start(context.Background(), Endpoint{Token: token})
				if err != nil {
					t.Error(err)
				}
				urls[i] = u
			})
		}
		wg.Wait()
		for _, u := range urls {
			if u != urls[0] || u == "" {
				t.Errorf("concurrent starts made several listeners: %v", urls)
			}
		}
		for _, other := range []Endpoint{{Token: token + "changed"}, {Token: token, Host: "localhost"}, {Token: token, Port: 1}, {}} {
			_, err := h.Start(context.Background(), other)
			wantCode(t, err, relaywire.CodeHubConflict)
			if got := relaywire.CodeOf(err); !strings.HasPrefix(got, prefix+".") {
				t.Errorf("the code %q has not the prefix %q", got, prefix)
			}
		}
		stop(t, h)
		_, err = h.Start(context.Background(), Endpoint{Token: token})
		wantCode(t, err, relaywire.CodeNotStarted)
	}
}

func TestSharedAuthAndOldClientDenied(t *testing.T) {
	t.Parallel()
	for _, weak := range []string{"", "short", strings.Repeat("a", 40), " " + token, token + "\n",
		strings.Repeat("abcdefghijk", 4), token[:31]} {
		_, err := NewHub(HubConfig{Profile: Shared, Token: weak})
		wantCode(t, err, relaywire.CodeTokenRequired)
		if weak != "" && strings.Contains(err.Error(), weak) {
			t.Error("the refusal tells the token")
		}
	}
	h, url := newHub(t, func(c *HubConfig) { c.Profile = Shared })
	_, err := h.Start(context.Background(), Endpoint{Token: "short"})
	wantCode(t, err, relaywire.CodeTokenRequired)
	for _, c := range []struct {
		f      relaywire.Frame
		reason string
	}{
		{relaywire.Frame{Type: relaywire.Hello, DaemonID: "old", Token: token}, relaywire.ReasonProtocol},
		{relaywire.Frame{Type: relaywire.Hello, DaemonID: "old", Token: token, Protocol: "coding-relay-v0"}, relaywire.ReasonProtocol},
		{relaywire.Frame{Type: relaywire.Hello, DaemonID: "wrong", Token: "wrong", Protocol: relaywire.Protocol}, relaywire.ReasonToken},
		// The order of the checks: token before protocol, id before token.
		{relaywire.Frame{Type: relaywire.Hello, DaemonID: "wrong", Token: "wrong"}, relaywire.ReasonToken},
		{relaywire.Frame{Type: relaywire.Hello, DaemonID: "  ", Token: "wrong"}, relaywire.ReasonID},
		{relaywire.Frame{Type: relaywire.Hello, DaemonID: strings.Repeat("é", 129), Token: "wrong"}, relaywire.ReasonID},
		{relaywire.Frame{Type: relaywire.Ping}, relaywire.ReasonHello},
	} {
		p := dial(t, url)
		p.send(c.f)
		if code, reason := p.closed(); code != relaywire.CloseRefused || reason != c.reason {
			t.Errorf("%+v was closed with %d %q, want %q", c.f, code, reason, c.reason)
		}
	}
	if d := h.Daemons(); len(d) != 0 {
		t.Errorf("refused daemons are registered: %v", d)
	}
}

// Blocker 1: a run that was configured with another token never reaches a daemon
// that authenticated with this one.
func TestConflictingInstallationTokenCannotRouteToExistingDaemon(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "same")
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "same", Payload: json.RawMessage(`{"secret":1}`), Token: token + "B"})
	wantCode(t, err, relaywire.CodeHubConflict)
	p.send(relaywire.Frame{Type: relaywire.Ping})
	if f := p.recv(); f.Type != relaywire.Pong {
		t.Fatalf("the daemon got %v", f)
	}
	j := run(t, h, p, JobRequest{DaemonID: "same", Token: token})
	p.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Fatal(err)
	}
}

func TestSenderOwnershipEventsFinishMCPAndReplacement(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	owner, attacker := connect(t, url, "owner"), connect(t, url, "attacker")
	var mu sync.Mutex
	calls := 0
	tools := toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
		mu.Lock()
		defer mu.Unlock()
		calls++
		return json.RawMessage(`{"ok":true}`), nil
	})
	j := run(t, h, owner, JobRequest{DaemonID: "owner", Tools: tools})
	attacker.event(j.ID(), `{"type":"injected"}`)
	attacker.finish(j.ID())
	attacker.send(relaywire.Frame{Type: relaywire.MCPRequest, JobID: j.ID(), RequestID: "bad", Payload: json.RawMessage(`{"id":1}`)})
	attacker.sync()
	select {
	case <-j.Done():
		t.Fatal("a foreign finish ended the job")
	default:
	}
	second := dial(t, url)
	second.send(relaywire.Frame{Type: relaywire.Hello, DaemonID: "owner", Protocol: relaywire.Protocol, Token: token})
	if code, reason := second.closed(); code != relaywire.CloseRefused || reason != relaywire.ReasonTaken {
		t.Errorf("a second socket of a live daemon was closed with %d %q", code, reason)
	}
	owner.event(j.ID(), `{"type":"legitimate"}`)
	owner.finish(j.ID())
	got, err := collect(t, j)
	if err != nil || len(got) != 1 || got[0] != `{"type":"legitimate"}` {
		t.Errorf("got %q, %v", got, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if calls != 0 {
		t.Error("a foreign sender used the job's tools")
	}
	if o := j.Outcome(); !o.Acknowledged || o.Code != "" || o.Fence != nil {
		t.Errorf("the outcome is %+v", o)
	}
}

func TestUnacknowledgedCancelFencesTargetAndRevokesTools(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.CancelTimeout = 50 * time.Millisecond })
	p := connect(t, url, "uncooperative")
	j := run(t, h, p, JobRequest{DaemonID: "uncooperative", Tools: toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
		return json.RawMessage(`"used"`), nil
	})})
	o, err := j.Cancel(context.Background(), "test")
	if err != nil || o.Acknowledged || o.Fence == nil || o.Code != "relay.daemon_cancelled" {
		t.Fatalf("got %+v, %v", o, err)
	}
	_, err = h.RunJob(context.Background(), JobRequest{DaemonID: "uncooperative", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeFenced)
	wantCode(t, h.WaitForDaemon(context.Background(), "uncooperative", time.Second), relaywire.CodeFenced)
	if len(h.Jobs()) != 0 {
		t.Error("the job is still in the table")
	}
	p.send(relaywire.Frame{Type: relaywire.MCPRequest, JobID: j.ID(), RequestID: "r", Payload: json.RawMessage(`{"id":1}`)})
	p.finish(j.ID()) // too late
	eventually(t, "the late finish is evidence", func() bool {
		f := h.Fences()
		return len(f) == 1 && len(f[0].Late) == 1 && f[0].Late[0].JobID == j.ID()
	})
	_, err = h.RunJob(context.Background(), JobRequest{DaemonID: "uncooperative", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeFenced)
	if _, err := collect(t, j); !relaywire.Is(err, relaywire.CodeCancelled) {
		t.Errorf("Next says %v", err)
	}
}

func TestUnresolvedFenceSurvivesHubRecreation(t *testing.T) {
	t.Parallel()
	for _, profile := range []Profile{Shared, Dedicated} {
		dir := t.TempDir()
		state := func(c *HubConfig) {
			c.StateDir, c.Profile, c.Limits.CancelTimeout = dir, profile, 20*time.Millisecond
		}
		h, url := newHub(t, state)
		p := connect(t, url, "lost")
		j := run(t, h, p, JobRequest{DaemonID: "lost", Timeout: 2 * time.Second})
		if _, err := collect(t, j); !relaywire.Is(err, relaywire.CodeTimeout) {
			t.Fatalf("got %v", err)
		}
		p.close()
		stop(t, h)
		again, url := newHub(t, state)
		p = dial(t, url)
		p.send(relaywire.Frame{Type: relaywire.Hello, DaemonID: "lost", Protocol: relaywire.Protocol, Token: token})
		if code, reason := p.closed(); code != relaywire.CloseRefused || reason != relaywire.ReasonTaken {
			t.Fatalf("got %d %q", code, reason)
		}
		_, err := again.RunJob(context.Background(), JobRequest{DaemonID: "lost", Payload: json.RawMessage(`{}`)})
		wantCode(t, err, relaywire.CodeFenced)
		f := again.Fences()
		if len(f) != 1 || f[0].DaemonID != "lost" || f[0].Code != FenceUnacknowledged || len(f[0].Jobs) != 1 || f[0].Jobs[0] != j.ID() {
			t.Errorf("the evidence is %+v", f)
		}
		stop(t, again)
	}
}

func TestBindConflictIsActionable(t *testing.T) {
	t.Parallel()
	_, url := newHub(t, nil)
	port, err := strconv.Atoi(url[strings.LastIndexByte(url, ':')+1:])
	if err != nil {
		t.Fatal(err)
	}
	second, err := NewHub(HubConfig{Token: token})
	if err != nil {
		t.Fatal(err)
	}
	defer stop(t, second)
	_, err = second.Start(context.Background(), Endpoint{Token: token, Port: port})
	wantCode(t, err, relaywire.CodeBindFailed)
	if !strings.Contains(err.Error(), "unique daemon-port") {
		t.Errorf("%q does not say what to do", err)
	}
}

func TestCancelPendingRefusesTargetReuse(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "busy")
	j := run(t, h, p, JobRequest{DaemonID: "busy"})
	done := make(chan Outcome, 1)
	go func() {
		o, _ := j.Cancel(context.Background(), "test")
		done <- o
	}()
	if f := p.recv(); f.Type != relaywire.Cancel || f.JobID != j.ID() {
		t.Fatalf("got %v", f)
	}
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "busy", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeCancelling)
	wantCode(t, h.WaitForDaemon(context.Background(), "busy", 0), relaywire.CodeCancelling)
	p.event(j.ID(), `{"type":"run.failed"}`) // dropped: it is cancelling
	p.finish(j.ID())
	if o := <-done; !o.Acknowledged || o.Fence != nil {
		t.Errorf("got %+v", o)
	}
	if got, err := collect(t, j); len(got) != 0 || !relaywire.Is(err, relaywire.CodeCancelled) {
		t.Errorf("got %q, %v", got, err)
	}
	j = run(t, h, p, JobRequest{DaemonID: "busy"})
	p.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Fatal(err)
	}
}

// What a cancelled job still says is dropped; what it had said is kept for its reader.
func TestEventsWhileCancellingAreDropped(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	p.event(j.ID(), `{"type":"before"}`)
	p.sync()
	go h.CancelJob(context.Background(), j.ID(), "test")
	p.want(relaywire.Cancel)
	p.event(j.ID(), `{"type":"run.failed","data":{"code":"agent_runtime.daemon_cancelled"}}`)
	p.finish(j.ID())
	if got, err := collect(t, j); len(got) != 1 || got[0] != `{"type":"before"}` || !relaywire.Is(err, relaywire.CodeCancelled) {
		t.Errorf("got %q, %v", got, err)
	}
}

// The source: cancellation_requires_remote_stop_ack_before_forgetting_job.
func TestCancellationRequiresRemoteStopAckBeforeForgettingJob(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	ctx, cancel := context.WithCancel(context.Background())
	j, err := h.RunJob(ctx, JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	p.want(relaywire.Start)
	cancel() // the consumer is gone
	p.want(relaywire.Cancel)
	if jobs := h.Jobs(); len(jobs) != 1 || jobs[0].State != "cancelling" {
		t.Errorf("the hub forgot the job: %+v", jobs)
	}
	select {
	case <-j.Done():
		t.Error("the job is settled without an acknowledgement")
	default:
	}
	p.finish(j.ID())
	<-j.Done()
	if o := j.Outcome(); !o.Acknowledged || o.Code != "relay.daemon_cancelled" {
		t.Errorf("got %+v", o)
	}
}

func TestDisconnectFencesAtOnceAndRevokesTools(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.StateDir = t.TempDir() })
	p := connect(t, url, "d")
	in, out := make(chan struct{}), make(chan error, 1)
	j := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
		close(in)
		<-ctx.Done()
		out <- context.Cause(ctx)
		return nil, ctx.Err()
	})})
	p.event(j.ID(), `{"type":"message.delta"}`)
	p.send(relaywire.Frame{Type: relaywire.MCPRequest, JobID: j.ID(), RequestID: "r", Payload: json.RawMessage(`{"id":1}`)})
	<-in
	p.close()
	got, err := collect(t, j)
	if err != nil || len(got) != 2 {
		t.Fatalf("got %q, %v", got, err)
	}
	var last struct {
		Type string
		Data struct {
			Code      string
			Retryable *bool
		}
	}
	if err := json.Unmarshal([]byte(got[1]), &last); err != nil || last.Type != "run.failed" ||
		last.Data.Code != "relay.daemon_disconnected" || last.Data.Retryable == nil || *last.Data.Retryable {
		t.Errorf("the last event is %s", got[1])
	}
	if err := <-out; err != errRevoked {
		t.Errorf("the tool call ended by %v", err)
	}
	if o := j.Outcome(); o.Acknowledged || o.Fence == nil || o.Fence.Code != FenceDisconnected {
		t.Errorf("the outcome is %+v", o)
	}
	if _, err := j.Next(context.Background()); err != io.EOF {
		t.Errorf("then %v", err)
	}
}
