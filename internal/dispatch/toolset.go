package dispatch

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// ToolSet is an MCP server whose tools a job may be granted, registered by the
// operator: Streamable HTTP, JSON-RPC in the body of a POST (Model Context
// Protocol 2025-06-18, "Transports"). Key, if any, is sent as a bearer token and
// never reaches a daemon.
type ToolSet struct {
	URL string
	Key string
}

// What one call to a tool set may cost.
const (
	maxToolAnswer = 16 << 20
	toolTime      = 10 * time.Minute
	endTime       = 5 * time.Second
	handshakeTime = 10 * time.Second
	idleTime      = 90 * time.Second
	maxSession    = 1024
)

// grant is one job's way to a tool set. Its session with the server is the job's
// own and is ended with it.
type grant struct {
	name string
	set  ToolSet
	http *http.Client
	log  *slog.Logger

	mu      sync.Mutex
	session string
	version string
}

func newGrant(name string, set ToolSet, log *slog.Logger) *grant {
	return &grant{name: name, set: set, log: log, http: &http.Client{
		Timeout: toolTime,
		// Its own, because end closes what is idle: not that of the whole program.
		Transport: &http.Transport{Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true,
			TLSHandshakeTimeout: handshakeTime, IdleConnTimeout: idleTime},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the key stays with this address
	}}
}

// Call passes one JSON-RPC message or batch on and returns the answer, nil if
// there is none to give. It ends with ctx, which the hub ends when the job's
// tools are revoked.
func (g *grant) Call(ctx context.Context, payload json.RawMessage) (json.RawMessage, error) {
	resp, err := g.do(ctx, http.MethodPost, payload)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusAccepted || resp.StatusCode == http.StatusNoContent:
		return nil, nil
	case resp.StatusCode != http.StatusOK:
		return nil, errdefs.New(errdefs.Unavailable, "the tool set %q answered with status %d", g.name, resp.StatusCode)
	}
	if s := resp.Header.Get("Mcp-Session-Id"); s != "" && len(s) <= maxSession {
		g.mu.Lock()
		g.session = s
		g.mu.Unlock()
	}
	body := &io.LimitedReader{R: resp.Body, N: maxToolAnswer + 1}
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	var answer json.RawMessage
	if kind == "text/event-stream" {
		answer, err = lastAnswers(body)
	} else if answer, err = io.ReadAll(body); len(bytes.TrimSpace(answer)) == 0 {
		answer = nil
	}
	switch {
	case body.N <= 0:
		return nil, errdefs.New(errdefs.Exhausted, "the tool set %q answered with more than %d bytes", g.name, maxToolAnswer)
	case err != nil:
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the answer of the tool set %q broke off", g.name)
	case answer != nil && !json.Valid(answer):
		return nil, errdefs.New(errdefs.Unavailable, "the tool set %q answered with something that is not JSON", g.name)
	}
	g.note(answer)
	return answer, nil
}

// do sends one request of the session.
func (g *grant) do(ctx context.Context, method string, payload json.RawMessage) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, g.set.URL, bytes.NewReader(payload))
	if err != nil {
		return nil, errdefs.New(errdefs.Internal, "the address of the tool set %q cannot be used", g.name)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if g.set.Key != "" {
		req.Header.Set("Authorization", "Bearer "+g.set.Key)
	}
	g.mu.Lock()
	session, version := g.session, g.version
	g.mu.Unlock()
	if session != "" {
		req.Header.Set("Mcp-Session-Id", session)
	}
	if version != "" {
		req.Header.Set("Mcp-Protocol-Version", version)
	}
	resp, err := g.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return nil, errdefs.Wrap(context.Cause(ctx), errdefs.Unavailable, "the call of the tool set %q was ended", g.name)
		}
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the tool set %q does not answer", g.name)
	}
	return resp, nil
}

// note remembers the protocol version that the server chose, which later requests
// must name.
func (g *grant) note(answer json.RawMessage) {
	var init struct {
		Result struct {
			ProtocolVersion string `json:"protocolVersion"`
		} `json:"result"`
	}
	if json.Unmarshal(answer, &init) == nil && init.Result.ProtocolVersion != "" && len(init.Result.ProtocolVersion) <= maxVersion {
		g.mu.Lock()
		g.version = init.Result.ProtocolVersion
		g.mu.Unlock()
	}
}

// end closes the session with the server, if there is one.
func (g *grant) end() {
	defer g.http.CloseIdleConnections()
	g.mu.Lock()
	open := g.session != ""
	g.mu.Unlock()
	if !open {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	resp, err := g.do(ctx, http.MethodDelete, nil)
	if err != nil {
		g.log.Debug("the session with a tool set was not ended", "tools", g.name, "error", err)
		return
	}
	resp.Body.Close()
}

// lastAnswers reads a stream of server-sent events and returns the JSON-RPC
// answers in it: one as it is, several as an array. What the server asks or tells
// on the way has no way to the agent and is passed over.
func lastAnswers(r io.Reader) (json.RawMessage, error) {
	var answers []json.RawMessage
	var data []byte
	take := func() {
		var m struct {
			Method string          `json:"method"`
			Result json.RawMessage `json:"result"`
			Error  json.RawMessage `json:"error"`
		}
		if len(data) > 0 && json.Unmarshal(data, &m) == nil && m.Method == "" && (m.Result != nil || m.Error != nil) {
			answers = append(answers, bytes.Clone(data))
		}
		data = data[:0]
	}
	br := bufio.NewReader(r)
	for {
		line, err := br.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		switch text := strings.TrimRight(line, "\r\n"); {
		case text == "":
			take()
		case strings.HasPrefix(text, "data:"):
			data = append(data, strings.TrimPrefix(strings.TrimPrefix(text, "data:"), " ")...)
		}
		if err != nil {
			take()
			break
		}
	}
	switch len(answers) {
	case 0:
		return nil, nil
	case 1:
		return answers[0], nil
	}
	return json.Marshal(answers)
}
