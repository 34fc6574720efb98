package gateway

import (
	"bufio"
	"bytes"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

func TestKeyIsAddedOutside(t *testing.T) {
	t.Parallel()
	var got *http.Request
	var body []byte
	b := setup(t, func(w http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
		w.Header().Set("Set-Cookie", "track=1")
		w.Header().Set("X-Echo", "the key is "+canary)
		w.Header().Set("X-Plain", "yes")
		_, _ = io.WriteString(w, "you sent "+r.Header.Get("Authorization")+r.Header.Get("X-Api-Key")+"!")
	}, nil)
	sent := http.Header{
		"Authorization": {"Bearer " + Placeholder}, "X-Api-Key": {Placeholder}, "Cookie": {"a=b"}, "Api-Key": {"x"},
		"X-Forwarded-For": {"1.2.3.4"}, "Forwarded": {"for=1.2.3.4"}, "Connection": {"X-Drop"}, "X-Drop": {"1"},
		"User-Agent": {"agent/1"}, "Openai-Beta": {"responses=v1"}, "Accept-Encoding": {"zstd,gzip"},
	}
	for i, want := range []struct{ name, value, absent string }{
		{"Authorization", "Bearer " + canary, "X-Api-Key"},
		{"X-Api-Key", canary, "Authorization"},
	} {
		b.routes[0] = b.routes[i]
		res, answer := b.do(http.MethodPost, "/responses?api_key=x&beta=true&key=y", "hello", sent)
		if got.Header.Get(want.name) != want.value || got.Header.Get(want.absent) != "" {
			t.Errorf("%s: upstream saw %v", want.name, got.Header)
		}
		for _, h := range []string{"Cookie", "Api-Key", "X-Forwarded-For", "Forwarded", "X-Drop"} {
			if got.Header.Get(h) != "" {
				t.Errorf("upstream saw %s: %q", h, got.Header.Get(h))
			}
		}
		if s := fmt.Sprint(got.Header, got.URL, got.Host); strings.Contains(s, Placeholder) {
			t.Errorf("upstream saw the placeholder: %s", s)
		}
		if got.URL.Path != "/base/responses" || got.URL.RawQuery != "beta=true" || got.Host != strings.TrimPrefix(b.upstream.URL, "http://") {
			t.Errorf("upstream saw %s at %s", got.URL, got.Host)
		}
		if got.Header.Get("User-Agent") != "agent/1" || got.Header.Get("Openai-Beta") == "" || got.Header.Get("Accept-Encoding") != "identity" || string(body) != "hello" {
			t.Errorf("upstream saw %v %q", got.Header, body)
		}
		if res.Header.Get("Set-Cookie") != "" || res.Header.Get("X-Echo") != "" || res.Header.Get("X-Plain") != "yes" {
			t.Errorf("the run saw %v", res.Header)
		}
		if !strings.Contains(answer, "****") || int64(len(answer)) != res.ContentLength {
			t.Errorf("the run saw %q", answer)
		}
	}
}

func TestHeadAndRoot(t *testing.T) {
	t.Parallel()
	var seen []string
	b := setup(t, func(_ http.ResponseWriter, r *http.Request) { seen = append(seen, r.Method+" "+r.URL.Path) }, nil)
	for _, path := range []string{"", "/", "/v1/models"} {
		if res, _ := b.do(http.MethodHead, path, "", nil); res.StatusCode != 200 {
			t.Errorf("HEAD %q: %d", path, res.StatusCode)
		}
	}
	if fmt.Sprint(seen) != "[HEAD /base HEAD /base/ HEAD /base/v1/models]" {
		t.Errorf("upstream saw %v", seen)
	}
	res, err := b.client.Head(fmt.Sprintf("http://127.0.0.1:%d/", b.routes[0].Port))
	if err != nil || res.StatusCode != 200 || len(seen) != 3 {
		t.Errorf("HEAD of the root: %v %v %v", res, err, seen)
	}
}

func TestStreamsChunkByChunk(t *testing.T) {
	t.Parallel()
	next := make(chan string)
	b := setup(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		rc := http.NewResponseController(w)
		_ = rc.Flush()
		for s := range next {
			_, _ = io.WriteString(w, s)
			_ = rc.Flush()
		}
	}, nil)
	res, err := b.client.Get(b.routes[0].BaseURL + "/responses")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	br := bufio.NewReader(res.Body)
	for i := range 50 {
		want := fmt.Sprintf("data: %d s\n", i) // its letters begin the key as well
		next <- want
		if got, err := br.ReadString('\n'); err != nil || got != want {
			t.Fatalf("chunk %d: %q %v", i, got, err)
		}
	}
	close(next)
	if rest, err := io.ReadAll(br); err != nil || len(rest) != 0 {
		t.Errorf("at the end: %q %v", rest, err)
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	b := setup(t, func(w http.ResponseWriter, r *http.Request) { t.Errorf("upstream saw %s %s", r.Method, r.URL) }, nil)
	addr := strings.TrimPrefix(b.routes[0].BaseURL, "http://")
	addr = addr[:strings.Index(addr, "/")]
	for _, c := range []struct {
		line   string
		header string
		status int
	}{
		{"GET /model/other/v1 HTTP/1.1", "", 404}, // configured, not granted
		{"GET /model/nobody HTTP/1.1", "", 404},
		{"GET /model/%6Fpenai/v1 HTTP/1.1", "", 404},
		{"GET /model/ HTTP/1.1", "", 404},
		{"GET /v1/messages HTTP/1.1", "", 404},
		{"POST / HTTP/1.1", "Content-Length: 0", 404},
		{"OPTIONS * HTTP/1.1", "", 404},
		{"GET /model/openai/../../admin HTTP/1.1", "", 400},
		{"GET /model/openai/%2e%2e/admin HTTP/1.1", "", 400},
		{"GET /model/openai/..%2fadmin HTTP/1.1", "", 400},
		{"GET /model/openai/%2e%2e%5cadmin HTTP/1.1", "", 400},
		{`GET /model/openai/..\admin HTTP/1.1`, "", 400},
		{"GET /model/openai/%252e%252e/admin HTTP/1.1", "", 400},
		{"GET /model/openai/..;/admin HTTP/1.1", "", 400},
		{"GET /model/openai//evil.test/ HTTP/1.1", "", 400},
		{"GET /model/openai/a/./b HTTP/1.1", "", 400},
		{"GET /model/openai/a%00b HTTP/1.1", "", 400},
		{"GET http://evil.test/model/openai/v1 HTTP/1.1", "", 403},
		{"CONNECT evil.test:443 HTTP/1.1", "", 405},
		{"TRACE /model/openai/v1 HTTP/1.1", "", 405},
		{"GET /model/openai/v1 HTTP/1.1", "Connection: Upgrade\r\nUpgrade: websocket", 403},
	} {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "%s\r\nHost: 127.0.0.1\r\nConnection: close\r\n%s\r\n\r\n", c.line, c.header)
		req := &http.Request{Method: strings.Fields(c.line)[0]}
		res, err := http.ReadResponse(bufio.NewReader(conn), req)
		if err != nil {
			t.Errorf("%s: %v", c.line, err)
			conn.Close()
			continue
		}
		body, _ := io.ReadAll(res.Body)
		conn.Close()
		if res.StatusCode != c.status {
			t.Errorf("%s: status %d, want %d: %s", c.line, res.StatusCode, c.status, body)
		}
		if c.status == 404 {
			var p problem
			if err := json.Unmarshal(body, &p); err != nil || p.Code != errdefs.NotFound || p.Next != "granted: /model/anthropic/, /model/openai/" || p.Error.Message == "" {
				t.Errorf("%s: %s", c.line, body)
			}
		}
		noCanary(t, res.Header, string(body))
	}
}

