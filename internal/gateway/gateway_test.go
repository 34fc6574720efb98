package gateway

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/netns"
)

func TestInsideTheBoxOnly(t *testing.T) {
	t.Parallel()
	need.Root(t)
	ns, otherNS := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	for _, p := range []string{ns, otherNS} {
		if err := netns.Create(p); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netns.Remove(p); err != nil {
				t.Error(err)
			}
		})
	}
	var seen http.Header
	up := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen = r.Header.Clone()
		_, _ = io.WriteString(w, r.URL.Path)
	}))
	t.Cleanup(up.Close)
	gw, err := New(Config{Providers: map[string]Provider{"openai": {BaseURL: up.URL, Key: canary, Style: StyleOpenAI}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = gw.Close(context.Background()) })
	routes, err := gw.Open(t.Context(), Grant{Run: "r", NetNS: ns, Providers: []string{"openai"}})
	if err != nil {
		t.Fatal(err)
	}
	url := routes[0].BaseURL + "/v1/models"

	inside := inNamespace(t, ns)
	req, _ := http.NewRequest(http.MethodGet, url, nil)
	req.Header.Set("Authorization", "Bearer "+routes[0].Env["OPENAI_API_KEY"])
	res, err := inside.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if string(body) != "/v1/models" || seen.Get("Authorization") != "Bearer "+canary {
		t.Errorf("inside: %q, upstream saw %v", body, seen)
	}
	noCanary(t, res.Header, string(body))
	for name, c := range map[string]*http.Client{"the machine": {Transport: &http.Transport{}}, "another box": inNamespace(t, otherNS)} {
		if res, err := c.Get(url); err == nil {
			res.Body.Close()
			t.Errorf("the listener answers from %s", name)
		}
	}
	if err := gw.CloseRun(t.Context(), "r"); err != nil {
		t.Fatal(err)
	}
	if res, err := inside.Get(url); err == nil {
		res.Body.Close()
		t.Error("the listener answers after the run was closed")
	}
}

func TestOpen(t *testing.T) {
	t.Parallel()
	b := setup(t, func(http.ResponseWriter, *http.Request) {}, nil)
	ctx := t.Context()

	if _, err := b.gw.Open(ctx, Grant{Run: "run_b", Providers: []string{"openai", "nobody"}}); !errdefs.Is(err, errdefs.NotFound) || !strings.Contains(err.Error(), "anthropic, openai") {
		t.Errorf("unknown provider: %v", err)
	}
	if _, err := b.gw.Open(ctx, Grant{Run: "run_b"}); !errdefs.Is(err, errdefs.Invalid) {
		t.Errorf("no provider: %v", err)
	}
	again, err := b.gw.Open(ctx, Grant{Run: "run_a", Providers: []string{"anthropic", "openai"}})
	if err != nil || again[1].BaseURL != b.routes[0].BaseURL {
		t.Errorf("opened again: %v %v", again, err)
	}
	if _, err := b.gw.Open(ctx, Grant{Run: "run_a", Providers: []string{"openai"}}); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("opened again for less: %v", err)
	}
	env := b.gw.Env(b.routes)
	want := map[string]string{"OPENAI_BASE_URL": b.routes[0].BaseURL, "OPENAI_API_KEY": Placeholder, "ANTHROPIC_BASE_URL": b.routes[1].BaseURL, "ANTHROPIC_API_KEY": Placeholder}
	for k, v := range want {
		if env[k] != v {
			t.Errorf("%s = %q, want %q", k, env[k], v)
		}
	}

	// The port of before comes back after a restart; a taken one is no obstacle.
	port := b.routes[0].Port
	taken, err := b.gw.Open(ctx, Grant{Run: "run_c", Providers: []string{"openai"}, Ports: map[string]int{"openai": port}})
	if err != nil || taken[0].Port == port || taken[0].Port == 0 {
		t.Errorf("asked for a taken port: %v %v", taken, err)
	}
	if err := b.gw.CloseRun(ctx, "run_a"); err != nil {
		t.Fatal(err)
	}
	back, err := b.gw.Open(ctx, Grant{Run: "run_a", Providers: []string{"openai"}, Ports: map[string]int{"openai": port}})
	if err != nil || back[0].Port != port {
		t.Errorf("asked for the old port %d: %v %v", port, back, err)
	}
	if err := b.gw.CloseRun(ctx, "run_never"); err != nil {
		t.Errorf("closing what is not open: %v", err)
	}
	if err := b.gw.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := b.gw.Open(ctx, Grant{Run: "run_d", Providers: []string{"openai"}}); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("opened after the end: %v", err)
	}
}

