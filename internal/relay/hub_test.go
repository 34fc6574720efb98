package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// The relay's part of two_separate_installation_processes: two hubs share a network
// and nothing else.
func TestTwoInstallationsShareNothing(t *testing.T) {
	t.Parallel()
	tokens := []string{token, token + "B"}
	a, urlA := newHub(t, func(c *HubConfig) { c.Profile = Shared; c.StateDir = t.TempDir() })
	b, urlB := newHub(t, func(c *HubConfig) { c.Profile = Shared; c.StateDir = t.TempDir(); c.Token = tokens[1] })
	for url, wrong := range map[string]string{urlA: tokens[1], urlB: tokens[0]} {
		p := dial(t, url)
		p.send(relaywire.Frame{Type: relaywire.Hello, DaemonID: "same", Protocol: relaywire.Protocol, Token: wrong})
		if code, reason := p.closed(); code != relaywire.CloseRefused || reason != relaywire.ReasonToken {
			t.Errorf("got %d %q", code, reason)
		}
	}
	pa := connect(t, urlA, "same")
	pb := dial(t, urlB)
	pb.send(relaywire.Frame{Type: relaywire.Hello, DaemonID: "same", Protocol: relaywire.Protocol, Token: tokens[1]})
	pb.want(relaywire.Ready)
	ja, jb := run(t, a, pa, JobRequest{DaemonID: "same"}), run(t, b, pb, JobRequest{DaemonID: "same"})
	go func() { pa.want(relaywire.Cancel); pa.finish(ja.ID()) }()
	if o, err := ja.Cancel(context.Background(), "test"); err != nil || !o.Acknowledged || o.Fence != nil {
		t.Errorf("got %+v, %v", o, err)
	}
	if jobs := b.Jobs(); len(jobs) != 1 || jobs[0].State != "running" {
		t.Errorf("cancelling in A touched B: %+v", jobs)
	}
	if _, err := b.CancelJob(context.Background(), ja.ID(), "not mine"); err == nil {
		t.Error("B knows a job of A")
	}
	pa.finish(jb.ID()) // the wrong hub
	pa.sync()
	pb.event(jb.ID(), `{"type":"x"}`)
	pb.finish(jb.ID())
	if got, err := collect(t, jb); err != nil || len(got) != 1 {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestTimeoutHasItsOwnCodeAndKeepsEvents(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Prefix = "codex" })
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d", Timeout: 2 * time.Second})
	p.event(j.ID(), `{"type":"before"}`)
	p.want(relaywire.Cancel)
	p.finish(j.ID())
	_, err := collect(t, j)
	if relaywire.CodeOf(err) != "codex.daemon_timeout" {
		t.Errorf("got %v", err)
	}
	if o := j.Outcome(); !o.Acknowledged || o.Code != "codex.daemon_timeout" {
		t.Errorf("got %+v", o)
	}
}

func TestRepeatedCancelsAreOne(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			// A context that ended does not end the clean-up.
			if o, err := j.Cancel(cancelled, "test"); err != nil || !o.Acknowledged {
				t.Errorf("got %+v, %v", o, err)
			}
		})
	}
	p.want(relaywire.Cancel)
	p.send(relaywire.Frame{Type: relaywire.Ping})
	if f := p.recv(); f.Type != relaywire.Pong {
		t.Errorf("a second %v was sent", f.Type)
	}
	p.finish(j.ID())
	wg.Wait()
}

func TestCaps(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.Jobs = 2 })
	p := connect(t, url, "d")
	a, b := run(t, h, p, JobRequest{DaemonID: "d"}), run(t, h, p, JobRequest{DaemonID: "d"})
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeBusy)
	_, err = h.RunJob(context.Background(), JobRequest{DaemonID: "e", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeOffline)
	if d := h.Daemons(); len(d) != 1 || len(d[0].Jobs) != 2 || d[0].ID != "d" || d[0].Incarnation == 0 {
		t.Errorf("got %+v", d)
	}
	p.finish(a.ID())
	p.finish(b.ID())
	collect(t, a)
	collect(t, b)
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	p.finish(j.ID())
	collect(t, j)
}

