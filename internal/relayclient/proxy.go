package relayclient

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/agent"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/relaywire"
)

// serverName is what agents know the host's tools by.
const serverName = "langbot_agent"

// bodyTime is how long a request to a proxy may take to arrive; idleTime how long a
// connection without one is kept.
const (
	bodyTime = 30 * time.Second
	idleTime = 2 * time.Minute
)

// proxy is the MCP server of one job: it forwards JSON-RPC to the hub. It is
// reached from this machine only, and only with its token.
type proxy struct {
	s       *session
	jobID   string
	token   string
	url     string
	slots   chan struct{} // one per call under way
	timeout atomic.Int64
	srv     *http.Server
	body    time.Duration   // bodyTime, but in tests
	ctx     context.Context // ends with the proxy; the owner's root
	end     context.CancelFunc
	serving chan struct{}

	mu      sync.Mutex
	closed  bool
	handled sync.WaitGroup
}

func newProxy(s *session, jobID string) (*proxy, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the tools of a job cannot be offered: %v", err)
	}
	p := &proxy{s: s, jobID: jobID, token: rand.Text() + rand.Text(), url: "http://" + l.Addr().String() + "/mcp",
		slots: make(chan struct{}, s.limits.MCPCalls), serving: make(chan struct{}), body: bodyTime}
	p.timeout.Store(int64(s.limits.MCPTimeout))
	p.ctx, p.end = context.WithCancel(context.Background())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { answer(w, json.RawMessage(`{"ok":true}`)) })
	mux.HandleFunc("POST /mcp", p.handle)
	mux.HandleFunc("POST /mcp/http", p.handle)
	// The server reads the body of a request that was refused before the answer goes out,
	// and by itself waits for it as long as it takes.
	timed := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(p.body))
		}
		mux.ServeHTTP(w, r)
	})
	p.srv = &http.Server{Handler: timed, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: idleTime, MaxHeaderBytes: 64 << 10,
		BaseContext: func(net.Listener) context.Context { return p.ctx }, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}
	go func() {
		defer close(p.serving)
		_ = p.srv.Serve(l) // always ErrServerClosed, by close
	}()
	return p, nil
}

func (p *proxy) mcp() MCP {
	return MCP{MCP: agent.MCP{Name: serverName, URL: p.url, Token: p.token}, timeout: func(d time.Duration) { p.timeout.Store(int64(d)) }}
}

// close ends every call and returns when no handler runs.
func (p *proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.end()
	_ = p.srv.Close()
	<-p.serving
	p.handled.Wait()
}

// enter counts a handler, unless the proxy is closed.
func (p *proxy) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.handled.Add(1)
	return true
}

func (p *proxy) allowed(r *http.Request) bool {
	got, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		got = r.Header.Get("X-LangBot-Agent-MCP-Token")
	}
	return subtle.ConstantTimeCompare([]byte(got), []byte(p.token)) == 1
}

func answer(w http.ResponseWriter, body json.RawMessage) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(body)
}

func (p *proxy) handle(w http.ResponseWriter, r *http.Request) {
	if !p.enter() {
		http.Error(w, "the job is over", http.StatusServiceUnavailable)
		return
	}
	defer p.handled.Done()
	if !p.allowed(r) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		http.Error(w, "the token is missing or wrong", http.StatusUnauthorized)
		return
	}
	select { // before the body is read: what waits costs little
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-r.Context().Done():
		return
	}
	c := http.NewResponseController(w)
	_ = c.SetReadDeadline(time.Now().Add(p.body)) // it may have waited for its slot
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, p.s.limits.MessageBytes))
	if err != nil {
		http.Error(w, "the body cannot be read or is larger than the limit", http.StatusRequestEntityTooLarge)
		return
	}
	_ = c.SetReadDeadline(time.Time{}) // from here on a read says whether the caller is there
	if len(body) == 0 {
		body = []byte("{}")
	}
	call, err := relaywire.DecodePayload(body)
	if err != nil || len(call) == 0 || call[0] != '{' && call[0] != '[' {
		http.Error(w, "the body is not a JSON-RPC message", http.StatusBadRequest)
		return
	}
	reply, err := p.s.call(r.Context(), p.jobID, call, time.Duration(p.timeout.Load()))
	if err != nil {
		if p.ctx.Err() != nil {
			err = errOver
		}
		// JSON-RPC's way, with the id: the agent's model reads it and goes on.
		reply = relaywire.RPCError(call, relaywire.RPCFailed, "the tool call failed: "+err.Error())
	}
	if relaywire.IsNull(reply) {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	answer(w, reply)
}
