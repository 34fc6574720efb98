package shim

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/process"
	"github.com/stockade-run/stockade/internal/wire"
)

// The private API of a shim, HTTP on shim.sock, spoken by [Client] alone. Errors
// are api.Problem bodies.
//
//	GET  /state                    wire.ProcState
//	GET  /wait?rev=&log=&blocked=          wire.ProcState, after a change or waitMost
//	PUT  /stdin?offset=&eof=       bytes -> api.StdinState
//	POST /signal                   wire.Signal -> 204
//	POST /resize                   api.Winsize -> 204
//	POST /close                    wire.Close -> wire.ProcState
//	POST /ack?cursor=              204
//	POST /forget                   204; the shim ends
const (
	// waitMost bounds one wait of a client, which asks again.
	waitMost = 30 * time.Second
	// maxConns is how many connections are served at once; a host program needs
	// one that waits and a few for requests.
	maxConns = 64
	// maxJSON bounds a JSON body.
	maxJSON = 64 << 10
	// maxGrace is the longest grace a close may ask for (api.CloseRequest).
	maxGrace = 600 * time.Second
)

type server struct {
	k         *keeper
	http      *http.Server
	forgotten chan struct{}
	once      sync.Once
}

func newServer(k *keeper) *server {
	s := &server{k: k, forgotten: make(chan struct{})}
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request) (any, error){
		"GET /state":   s.state,
		"GET /wait":    s.wait,
		"PUT /stdin":   s.stdin,
		"POST /signal": s.signal,
		"POST /resize": s.resize,
		"POST /close":  s.close,
		"POST /ack":    s.ack,
		"POST /forget": s.forget,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			answer, err := h(w, r)
			reply(w, answer, err, k.log)
		})
	}
	s.http = &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 8 << 10,
		ErrorLog: slog.NewLogLogger(k.log.Handler(), slog.LevelWarn),
	}
	return s
}

// shutdown lets the answer to forget out, and ends.
func (s *server) shutdown() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.http.Shutdown(ctx)
}

func reply(w http.ResponseWriter, answer any, err error, log *slog.Logger) {
	status := http.StatusOK
	if err != nil {
		if _, known := errors.AsType[*errdefs.Error](err); !known {
			log.Error("request", "error", err)
		}
		p := api.ProblemOf(err, logFile)
		answer, status = p, p.Status
		w.Header().Set("Content-Type", api.ProblemType)
	} else if answer == nil {
		w.WriteHeader(http.StatusNoContent)
		return
	} else {
		w.Header().Set("Content-Type", "application/json")
	}
	b, merr := json.Marshal(answer)
	if merr != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

func decode(w http.ResponseWriter, r *http.Request, v any) error {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxJSON))
	if err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the request cannot be read: %v", err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return errdefs.Wrap(err, errdefs.Invalid, "the request is not the JSON that was expected: %v", err)
	}
	return nil
}

// number reads an integer from the query; absent is def.
func number(r *http.Request, name string, def int64) (int64, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return def, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return 0, errdefs.New(errdefs.Invalid, "%s is not a number: %q", name, clip(v, 32))
	}
	return n, nil
}

func (s *server) state(http.ResponseWriter, *http.Request) (any, error) {
	st, _ := s.k.state()
	return st, nil
}

func (s *server) wait(_ http.ResponseWriter, r *http.Request) (any, error) {
	rev, err := strconv.ParseUint(r.URL.Query().Get("rev"), 10, 64)
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, "rev is not a number")
	}
	log, err := number(r, "log", -1)
	if err != nil {
		return nil, err
	}
	timeout := time.NewTimer(waitMost)
	defer timeout.Stop()
	wasBlocked := r.URL.Query().Get("blocked") == "true"
	for {
		var output <-chan struct{}
		if log >= 0 {
			output = s.k.spool.Changed() // taken before the look, so that no change is missed
		}
		st, changed := s.k.state()
		if st.Rev != rev || log >= 0 && (st.Log.Next > log || st.Log.EOF || st.Log.Blocked != wasBlocked) {
			return st, nil
		}
		select {
		case <-changed:
		case <-output:
		case <-timeout.C:
			return st, nil
		case <-r.Context().Done():
			return st, nil
		}
	}
}

