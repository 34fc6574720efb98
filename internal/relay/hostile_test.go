package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/internal/relaywire"
)

// hello is the message of a good handshake.
func hello(id string) []byte {
	return relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Hello, DaemonID: id, Protocol: relaywire.Protocol, Token: token})
}

// Every case says raw bytes as a registered daemon that has a job of its own. {OWN}
// is its job, {OTHER} the job of a bystander, who must not notice anything.
func TestHostileFrames(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.MessageBytes = 1 << 20 })
	bystander := connect(t, url, "bystander")
	other := run(t, h, bystander, JobRequest{DaemonID: "bystander", Tools: toolFunc(func(context.Context, json.RawMessage) (json.RawMessage, error) {
		t.Error("somebody used the bystander's tools")
		return nil, nil
	})})
	big := strings.Repeat("x", 900<<10)
	for i, c := range []struct {
		name   string
		raw    string
		binary bool
		code   int // 0: ignored, the connection lives
	}{
		{name: "empty", raw: ""},
		{name: "space", raw: " \n"},
		{name: "no json", raw: "hello"},
		{name: "cut short", raw: `{"type":"run.event","job_id":"{OWN}","event":{"type":`},
		{name: "two objects", raw: `{"type":"run.finished","job_id":"{OWN}"}{}`},
		{name: "array", raw: `[{"type":"run.finished","job_id":"{OWN}"}]`},
		{name: "null", raw: `null`},
		{name: "number", raw: `1e999999999`},
		{name: "no type", raw: `{"job_id":"{OWN}"}`},
		{name: "type of a number", raw: `{"type":5,"job_id":"{OWN}"}`},
		{name: "unknown type", raw: `{"type":"run.explode","job_id":"{OWN}"}`},
		{name: "hub's own type start", raw: `{"type":"run.start","job_id":"{OWN}","payload":{}}`},
		{name: "hub's own type cancel", raw: `{"type":"run.cancel","job_id":"{OWN}"}`},
		{name: "hub's own type response", raw: `{"type":"mcp.response","job_id":"{OWN}","request_id":"x","payload":1}`},
		{name: "old cleanup", raw: `{"type":"run.cleanup","job_id":"{OWN}"}`},
		{name: "second hello", raw: string(hello("somebody-else"))},
		{name: "hello for the bystander", raw: string(hello("bystander"))},
		{name: "type in capitals", raw: `{"type":"RUN.FINISHED","job_id":"{OWN}"}`},
		{name: "key in capitals", raw: `{"TYPE":"run.finished","JOB_ID":"{OWN}"}`},
		{name: "event of text", raw: `{"type":"run.event","job_id":"{OWN}","event":"text"}`},
		{name: "event of null", raw: `{"type":"run.event","job_id":"{OWN}","event":null}`},
		{name: "event of an array", raw: `{"type":"run.event","job_id":"{OWN}","event":[{}]}`},
		{name: "no event", raw: `{"type":"run.event","job_id":"{OWN}"}`},
		{name: "event with NaN", raw: `{"type":"run.event","job_id":"{OWN}","event":{"x":NaN}}`},
		{name: "event with a raw surrogate", raw: "{\"type\":\"run.event\",\"job_id\":\"{OWN}\",\"event\":{\"x\":\"\xed\xa0\x80\"}}"},
		{name: "event with a control character", raw: "{\"type\":\"run.event\",\"job_id\":\"{OWN}\",\"event\":{\"x\":\"\x00\"}}"},
		{name: "event nested too deep", raw: `{"type":"run.event","job_id":"{OWN}","event":` + strings.Repeat(`{"a":`, 9999) + `1` + strings.Repeat(`}`, 9999) + `}`},
		{name: "only brackets", raw: strings.Repeat("[", 1<<20)},
		{name: "job of a number", raw: `{"type":"run.finished","job_id":7}`},
		{name: "job of an object", raw: `{"type":"run.finished","job_id":{"{OWN}":1}}`},
		{name: "no job", raw: `{"type":"run.finished"}`},
		{name: "unknown job", raw: `{"type":"run.finished","job_id":"AAAAAAAAAAAAAAAAAAAAAA"}`},
		{name: "huge job id", raw: `{"type":"run.finished","job_id":"` + big + `"}`},
		{name: "somebody's job: event", raw: `{"type":"run.event","job_id":"{OTHER}","event":{"type":"injected"}}`},
		{name: "somebody's job: finish", raw: `{"type":"run.finished","job_id":"{OTHER}"}`},
		{name: "somebody's job: tool", raw: `{"type":"mcp.request","job_id":"{OTHER}","request_id":"r","payload":{"id":1}}`},
		{name: "somebody's job: cancel", raw: `{"type":"run.cancel","job_id":"{OTHER}"}`},
		{name: "tool without an id", raw: `{"type":"mcp.request","job_id":"{OWN}","payload":{"id":1}}`},
		{name: "tool with an id of a number", raw: `{"type":"mcp.request","job_id":"{OWN}","request_id":1,"payload":{"id":1}}`},
		{name: "tool without a payload", raw: `{"type":"mcp.request","job_id":"{OWN}","request_id":"r"}`},
		{name: "binary nonsense", raw: "\x00\x01\x02\xff", binary: true},
		{name: "large nonsense", raw: big},
		{name: "too large of somebody's job", raw: `{"type":"run.event","job_id":"{OTHER}","event":{"x":"` + strings.Repeat("x", 2<<20) + `"}}`},
		{name: "too large finish", raw: `{"type":"run.finished","job_id":"{OWN}","x":"` + strings.Repeat("x", 2<<20) + `"}`},
		{name: "too large of nobody", raw: `{"x":"` + strings.Repeat("x", 2<<20) + `","type":"run.finished","job_id":"{OWN}"}`},
		{name: "many keys", raw: `{"type":"run.explode"` + strings.Repeat(`,"k":1`, 100_000) + `}`},
		{name: "far too large", raw: `{"type":"run.event","job_id":"{OWN}","event":{"x":"` + strings.Repeat("x", excess*(1<<20+relaywire.EnvelopeBytes)) + `"}}`, code: relaywire.CloseTooBig},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := fmt.Sprintf("hostile-%d", i)
			p := connect(t, url, id)
			own := run(t, h, p, JobRequest{DaemonID: id})
			raw := strings.NewReplacer("{OWN}", own.ID(), "{OTHER}", other.ID()).Replace(c.raw)
			typ := websocket.MessageText
			if c.binary {
				typ = websocket.MessageBinary
			}
			err := p.ws.Write(context.Background(), typ, []byte(raw))
			if c.code != 0 {
				if code, _ := p.closed(); code != c.code && code != -1 {
					t.Errorf("closed with %d, want %d", code, c.code)
				}
				<-own.Done()
				if o := own.Outcome(); o.Fence == nil {
					t.Errorf("a lost daemon with a job is not fenced: %+v", o)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			// Ignored: it is alive, its own job is untouched and ends properly.
			p.sync()
			p.event(own.ID(), `{"type":"after"}`)
			p.finish(own.ID())
			p.finish(own.ID()) // twice
			if got, err := collect(t, own); err != nil || len(got) != 1 || got[0] != `{"type":"after"}` {
				t.Errorf("got %.100q, %v", got, err)
			}
			p.event(own.ID(), `{"type":"late"}`)
			p.sync()
		})
	}
	// Binary frames that are JSON count, as in the source.
	msg := relaywire.Append(nil, &relaywire.Frame{Type: relaywire.Event, JobID: other.ID(), Event: json.RawMessage(`{"type":"binary"}`)})
	if err := bystander.ws.Write(context.Background(), websocket.MessageBinary, msg); err != nil {
		t.Fatal(err)
	}
	bystander.finish(other.ID())
	if got, err := collect(t, other); err != nil || len(got) != 1 || got[0] != `{"type":"binary"}` {
		t.Errorf("the bystander got %q, %v", got, err)
	}
	if o := other.Outcome(); !o.Acknowledged || o.Fence != nil {
		t.Errorf("the bystander's outcome is %+v", o)
	}
}

