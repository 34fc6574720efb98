package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/config"
	"github.com/stockade-run/stockade/internal/errdefs"
)

const relayTestToken = "correct-horse-battery-staple-0123456789"

// startRelay runs a relay alone until the test ends or stop is called, which
// returns what RunRelay did.
func startRelay(t *testing.T, dir string) (url, daemons string, stop func() error) {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir, cfg.Listen = dir, "127.0.0.1:0"
	cfg.Relay.Listen, cfg.Relay.TokenFile = "127.0.0.1:0", filepath.Join(t.TempDir(), "token")
	cfg.Relay.CancelTimeout = 5 * time.Second // some daemons here answer, one does not
	if err := os.WriteFile(cfg.Relay.TokenFile, []byte(relayTestToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ready, done := make(chan string, 1), make(chan error, 1)
	go func() {
		done <- RunRelay(ctx, Options{Config: cfg, Version: "test", Ready: func(url string) { ready <- url }})
	}()
	var result error
	var stopped bool
	stop = func() error {
		if !stopped {
			cancel()
			result, stopped = <-done, true
		}
		return result
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	select {
	case url = <-ready:
	case err := <-done:
		cancel()
		stopped, result = true, nil
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, RelayAddressFile))
	if err != nil {
		t.Fatal(err)
	}
	return url, strings.TrimSpace(string(b)), stop
}

func relayClient(t *testing.T, url, dir, key string) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{URL: url, KeyFile: filepath.Join(dir, key)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

// relayDaemon connects; with ack it finishes what it is told to cancel, else it
// floods without end.
func relayDaemon(t *testing.T, url, id string, ack bool) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ws, _, err := websocket.Dial(ctx, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	say := func(format string, args ...any) error {
		return ws.Write(ctx, websocket.MessageText, fmt.Appendf(nil, format, args...))
	}
	if err := say(`{"type":"daemon.hello","daemon_id":%q,"protocol":"coding-relay-v1","token":%q}`, id, relayTestToken); err != nil {
		t.Fatal(err)
	}
	if _, b, err := ws.Read(ctx); err != nil || !strings.Contains(string(b), "daemon.ready") {
		t.Fatalf("%s %v", b, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			_, b, err := ws.Read(ctx)
			if err != nil {
				return
			}
			var f struct {
				Type  string `json:"type"`
				JobID string `json:"job_id"`
			}
			if json.Unmarshal(b, &f) != nil {
				return
			}
			switch {
			case f.Type == "run.start":
				for i := range 3 {
					_ = say(`{"type":"run.event","job_id":%q,"event":{"n":%d}}`, f.JobID, i)
				}
			case f.Type == "run.cancel" && ack:
				_ = say(`{"type":"run.finished","job_id":%q}`, f.JobID)
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done; ws.CloseNow() })
}

// TestRelayAlone goes the whole way: keys, a job over HTTP, leaving it, the fence,
// its clearing, and all of it again after a restart.
func TestRelayAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	url, daemons, stop := startRelay(t, dir)
	user, admin := relayClient(t, url, dir, "default.key"), relayClient(t, url, dir, "admin.key")
	ctx := t.Context()
	if h, err := user.Health(ctx); err != nil || h.Status != "ok" {
		t.Errorf("%+v %v", h, err)
	}
	// The keys are for different things; nothing else of a server is here.
	if _, err := user.RelayFences(ctx); !client.IsCode(err, client.Denied) {
		t.Errorf("%v", err)
	}
	if _, err := admin.RunRelayJob(ctx, client.RelayJobRequest{DaemonID: "d", Payload: []byte(`{}`)}); !client.IsCode(err, client.Denied) {
		t.Errorf("%v", err)
	}
	if _, err := admin.Targets(ctx); !client.IsCode(err, client.NotFound) {
		t.Errorf("%v", err)
	}
	if _, err := relayClientWith(t, url, "stk_aaaaaaaaaaaaaaaaaaaaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa").RelayJobs(ctx); !client.IsCode(err, client.Unauthenticated) {
		t.Errorf("%v", err)
	}
	for _, name := range []string{"admin.key", "default.key"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, info, err)
		}
	}

	// Leaving is settling: closed, and nothing runs there any more.
	relayDaemon(t, daemons, "polite", true)
	job, err := user.RunRelayJob(ctx, client.RelayJobRequest{DaemonID: "polite", Payload: []byte(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := job.Next(); err != nil || string(e) != `{"n":0}` {
		t.Errorf("%s %v", e, err)
	}
	job.Close()
	waitFor(t, func() bool { jobs, err := user.RelayJobs(ctx); return err == nil && len(jobs) == 0 })
	if fences, err := admin.RelayFences(ctx); err != nil || len(fences) != 0 {
		t.Errorf("%+v %v", fences, err)
	}

	// A daemon that does not confirm is fenced; the last line says so.
	relayDaemon(t, daemons, "rude", false)
	job, err = user.RunRelayJob(ctx, client.RelayJobRequest{DaemonID: "rude", Payload: []byte(`{}`), TimeoutMillis: 2000})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	for err == nil {
		_, err = job.Next()
	}
	o, ok := job.Outcome()
	if err != io.EOF || !ok || o.Acknowledged || o.Fence == nil || o.Code != "relay.daemon_timeout" {
		t.Fatalf("%+v %v %v", o, ok, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, AddressFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the address is left: %v", err)
	}

	// The next one has the same keys and the same fence.
	url, _, _ = startRelay(t, dir)
	user, admin = relayClient(t, url, dir, "default.key"), relayClient(t, url, dir, "admin.key")
	if _, err := user.RunRelayJob(ctx, client.RelayJobRequest{DaemonID: "rude", Payload: []byte(`{}`)}); !client.IsCode(err, client.Fenced) {
		t.Errorf("%v", err)
	}
	f, err := admin.RelayFence(ctx, "rude")
	if err != nil || f.Key != o.Fence.Key {
		t.Fatalf("%+v %v", f, err)
	}
	if _, err := admin.ClearRelayFence(ctx, f.Key, client.ClearRelayFenceRequest{Fence: f.ID, Reason: "the machine was restarted"}); err != nil {
		t.Error(err)
	}
	if fences, err := admin.RelayFences(ctx); err != nil || len(fences) != 0 {
		t.Errorf("%+v %v", fences, err)
	}
}

func relayClientWith(t *testing.T, url, key string) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{URL: url, Key: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.CloseIdle)
	return c
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-deadline:
			t.Fatal("it did not come to be within a minute")
		case <-tick.C:
		}
	}
}

// TestRelayStopTellsItsCallers: whoever reads a job when the relay is stopped hears
// how its job ended.
func TestRelayStopTellsItsCallers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	url, daemons, stop := startRelay(t, dir)
	user := relayClient(t, url, dir, "default.key")
	relayDaemon(t, daemons, "polite", true)
	job, err := user.RunRelayJob(t.Context(), client.RelayJobRequest{DaemonID: "polite", Payload: []byte(`{}`)})
	if err != nil {
		t.Fatal(err)
	}
	defer job.Close()
	stopped := make(chan error, 1)
	go func() { stopped <- stop() }()
	for err == nil {
		_, err = job.Next()
	}
	if o, ok := job.Outcome(); err != io.EOF || !ok || !o.Acknowledged || o.Cause != "the server is shutting down" {
		t.Errorf("%+v %v %v", o, ok, err)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// TestRelayConnectionCut: a caller whose connection is lost is one that left.
func TestRelayConnectionCut(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	url, daemons, _ := startRelay(t, dir)
	user := relayClient(t, url, dir, "default.key")
	relayDaemon(t, daemons, "polite", true)
	key, err := os.ReadFile(filepath.Join(dir, "default.key"))
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	body := `{"daemon_id":"polite","payload":{}}`
	fmt.Fprintf(conn, "POST /v1/relay/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
		strings.TrimSpace(string(key)), len(body), body)
	waitFor(t, func() bool { jobs, err := user.RelayJobs(t.Context()); return err == nil && len(jobs) == 1 })
	if err := conn.(*net.TCPConn).SetLinger(0); err != nil { // a reset, as from a machine that died
		t.Fatal(err)
	}
	conn.Close()
	waitFor(t, func() bool { jobs, err := user.RelayJobs(t.Context()); return err == nil && len(jobs) == 0 })
}

func TestRelayRefusals(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	strong := file("strong", relayTestToken+"\n")
	for name, tc := range map[string]struct {
		change func(*config.Config)
		want   string
	}{
		"no token, shared":      {func(c *config.Config) { c.Relay.TokenFile = "" }, "no token"},
		"weak token":            {func(c *config.Config) { c.Relay.TokenFile = file("weak", "short\n") }, "32"},
		"one letter":            {func(c *config.Config) { c.Relay.TokenFile = file("same", strings.Repeat("a", 40)) }, "12"},
		"space around":          {func(c *config.Config) { c.Relay.TokenFile = file("space", " "+relayTestToken+"\n") }, "space"},
		"empty token file":      {func(c *config.Config) { c.Relay.TokenFile = file("empty", "\n") }, "is empty"},
		"missing token file":    {func(c *config.Config) { c.Relay.TokenFile = filepath.Join(dir, "missing") }, "cannot be read"},
		"a token of a megabyte": {func(c *config.Config) { c.Relay.TokenFile = file("big", strings.Repeat("a", 1<<20)) }, "no token"},
		"open to the world": {func(c *config.Config) {
			c.Relay.TokenFile, c.Relay.Profile, c.Relay.Listen = "", "dedicated", "0.0.0.0:0"
		}, "without a token"},
		"open to all addresses": {func(c *config.Config) { c.Relay.TokenFile, c.Relay.Profile, c.Relay.Listen = "", "dedicated", ":0" }, "without a token"},
		"no port":               {func(c *config.Config) { c.Relay.Listen = "127.0.0.1" }, "HOST:PORT"},
		"a name for a port":     {func(c *config.Config) { c.Relay.Listen = "127.0.0.1:http" }, "HOST:PORT"},
		"no address":            {func(c *config.Config) { c.Relay.Listen = "" }, "no address"},
	} {
		c := config.Default()
		c.StateDir, c.Listen = filepath.Join(dir, "state-"+strings.ReplaceAll(name, " ", "-")), "127.0.0.1:0"
		c.Relay.Listen, c.Relay.TokenFile = "127.0.0.1:0", strong
		tc.change(&c)
		err := RunRelay(t.Context(), Options{Config: c, Ready: func(string) { t.Errorf("%s: it serves", name) }})
		if !errdefs.Is(err, errdefs.Invalid) && !errdefs.Is(err, errdefs.Unauthenticated) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), relayTestToken) {
			t.Errorf("%s: the token is in the error", name)
		}
		if keys, _ := filepath.Glob(filepath.Join(c.StateDir, "*.key")); len(keys) > 0 {
			t.Errorf("%s: keys were made before the right to listen was checked: %v", name, keys)
		}
	}
}

// TestRelayDirectoryIsLocked: one at a time; and a port that is taken leaves
// nothing behind that would keep the next one out.
func TestRelayDirectoryIsLocked(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	url, _, stop := startRelay(t, dir)
	cfg := config.Default()
	cfg.StateDir, cfg.Listen, cfg.Relay.Listen, cfg.Relay.Profile = dir, "127.0.0.1:0", "127.0.0.1:0", "dedicated"
	if err := RunRelay(t.Context(), Options{Config: cfg}); !errdefs.Is(err, errdefs.Conflict) {
		t.Errorf("%v", err)
	}
	cfg.StateDir, cfg.Listen = filepath.Join(t.TempDir(), "two"), strings.TrimPrefix(url, "http://")
	if err := RunRelay(t.Context(), Options{Config: cfg}); !errdefs.Is(err, errdefs.Unavailable) {
		t.Errorf("%v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	startRelay(t, dir)
	if resp, err := http.Get(url + "/v1/health"); err == nil {
		resp.Body.Close()
	}
	http.DefaultClient.CloseIdleConnections()
}
