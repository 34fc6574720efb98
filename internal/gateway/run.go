package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// Why a call was ended from outside.
var (
	errRunClosed = errors.New("the run's rights have ended")
	errIdle      = errors.New("nothing moved for too long")
)

// route is one granted provider of one run and what went over it.
type route struct {
	provider *provider
	proxy    *httputil.ReverseProxy

	// Not yet reported.
	requests, up, down atomic.Int64
}

// run is one open run: a listener, its server, and the calls in flight.
type run struct {
	id     string
	gw     *Gateway
	log    *slog.Logger
	port   int
	routes map[string]*route // fixed
	server *http.Server
	root   context.Context // of every call
	cancel context.CancelCauseFunc

	mu     sync.Mutex // guards closed against calls.Add
	closed bool
	calls  sync.WaitGroup
	active chan struct{} // one slot per call in flight

	news       chan struct{} // a call began or ended since the last report
	stopReport chan struct{}
	done       chan struct{} // closed when nothing of the run is left
}

// newRun takes over l and begins to serve.
func newRun(g *Gateway, id string, l net.Listener, routes map[string]*route) *run {
	root, cancel := context.WithCancelCause(context.Background())
	r := &run{
		id: id, gw: g, log: g.logger(id), routes: routes, root: root, cancel: cancel,
		active:     make(chan struct{}, g.cfg.Concurrent),
		news:       make(chan struct{}, 1),
		stopReport: make(chan struct{}), done: make(chan struct{}),
	}
	if a, ok := l.Addr().(*net.TCPAddr); ok {
		r.port = a.Port
	}
	for _, rt := range routes {
		rt.proxy = r.newProxy(rt)
	}
	r.server = &http.Server{
		Handler:           http.HandlerFunc(r.serve),
		BaseContext:       func(net.Listener) context.Context { return root },
		ReadHeaderTimeout: 30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		// OPTIONS * is refused like everything that is no model route.
		DisableGeneralOptionsHandler: true,
		ErrorLog:                     slog.NewLogLogger(r.log.Handler(), slog.LevelDebug),
	}
	served, reported := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(served)
		err := r.server.Serve(newLimitListener(l, connectionsPerCall*g.cfg.Concurrent))
		if !errors.Is(err, http.ErrServerClosed) {
			r.log.Error("the model routes of a run stopped", "error", err)
		}
	}()
	go func() {
		defer close(reported)
		r.report()
	}()
	go func() { // ends the run once stop was called
		defer close(r.done)
		<-served
		r.calls.Wait()
		close(r.stopReport)
		<-reported
	}()
	return r
}

// stop ends the rights: no connection is accepted, no call begins, and those in
// flight are cancelled and cut off. done tells when all of it is over.
func (r *run) stop() {
	r.mu.Lock()
	first := !r.closed
	r.closed = true
	r.mu.Unlock()
	if !first {
		return
	}
	r.cancel(errRunClosed)
	_ = r.server.Close() // closes the listener and every connection; its error is that of a socket already gone
}

// begin counts a call in, unless the run is closed.
func (r *run) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.calls.Add(1)
	return true
}

func (r *run) list(order []string) []Route {
	out := make([]Route, 0, len(order))
	for _, name := range order {
		base := fmt.Sprintf("http://127.0.0.1:%d%s%s", r.port, prefix, name)
		out = append(out, Route{Provider: name, Port: r.port, BaseURL: base, Env: styleEnv(r.routes[name].provider.style, base)})
	}
	return out
}

// serve admits one call and hands it to its route.
func (r *run) serve(w http.ResponseWriter, req *http.Request) {
	if !r.begin() {
		panic(http.ErrAbortHandler)
	}
	defer r.calls.Done()
	if req.ContentLength != 0 {
		// What is not read of the body of a refused call the http.Server reads, before
		// the answer goes out.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(r.gw.cfg.Idle))
	}
	rt, status, err := r.admit(req)
	if err != nil {
		writeProblem(w, status, err)
		return
	}
	if rt == nil { // a client asking whether anything is there
		w.WriteHeader(http.StatusOK)
		return
	}
	select {
	case r.active <- struct{}{}:
		defer func() { <-r.active }()
	default:
		writeProblem(w, 0, errdefs.New(errdefs.Exhausted, "the run has %d calls to models in flight, which is its limit", cap(r.active)).
			With("limit", fmt.Sprint(cap(r.active))).WithNext("wait for one to end and try again"))
		return
	}
	rt.requests.Add(1)
	r.tell()
	defer r.tell()
	r.forward(w, req, rt)
}

// tell wakes the report, so that little is lost if the server dies.
func (r *run) tell() {
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// report hands the counts to the ledger when a call begins or ends, now and then
// while one streams, and once at the end.
func (r *run) report() {
	t := time.NewTicker(r.gw.cfg.Report)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			r.flush()
		case <-r.news:
			r.flush()
		case <-r.stopReport:
			r.flush()
			return
		}
	}
}

// flush reports what was not reported yet. What cannot be reported is kept for
// the next time.
func (r *run) flush() {
	if r.gw.cfg.Usage == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.root), 5*time.Second)
	defer cancel()
	for name, rt := range r.routes {
		n, up, down := rt.requests.Swap(0), rt.up.Swap(0), rt.down.Swap(0)
		if n == 0 && up == 0 && down == 0 {
			continue
		}
		if err := r.gw.cfg.Usage.AddRunUsage(ctx, r.id, name, n, up, down); err != nil {
			rt.requests.Add(n)
			rt.up.Add(up)
			rt.down.Add(down)
			r.log.Warn("the use of a model could not be recorded", "provider", name, "error", err)
		}
	}
}
