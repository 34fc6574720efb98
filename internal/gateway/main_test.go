package gateway

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/netns"
)

func TestMain(m *testing.M) { need.Main(m) }

// canary is the operator's key in these tests; nothing a run can see may hold it.
const canary = "sk-canary-0123456789abcdef"

// ledger records usage.
type ledger struct {
	mu   sync.Mutex
	fail error
	sum  map[string][3]int64
}

func (l *ledger) AddRunUsage(_ context.Context, run, provider string, n, up, down int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail != nil {
		return l.fail
	}
	if l.sum == nil {
		l.sum = map[string][3]int64{}
	}
	s := l.sum[run+"/"+provider]
	l.sum[run+"/"+provider] = [3]int64{s[0] + n, s[1] + up, s[2] + down}
	return nil
}

func (l *ledger) of(run, provider string) [3]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sum[run+"/"+provider]
}

// bench is one gateway on plain loopback with one upstream.
type bench struct {
	t        *testing.T
	gw       *Gateway
	upstream *httptest.Server
	ledger   *ledger
	routes   []Route
	client   *http.Client
}

// setup serves the run "run_a" with the providers "openai" and "anthropic",
// both of which lead to h below /base.
func setup(t *testing.T, h http.HandlerFunc, change func(*Config)) *bench {
	t.Helper()
	up := httptest.NewServer(h)
	t.Cleanup(up.Close)
	b := &bench{t: t, upstream: up, ledger: &ledger{}}
	cfg := Config{
		Providers: map[string]Provider{
			"openai":    {BaseURL: up.URL + "/base", Key: canary, Style: StyleOpenAI},
			"anthropic": {BaseURL: up.URL + "/base/", Key: canary, Style: StyleAnthropic},
			"other":     {BaseURL: up.URL, Key: canary, Style: StyleOpenAI},
		},
		Usage:  b.ledger,
		Listen: func(_, network, addr string) (net.Listener, error) { return net.Listen(network, addr) },
	}
	if change != nil {
		change(&cfg)
	}
	gw, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.gw = gw
	b.routes, err = gw.Open(t.Context(), Grant{Run: "run_a", Providers: []string{"openai", "anthropic"}})
	if err != nil {
		t.Fatal(err)
	}
	b.client = &http.Client{
		Transport:     &http.Transport{DisableCompression: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	t.Cleanup(func() {
		b.client.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := gw.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return b
}

// do sends a request to the first route (openai) and returns the answer, body
// read, having made sure that the canary is nowhere in it.
func (b *bench) do(method, path, body string, header http.Header) (*http.Response, string) {
	b.t.Helper()
	req, err := http.NewRequest(method, b.routes[0].BaseURL+path, strings.NewReader(body))
	if err != nil {
		b.t.Fatal(err)
	}
	for k, v := range header {
		req.Header[k] = v
	}
	res, err := b.client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	noCanary(b.t, res.Header, string(got))
	return res, string(got)
}

func noCanary(t *testing.T, h http.Header, body string) {
	t.Helper()
	var all strings.Builder
	_ = h.Write(&all)
	if strings.Contains(all.String()+body, canary) {
		t.Errorf("the run can see the real key:\n%s\n%s", all.String(), body)
	}
}

// inNamespace returns a client whose connections begin inside the namespace.
func inNamespace(t *testing.T, path string) *http.Client {
	tr := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		return netns.Dial(ctx, path, network, addr)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}