func TestWaitForDaemon(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	got := make(chan error, 1)
	go func() { got <- h.WaitForDaemon(context.Background(), " d ", soon) }()
	connect(t, url, "d")
	if err := <-got; err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("why")
	cancel(why)
	if err := h.WaitForDaemon(ctx, "nobody", soon); err != why {
		t.Errorf("got %v", err)
	}
	go func() { got <- h.WaitForDaemon(context.Background(), "nobody", soon) }()
	stop(t, h)
	wantCode(t, <-got, relaywire.CodeNotStarted)
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeNotStarted)
}

// Stop settles every job, at the same time, while the daemons can still answer.
func TestStopSettlesEveryJob(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.StateDir = t.TempDir(); c.Limits.CancelTimeout = 5 * time.Second })
	var jobs []*Job
	var peers []*peer
	for i := range 6 {
		id := fmt.Sprintf("d%d", i)
		p := connect(t, url, id)
		peers = append(peers, p)
		jobs = append(jobs, run(t, h, p, JobRequest{DaemonID: id}))
	}
	stranger := dial(t, url) // in its handshake
	closed := make(chan int, 6)
	for i, p := range peers {
		go func() {
			p.want(relaywire.Cancel)
			if i > 0 { // the first never answers
				p.finish(jobs[i].ID())
			}
			code, _ := p.closed()
			closed <- code
		}()
	}
	stop(t, h)
	stop(t, h)
	for i, j := range jobs {
		select {
		case <-j.Done():
		default:
			t.Fatal("a job is not settled")
		}
		if o := j.Outcome(); o.Acknowledged != (i > 0) || (o.Fence != nil) != (i == 0) {
			t.Errorf("job %d: %+v", i, o)
		}
		if _, err := j.Next(context.Background()); !relaywire.Is(err, relaywire.CodeCancelled) {
			t.Errorf("job %d: %v", i, err)
		}
	}
	for range peers {
		if code := <-closed; code != relaywire.CloseGoingAway {
			t.Errorf("closed with %d", code)
		}
	}
	stranger.closed()
}

// A daemon that has left may come back at once: it knows of the end of its connection
// before the hub does.
func TestDaemonComesBackAtOnce(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	h.mu.Lock()
	h.comeback = soon // on a machine however busy
	h.mu.Unlock()
	for i := range 1000 {
		p := connect(t, url, "d")
		if i%2 == 0 {
			_ = p.ws.Close(websocket.StatusNormalClosure, "goodbye") // waits for the answer
		}
		p.close()
	}
}

// A daemon that says hello to a hub that stops is told that, and not that it is fenced.
func TestHelloToAHubThatStops(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	late := dial(t, url)
	stopped := make(chan struct{})
	go func() { stop(t, h); close(stopped) }()
	p.want(relaywire.Cancel) // so it stops, and waits for the job
	late.raw(hello("late"))
	if code, reason := late.closed(); code != relaywire.CloseGoingAway || reason != relaywire.ReasonStopping {
		t.Errorf("got %d %q", code, reason)
	}
	p.finish(j.ID())
	p.closed()
	<-stopped
}

// A run.start that is still waiting in the hub is taken back: nothing runs, so
// nothing is fenced, although the daemon never answers.
func TestUnsentStartIsWithdrawn(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.CancelTimeout = 100 * time.Millisecond; c.Limits.StallTimeout = soon })
	p := rawConnect(t, url, "deaf")
	big := json.RawMessage(`{"x":"` + strings.Repeat("x", 15<<20) + `"}`)
	first, err := h.RunJob(context.Background(), JobRequest{DaemonID: "deaf", Payload: big})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first is being sent", func() bool { return first.link.out.sending() })
	second, err := h.RunJob(context.Background(), JobRequest{DaemonID: "deaf", Payload: json.RawMessage(`{"y":1}`)})
	if err != nil {
		t.Fatal(err)
	}
	if o, _ := second.Cancel(context.Background(), "test"); !o.Acknowledged || o.Fence != nil {
		t.Errorf("got %+v", o)
	}
	// What waits for a daemon that does not read is bounded.
	third, err := h.RunJob(context.Background(), JobRequest{DaemonID: "deaf", Payload: big})
	if err != nil {
		t.Fatal(err)
	}
	fourth, err := h.RunJob(context.Background(), JobRequest{DaemonID: "deaf", Payload: big})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.RunJob(context.Background(), JobRequest{DaemonID: "deaf", Payload: big})
	wantCode(t, err, relaywire.CodeBusy)
	for _, j := range []*Job{third, fourth} {
		if o, _ := j.Cancel(context.Background(), "test"); !o.Acknowledged || o.Fence != nil {
			t.Errorf("got %+v", o)
		}
	}
	// The first may have arrived in part: it is fenced.
	if o, _ := first.Cancel(context.Background(), "test"); o.Acknowledged || o.Fence == nil {
		t.Errorf("got %+v", o)
	}
	p.nc.Close()
}

