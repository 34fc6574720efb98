package relay

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

func (p *peer) ask(job, request, payload string) {
	p.t.Helper()
	p.send(relaywire.Frame{Type: relaywire.MCPRequest, JobID: job, RequestID: request, Payload: json.RawMessage(payload)})
}

func TestToolCalls(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.MCPTimeout = 50 * time.Millisecond; c.Limits.MessageBytes = 1 << 16 })
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(ctx context.Context, in json.RawMessage) (json.RawMessage, error) {
		switch {
		case strings.Contains(string(in), "secret"):
			return nil, errors.New("internal: a secret")
		case strings.Contains(string(in), "told"):
			return nil, errdefs.New(errdefs.Denied, "not allowed")
		case strings.Contains(string(in), "slow"):
			<-ctx.Done()
			return nil, ctx.Err()
		case strings.Contains(string(in), "garbage"):
			return json.RawMessage(`{`), nil
		case strings.Contains(string(in), "large"):
			return json.RawMessage(`"` + strings.Repeat("x", 1<<16) + `"`), nil
		case strings.Contains(string(in), "note"):
			return nil, nil
		}
		return in, nil
	})})
	for request, c := range map[string]struct{ in, want string }{
		"echo":    {`{"jsonrpc":"2.0","id":1,"method":"x"}`, `{"jsonrpc":"2.0","id":1,"method":"x"}`},
		"batch":   {`[{"id":1},{"id":2}]`, `[{"id":1},{"id":2}]`},
		"note":    {`{"method":"note"}`, `null`},
		"failed":  {`{"id":"a","method":"secret"}`, `{"jsonrpc":"2.0","id":"a","error":{"code":-32000,"message":"the tool call failed"}}`},
		"told":    {`{"id":5,"method":"told"}`, `{"jsonrpc":"2.0","id":5,"error":{"code":-32000,"message":"not allowed"}}`},
		"slow":    {`[{"id":6,"method":"slow"}]`, `[{"jsonrpc":"2.0","id":6,"error":{"code":-32000,"message":"the tool call took longer than 50ms"}}]`},
		"garbage": {`{"id":7,"method":"garbage"}`, `{"jsonrpc":"2.0","id":7,"error":{"code":-32000,"message":"the tool call failed"}}`},
		"large":   {`{"id":8,"method":"large"}`, `{"jsonrpc":"2.0","id":8,"error":{"code":-32000,"message":"the tool's answer is larger than 65536 bytes"}}`},
	} {
		p.ask(j.ID(), request, c.in)
		f := p.want(relaywire.MCPResponse)
		if f.RequestID != request || f.JobID != j.ID() || string(f.Payload) != c.want {
			t.Errorf("%s: got %s", request, f.Payload)
		}
	}
	p.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Fatal(err)
	}
	none := run(t, h, p, JobRequest{DaemonID: "d"})
	p.ask(none.ID(), "r", `{"id":1}`)
	if f := p.want(relaywire.MCPResponse); !strings.Contains(string(f.Payload), `"id":1,"error"`) {
		t.Errorf("a job without tools answers %s", f.Payload)
	}
	p.finish(none.ID())
	collect(t, none)
}

// A tool call of a job that takes for ever, and ignores its context at that, delays
// neither the events, nor the end, nor the cancel of anything.
func TestSlowToolCallDelaysNoAcknowledgement(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	in, release := make(chan struct{}), make(chan struct{})
	defer close(release)
	slow := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
		close(in)
		<-release
		return json.RawMessage(`"too late"`), nil
	})})
	quick := run(t, h, p, JobRequest{DaemonID: "d"})
	p.ask(slow.ID(), "r", `{"id":1}`)
	<-in
	p.event(quick.ID(), `{"type":"a"}`)
	p.finish(quick.ID())
	if got, err := collect(t, quick); err != nil || len(got) != 1 {
		t.Fatalf("got %q, %v", got, err)
	}
	done := make(chan Outcome, 1)
	go func() {
		o, _ := slow.Cancel(context.Background(), "test")
		done <- o
	}()
	p.want(relaywire.Cancel)
	p.finish(slow.ID())
	if o := <-done; !o.Acknowledged || o.Fence != nil {
		t.Errorf("a slow tool call fenced the target: %+v", o)
	}
}

// A tool that ignores its context keeps neither its job nor the hub from ending.
func TestStopDoesNotWaitForStubbornTools(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	in, release, out := make(chan struct{}), make(chan struct{}), make(chan struct{})
	j := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
		defer close(out)
		close(in)
		<-release
		return nil, nil
	})})
	p.ask(j.ID(), "r", `{"id":1}`)
	<-in
	go func() { p.want(relaywire.Cancel); p.finish(j.ID()); p.closed() }()
	stop(t, h)
	if o := j.Outcome(); !o.Acknowledged {
		t.Errorf("got %+v", o)
	}
	close(release)
	<-out
}

