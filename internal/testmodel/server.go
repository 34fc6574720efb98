package testmodel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// maxRequests bounds what is remembered for assertions.
const maxRequests = 1000

// Config is what a server is made from.
type Config struct {
	// Script is the task.
	Script []Turn
	// Key is the only credential that is accepted, as a bearer token or in
	// X-Api-Key. Empty accepts all.
	Key string
	// Pace is the time between two pieces of an answer; 0 waits not at all.
	Pace time.Duration
	// Piece is about how many bytes of text one event carries; 0 is 16.
	Piece int
	// Hold, if set, is asked before each answer; the answer begins when the
	// channel it returned is closed. A nil channel does not hold.
	Hold func(turn int) <-chan struct{}
	// Cut, if set, is asked before each answer whether its connection breaks after
	// the first event.
	Cut func(turn int) bool
}

// Request is one request as it came in.
type Request struct {
	Method string
	Path   string
	Header http.Header
	// Turn is the turn of the script that was answered; -1 for anything else.
	Turn int
	// Tools are the names of the offered tools.
	Tools []string
	// Outputs are the results of the tool calls so far, in order.
	Outputs []string
	// Refused says that the credential was not the right one.
	Refused bool
}

// Server is a running model server.
type Server struct {
	cfg  Config
	http *http.Server
	addr string
	done chan struct{}

	mu       sync.Mutex
	requests []Request
}

// Start listens on a free port of 127.0.0.1 and serves until Close.
func Start(cfg Config) (*Server, error) {
	if cfg.Piece <= 0 {
		cfg.Piece = 16
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start the scripted model server: %w", err)
	}
	s := &Server{cfg: cfg, addr: l.Addr().String(), done: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", func(http.ResponseWriter, *http.Request) {}) // clients ask whether anything is there
	mux.HandleFunc("GET /v1/models", s.handle(s.models))
	mux.HandleFunc("POST /v1/responses", s.handle(s.responses))
	mux.HandleFunc("POST /v1/messages", s.handle(s.messages))
	s.http = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() {
		defer close(s.done)
		_ = s.http.Serve(l) // always ErrServerClosed, by Close
	}()
	return s, nil
}

// URL is the server's root: the base URL for an Anthropic client. An OpenAI
// client wants it with /v1.
func (s *Server) URL() string { return "http://" + s.addr }

// Close ends every answer and the server.
func (s *Server) Close() {
	_ = s.http.Close()
	<-s.done
}

// Requests returns what came in so far, oldest first.
func (s *Server) Requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.requests)
}

func (s *Server) record(r Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.requests) < maxRequests {
		s.requests = append(s.requests, r)
	}
}

// asked is what matters of a request of either API.
type asked struct {
	Model   string
	tools   map[string]bool
	outputs []string
}

// handle checks the credential, reads the body and records the request.
func (s *Server) handle(next func(http.ResponseWriter, *http.Request, []byte, *Request)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec := Request{Method: r.Method, Path: r.URL.Path, Header: r.Header.Clone(), Turn: -1}
		if k := s.cfg.Key; k != "" && r.Header.Get("Authorization") != "Bearer "+k && r.Header.Get("X-Api-Key") != k {
			rec.Refused = true
			s.record(rec)
			refuse(w, http.StatusUnauthorized, "authentication_error", "this is not the key")
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 64<<20))
		if err != nil {
			refuse(w, http.StatusBadRequest, "invalid_request_error", "the body could not be read")
			return
		}
		next(w, r, body, &rec)
	}
}

func refuse(w http.ResponseWriter, status int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"type": "error", "error": map[string]any{"type": kind, "message": message}})
}

func (s *Server) models(w http.ResponseWriter, _ *http.Request, _ []byte, rec *Request) {
	s.record(*rec)
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"object":"list","data":[{"id":"scripted","object":"model","created":0,"owned_by":"stockade"}]}`)
}

// turn chooses the answer to what was asked. Requests without a tool that could
// act are a client's own errands, such as finding a title; they get a word.
func (s *Server) turn(a asked, rec *Request) (Turn, toolUse) {
	for name := range a.tools {
		rec.Tools = append(rec.Tools, name)
	}
	slices.Sort(rec.Tools)
	rec.Outputs = a.outputs
	if _, able := (&Call{Shell: "true"}).tool(a.tools); !able {
		return Turn{Text: "Working on the task"}, toolUse{}
	}
	n := len(a.outputs)
	if n >= len(s.cfg.Script) {
		return Turn{Text: "The script has ended."}, toolUse{}
	}
	rec.Turn = n
	t := s.cfg.Script[n]
	var use toolUse
	if t.Call != nil {
		use, _ = t.Call.tool(a.tools)
	}
	return t, use
}

// sse writes server-sent events at the configured pace.
type sse struct {
	w    http.ResponseWriter
	ctx  context.Context
	pace time.Duration
	cut  bool
	err  error
}

var errGone = errors.New("the client is gone")

// begin waits for the hold and starts the stream.
func (s *Server) begin(w http.ResponseWriter, r *http.Request, turn int) *sse {
	out := &sse{w: w, ctx: r.Context(), pace: s.cfg.Pace}
	if s.cfg.Hold != nil && turn >= 0 {
		if c := s.cfg.Hold(turn); c != nil {
			select {
			case <-c:
			case <-out.ctx.Done():
				out.err = errGone
				return out
			}
		}
	}
	out.cut = s.cfg.Cut != nil && s.cfg.Cut(turn)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	return out
}

// event writes one event and flushes it.
func (e *sse) event(kind string, fields map[string]any) {
	if e.err != nil {
		return
	}
	fields["type"] = kind
	data, err := json.Marshal(fields)
	if err != nil {
		e.err = err
		return
	}
	if _, e.err = fmt.Fprintf(e.w, "event: %s\ndata: %s\n\n", kind, data); e.err == nil {
		e.err = http.NewResponseController(e.w).Flush()
	}
	if e.cut {
		panic(http.ErrAbortHandler)
	}
}

// text writes one event per piece.
func (e *sse) text(parts []string, event func(string)) {
	for _, p := range parts {
		if e.pace > 0 && e.err == nil {
			t := time.NewTimer(e.pace)
			select {
			case <-t.C:
			case <-e.ctx.Done():
				e.err = errGone
			}
			t.Stop()
		}
		event(p)
	}
}