// An event beyond the limit ends its job, with the limit named, and only that job.
func TestEventTooLargeEndsOnlyItsJob(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.MessageBytes = 1 << 20 })
	p := connect(t, url, "d")
	a, b := run(t, h, p, JobRequest{DaemonID: "d"}), run(t, h, p, JobRequest{DaemonID: "d"})
	p.ask(b.ID(), "r", `{"id":1,"x":"`+strings.Repeat("x", 2<<20)+`"}`)
	if f := p.want(relaywire.MCPResponse); f.RequestID != "r" || !strings.Contains(string(f.Payload), "-32600") {
		t.Errorf("got %+v", f)
	}
	p.event(a.ID(), `{"type":"small"}`)
	p.event(a.ID(), `{"x":"`+strings.Repeat("x", 2<<20)+`"}`)
	if f := p.want(relaywire.Cancel); f.JobID != a.ID() {
		t.Errorf("got %+v", f)
	}
	p.finish(a.ID())
	got, err := collect(t, a)
	wantCode(t, err, relaywire.CodeEventTooLarge)
	if len(got) != 1 || !strings.Contains(err.Error(), "1048576") {
		t.Errorf("got %q, %v", got, err)
	}
	p.event(b.ID(), `{"type":"small"}`)
	p.finish(b.ID())
	if got, err := collect(t, b); err != nil || len(got) != 1 {
		t.Errorf("got %q, %v", got, err)
	}
}

