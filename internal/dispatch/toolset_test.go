package dispatch

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// toolServer speaks enough of MCP's Streamable HTTP: a session, JSON answers,
// answers as a stream, notifications.
func toolServer(t *testing.T, ended chan<- string, held chan<- struct{}) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer tool-key" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.Method == http.MethodDelete {
			ended <- r.Header.Get("Mcp-Session-Id")
			return
		}
		b, _ := io.ReadAll(r.Body)
		var call struct {
			ID     json.RawMessage
			Method string
		}
		_ = json.Unmarshal(b, &call)
		if call.Method != "initialize" && (r.Header.Get("Mcp-Session-Id") != "s-1" || r.Header.Get("Mcp-Protocol-Version") != "2025-06-18") {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		switch call.Method {
		case "initialize":
			w.Header().Set("Mcp-Session-Id", "s-1")
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-06-18"}}`, call.ID)
		case "tools/call":
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprintf(w, "event: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\ndata: \"result\":{\"ok\":true}}\n\n", call.ID)
		case "slow":
			close(held)
			<-r.Context().Done() // until the caller has gone
		case "large":
			_, _ = io.Copy(w, io.LimitReader(zeros{}, maxToolAnswer+2))
		case "garbage":
			_, _ = io.WriteString(w, "<html>")
		case "redirect":
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusTemporaryRedirect)
		default:
			w.WriteHeader(http.StatusAccepted)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestToolSetIsCalled(t *testing.T) {
	t.Parallel()
	ended, held := make(chan string, 1), make(chan struct{})
	s := toolServer(t, ended, held)
	g := newGrant("docs", ToolSet{URL: s.URL, Key: "tool-key"}, slog.New(slog.DiscardHandler))
	call := func(payload string) (string, error) {
		a, err := g.Call(t.Context(), json.RawMessage(payload))
		return string(a), err
	}
	for _, c := range []struct{ payload, want string }{
		{`{"jsonrpc":"2.0","id":1,"method":"initialize"}`, `"protocolVersion":"2025-06-18"`},
		{`{"jsonrpc":"2.0","method":"notifications/initialized"}`, ""},
		{`{"jsonrpc":"2.0","id":"a","method":"tools/call"}`, `"id":"a","result":{"ok":true}`},
	} {
		if got, err := call(c.payload); err != nil || !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s: got %s, %v", c.payload, got, err)
		}
	}
	for method, code := range map[string]errdefs.Code{"large": errdefs.Exhausted, "garbage": errdefs.Unavailable, "redirect": errdefs.Unavailable} {
		if got, err := call(`{"jsonrpc":"2.0","id":2,"method":"` + method + `"}`); !errdefs.Is(err, code) || strings.Contains(err.Error(), "tool-key") {
			t.Errorf("%s: got %.60s, %v", method, got, err)
		}
	}
	// Revoking the tools ends a call that is under way.
	ctx, revoke := context.WithCancel(t.Context())
	answered := make(chan error, 1)
	go func() {
		_, err := g.Call(ctx, json.RawMessage(`{"jsonrpc":"2.0","id":3,"method":"slow"}`))
		answered <- err
	}()
	<-held
	revoke()
	if err := <-answered; !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("revoked: %v", err)
	}
	g.end()
	if id := <-ended; id != "s-1" {
		t.Errorf("the session %q was ended", id)
	}
	wrong := newGrant("docs", ToolSet{URL: s.URL, Key: "another"}, slog.New(slog.DiscardHandler))
	if _, err := wrong.Call(t.Context(), json.RawMessage(`{"id":1,"method":"initialize"}`)); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("a wrong key: %v", err)
	}
}

func FuzzLastAnswers(f *testing.F) {
	f.Add("data: {\"id\":1,\"result\":1}\n\ndata: {\"id\":2,\"error\":{}}\n\n")
	f.Add("data:\n\n: x\r\ndata: [")
	f.Fuzz(func(t *testing.T, s string) {
		a, err := lastAnswers(strings.NewReader(s))
		if err != nil || a != nil && !json.Valid(a) {
			t.Errorf("%q gave %s, %v", s, a, err)
		}
	})
}

func TestAGrantedToolSetIsTheJobs(t *testing.T) {
	t.Parallel()
	ended := make(chan string, 1)
	s := toolServer(t, ended, nil)
	r := newRig(t, "", time.Minute)
	r.s.cfg.ToolSets = map[string]ToolSet{"docs": {URL: s.URL, Key: "tool-key"}}
	answers := make(chan string, 1)
	r.daemon("laptop", func(f relaywire.Frame, say func(relaywire.Frame)) {
		switch f.Type {
		case relaywire.Start:
			say(relaywire.Frame{Type: relaywire.MCPRequest, JobID: f.JobID, RequestID: "1", Payload: json.RawMessage(`{"jsonrpc":"2.0","id":1,"method":"initialize"}`)})
		case relaywire.MCPResponse:
			if f.RequestID == "1" {
				say(relaywire.Frame{Type: relaywire.MCPRequest, JobID: f.JobID, RequestID: "2", Payload: json.RawMessage(`{"jsonrpc":"2.0","id":2,"method":"tools/call"}`)})
				return
			}
			answers <- string(f.Payload)
			say(relaywire.Frame{Type: relaywire.Finished, JobID: f.JobID})
		}
	})
	ask := req("laptop")
	ask.Tools = []string{"files"}
	if _, err := r.s.Run(t.Context(), owner, ask); !errdefs.Is(err, errdefs.Invalid) || !strings.Contains(err.Error(), "there are: docs") {
		t.Errorf("a set that is not there: %v", err)
	}
	ask.Tools = []string{"docs", "docs"}
	if _, err := r.s.Run(t.Context(), owner, ask); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("two sets: %v", err)
	}
	ask.Tools = []string{"docs"}
	job, err := r.s.Run(t.Context(), owner, ask)
	if err != nil {
		t.Fatal(err)
	}
	if got := <-answers; !strings.Contains(got, `"ok":true`) || strings.Contains(got, "tool-key") {
		t.Errorf("%s", got)
	}
	if o, err := job.Leave(t.Context(), "over"); err != nil || !o.Acknowledged {
		t.Errorf("%+v %v", o, err)
	}
	// Whoever stops waits for the end of the session.
	if err := r.hub.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	r.s.Close()
	select {
	case id := <-ended:
		if id != "s-1" {
			t.Errorf("the session %q was ended", id)
		}
	default:
		t.Error("the session goes on")
	}
	if _, err := r.s.Run(t.Context(), owner, api.RelayJobRequest{DaemonID: "laptop", Payload: json.RawMessage(`{}`)}); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("after the end: %v", err)
	}
}

// The end of a job's grant closes its own connections, not those that the rest of the
// program keeps.
func TestTheEndOfAGrantClosesItsOwnConnections(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) }))
	defer server.Close()
	defer http.DefaultClient.CloseIdleConnections()
	reused := false
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(c httptrace.GotConnInfo) { reused = c.Reused }})
	for range 2 {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		g := newGrant("x", ToolSet{URL: server.URL}, slog.New(slog.DiscardHandler))
		if _, err := g.Call(t.Context(), json.RawMessage(`{"method":"x"}`)); err != nil {
			t.Fatal(err)
		}
		g.end()
	}
	if !reused {
		t.Error("a connection of somebody else was closed")
	}
}