func TestListenFailure(t *testing.T) {
	t.Parallel()
	gw, err := New(Config{
		Providers: map[string]Provider{"p": {BaseURL: "https://example.test", Style: StyleOpenAI}},
		Listen:    func(string, string, string) (net.Listener, error) { return nil, errors.New("no such namespace") },
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gw.Open(t.Context(), Grant{Run: "r", Providers: []string{"p"}}); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("got %v", err)
	}
}

func TestProvidersAreChecked(t *testing.T) {
	t.Parallel()
	good := Provider{BaseURL: "https://api.example.test/v1", Key: canary, Style: StyleOpenAI}
	for name, change := range map[string]func(*Provider) string{
		"no scheme":      func(p *Provider) string { p.BaseURL = "api.example.test"; return "p" },
		"file scheme":    func(p *Provider) string { p.BaseURL = "file:///etc"; return "p" },
		"password":       func(p *Provider) string { p.BaseURL = "https://u:" + canary + "@h/"; return "p" },
		"broken":         func(p *Provider) string { p.BaseURL = "https://h:" + canary + "/"; return "p" },
		"query":          func(p *Provider) string { p.BaseURL += "?a=b"; return "p" },
		"dot segment":    func(p *Provider) string { p.BaseURL += "/../x"; return "p" },
		"style":          func(p *Provider) string { p.Style = "grpc"; return "p" },
		"key with break": func(p *Provider) string { p.Key += "\n"; return "p" },
		"asterisks":      func(p *Provider) string { p.Key = "****"; return "p" },
		"name":           func(*Provider) string { return "a/b" },
	} {
		p := good
		n := change(&p)
		_, err := New(Config{Providers: map[string]Provider{n: p}})
		if !errdefs.Is(err, errdefs.Invalid) || strings.Contains(err.Error(), canary) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(Config{Providers: map[string]Provider{"p": good}}); err != nil {
		t.Error(err)
	}
}

// P8: when CloseRun returns, the calls in flight are over on both sides and the
// usage is in the ledger.
func TestCloseEndsCallsInFlight(t *testing.T) {
	t.Parallel()
	started, ended := make(chan struct{}), make(chan struct{})
	b := setup(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "first\n")
		_ = http.NewResponseController(w).Flush()
		close(started)
		<-r.Context().Done()
		close(ended)
	}, nil)
	res, err := b.client.Get(b.routes[0].BaseURL + "/stream")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	<-started
	if err := b.gw.CloseRun(t.Context(), "run_a"); err != nil {
		t.Fatal(err)
	}
	if got := b.ledger.of("run_a", "openai"); got != [3]int64{1, 0, 6} {
		t.Errorf("usage when CloseRun returned: %v", got)
	}
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("the stream of a closed run ended as if it were complete")
	}
	<-ended
	if res, err := b.client.Get(b.routes[0].BaseURL + "/x"); err == nil {
		res.Body.Close()
		t.Error("a closed run is served")
	}
}

func TestCloseRunIsBounded(t *testing.T) {
	t.Parallel()
	b := setup(t, func(http.ResponseWriter, *http.Request) {}, nil)
	r := b.gw.runs["run_a"]
	if !r.begin() { // a call that does not end
		t.Fatal("the run is closed")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.gw.CloseRun(ctx, "run_a"); !errdefs.Is(err, errdefs.Indeterminate) {
		t.Errorf("got %v", err)
	}
	if r.begin() {
		t.Error("a call began after the rights ended")
	}
	r.calls.Done()
	if err := b.gw.CloseRun(t.Context(), "run_a"); err != nil {
		t.Error(err)
	}
}

func TestUsageIsKeptUntilItIsRecorded(t *testing.T) {
	t.Parallel()
	b := setup(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "12345") },
		func(c *Config) { c.Report = time.Hour })
	b.ledger.mu.Lock()
	b.ledger.fail = errors.New("busy")
	b.ledger.mu.Unlock()
	b.do(http.MethodPost, "/x", "abc", nil)
	r := b.gw.runs["run_a"]
	r.flush()
	b.ledger.mu.Lock()
	b.ledger.fail = nil
	b.ledger.mu.Unlock()
	b.do(http.MethodPost, "/x", "abc", nil)
	if err := b.gw.CloseRun(t.Context(), "run_a"); err != nil {
		t.Fatal(err)
	}
	if got := b.ledger.of("run_a", "openai"); got != [3]int64{2, 6, 10} {
		t.Errorf("usage %v", got)
	}
}