// A stranger who speaks HTTP is answered and sent away: neither a body that never
// comes nor silence after the answer keeps the connection.
func TestStrangersDoNotStay(t *testing.T) {
	t.Parallel()
	_, url := newHub(t, func(c *HubConfig) { c.Limits.HelloTimeout = time.Second })
	for name, more := range map[string]string{"silence": "", "a body that never comes": "Content-Length: 10\r\n"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "ws://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetReadDeadline(time.Now().Add(soon))
		fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: x\r\n%s\r\n", more)
		if got, err := io.ReadAll(conn); err != nil || !bytes.HasPrefix(got, []byte("HTTP/1.1 4")) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// Before the hello, nothing is believed.
func TestHostileHandshakes(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.HelloTimeout = 5 * time.Second; c.Limits.Daemons = 2 })
	victim := connect(t, url, "victim")
	j := run(t, h, victim, JobRequest{DaemonID: "victim"})
	for _, c := range []struct {
		name, raw string
		code      int
		reason    string
	}{
		{"silence", "", -1, ""},
		{"no json", "}{", -1, ""},
		{"NaN", `{"type":"daemon.hello","x":NaN}`, -1, ""},
		{"too large", `{"type":"daemon.hello","x":"` + strings.Repeat("x", relaywire.EnvelopeBytes) + `"}`, relaywire.CloseTooBig, "*"},
		{"array", `[]`, relaywire.CloseRefused, relaywire.ReasonHello},
		{"event first", `{"type":"run.event","job_id":"` + j.ID() + `","event":{}}`, relaywire.CloseRefused, relaywire.ReasonHello},
		{"finish first", `{"type":"run.finished","job_id":"` + j.ID() + `"}`, relaywire.CloseRefused, relaywire.ReasonHello},
		{"id of a number", `{"type":"daemon.hello","daemon_id":5}`, relaywire.CloseRefused, relaywire.ReasonID},
		{"id of half a surrogate", `{"type":"daemon.hello","daemon_id":"\ud800"}`, relaywire.CloseRefused, relaywire.ReasonID},
		{"token of an array", `{"type":"daemon.hello","daemon_id":"x","token":["` + token + `"]}`, relaywire.CloseRefused, relaywire.ReasonToken},
		{"token cut", `{"type":"daemon.hello","daemon_id":"x","token":"` + token[:20] + `"}`, relaywire.CloseRefused, relaywire.ReasonToken},
		{"live id", string(hello("victim")), relaywire.CloseRefused, relaywire.ReasonTaken},
		{"live id with space", string(hello("  victim\t")), relaywire.CloseRefused, relaywire.ReasonTaken},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := dial(t, url)
			if c.raw != "" {
				p.raw([]byte(c.raw))
			}
			code, reason := p.closed()
			if code != c.code && c.code != relaywire.CloseTooBig || reason != c.reason && c.reason != "*" {
				t.Errorf("closed with %d %q, want %d %q", code, reason, c.code, c.reason)
			}
		})
	}
	// The cap of connected and fenced ids.
	second := connect(t, url, "second")
	third := dial(t, url)
	third.raw(hello("third"))
	if code, reason := third.closed(); code != relaywire.CloseRefused || reason != relaywire.ReasonTaken {
		t.Errorf("the third of two was closed with %d %q", code, reason)
	}
	second.close()
	eventually(t, "the second is gone", func() bool { return len(h.Daemons()) == 1 })
	connect(t, url, "third")
	victim.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Error(err)
	}
	// Not a WebSocket at all.
	tr := &http.Transport{DisableKeepAlives: true}
	res, err := (&http.Client{Transport: tr}).Get("http" + strings.TrimPrefix(url, "ws"))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("a plain request got %s", res.Status)
	}
	// A page of another site in somebody's browser.
	_, res, err = websocket.Dial(context.Background(), url, &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: tr}, HTTPHeader: http.Header{"Origin": {"https://evil.example"}}})
	if err == nil || res.StatusCode != http.StatusForbidden {
		t.Errorf("a foreign origin was let in: %v", err)
	}
}