func TestBodyLimit(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var complete int
	b := setup(t, func(_ http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			mu.Lock()
			complete++
			mu.Unlock()
		}
	}, func(c *Config) { c.MaxBody = 1000 })
	for _, c := range []struct {
		size, status int
		chunked      bool
	}{{1000, 200, false}, {1000, 200, true}, {1001, 413, false}, {1001, 413, true}, {1 << 20, 413, true}} {
		var body io.Reader = bytes.NewReader(make([]byte, c.size))
		if c.chunked {
			body = io.NopCloser(body) // hides the length
		}
		res, err := b.client.Post(b.routes[0].BaseURL+"/x", "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != c.status || c.status == 413 && !strings.Contains(string(text), "1000 bytes") {
			t.Errorf("%+v: %d %s", c, res.StatusCode, text)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if complete != 2 {
		t.Errorf("upstream took %d requests as complete, want 2", complete)
	}
}

func TestConcurrencyLimit(t *testing.T) {
	t.Parallel()
	in, out := make(chan struct{}), make(chan struct{})
	b := setup(t, func(http.ResponseWriter, *http.Request) { in <- struct{}{}; <-out }, func(c *Config) { c.Concurrent = 2 })
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if res, _ := b.do(http.MethodGet, "/x", "", nil); res.StatusCode != 200 {
				t.Errorf("status %d", res.StatusCode)
			}
		})
		<-in
	}
	res, body := b.do(http.MethodGet, "/x", "", nil)
	if res.StatusCode != 429 || res.Header.Get("Retry-After") == "" || !strings.Contains(body, `"code":"exhausted"`) || !strings.Contains(body, `"limit":"2"`) {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	close(out)
	wg.Wait()
}