// A daemon that is gone without a word is found out, and one that answers is not.
func TestSilentDaemonIsFoundOut(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) {
		c.Limits.PingInterval, c.Limits.PongTimeout = 20*time.Millisecond, 5*time.Second
	})
	live := connect(t, url, "live")
	go func() {
		for {
			if _, err := live.next(); err != nil {
				return
			}
		}
	}()
	rawConnect(t, url, "dead") // never answers a ping
	j, err := h.RunJob(context.Background(), JobRequest{DaemonID: "dead", Payload: json.RawMessage(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, j)
	if err != nil || len(got) != 1 || !strings.Contains(got[0], "daemon_disconnected") {
		t.Errorf("got %q, %v", got, err)
	}
	if d := h.Daemons(); len(d) != 1 || d[0].ID != "live" {
		t.Errorf("got %+v", d)
	}
}

// Pongs of a daemon that only asks, and does not read, are not piled up.
func TestPingFlood(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := rawConnect(t, url, "d")
	ping := masked(nil, []byte(`{"type":"daemon.ping"}`))
	for range 100 {
		if _, err := p.nc.Write([]byte(strings.Repeat(string(ping), 1000))); err != nil {
			t.Fatal(err)
		}
	}
	h.mu.Lock()
	o := &h.targets[keyOf("d")].link.out
	h.mu.Unlock()
	o.mu.Lock()
	if len(o.urgent) > 1 {
		t.Errorf("%d pongs wait", len(o.urgent))
	}
	o.mu.Unlock()
}

// Many daemons with a job each are served in turns: none is far behind another.
func TestFairBetweenDaemons(t *testing.T) {
	const daemons, events = 20, 400
	h, url := newHub(t, nil)
	var wg sync.WaitGroup
	counts := make([]int, daemons)
	for i := range daemons {
		id := fmt.Sprint("d", i)
		p := rawConnect(t, url, id)
		j, err := h.RunJob(context.Background(), JobRequest{DaemonID: id, Payload: json.RawMessage(`{}`)})
		if err != nil {
			t.Fatal(err)
		}
		p.recv(t)
		wg.Go(func() {
			if err := p.flood(j.ID(), eventOf(4<<10), events); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			err := j.Stream(context.Background(), func(batch []json.RawMessage) error {
				counts[i] += len(batch)
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i, n := range counts {
		if n != events {
			t.Errorf("daemon %d: %d events of %d", i, n, events)
		}
	}
}

func TestStreamStopsAtAnError(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	j := run(t, h, p, JobRequest{DaemonID: "d"})
	p.event(j.ID(), `{"n":1}`)
	if e, err := j.Next(context.Background()); err != nil || string(e) != `{"n":1}` {
		t.Fatal(e, err)
	}
	p.event(j.ID(), `{"n":2}`)
	broken := errors.New("broken pipe")
	if err := j.Stream(context.Background(), func([]json.RawMessage) error { return broken }); err != broken {
		t.Errorf("got %v", err)
	}
	p.event(j.ID(), `{"n":3}`)
	p.finish(j.ID())
	n := 0
	if err := j.Stream(context.Background(), func(e []json.RawMessage) error { n += len(e); return nil }); err != nil || n != 1 {
		t.Errorf("got %d, %v", n, err)
	}
	if _, err := j.NextBatch(context.Background()); err != io.EOF {
		t.Errorf("got %v", err)
	}
}