// A payload that is no object, or too large, is refused before anything is sent or
// marked.
func TestPayloadsRefusedBeforeDispatch(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, func(c *HubConfig) { c.Limits.MessageBytes = 64 << 10; c.StateDir = t.TempDir() })
	p := connect(t, url, "d")
	for payload, code := range map[string]relaywire.Code{
		"":       relaywire.CodePayloadInvalid,
		"[]":     relaywire.CodePayloadInvalid,
		`{"a":}`: relaywire.CodePayloadInvalid,
		`{"a":"` + strings.Repeat("x", 64<<10) + `"}`: relaywire.CodePayloadTooLarge,
	} {
		_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "d", Payload: json.RawMessage(payload)})
		wantCode(t, err, code)
		if code == relaywire.CodePayloadTooLarge && !strings.Contains(err.Error(), "65536") {
			t.Errorf("%q does not name the limit", err)
		}
	}
	for _, id := range []string{"", " ", strings.Repeat("x", 129), "\xff"} {
		_, err := h.RunJob(context.Background(), JobRequest{DaemonID: id, Payload: json.RawMessage(`{}`)})
		wantCode(t, err, relaywire.CodeIDInvalid)
	}
	_, err := h.RunJob(context.Background(), JobRequest{DaemonID: "nobody", Payload: json.RawMessage(`{}`)})
	wantCode(t, err, relaywire.CodeOffline)
	wantCode(t, h.WaitForDaemon(context.Background(), "nobody", time.Millisecond), relaywire.CodeOffline)
	p.send(relaywire.Frame{Type: relaywire.Ping})
	if f := p.recv(); f.Type != relaywire.Pong {
		t.Errorf("the daemon got %v", f.Type)
	}
	if len(h.Fences()) != 0 || len(h.Jobs()) != 0 {
		t.Error("a refused job left something behind")
	}
}

// The source closes the socket for these and fences the target; here they are
// carried, whole, in both directions.
func TestLargeMessagesAreCarried(t *testing.T) {
	t.Parallel()
	h, url := newHub(t, nil)
	p := connect(t, url, "d")
	large := json.RawMessage(`{"type":"x","data":"` + strings.Repeat("é\\n", 2<<20) + `"}`)
	j := run(t, h, p, JobRequest{DaemonID: "d", Payload: large})
	p.event(j.ID(), string(large))
	full := json.RawMessage(`{"x":"` + strings.Repeat("y", 16<<20-8) + `"}`) // exactly the limit
	p.event(j.ID(), string(full))
	p.finish(j.ID())
	got, err := collect(t, j)
	if err != nil || len(got) != 2 || got[0] != string(large) || got[1] != string(full) {
		t.Fatalf("got %d events, %v", len(got), err)
	}
	j = run(t, h, p, JobRequest{DaemonID: "d", Payload: full})
	p.finish(j.ID())
	if _, err := collect(t, j); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(full[:6], []byte(`{"x":"`)) {
		t.Error("the payload was written to")
	}
}