// Tools are revoked, calls under way included, before run.cancel is sent and before
// completion can be seen.
func TestToolsRevokedBeforeCancelAndBeforeCompletion(t *testing.T) {
	t.Parallel()
	for _, cancel := range []bool{true, false} {
		h, url := newHub(t, nil)
		p := connect(t, url, "d")
		in := make(chan struct{})
		var mu sync.Mutex
		revoked := false
		j := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(ctx context.Context, _ json.RawMessage) (json.RawMessage, error) {
			close(in)
			<-ctx.Done()
			mu.Lock()
			revoked = true
			mu.Unlock()
			return json.RawMessage(`"stolen"`), nil
		})})
		p.ask(j.ID(), "r1", `{"id":1}`)
		<-in
		if cancel {
			go j.Cancel(context.Background(), "test")
			p.want(relaywire.Cancel)
			p.ask(j.ID(), "r2", `{"id":2}`) // after it
		}
		p.finish(j.ID())
		<-j.Done()
		mu.Lock()
		if !revoked {
			t.Error("the job is over and a call of it is under way")
		}
		mu.Unlock()
		p.ask(j.ID(), "r3", `{"id":3}`) // nobody's job now
		p.send(relaywire.Frame{Type: relaywire.Ping})
		for {
			f := p.recv()
			if f.Type == relaywire.Pong {
				break
			}
			if f.Type == relaywire.MCPResponse && (!strings.Contains(string(f.Payload), "revoked") || f.RequestID == "r3") {
				t.Errorf("after the revocation %s was answered %s", f.RequestID, f.Payload)
			}
		}
		stop(t, h)
	}
}

// A daemon that asks without end is refused, not queued for ever.
func TestToolCallsAreBounded(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.MCPCalls = 2 })
	p := connect(t, url, "d")
	var mu sync.Mutex
	now, most := 0, 0
	release := make(chan struct{})
	j := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(ctx context.Context, in json.RawMessage) (json.RawMessage, error) {
		mu.Lock()
		now++
		most = max(most, now)
		mu.Unlock()
		<-release
		mu.Lock()
		now--
		mu.Unlock()
		return in, nil
	})})
	const calls = 100
	for range calls {
		p.ask(j.ID(), "r", `{"id":1}`)
	}
	p.sync() // every refusal was queued before the pong's frame was handled
	close(release)
	p.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	if most > 2 || now != 0 {
		t.Errorf("%d calls at once, %d left", most, now)
	}
}

// No call begins once the tools are revoked, also one that waited for its turn and gets
// it at that moment.
func TestNoCallBeginsAfterTheRevocation(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	for range 1000 {
		b := newToolbox(j, toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
			t.Error("called")
			return nil, nil
		}))
		b.revoke()
		b.answer("r", json.RawMessage(`{"method":"x"}`))
		if why := b.pass(relaywire.Frame{Type: relaywire.MCPResponse}); why == "" {
			t.Error("passed on")
		}
		if t.Failed() {
			break
		}
	}
	p.finish(j.ID())
	collect(t, j)
}

// A job that ended by itself did, whoever wants to end it before it is settled; and its
// fence is its own, also when an operator was quicker than the settling.
func TestAnEndIsTheFirst(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.CancelTimeout = time.Millisecond })
	p := connect(t, url, "d")
	for _, fenced := range []bool{false, true} {
		in, release := make(chan struct{}), make(chan struct{})
		j := run(t, h, p, JobRequest{DaemonID: "d", Tools: toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
			close(in)
			<-release // so the job is not settled
			return nil, nil
		})})
		p.ask(j.ID(), "r", `{"id":1}`)
		<-in
		if fenced {
			j.ask(relaywire.CodeCancelled, "test")
			<-j.ended
			if _, err := clearFence(h, "d", "me", "looked at ps"); err != nil {
				t.Fatal(err)
			}
		} else {
			p.finish(j.ID())
			<-j.ended
			j.ask(relaywire.CodeCancelled, "too late")
		}
		close(release)
		<-j.Done()
		o := j.Outcome()
		if fenced {
			if o.Acknowledged || o.Fence == nil || len(o.Fence.Jobs) != 1 {
				t.Errorf("it was fenced: %+v", o)
			}
			continue
		}
		if !o.Acknowledged || o.Code != "" {
			t.Errorf("it finished by itself: %+v", o)
		}
		if _, err := j.Next(context.Background()); err != io.EOF {
			t.Error(err)
		}
	}
}

// A daemon that asks and does not read is owed a bounded number of answers, however
// little there is in them.
func TestAnswersWithoutAPayloadAreBounded(t *testing.T) {
	t.Parallel()
	const bound = 64 << 10
	h, url := newHub(t, func(c *HubConfig) { c.Limits.OutboxBytes = bound })
	p := rawConnect(t, url, "d")
	big := json.RawMessage(`{"x":"` + strings.Repeat("x", 15<<20) + `"}`)
	j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: big})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the start is being sent", func() bool { return j.link.out.sending() })
	note := masked(nil, []byte(`{"type":"mcp.request","job_id":"`+j.ID()+`","request_id":"r","payload":{"method":"note"}}`))
	for range 20 {
		if _, err := p.nc.Write([]byte(strings.Repeat(string(note), 1000))); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.nc.Write(masked(nil, []byte(`{"type":"run.event","job_id":"`+j.ID()+`","event":{}}`))); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Next(context.Background()); err != nil { // so all before was handled
		t.Fatal(err)
	}
	o := &j.link.out
	o.mu.Lock()
	if n := len(o.normal); n == 0 || n > bound/frameBytes {
		t.Errorf("%d answers wait", n)
	}
	o.mu.Unlock()
	p.nc.Close()
}