// stdin takes the body in pieces, so that no more of it is held than the window
// allows. If a later piece is refused the answer is how far it was accepted.
func (s *server) stdin(w http.ResponseWriter, r *http.Request) (any, error) {
	offset, err := number(r, "offset", -1)
	if err != nil {
		return nil, err
	}
	eof := r.URL.Query().Get("eof") == "true"
	if r.ContentLength < 0 || r.ContentLength > StdinWindow {
		return nil, errdefs.New(errdefs.Invalid, "one write carries at most %d bytes of known length", StdinWindow)
	}
	left := r.ContentLength
	buf := make([]byte, min(left, 32<<10))
	for done := false; ; done = true {
		n := min(left, int64(len(buf)))
		if _, err := io.ReadFull(r.Body, buf[:n]); err != nil {
			return nil, errdefs.Wrap(err, errdefs.Invalid, "the request ended early")
		}
		left -= n
		st, err := s.k.input.write(offset, buf[:n], eof && left == 0)
		if err != nil && !done {
			return nil, err
		}
		offset += n
		if err != nil || left == 0 || st.Accepted < offset {
			return st, nil
		}
	}
}

func (s *server) signal(w http.ResponseWriter, r *http.Request) (any, error) {
	var req wire.Signal
	if err := decode(w, r, &req); err != nil {
		return nil, err
	}
	sig, err := parseSignal(req.Signal)
	if err != nil {
		return nil, err
	}
	if st, _ := s.k.state(); st.Phase == wire.PhaseEnded {
		return nil, errdefs.New(errdefs.Conflict, "the process has ended; %s cannot reach it", req.Signal)
	}
	s.k.signal(sig)
	return nil, nil
}

func (s *server) resize(w http.ResponseWriter, r *http.Request) (any, error) {
	var req api.Winsize
	if err := decode(w, r, &req); err != nil {
		return nil, err
	}
	if req.Rows == 0 || req.Cols == 0 || req.Rows > 4096 || req.Cols > 4096 {
		return nil, errdefs.New(errdefs.Invalid, "a terminal of %d rows and %d columns; both go from 1 to 4096", req.Rows, req.Cols)
	}
	return nil, s.k.resize(req)
}

// close stops the process and answers when it has ended, or when there is a
// reason why that cannot be shown.
func (s *server) close(w http.ResponseWriter, r *http.Request) (any, error) {
	var req wire.Close
	if err := decode(w, r, &req); err != nil {
		return nil, err
	}
	grace := time.Duration(req.GraceMillis) * time.Millisecond
	if req.GraceMillis < 0 || req.GraceMillis > maxGrace.Milliseconds() {
		return nil, errdefs.New(errdefs.Invalid, "a grace of %d ms; it goes from 0 to %d", req.GraceMillis, maxGrace.Milliseconds())
	}
	s.k.send(process.KeepClose{Reason: clip(req.Reason, 1024), Grace: grace})
	for {
		st, changed := s.k.state()
		if st.Phase == wire.PhaseEnded || st.Unproven != "" {
			return st, nil
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return st, nil
		}
	}
}

func (s *server) ack(_ http.ResponseWriter, r *http.Request) (any, error) {
	cursor, err := number(r, "cursor", -1)
	if err != nil {
		return nil, err
	}
	return nil, s.k.spool.Ack(cursor)
}

func (s *server) forget(http.ResponseWriter, *http.Request) (any, error) {
	if st, _ := s.k.state(); st.Phase != wire.PhaseEnded {
		return nil, errdefs.New(errdefs.Conflict, "the process has not ended (%s)", st.Phase).WithNext("close it first")
	}
	s.once.Do(func() { close(s.forgotten) })
	return nil, nil
}

// limitedListener holds back connections over a number.
type limitedListener struct {
	net.Listener
	free chan struct{}
}

func limit(l net.Listener, n int) net.Listener {
	return &limitedListener{l, make(chan struct{}, n)}
}

func (l *limitedListener) Accept() (net.Conn, error) {
	l.free <- struct{}{}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.free
		return nil, err
	}
	return &limitedConn{Conn: c, free: l.free}, nil
}

type limitedConn struct {
	net.Conn
	free chan struct{}
	once sync.Once
}

func (c *limitedConn) Close() error {
	defer c.once.Do(func() { <-c.free })
	return c.Conn.Close()
}