func TestIdleCallsEnd(t *testing.T) {
	t.Parallel()
	block := make(chan struct{})
	upstream := func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/begun") {
			_, _ = io.WriteString(w, "x")
			_ = http.NewResponseController(w).Flush()
		}
		select {
		case <-r.Context().Done():
		case <-block:
		}
	}
	t.Cleanup(func() { close(block) })
	silent := setup(t, upstream, func(c *Config) { c.Idle = 50 * time.Millisecond })
	res, body := silent.do(http.MethodGet, "/silent", "", nil)
	if res.StatusCode != 504 || !strings.Contains(body, "50ms") {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	// A machine that was too busy to bring the first byte in time says 504 too.
	for idle := time.Second; ; idle *= 2 {
		begun := setup(t, upstream, func(c *Config) { c.Idle = idle })
		res, err := begun.client.Get(begun.routes[0].BaseURL + "/begun")
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode == http.StatusGatewayTimeout && idle < time.Minute {
			continue
		}
		if err == nil {
			t.Errorf("a stream that stalled ended as if complete: %q", got)
		}
		break
	}
}

func TestBadUpstreams(t *testing.T) {
	t.Parallel()
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path[len("/base/"):] {
		case "401":
			w.WriteHeader(401)
			_, _ = io.WriteString(w, `{"error":"Incorrect API key provided: `+canary[:10]+"***"+canary[20:]+`"}`)
		case "redirect":
			http.Redirect(w, r, "http://169.254.1.1/?k="+canary, http.StatusTemporaryRedirect)
		case "500":
			w.WriteHeader(500)
			_, _ = io.WriteString(w, "panic with "+canary)
		case "cut":
			panic(http.ErrAbortHandler)
		}
	})
	b := setup(t, answer, nil)
	for path, want := range map[string]struct {
		status int
		text   string
	}{
		"401":      {401, "refused the operator's key"},
		"redirect": {502, "answered with a redirect"},
		"500":      {500, "panic with ****"},
		"cut":      {502, "the connection broke"},
	} {
		res, body := b.do(http.MethodGet, "/"+path, "", nil)
		if res.StatusCode != want.status || !strings.Contains(body, want.text) || strings.Contains(body, canary[:10]) || res.Header.Get("Location") != "" {
			t.Errorf("%s: %d %v %s", path, res.StatusCode, res.Header, body)
		}
	}
}

func TestUpstreamTLSIsVerified(t *testing.T) {
	t.Parallel()
	up := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) }))
	up.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	up.EnableHTTP2 = true
	up.StartTLS()
	t.Cleanup(up.Close)
	pool := x509.NewCertPool()
	pool.AddCert(up.Certificate())
	const goneURL = "http://127.0.0.1:1" // tcpmux, which nobody serves

	var log bytes.Buffer
	provider := func(url string) func(*Config) {
		return func(c *Config) {
			c.Providers["openai"] = Provider{BaseURL: url, Key: canary, Style: StyleOpenAI}
			c.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		}
	}
	bad := setup(t, nil, provider(up.URL))
	if res, body := bad.do(http.MethodGet, "/v1/models", "", nil); res.StatusCode != 502 || !strings.Contains(body, "certificate") {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	good := setup(t, nil, func(c *Config) { provider(up.URL)(c); c.RootCAs = pool })
	if res, body := good.do(http.MethodGet, "/v1/models", "", nil); res.StatusCode != 200 || body != "HTTP/2.0" {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	none := setup(t, nil, provider(goneURL))
	if res, body := none.do(http.MethodGet, "/v1/models", "", nil); res.StatusCode != 502 || !strings.Contains(body, "refused") || strings.Contains(body, "127.0.0.1") {
		t.Errorf("%d %s", res.StatusCode, body)
	}
	for _, b := range []*bench{bad, good, none} {
		if err := b.gw.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if strings.Contains(log.String(), canary) || !strings.Contains(log.String(), "a model provider did not answer") {
		t.Errorf("log: %s", log.String())
	}
}
